"""DeepLIFT through norms, softmax and products: sums, and integrals along the line by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
from regrad.errors import ArgumentError, RuleError
from regrad.rules import lrp
from tests.helpers.relevance_networks import fill, numbers
from tests.torch.placed import Made

W, A = numbers(8, seed=3) + 1.5, numbers(8, 8, seed=4)
MASK = torch.tensor([[True, False], [True, True]])


def heads(x):
    return (x @ A).view(-1, 2, 4), x.view(-1, 2, 4)


# One op each, of a value and another value that both move.
SMOOTH = {
    "layer_norm": lambda x: F.layer_norm(x, (8,), W, W),
    "rms_norm": lambda x: F.rms_norm(x, (8,), W),
    "group_norm": lambda x: F.group_norm(x, 2, W, W),
    "instance_norm": lambda x: F.instance_norm(x.view(-1, 2, 4)),
    "softmax": lambda x: x.softmax(-1),
    "masked softmax": lambda x: (x + torch.tensor([0.0, -torch.inf] * 4)).softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "glu": F.glu,
    "logsumexp": lambda x: x.logsumexp(-1),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, W[None].expand_as(x)),
    "std": lambda x: x.std(-1),
    "prod": lambda x: x.prod(-1),
    "pow": lambda x: x**3,
}
PRODUCTS = {
    "mul": lambda a, b: a * b,
    "matmul": lambda a, b: a[:, None] @ b[:, :, None],
    "einsum": lambda a, b: torch.einsum("bi,bj->bij", a, b),
    "div": lambda a, b: a / (b + 3),
    "maximum": torch.maximum,
    "torch.max": torch.max,
    "minimum": torch.minimum,
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
}
ELEMENTWISE = {
    "prelu": lambda x: F.prelu(x, W[:1] / 9), "prelu of channels": lambda x: F.prelu(x, W / 9),
    "rrelu": F.rrelu, "logsigmoid": F.logsigmoid, "exp": torch.exp, "clamp": lambda x: x.clamp(0.2),
    "square": torch.square, "abs": abs, "x * x": lambda x: x * x, "1 / x": lambda x: 1 / (x + 3),
}  # fmt: skip
REDUCED = {
    "max": lambda x: x.max(-1)[0], "amax": lambda x: x.amax(-1),
    "swiglu": lambda x: F.silu(x @ A) * (x @ A.T),
    "attention": lambda x: F.scaled_dot_product_attention(*heads(x), heads(x)[1]),
    "causal": lambda x: F.scaled_dot_product_attention(*heads(x), heads(x)[1], is_causal=True),
    "masked": lambda x: F.scaled_dot_product_attention(*heads(x), heads(x)[1], attn_mask=MASK),
    "layer norm by hand": lambda x: (x - x.mean(-1, keepdim=True))
    * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
    "rms norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "log(sqrt)": lambda x: torch.log(torch.sqrt(x + 3)),
}  # fmt: skip
EVERY = {**SMOOTH, **ELEMENTWISE, **REDUCED} | {
    name: lambda x, f=f: f(x, x @ A) for name, f in PRODUCTS.items()
}


def weighted(y):
    """Return a sum of all outputs of an example with different weights."""
    y = y.flatten(1) if y.ndim > 1 else y[:, None]
    return y @ torch.linspace(-1, 2.3, y.shape[1], dtype=y.dtype)


def run(f, x, base, target=weighted):
    return lrp.relevance(Made(lambda m, *x: f(*x)), x, target, lrp.deep_lift(), reference=base)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_the_differences_are_conserved(name, zero):
    x, base = numbers(3, 8, seed=1), numbers(1, 8, seed=2)
    base = base * 0 if zero and name != "cosine_similarity" else base
    found = run(EVERY[name], x, base)
    torch.testing.assert_close(found.total, weighted(EVERY[name](x)) - weighted(EVERY[name](base)))
    assert abs(found.total).max() > 1e-2
    assert abs(found.missing).max() <= 1e-9 * abs(found.total).max()


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax", "attention", "swiglu"])
def test_the_differences_of_float32_are_conserved(name, monkeypatch):
    for key in ("W", "A"):
        monkeypatch.setitem(globals(), key, globals()[key].float())
    found = run(EVERY[name], numbers(3, 8, seed=1).float(), numbers(1, 8, seed=2).float())
    assert abs(found.missing).max() <= 1e-4 * abs(found.total).max()


def midpoints(f, xs, bases, count=20000):
    """Return the integral of the gradient along the line, from many points at once, by autograd."""
    t = (torch.arange(count, dtype=torch.float64)[:, None] + 0.5) / count
    found = [torch.empty_like(x) for x in xs]
    for i in range(len(xs[0])):
        points = [
            (b[0] + t * (x[i] - b[0])).requires_grad_() for x, b in zip(xs, bases, strict=True)
        ]
        for part, dx in zip(
            found, torch.autograd.grad(weighted(f(*points)).sum(), points), strict=True
        ):
            part[i] = dx.mean(0)
    return [mean * (x - b) for mean, x, b in zip(found, xs, bases, strict=True)]


@pytest.mark.parametrize("name", [n for n in SMOOTH if n != "normalize"])
def test_the_shares_are_the_integral_along_the_line(name):
    """(`F.normalize` is Python code of three ops, each with its own line.)"""
    x, base = numbers(2, 8, seed=1), numbers(1, 8, seed=2)
    (due,) = midpoints(SMOOTH[name], [x], [base])
    torch.testing.assert_close(run(SMOOTH[name], x, base).inputs, due, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PRODUCTS)
def test_two_values_move_together(name):
    xs = numbers(2, 8, seed=1), numbers(2, 8, seed=5)
    bases = numbers(1, 8, seed=2), numbers(1, 8, seed=6)
    due = midpoints(PRODUCTS[name], xs, bases)
    found = run(PRODUCTS[name], xs, bases)
    bends = "max" in name or "min" in name  # (midpoints err by a step where the line bends)
    torch.testing.assert_close([*found.inputs], due, rtol=0, atol=1e-3 if bends else 1e-6)
    assert abs(found.missing).max() < 1e-11


class Transformer(nn.Module):
    """Attention, a layer norm, an RMS norm and SwiGLU."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(8), nn.RMSNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.after(x)
        return self.head((x + self.down(F.silu(self.gate(y)) * self.up(y))).mean(1))


@pytest.mark.parametrize("zero", [False, True])
def test_a_transformer_block(zero):
    model, x = fill(Transformer()), numbers(2, 5, 8, seed=1)
    base = torch.zeros(1, 5, 8).double() if zero else numbers(1, 5, 8, seed=2)
    found = lrp.relevance(model, x, 1, lrp.deep_lift(), ["before", "down"], reference=base)
    torch.testing.assert_close(found.total, (model(x) - model(base))[:, 1].detach())
    assert abs(found.missing / found.total).max() < 1e-9
    without = {k: r for k, r in lrp.deep_lift().items() if k is not F.layer_norm}
    less = lrp.relevance(model, x, 1, without, reference=base)
    assert abs(less.missing / less.total).max() > 1e-3


def test_layers_of_torch():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = fill(Made(lambda m, x: m.layer(x).mean(1), layer=layer)).eval(), numbers(2, 4, 8)
    found = lrp.relevance(model, x, 2, lrp.deep_lift(), reference=numbers(1, 4, 8, seed=7))
    assert abs(found.missing / found.total).max() < 1e-9


class ByHand(nn.Module):
    """The formulas of `nn.LSTM` and `nn.GRU`, in ops of torch, with the weights of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        w, v, b, c = self.layer._flat_weights
        h = s = x.new_zeros(len(x), self.layer.hidden_size)
        for row in x.unbind(1):
            given, held = row @ w.T + b, h @ v.T + c
            if isinstance(self.layer, nn.LSTM):
                i, f, g, o = (given + held).chunk(4, -1)
                s = torch.sigmoid(f) * s + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(s)
            else:
                (r, z, n), (p, q, m) = given.chunk(3, -1), held.chunk(3, -1)
                z, n = torch.sigmoid(z + q), torch.tanh(n + torch.sigmoid(r + p) * m)
                h = n + z * (h - n)
        return h


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_their_formulas(kind):
    layer = fill(kind(4, 6, batch_first=True))
    model = Made(lambda m, x: m.layer(x)[0][:, -1], layer=layer)
    given = numbers(3, 5, 4, seed=1), weighted, lrp.deep_lift()
    found, due = (
        lrp.relevance(m, *given, reference=numbers(1, 5, 4)) for m in (model, ByHand(layer))
    )
    torch.testing.assert_close(found.inputs, due.inputs, rtol=0, atol=1e-12)
    assert abs(found.missing / found.total).max() < 1e-9


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_the_differences_of_recurrent_layers_are_conserved(kind):
    more = {} if "Cell" in kind.__name__ else {"num_layers": 2, "bidirectional": True}

    def forward(m, x):  # (the batch is the second axis of a layer's input)
        y = m.layer(x.transpose(0, 1) if more else x[:, 0])
        y = y[0] if isinstance(y, tuple) else y
        return y[-1] if more else y

    model = Made(forward, layer=fill(kind(4, 6, **more)))
    x, base = numbers(5, 2, 4, seed=1), numbers(1, 2, 4)
    found = lrp.relevance(model, x, weighted, lrp.deep_lift(), reference=base)
    assert abs(found.missing / found.total).max() < 1e-9 and abs(found.total).max() > 1e-2


def test_kinks_within_an_op_are_reported():
    found = run(lambda x: x.norm(p=1, dim=-1), numbers(1, 2, seed=1), numbers(1, 2, seed=2))
    assert abs(found.missing).max() <= 1e-9 * abs(found.total).max()
    lost = run(lambda x: torch.where(x > 0, x, 0.1 * x), numbers(2, 8), numbers(1, 8, seed=2))
    assert abs(lost.missing).max() > 1e-2


def test_misuse():
    with pytest.raises(ArgumentError, match="an even number of points, got 3"):
        lrp.mean_gradient(3)
    with pytest.raises(ArgumentError, match="Pass one: reference=zeros_like"):
        lrp.relevance(nn.Softmax(-1), numbers(2, 3), 0, {"Softmax": lrp.mean_gradient()})
    wrong = pytest.raises(RuleError, match="mean_gradient is for a batch of inputs and their ref")
    with wrong, rg.gradient_override_map({"Softmax": lrp.mean_gradient()}):
        rg.grad(lambda x: rg.sum(rg.nn.softmax(x)[:, 0]))(rg.ones((3, 2)))


@pytest.mark.parametrize("compiled", [False, True])
def test_regrad_itself(compiled):
    a, b = numbers(2, 4, seed=1).numpy(), numbers(2, 4, seed=2).numpy()

    def f(a, b):
        return rg.sum((rg.nn.softmax(a) * rg.maximum(a, b))[:1, 2:])

    def both(a, b):
        with rg.gradient_override_map(
            {"Softmax": lrp.mean_gradient(), "Mul": lrp.mean_gradient(2),
             "Maximum": lrp.rescale_greater}
        ):  # fmt: skip
            return rg.grads(f)([a, b])

    da, db = (rg.jit(both) if compiled else both)(rg.tensor(a), rg.tensor(b))
    got = ((a[0] - a[1]) * da.numpy()[0] + (b[0] - b[1]) * db.numpy()[0]).sum()
    turned = f(rg.tensor(a[::-1].copy()), rg.tensor(b[::-1].copy()))
    due = f(rg.tensor(a), rg.tensor(b)).item() - turned.item()
    assert abs(due) > 1e-2 and abs(got - due) < 1e-9
