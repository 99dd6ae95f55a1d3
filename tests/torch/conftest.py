"""Half of the tests ask for gradients by `.backward()`, see `by_backward`; no program is kept."""

import sys
import zlib

import pytest

from tests.helpers.optional import is_installed

if is_installed("torch"):  # (tests of other packages run in this folder, too)
    from tests.helpers import by_backward
    from tests.torch.common import FIRED


@pytest.fixture(autouse=is_installed("torch"))
def road(request, monkeypatch):
    """Choose the road of a test by a hash of its name."""
    if by_backward.ROAD == "backward" or zlib.crc32(request.node.nodeid.encode()) % 2:
        by_backward.install(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Forget the programs of other tests, and their limits of recompilation."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=is_installed("torch"))
def rules_have_run():
    """Ask the scopes of `common.fired` at the end of each test."""
    FIRED.clear()
    yield
    for scope in FIRED:
        scope.assert_fired()
