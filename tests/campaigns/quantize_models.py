"""Float models on which quantizers are compared, small and as people write them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 96), nn.Linear(96, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu(self.b(F.gelu(self.a(x)))))


class Residual(nn.Module):
    """A residual block, whose second convolution is grouped."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, out, 3, stride=stride, padding=1, bias=False)
        self.b = nn.Conv2d(out, out, 3, padding=1, groups=2)
        self.short = nn.Conv2d(width, out, 1, stride=stride, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.b(F.relu(self.norm(self.a(x)))) + self.short(x))


class ConvNet(nn.Module):
    """A ResNet in small: strides, groups, shortcuts of 1x1, a mean over the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(Residual(16, 16, 1), Residual(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).movedim(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.two(x))))


class ViT(nn.Module):
    """A vision transformer: patches by a convolution, a class token, two encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token, self.place = (nn.Parameter(torch.randn(1, n, WIDTH) / 8) for n in (1, 17))
        self.encoders, self.head = nn.Sequential(Encoder(), Encoder()), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).movedim(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.encoders(x)[:, 0])


class Llama(nn.Module):
    """A block of Llama: RMS norms, rotations, grouped queries, a gated product; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        sizes = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64),
                 "gate": (64, 128), "up": (64, 128), "down": (128, 64)}  # fmt: skip
        for name, (a, b) in sizes.items():
            setattr(self, name, nn.Linear(a, b, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        q, k, v = (f(h).unflatten(-1, (-1, 16)).movedim(-2, 1) for f in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(2, 1) for y in (rotated(k), v))
        y = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + self.o(y.movedim(1, 2).flatten(2))
        h = self.two(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Positions as rotations of pairs."""
    n = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -(torch.arange(n) / n)
    a, b = x.split(n, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (Mlp, (16, WIDTH)), "ConvNet": (ConvNet, (4, 3, 16, 16)),
    "ViT": (ViT, (4, 3, 16, 16)), "Llama": (Llama, (2, 12, WIDTH)),
}  # fmt: skip


def built(
    name: str, dtype: torch.dtype, even: Any = None, seed: int = 0
) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with random weights of a fixed seed, and its input.

    With `even=(per, side)` the largest weight of each part is moved so that its scale, of `side`
    codes, is a power of two: a value between two codes is then there in every arithmetic.
    """
    torch.manual_seed(seed)
    make, shape = MODELS[name]
    model, x = make().to(dtype), torch.randn(shape, dtype=dtype)
    for p in model.parameters():  # (uniform numbers are multiples of one, and so lie on ties)
        p.data.add_(torch.randn_like(p), alpha=1e-6)
    for layer in model.modules():
        if even and isinstance(layer, nn.Linear | nn.Conv2d):
            make_even(layer.weight.data, *even)
    return model, x


def make_even(w: torch.Tensor, per: str | int, side: float) -> None:
    sizes = {"tensor": w.numel(), "channel": w[0].numel()}
    parts = w.view(-1, per if isinstance(per, int) else sizes[per])
    at = parts.abs().argmax(1, keepdim=True)
    most = parts.gather(1, at)
    scale = (most.abs() / side).log2().ceil().exp2()
    parts.scatter_(1, at, most.sign() * side * scale)
