"""What TensorFlow.js answered, as cases, and what compares it.

An expression is a tree, `["mul", "x0", ["square", "x0"]]`; `OPS` says what its names are here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

import regrad as rg
import regrad.linalg
import regrad.losses
import regrad.nn
from tests.helpers.paths import GOLDEN

FILES = {
    kind: json.loads((GOLDEN / f"tfjs_{kind}.json").read_text())
    for kind in ("op", "second_order", "custom", "variable", "optimizer")
}


def cases(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"tol": FILES[kind]["meta"]["tolerance"]} | case
        for kind in kinds
        for case in FILES[kind]["cases"]
    ]


SAME = (
    "abs acos add asin atan atan2 atanh ceil cos erf exp expm1 floor log log1p maximum minimum "
    "pow reciprocal round sign sin sinh sqrt square step tan tanh where"
)
SAME_IN_NN = "prelu relu relu6 selu sigmoid softmax softplus"
PLAIN = {  # TensorFlow.js's name → ours, where the arguments are the same
    **{name: name for name in SAME.split()},
    **{name: f"nn.{name}" for name in SAME_IN_NN.split()},
    "clone": "identity",
    "div": "divide",
    "greaterEqual": "greater_equal",
    "logSigmoid": "nn.log_sigmoid",
    "logSoftmax": "nn.log_softmax",
    "mod": "remainder",
    "mul": "multiply",
    "neg": "negative",
    "onesLike": "ones_like",
    "sub": "subtract",
    "zerosLike": "zeros_like",
}
LOSSES = {
    "absoluteDifference": "absolute_difference",
    "cosineDistance": "cosine_distance",
    "hingeLoss": "hinge_loss",
    "huberLoss": "huber_loss",
    "logLoss": "log_loss",
    "meanSquaredError": "mean_squared_error",
    "sigmoidCrossEntropy": "sigmoid_cross_entropy",
    "softmaxCrossEntropy": "softmax_cross_entropy",
}
SNAKE = {
    "alignCorners": "align_corners",
    "batchDims": "batch_dims",
    "depthRadius": "depth_radius",
    "filterSize": "filter_size",
    "keepDims": "keepdims",
    "labelSmoothing": "label_smoothing",
    "numSegments": "num_segments",
    "offValue": "off_value",
    "onValue": "on_value",
    "outputShape": "output_shape",
    "transposeA": "transpose_a",
    "transposeB": "transpose_b",
    "varianceEpsilon": "epsilon",
    "clipValueMin": "min",
    "clipValueMax": "max",
    "perm": "axes",
}
RENAMED = {  # the arguments are the same but for their names (SNAKE)
    "avgPool": "nn.avg_pool",
    "batchNorm": "nn.batch_norm",
    "broadcastTo": "broadcast_to",
    "clipByValue": "clip",
    "concat": "concat",
    "conv2d": "nn.conv2d",
    "conv2dTranspose": "nn.conv2d_transpose",
    "conv3d": "nn.conv3d",
    "dilation2d": "nn.dilation2d",
    "expandDims": "expand_dims",
    "gather": "take",
    "leakyRelu": "nn.leaky_relu",
    "localResponseNormalization": "nn.local_response_normalization",
    "logSumExp": "logsumexp",
    "matMul": "matmul",
    "max": "max",
    "maxPool": "nn.max_pool",
    "maxPool3d": "nn.max_pool3d",
    "mean": "mean",
    "min": "min",
    "prod": "prod",
    "reshape": "reshape",
    "resizeBilinear": "nn.resize_bilinear",
    "reverse": "flip",
    "separableConv2d": "nn.separable_conv2d",
    "squeeze": "squeeze",
    "stack": "stack",
    "sum": "sum",
    "transpose": "permute_dims",
    "unsortedSegmentSum": "segment_sum",
}
LISTS = ("concat", "stack")  # take all their arguments as one list


def function(path: str) -> Callable[..., Any]:
    return attrgetter(path)(rg)


def renamed(path: str) -> Callable[..., Any]:
    def call(*args: Any, **attrs: Any) -> Any:
        return function(path)(*args, **{SNAKE.get(k, k): hashable(v) for k, v in attrs.items()})

    return call


def hashable(value: Any) -> Any:
    """Lists as tuples, as one writes axes and shapes in Python."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def loss(path: str) -> Callable[..., Any]:
    def call(*args: Any, reduction: str = "SUM_BY_NONZERO_WEIGHTS", **attrs: Any) -> Any:
        return renamed(f"losses.{path}")(*args, reduction=reduction.lower(), **attrs)

    return call


def slice_to(x: Any, begin: Any, size: Any = None) -> Any:
    begin = [begin] if isinstance(begin, int) else begin
    rest = [-1] * (x.ndim - len(begin))
    size = [-1] * x.ndim if size is None else size
    return rg.slice(x, [*begin, *(0 for _ in rest)], size)


def norm(x: Any, ord: Any = "euclidean", axis: Any = None) -> Any:
    return rg.linalg.vector_norm(x, axis=axis, ord={"euclidean": 2}.get(ord, ord))


def moments(x: Any, axis: Any = None, keepDims: bool = False, output: str = "mean") -> Any:
    mean, variance = rg.nn.moments(x, axis=hashable(axis), keepdims=keepDims)
    return mean if output == "mean" else variance


def one_hot(x: Any, depth: int, dtype: str = "int32", **values: Any) -> Any:
    return rg.astype(renamed("one_hot")(x, depth, **values), dtype)


OPS: dict[str, Callable[..., Any]] = {
    **{name: renamed(path) for name, path in (PLAIN | RENAMED).items()},
    **{name: loss(path) for name, path in LOSSES.items()},
    "cast": lambda x, dtype: rg.astype(x, dtype),
    "mirrorPad": lambda x, paddings, mode: rg.pad(x, paddings, mode=mode),
    "moments": moments,
    "norm": norm,
    "oneHot": one_hot,
    "slice": slice_to,
    "tile": lambda x, reps: rg.tile(x, tuple(reps)),
    "unstack": lambda x, axis, index: rg.unstack(x, axis=axis)[index],
}


def evaluate(tree: Any, leaves: dict[str, Any], ops: dict[str, Callable[..., Any]]) -> Any:
    """The value of an expression whose leaves are named in `leaves`."""
    if isinstance(tree, str):
        return leaves[tree]
    if not isinstance(tree, list):
        return tree  # a number, or None for an absent argument
    name, *rest = tree
    attrs = rest.pop() if rest and isinstance(rest[-1], dict) else {}
    args = [evaluate(arg, leaves, ops) for arg in rest]
    return ops[name](*([args] if name in LISTS else args), **attrs)


def named(letter: str, values: Any) -> dict[str, Any]:
    return {f"{letter}{i}": value for i, value in enumerate(values)}


def tensor(spec: dict[str, Any] | None) -> Any:
    return None if spec is None else rg.asarray(array(spec))


def array(spec: dict[str, Any]) -> np.ndarray:
    values = np.array([float(v) for v in spec["values"]])  # "NaN", "-Infinity" and "-0" too
    return values.reshape(spec["shape"]).astype(spec["dtype"])


def custom(definition: dict[str, Any], ops: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A custom-gradient op as a case describes it."""

    @rg.custom_grad
    def op(*xs: Any, save: Any) -> Any:
        value = evaluate(definition["value"], named("x", xs), ops)
        save([(named("x", xs) | {"value": value})[leaf] for leaf in definition.get("save", ())])

        def grad_func(dy: Any, saved: Any) -> Any:
            leaves = {"dy": dy} | named("saved", saved) | named("x", xs)
            return [evaluate(tree, leaves, ops) for tree in definition["grads"]]

        return {"value": value, "grad_func": grad_func}

    return op


def vocabulary(case: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """`OPS`, and the case's own custom ops (which may use each other)."""
    ops = dict(OPS)
    ops.update({name: custom(entry, ops) for name, entry in case.get("customs", {}).items()})
    return ops


def function_of(case: dict[str, Any]) -> Callable[..., Any]:
    """The case's function of the inputs in `wrt`; the others are constants."""
    ops, constants = vocabulary(case), named("x", map(tensor, case["inputs"]))

    def f(*xs: Any) -> Any:
        wanted = {f"x{i}": x for i, x in zip(case["wrt"], xs, strict=True)}
        return evaluate(case["f"], constants | wanted, ops)

    return f


def check(got: Any, due: dict[str, Any] | None, case: dict[str, Any]) -> None:
    """Same shape, float32 where TensorFlow.js has float32, and the same numbers."""
    if due is None:
        assert got is None
        return
    assert got.shape == tuple(due["shape"])
    assert (got.dtype == np.float32) == (due["dtype"] == "float32"), got.dtype
    np.testing.assert_allclose(got.numpy().astype(float), array(due).astype(float), **case["tol"])


def variables_of(case: dict[str, Any]) -> dict[str, rg.Variable]:
    return {
        spec["name"]: rg.Variable(tensor(spec), spec["trainable"], spec["name"])
        for spec in case["variables"]
    }


def loss_of(case: dict[str, Any], variables: dict[str, rg.Variable]) -> Callable[[], Any]:
    leaves = named("v", variables.values()) | named("x", map(tensor, case["inputs"]))
    return lambda: evaluate(case["f"], leaves, OPS)


def chosen(case: dict[str, Any], variables: dict[str, rg.Variable]) -> Any:
    names = case["varList"]
    return None if names is None else [variables[name] for name in names]


def near(got: Any, due: Any) -> None:
    """The numbers that the documentation prints."""
    np.testing.assert_allclose(got._values(), due, rtol=1e-5, atol=1e-6)
