"""On a PyTorch that has changed, rules count or are refused by name. Nothing is passed over."""

import pytest
import torch

import regrad.torch.promises  # noqa: F401 (before a test changes the features, to which it adds)
from regrad.errors import HostError, PassedOverError, UntestedHostWarning
from regrad.torch.host import COMPILING, FUNCTIONS, HOST, OVERRIDES
from tests.helpers.host_checks import HostTests
from tests.torch.common import backward, bare_function, leaf, override

RULES = {"Relu": lambda dy: dy * 7}
pytestmark = pytest.mark.versions


class TestTorch(HostTests):
    host, overrides, library = HOST, OVERRIDES, "torch"
    at_rest = frozenset({"Function", "script", "compiled Function"})
    roots, features, parts = r"torch\.", 6, 10
    old, wanted = "2.9.1+cpu", r"needs PyTorch 2\.10 .* 2\.9\.1 is inst"

    def open(self):
        with override({"Relu": "Relu"}):
            torch.relu(torch.ones(1))


def test_a_promise_that_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr(FUNCTIONS, "losses", ["something is gone"])
    own = bare_function("Own", lambda ctx, x: torch.relu(x), lambda ctx, dy: dy)
    wanted = (
        rf"PyTorch {HOST.version} does not support overrides where an autograd.Function is "
        r"applied: something is gone\. Versions 2\.10 to 2\.\d+ are tested\. Call torch's own"
    )
    with override({"Relu": "Relu"}):
        torch.relu(leaf(1, 1))
        with pytest.raises(HostError, match=wanted):
            own.apply(leaf(1, 1))


def test_compiled_code_alone_is_refused(monkeypatch):
    monkeypatch.setattr(COMPILING, "losses", ["something is gone"])
    x = leaf(1, 1)
    f = torch.compile(lambda x: torch.relu(x) * 3, backend="aot_eager")
    with override(RULES):
        assert backward(torch.relu(x), x).tolist() == [7, 7]
        with pytest.raises(HostError, match=r"does not support overrides in torch\.compile"):
            f(x)
    monkeypatch.undo()
    assert f(x).tolist() == [3, 3]


@pytest.fixture
def newer(monkeypatch):
    """Have PyTorch be newer than what was tested, and nothing be checked yet."""
    monkeypatch.setattr(HOST, "newest", "2.9")
    monkeypatch.setattr(HOST, "_warned", False)
    for feature in HOST.features:
        monkeypatch.setattr(feature, "checked", False)


@pytest.mark.slow
def test_a_newer_torch_is_looked_at_once(newer):
    """In a state of its own: nothing of the caller's is seen or changed."""
    seed = torch.get_rng_state()
    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        warned = pytest.warns(UntestedHostWarning, match=r"2\.10 to 2\.9 .*regrad hosts")
        with warned as w, override({"Relu": "Relu"}):
            torch.relu(torch.ones(2))
        assert w[0].filename == __file__
        with override({"Relu": "Relu"}):
            torch.relu(torch.ones(2))
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert len(seen) < 20  # of this test's own ops; the programs run hundreds
    assert torch.equal(seed, torch.get_rng_state())
    found = {feature.name: (feature.checked, feature.losses) for feature in HOST.features}
    assert {*map(str, found.values())} == {"(True, [])"}, found


def test_nothing_is_looked_at_while_a_program_is_written(newer):
    f = override({})(torch.nn.ReLU())
    torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert not any(feature.checked for feature in HOST.features)


def test_a_function_that_began_before_the_scope():
    """A Function that began before the scope opened is found, or refused."""

    in_scope = override({"Relu": "Relu"})(torch.relu)
    begun = bare_function("Begun", lambda ctx, x: in_scope(x), lambda ctx, dy: dy)
    in_two_parts = bare_function(
        "InTwoParts", lambda x: in_scope(x), lambda ctx, dy: dy,
        setup_context=lambda ctx, inputs, output: None,
    )  # fmt: skip
    x = leaf(1, 1)
    with pytest.raises(PassedOverError, match=r"Begun, a torch\.autograd\.Function"):
        begun.apply(x)
    with pytest.raises(PassedOverError, match="began before the scope opened"):
        in_two_parts.apply(x)
    forward = torch.autograd.Function.forward
    begun.forward = staticmethod(lambda ctx, x: x * 2)
    with override({"Relu": "Relu"}):
        begun.forward = staticmethod(lambda ctx, x: x * 3)
        assert begun.apply(x).tolist() == [3, 3]
        torch.relu(x)
    assert begun.apply(x).tolist() == [3, 3] and torch.autograd.Function.forward is forward
