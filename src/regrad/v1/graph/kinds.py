"""The kinds of dtypes that ops accept."""

from __future__ import annotations

from regrad.core.tensor import TensorLike
from regrad.errors import DTypeError
from regrad.v1 import dtypes
from regrad.v1.graph.tensors import rg_read

# NumPy's kind codes, in the groups for which TensorFlow registers ops.
ANY, BOOLS, INTEGERS, FLOATS, COMPLEX = "", "b", "iu", "f", "c"
REALS, INEXACT, NUMBERS = "iuf", "fc", "iufc"
SPELT = {
    "b": "bools", "iu": "integers", "f": "real floats", "c": "complex numbers",
    "iuf": "real numbers", "fc": "real or complex floats", "iufc": "real or complex numbers",
}  # fmt: skip


def check_kinds(op_type: str, kinds: str, *xs: TensorLike) -> None:
    """Raise DTypeError for tensors of dtypes that TensorFlow's op does not accept."""
    for x in xs:
        dtype = rg_read(x).dtype
        if kinds and dtype.kind not in kinds:
            expected = SPELT[kinds].removeprefix("real or complex ")
            raise DTypeError(
                f"{op_type} takes {expected}, got {dtypes.of(dtype).name}: {x}. Use tf.cast."
            )
