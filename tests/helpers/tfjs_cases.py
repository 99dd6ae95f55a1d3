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


def renames(text):
    """TensorFlow.js's names → ours: the same, or the one after the =."""
    return {name: ours or name for name, _, ours in (word.partition("=") for word in text.split())}


PLAIN = renames("""
    abs acos add asin atan atan2 atanh ceil cos erf exp expm1 floor log log1p maximum minimum
    pow reciprocal round sign sin sinh sqrt square step tan tanh where clone=identity div=divide
    greaterEqual=greater_equal mod=remainder mul=multiply neg=negative onesLike=ones_like
    sub=subtract zerosLike=zeros_like broadcastTo=broadcast_to clipByValue=clip concat
    expandDims=expand_dims gather=take logSumExp=logsumexp matMul=matmul max mean min prod reshape
    reverse=flip squeeze stack sum transpose=permute_dims unsortedSegmentSum=segment_sum
""")
IN_NN = renames("""
    prelu relu relu6 selu sigmoid softmax softplus logSigmoid=log_sigmoid logSoftmax=log_softmax
    avgPool=avg_pool batchNorm=batch_norm conv2d conv2dTranspose=conv2d_transpose conv3d dilation2d
    leakyRelu=leaky_relu localResponseNormalization=local_response_normalization maxPool=max_pool
    maxPool3d=max_pool3d resizeBilinear=resize_bilinear separableConv2d=separable_conv2d
""")
LOSSES = renames("""
    absoluteDifference=absolute_difference cosineDistance=cosine_distance hingeLoss=hinge_loss
    huberLoss=huber_loss logLoss=log_loss meanSquaredError=mean_squared_error
    sigmoidCrossEntropy=sigmoid_cross_entropy softmaxCrossEntropy=softmax_cross_entropy
""")
ARGUMENTS = renames("""
    alignCorners=align_corners batchDims=batch_dims depthRadius=depth_radius keepDims=keepdims
    filterSize=filter_size labelSmoothing=label_smoothing numSegments=num_segments perm=axes
    offValue=off_value onValue=on_value outputShape=output_shape transposeA=transpose_a
    transposeB=transpose_b varianceEpsilon=epsilon clipValueMin=min clipValueMax=max
""")
LISTS = ("concat", "stack")  # take all their arguments as one list


def renamed(path):
    def call(*args, **attrs):
        attrs = {ARGUMENTS.get(k, k): hashable(v) for k, v in attrs.items()}
        return attrgetter(path)(rg)(*args, **attrs)

    return call


def hashable(value):
    """Lists as tuples, as one writes axes and shapes in Python."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def loss(name):
    def call(*args, reduction="SUM_BY_NONZERO_WEIGHTS", **attrs):
        return renamed(f"losses.{name}")(*args, reduction=reduction.lower(), **attrs)

    return call


def slice_to(x, begin, size=None):
    begin = [begin] if isinstance(begin, int) else begin
    rest = [0] * (x.ndim - len(begin))
    return rg.slice(x, [*begin, *rest], [-1] * x.ndim if size is None else size)


def norm(x, ord="euclidean", axis=None):
    return rg.linalg.vector_norm(x, axis=axis, ord={"euclidean": 2}.get(ord, ord))


def moments(x, axis=None, keepDims=False, output="mean"):
    mean, variance = rg.nn.moments(x, axis=hashable(axis), keepdims=keepDims)
    return mean if output == "mean" else variance


def one_hot(x, depth, dtype="int32", **values):
    return rg.astype(renamed("one_hot")(x, depth, **values), dtype)


OPS: dict[str, Callable[..., Any]] = {
    **{name: renamed(ours) for name, ours in PLAIN.items()},
    **{name: renamed(f"nn.{ours}") for name, ours in IN_NN.items()},
    **{name: loss(ours) for name, ours in LOSSES.items()},
    "cast": lambda x, dtype: rg.astype(x, dtype),
    "mirrorPad": lambda x, paddings, mode: rg.pad(x, paddings, mode=mode), "moments": moments,
    "norm": norm, "oneHot": one_hot, "slice": slice_to,
    "tile": lambda x, reps: rg.tile(x, tuple(reps)),
    "unstack": lambda x, axis, index: rg.unstack(x, axis=axis)[index],
}  # fmt: skip


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
