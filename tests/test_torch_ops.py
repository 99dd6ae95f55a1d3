"""Every op type that torch has, in every spelling: the value stays, the rule fires, nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import regrad.torch
from regrad.registry import OPS
from regrad.torch.optypes import BINARY, REVERSED, UNARY, families, spellings

override = regrad.torch.gradient_override_map

# What a family is called with. The tensors stand for the op's inputs, in order.
X = torch.tensor([[0.31, 0.52, 0.83], [0.24, 0.65, 0.46]], dtype=torch.float64)
Y = torch.tensor([[0.72, 0.53, 0.24], [0.95, 0.36, 0.17]], dtype=torch.float64)
ABOVE = X + 1
DEFINITE = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
IMAGE = torch.linspace(0.1, 2.3, 2 * 3 * 6 * 6, dtype=torch.float64).sin().reshape(2, 3, 6, 6)
VOLUME = torch.linspace(0.1, 2.3, 2 * 3 * 4**3, dtype=torch.float64).sin().reshape(2, 3, 4, 4, 4)
VECTOR = X[0]
MASK = Y > 0.5

ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "Acosh": [(ABOVE,)],
    "Cholesky": [(DEFINITE,)],
    "MatrixInverse": [(DEFINITE,)],
    "MatMul": [(X, Y.mT.contiguous()), (X[None], Y.mT[None]), (X, VECTOR), (VECTOR, VECTOR)],
    "Softmax": [(X, -1), (X, -1, False)],
    "LogSoftmax": [(X, -1), (X, -1, False)],
    "ClipByValue": [(X, 0.4, 0.6), (X, Y - 0.3, Y + 0.1)],
    "Prelu": [(X - 0.5, torch.tensor([0.25], dtype=torch.float64))],
    "Step": [(X - 0.5, Y)],
    "Sum": [(X,), (X, [1])],
    "Max": [(X,)],
    "Cumsum": [(X, 1)],
    "Cumprod": [(X, 1)],
    "SelectV2": [(MASK, X, Y), (MASK, X, 0.5), (MASK, 0.5, X), (MASK, 0.5, 0.25)],
    "Conv2D": [(IMAGE, IMAGE[:, :, :3, :3].contiguous())],
    "Conv3D": [(VOLUME, VOLUME[:, :, :2, :2, :2].contiguous())],
    "MaxPool": [(IMAGE, 2)],
    "AvgPool": [(IMAGE, 2)],
    "MaxPool3D": [(VOLUME, 2)],
    "AvgPool3D": [(VOLUME, 2)],
    "Reshape": [(X, [3, 2])],
    "ConcatV2": [([X, Y],)],
    "Pack": [([X, Y],)],
    "Round": [(X,)],
}  # fmt: skip
PAIRS = [(X, Y), (X, 2.0), (2.0, X)]

# Overloads that no gradient passes: of results given, of plain numbers, of strings and names.
NO_GRADIENT = ("out", "Scalar_out", "Tensor_out", "str", "int", "float", "complex", "Scalar", "t")


def forms(op_type: str) -> list[tuple[Any, ...]]:
    """What a callable of the family may be called with."""
    return ARGUMENTS.get(op_type) or (PAIRS if op_type in BINARY else [(X,)])


def fresh(value: Any) -> Any:
    if isinstance(value, list):
        return [fresh(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.clone().requires_grad_(value.is_floating_point() or value.is_complex())
    return value


def leaves(values: Sequence[Any]) -> list[torch.Tensor]:
    flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return [v for v in flat if isinstance(v, torch.Tensor)]


def run(function: Any, args: Sequence[Any], in_place: bool) -> tuple[Any, list[torch.Tensor]]:
    """A call with leaves of its own, and those (a copy of the first one is changed in place)."""
    given = [fresh(a) for a in args]
    with torch._C.DisableTorchFunction():
        first = given[0] * 1 if in_place else given[0]
    return function(first, *given[1:]), leaves(given)


def plain(function: Any, op_type: str, in_place: bool) -> Iterator[tuple[Sequence[Any], Any]]:
    """The forms that a callable takes, and what it gives for them."""
    for args in forms(op_type):
        for each in (args, (args[1], args[0], *args[2:]) if op_type == "SelectV2" else args)[:2]:
            try:
                y, _ = run(function, each, in_place)
            except (
                RuntimeError,
                TypeError,
                IndexError,
                ValueError,
                NotImplementedError,
                AttributeError,
            ):
                continue
            if isinstance(y, torch.Tensor) and y.requires_grad:
                yield each, y
                break
