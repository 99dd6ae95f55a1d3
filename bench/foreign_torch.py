"""Models in PyTorch, large and tiny: overrides against hand-written Functions, and no scope."""

from __future__ import annotations

import cProfile
import os
import pstats
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import regrad as rg
import regrad.torch
from bench.contestants import Contestants
from bench.measures import Speed
from bench.report import Measure, Row
from bench.timing import Effort

DEVICE = os.environ.get("REGRAD_BENCH_DEVICE", "cpu")  # `--device` of `python -m bench`
BATCH, SIZE = (4, 64) if DEVICE == "cpu" else (64, 224)  # small batches do not fill a GPU
STAGES = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
          (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))  # fmt: skip


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int, out: int, stride: int, relu: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = relu
        self.shortcut = nn.Sequential()
        if stride != 1 or width != out:
            narrow = nn.Conv2d(width, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


def resnet18(relu: nn.Module) -> nn.Module:
    blocks = [Block(width, out, stride, relu) for width, out, stride in STAGES]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), relu, nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Guided(torch.autograd.Function):
    """Guided ReLU in the usual form for torch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return dy.clamp(min=0) * (x > 0)


class ByHand(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Guided.apply(x)


def guided_in_torch(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy.clamp(min=0) * (x > 0)


class Dense(nn.Module):
    """A layer of a DenseNet: it appends its output to its input."""

    def __init__(self, width: int, relu: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.BatchNorm2d(width), relu, nn.Conv2d(width, 128, 1, bias=False),
            nn.BatchNorm2d(128), relu, nn.Conv2d(128, 32, 3, 1, 1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.inner(x)], 1)


def densenet121(relu: nn.Module) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), relu]
    width = 64
    for count in (6, 12, 24, 16):
        if width > 64:
            layers += [nn.BatchNorm2d(width), relu, nn.Conv2d(width, width // 2, 1, bias=False)]
            layers.append(nn.AvgPool2d(2))
            width //= 2
        layers += [Dense(width + 32 * i, relu) for i in range(count)]
        width += 32 * count
    head = [nn.BatchNorm2d(width), relu, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(width, 10))


def perceptron(relu: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 64), relu, nn.Linear(64, 64), relu, nn.Linear(64, 10)
    )


def done(y: torch.Tensor) -> torch.Tensor:
    """Wait until a result has been computed, and return it."""
    if y.is_cuda:
        torch.cuda.synchronize()
    return y


def step(
    relu: nn.Module,
    scope: Callable[[], Any] = nullcontext,
    net: Callable[[nn.Module], nn.Module] = resnet18,
    size: int = SIZE,
    mixed: bool = False,
) -> Callable[[], torch.Tensor]:
    """Return a step of gradient descent, which returns the first layer's gradient.

    With `mixed`, it runs in bfloat16 by autocast, with channels last.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    memory = torch.channels_last if mixed else torch.contiguous_format
    model = net(relu).to(DEVICE, memory_format=memory)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, 3, size, size).to(DEVICE, memory_format=memory)
    target = torch.arange(BATCH, device=DEVICE) % 10

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        with scope(), torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return done(next(model.parameters()).grad)

    return run


def alike(calls: Contestants, within: float = 1e-4) -> Contestants:
    first, *rest = [call() for call in calls.values()]
    for other in rest:
        torch.testing.assert_close(other, first, rtol=within, atol=within)
    return calls


def under(rule: Any) -> Callable[[], Any]:
    return lambda: regrad.torch.gradient_override_map({"Relu": rule})


def overridden(rule: Any) -> Callable[[], Contestants]:
    return lambda: alike({"regrad": step(nn.ReLU(), under(rule)), "Function": step(ByHand())})


def by_builtin() -> Contestants:
    """The same rule through torch's own gradient (`builtin`), and as a formula."""
    formula, builtin = under(scaled_in_torch), under(lambda dy, builtin: 0.5 * builtin(dy))
    return alike({"regrad": step(nn.ReLU(), builtin), "formula": step(nn.ReLU(), formula)})


def scaled_in_torch(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 0.5 * dy * (x > 0)


def in_place() -> Contestants:
    """ReLUs in place under a rule. Hand-written code would need an edited model, out of place."""
    ours = step(nn.ReLU(inplace=True), under(rg.rules.guided_relu))
    return alike({"regrad": ours, "Function": step(ByHand())})


def as_trained(rule: Any) -> Contestants:
    """In place, in mixed precision and with channels last. The Function is out of place."""
    ours = step(nn.ReLU(inplace=True), under(rule), mixed=True)
    return alike({"regrad": ours, "Function": step(ByHand(), mixed=True)}, 1e-2)


def nothing() -> Any:
    """A scope whose op type does not occur."""
    rules = {"Atan2": rg.rules.optional(rg.rules.straight_through)}
    return regrad.torch.gradient_override_map(rules)


def unmatched(*model: Any, **options: Any) -> Contestants:
    """A scope whose op type does not occur, so regrad inspects all ops and changes none."""
    relu = nn.ReLU(inplace=options.get("mixed", False))
    ours = step(relu, nothing, *model, **options)
    return alike({"regrad": ours, "no scope": step(relu, nullcontext, *model, **options)})


class Llama(nn.Module):
    """A block of a language model: norms, attention, and a gated layer."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], width: int = 128):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).mT for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT, is_causal=True)
        x = x + self.out(y.mT.flatten(-2).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(self.activation(self.gate(y)) * self.up(y))


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return silu_in_torch(dy, *ctx.saved_tensors)


def silu_in_torch(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def llama(activation: Any, scope: Callable[[], Any] = nullcontext) -> Callable[[], torch.Tensor]:
    """Return a forward and backward pass of four blocks, which returns the first gradient."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Llama(activation) for _ in range(4)]).to(DEVICE)
    x = torch.randn(1, 64, 128).to(DEVICE)

    def run() -> torch.Tensor:
        with scope():
            y = model(x)
        return done(torch.autograd.grad(y.sum(), next(model.parameters()))[0])

    return run


def llama_under_a_rule() -> Contestants:
    scope = lambda: regrad.torch.gradient_override_map({"Silu": silu_in_torch})  # noqa: E731
    return alike({"regrad": llama(F.silu, scope), "Function": llama(Silu.apply)})


def llama_unmatched() -> Contestants:
    return alike({"regrad": llama(F.silu, nothing), "no scope": llama(F.silu)})


def sines() -> Contestants:
    """regrad's own functions, in eager mode, on torch's data."""
    data = torch.linspace(-1.0, 1.0, 1_000_000, device=DEVICE)

    def chain(sin: Callable[[Any], Any], x: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            y = x
            for _ in range(50):
                y = sin(y)
            return done(y if isinstance(y, torch.Tensor) else torch.as_tensor(y.data))

        return run

    return alike({"regrad": chain(rg.sin, rg.asarray(data)), "torch": chain(torch.sin, data)})


# -- exact: the number of functions that Python enters ---------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, relu: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.relu = relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = self.relu(y + x if i == 2 else y)
        return y


BLOCKS, OPS, HITS = 16, 10, 3  # ops and ReLUs per block


def count_calls(relu: nn.Module, scope: Callable[[], Any] = nullcontext) -> int:
    """Return the number of Python and C function calls in a step of bottlenecks in a scope."""
    model = nn.Sequential(*[Bottleneck(relu) for _ in range(BLOCKS)])
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x = torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last)

    def run() -> None:
        with scope(), torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()

    for _ in range(4):
        run()
    with cProfile.Profile() as profile:
        run()
    return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]


def count_opening() -> int:
    """Return the number of function calls to open and close a known scope."""
    for _ in range(4):
        with nothing():
            pass
    with cProfile.Profile() as profile, nothing():
        pass
    return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]


def calls(effort: Effort | None = None) -> Iterator[Row]:
    """Calls of Python in a step of bottlenecks in bfloat16, with channels last and in place."""
    relu = nn.ReLU(inplace=True)
    plain, hand, lone = count_calls(relu), count_calls(ByHand()), count_calls(relu, nothing)
    found = {
        "an op where nothing matches": ((lone - plain) / (BLOCKS * OPS), "no scope", 8),
        "opening and closing a scope": (count_opening(), "no scope", 160),
    }
    for name, rule, bound in (
        ("rule in torch", guided_in_torch, 20), ("regrad's rule", rg.rules.guided_relu, 30),
    ):  # fmt: skip
        hits = count_calls(relu, under(rule)) - lone - (hand - plain)
        found[f"a hit, {name}"] = hits / (BLOCKS * HITS), "Function", bound
    for title, (count, peer, bound) in found.items():
        yield Row(f"calls of {title}", f"+{count:.1f}", peer, "", "", f"≤ {bound}", count <= bound)


def at_a_path() -> Contestants:
    """Keys that name each block by its path, against a single key for all blocks."""
    models: list[nn.Module] = []

    def net(relu: nn.Module) -> nn.Module:
        models.append(resnet18(relu))
        return models[-1]

    def scope() -> Any:
        rules = {rg.at(("2", "*.relu"), "Relu"): guided_in_torch}
        return regrad.torch.gradient_override_map(rules, model=models[-1])

    ours, plain = step(nn.ReLU(), scope, net), step(nn.ReLU(), under(guided_in_torch))
    return alike({"regrad": ours, "by op type": plain})


def dense() -> Contestants:
    ours = step(nn.ReLU(), under(guided_in_torch), densenet121, 32)
    return alike({"regrad": ours, "Function": step(ByHand(), nullcontext, densenet121, 32)})


def relus(f: Callable[..., torch.Tensor], scope: Callable[[], Any] = nullcontext) -> Any:
    """Return a pass through twenty ReLUs of 16 floats, which returns the gradient."""
    x = torch.linspace(-1.0, 1.0, 16, device=DEVICE, requires_grad=True)

    def run() -> torch.Tensor:
        y = x
        with scope():
            for _ in range(20):
                y = f(y)
        return done(torch.autograd.grad(y.sum(), x)[0])

    return run


def tiny() -> Contestants:
    return alike({
        "regrad": relus(torch.relu, under(guided_in_torch)), "Function": relus(Guided.apply),
    })  # fmt: skip


def tiny_in_regrad() -> Contestants:
    return alike({
        "regrad": relus(torch.relu, under(rg.rules.guided_relu)), "Function": relus(Guided.apply),
    })  # fmt: skip


class Empty(TorchFunctionMode):
    """The minimal cost of a scope: a mode that runs each function unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def function_as_key() -> Contestants:
    """Twenty calls of a third-party Function under a rule for it, and in an empty mode."""
    rules = {Guided: guided_in_torch}
    ours = relus(Guided.apply, lambda: regrad.torch.gradient_override_map(rules))
    return alike({"regrad": ours, "empty mode": relus(Guided.apply, Empty)})


def fresh() -> Contestants:
    """A new rule function at each step, against a rule function that is reused."""
    kept = under(guided_in_torch)
    anew = lambda: under(lambda dy, x: dy.clamp(min=0) * (x > 0))()  # noqa: E731
    return alike({"regrad": relus(torch.relu, anew), "kept": relus(torch.relu, kept)})


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return dy * (1 - y * y)


def recurrent() -> Contestants:
    """An LSTM of 100 steps under a rule for Tanh, and a loop of cells with a Function."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer, x = nn.LSTM(32, 32).to(DEVICE), torch.randn(100, 8, 32).to(DEVICE)
    rules = {"Tanh": lambda dy, y: dy * (1 - y * y)}

    def by_hand() -> torch.Tensor:
        w_ih, w_hh, b_ih, b_hh = layer.parameters()
        h = c = x.new_zeros(8, 32)
        ys = []
        for each in x:
            gates = F.linear(each, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * Tanh.apply(g)
            h = o.sigmoid() * Tanh.apply(c)
            ys.append(h)
        return torch.stack(ys)

    def under_a_rule() -> torch.Tensor:
        with regrad.torch.gradient_override_map(rules):
            return layer(x)[0]

    def gradient(forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: done(torch.autograd.grad(forward().sum(), layer.weight_hh_l0)[0])

    return alike({"regrad": gradient(under_a_rule), "Function": gradient(by_hand)})


def _measures() -> Iterator[tuple[str, Measure]]:
    title = "ResNet-18 step in torch, "
    pair = {"Function": 1.08}
    yield "torch-step", Speed(title + "guided ReLU", overridden(rg.rules.guided_relu), pair)
    yield "torch-builtin", Speed(title + "rule by builtin", by_builtin, {"formula": 1.2})
    yield "torch-rule", Speed(title + "rule in torch", overridden(guided_in_torch), pair)
    yield "torch-in-place", Speed(title + "in place", in_place, pair)
    yield "torch-scope", Speed(title + "nothing matched", unmatched, {"no scope": 1.05})
    yield (
        "torch-mixed",
        Speed(title + "as trained, regrad's rule", partial(as_trained, rg.rules.guided_relu), pair),
    )
    yield (
        "torch-mixed-rule",
        Speed(title + "as trained, rule in torch", partial(as_trained, guided_in_torch), pair),
    )
    yield (
        "torch-mixed-scope",
        Speed(
            title + "as trained, nothing matched",
            partial(unmatched, mixed=True),
            {"no scope": 1.06},
        ),
    )
    yield (
        "torch-llama",
        Speed("Llama blocks in torch, rule for Silu", llama_under_a_rule, {"Function": 1.06}),
    )
    yield (
        "torch-llama-scope",
        Speed("Llama blocks in torch, nothing matched", llama_unmatched, {"no scope": 1.06}),
    )
    yield "torch-data", Speed("50 sines of 1,000,000 floats on torch's data", sines, {"torch": 2.0})
    yield "torch-calls", calls
    yield "torch-path", Speed(title + "rule by path", at_a_path, {"by op type": 1.1})
    yield "torch-dense", Speed("DenseNet-121 step in torch, 32 px", dense, {"Function": 1.08})
    yield (
        "torch-lstm",
        Speed("LSTM of 100 steps in torch, rule for Tanh", recurrent, {"Function": 1.15}),
    )
    few = "20 ReLUs of 16 floats in torch"
    yield "torch-relus", Speed(few, tiny, {"Function": 1.35})
    yield "torch-rules", Speed(f"{few}, regrad's rule", tiny_in_regrad, {"Function": 1.6})
    key = "20 calls of a Function in torch that is a key"
    yield "torch-key", Speed(key, function_as_key, {"empty mode": 1.3})
    yield "torch-fresh", Speed("20 ReLUs in torch, a new rule each time", fresh, {"kept": 1.1})
    small = lambda: unmatched(perceptron, 4)  # noqa: E731
    yield (
        "torch-tiny",
        Speed("Step of a tiny MLP in torch, nothing matched", small, {"no scope": 1.35}),
    )


MEASURES: dict[str, Measure] = dict(_measures())
