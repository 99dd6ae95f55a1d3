"""Networks as people have them, and their training; rules for them, and the same by hand.

By hand means without regrad: the network calls Functions instead of torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# -- rules, and the same by hand -------------------------------------------------------------------


def leaky(dy: Tensor, x: Tensor) -> Tensor:
    return dy * torch.where(x > 0, 1.0, 0.25).to(dy.dtype)


def sharper(dy: Tensor, y: Tensor) -> Tensor:
    return 0.5 * y * (dy - (dy * y).sum(-1, keepdim=True))


class Leaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return leaky(dy, *ctx.saved_tensors)


class Sharper(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sharper(dy, *ctx.saved_tensors)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    ahead = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(ahead, -torch.inf)
    return Sharper.apply(scores) @ v  # pyright: ignore


RELU: dict[Any, Any] = {"Relu": leaky}
BOTH: dict[Any, Any] = {"Relu": leaky, "Softmax": sharper}

# -- networks --------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, relu: Any) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.GroupNorm(2, 8) for _ in range(2))
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.first(x)))
        return self.relu(x + self.norm2(self.second(y)))


class ResNet(nn.Module):
    """Functional ReLUs, and one in place; `relu` is for the network written by hand."""

    def __init__(self, relu: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.relu = relu or F.relu
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        blocks = [Residual(relu or each) for each in (nn.ReLU(inplace=True), F.relu)]
        self.blocks = nn.Sequential(blocks[0], nn.MaxPool2d(2), blocks[1])
        self.head, self.idle = nn.Linear(8, 5), nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.relu(self.stem(x))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        parts = [w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)]
        return self.wo(self.attend(*parts, is_causal=True).transpose(1, 2).flatten(-2))


class Forward(nn.Module):
    def __init__(self, relu: Any) -> None:
        super().__init__()
        self.w1, self.w2, self.relu = nn.Linear(16, 32), nn.Linear(32, 16), relu

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.relu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, relu: Any, attend: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.mlp = Attention(attend), Forward(relu)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, relu: Any = F.relu, attend: Any = F.scaled_dot_product_attention,
                 checkpoints: bool = False) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(relu, attend) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        self.checkpoints = checkpoints
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


def resnet_by_hand() -> nn.Module:
    return ResNet(Leaky.apply)


def gpt_by_hand(**options: Any) -> nn.Module:
    return GPT(Leaky.apply, attend, **options)


# -- training --------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


def images() -> Batch:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(8, 3, 8, 8, generator=random, dtype=torch.float64)
    return x, torch.randint(0, 5, (8,), generator=random)


def texts() -> Batch:
    tokens = torch.randint(0, 11, (8, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, -2), labels.flatten())


def whole(x: Any) -> Tensor:
    """A tensor, or all of a DTensor."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def state(model: nn.Module) -> dict[str, Tensor]:
    """The weights, and those gradients that there are."""
    found = {}
    for name, p in model.named_parameters():
        name = name.replace("module.", "").replace("_orig_mod.", "")
        if p.grad is not None:
            found[name], found[f"gradient of {name}"] = whole(p), whole(p.grad)
    return found


def train(model: nn.Module, batch: Batch, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the weights and gradients after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state(model)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert distance(a, b) < 1e-8, distance(a, b)
