"""CONTRIBUTING, followed to the letter: an op in one block and one line of samples."""

import re

import numpy as np

import regrad as rg
import regrad.ops.elementwise as family
from regrad.registry import OPS
from regrad.testing import check_gradients
from tests import samples
from tests.helpers.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_the_block_makes_an_op_that_passes_its_sample():
    scope = {**vars(family)}
    exec(BLOCKS[0].replace("Sinc", "ContributedSinc"), scope)
    rg.sinc = scope["sinc"]
    try:
        names = {"rg": rg, "np": np, "sample": samples.sample, "away": samples.away}
        (row,) = eval(f"[{BLOCKS[1].strip()}]", names)
    finally:
        del rg.sinc
        OPS.pop("ContributedSinc")
    np.testing.assert_allclose(row.f(row.inputs[0]).numpy(), row.reference(row.inputs[0]))
    check_gradients(row.f, [*row.inputs], order=3)
    check_gradients(row.f, [np.array([0.0])], order=1)
