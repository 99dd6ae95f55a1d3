"""torch's fast path of transformers, and other kernels that stand for several functions."""

import contextvars
import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
from regrad.errors import PassedOverError
from regrad.rules import optional
from tests.torch.common import close, fired, override

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("key", ["Sign", "MatMul", "Softmax", "Relu"])
def test_the_fast_path_stays(key):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, pad = torch.randn(2, 5, 8), torch.arange(5).expand(2, 5) > torch.tensor([[2], [4]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=pad)
        with override({key: lambda dy: dy}) as used:
            y = model(x, src_key_padding_mask=pad)
    assert torch.equal(y, expected) and bool(used.hits) == (key != "Sign")


SIGN = rg.replace(lambda x, w, bias: F.linear(x, w.sign(), bias))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("where", ["everywhere", "layers.1.linear1", "the attention alone"])
def test_values_that_the_fast_path_would_not_replace_are_replaced(where, compiles):
    """In evaluation, too: as in a copy whose weights are those that the rule takes."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    key = rg.at(where, F.linear) if where == "layers.1.linear1" else F.linear
    alone = where == "the attention alone"
    model = model.layers[0].self_attn if alone else model
    changed = copy.deepcopy(model)
    for name, weight in changed.named_parameters():
        if weight.dim() == 2 and (key is F.linear or name.startswith(where)):
            weight.data = weight.sign()
    xs = [torch.randn(2, 5, 8)] * (3 if alone else 1)
    f = torch.compile(model, backend="aot_eager") if compiles else model
    with torch.no_grad():
        y = fired({key: SIGN}, f, *xs, values=True, model=model)
        expected = changed(*xs)
    close([y[0]], [expected[0]], 1e-5)  # (the attention returns its weights, too)


def test_the_fast_path_is_left_in_these_scopes_alone():
    fast = torch.backends.mha.get_fastpath_enabled
    one = {F.linear: optional(rg.replace(lambda x, w, bias: x))}
    other = {"Sign": optional(rg.replace(lambda x: x))}
    for outer, inner in ((one, other), (other, one)):
        with override(outer, values=True):
            assert torch.backends.mha.get_fastpath_enabled() is (outer is other)
            with override(inner, values=True):
                assert not torch.backends.mha.get_fastpath_enabled()
                assert contextvars.Context().run(torch.backends.mha.get_fastpath_enabled)
            assert torch.backends.mha.get_fastpath_enabled() is (outer is other)
    assert torch.backends.mha.get_fastpath_enabled is fast


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="it is newer")
@pytest.mark.parametrize("key", [F.linear, F.cross_entropy, "MatMul", "LogSoftmax"])
def test_a_loss_in_chunks_is_refused(key):
    """With options it is one op, in which none of the functions is called."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    target, options = torch.arange(4), nn.LinearCrossEntropyOptions()
    with override({key: lambda dy, builtin: builtin(dy)}):
        F.linear_cross_entropy(x, w, target)
        with pytest.raises(PassedOverError, match="linear_cross_entropy with options"):
            F.linear_cross_entropy(x, w, target, options=options)


def test_another_mode_is_seen_by_modules():
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    patched = mock.patch("torch._transformer_encoder_layer_fwd")
    with torch.no_grad(), patched as fast, override({"Sign": "Sign"}), Other():
        layer(x)
    assert not fast.called
