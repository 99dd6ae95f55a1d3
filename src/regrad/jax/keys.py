"""What a key of an override means in a JAX program: an op type, a primitive, or a function.

An op type stands for what `TABLE` says. Any other string is the name of a JAX primitive. A
function is found in a program by the place where it was written, which JAX notes for `jax.jit`,
`jax.custom_jvp` and `jax.custom_vjp`; a plain function leaves no trace of itself.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import ad, batching

from regrad.errors import ArgumentError, GradientError, UnknownOpError, kind, near
from regrad.jax.linear import body_of
from regrad.registry import ALIASES, OPS, Input, Op, canonical, not_yet

CALLED = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")  # what a function leaves behind
Attrs = Mapping[str, Any]


class Target:
    """What an op type stands for: a primitive, with the attributes it has, or a function.

    `power` picks equations of `integer_pow`, `when` others by what they look like; `refused` says
    why one cannot be covered. `lies` are the op's names for the operands, where these stand in
    another order, and `form` is how an equation must be written to be one of the op type. A
    function's `options` say with which arguments it may have been called, from its equations.
    """

    def __init__(
        self,
        name: str,
        attrs: Callable[[Attrs], dict[str, Any]] = lambda params: {},
        power: int | None = None,
        refused: Callable[[Any], str] = lambda eqn: "",
        *,
        when: Callable[[Any], bool] = lambda eqn: True,
        lies: Sequence[str] = (),
        form: Callable[[Any], Form | None] = lambda eqn: None,
        options: Callable[[Sequence[Any]], list[dict[str, Any]]] | None = None,
        inlined: bool = False,
    ) -> None:
        self.name = name
        self.attrs = attrs
        self.power = power
        self.refused = refused
        self.when = when
        self.lies = lies
        self.form = form
        self.options = options
        self.inlined = inlined

    def fits(self, eqn: Any) -> bool:
        """Whether an equation is one of these."""
        named = eqn.primitive.name == self.name
        return named and self.power in (None, eqn.params.get("y")) and self.when(eqn)

    def meets(self, other: Target) -> bool:
        """Whether both cover the same equations."""
        powers = {self.power, other.power}
        return self.name == other.name and (None in powers or len(powers) == 1)

    @property
    def function(self) -> Any:
        """The function of JAX that is meant, if it is no primitive."""
        module, _, name = self.name.rpartition(".")
        return getattr(functools.reduce(getattr, module.split(".")[1:], jax), name)

    def __repr__(self) -> str:
        return f"`{self.name}`"


class Form(NamedTuple):
    """A `dot_general` as a product of matrices: axes in another order, some of them as one.

    `orders` and `shapes` are those of the operands as matrices (with the batch ahead), `split`
    the operands' own axes in that order.
    """

    orders: tuple[tuple[int, ...], tuple[int, ...]]
    split: tuple[tuple[int, ...], tuple[int, ...]]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    def operand(self, x: Any, i: int) -> Any:
        """An operand as a matrix."""
        return x.transpose(self.orders[i]).reshape(self.shapes[i])

    def undone(self, x: Any, i: int) -> Any:
        """A matrix as the operand that it was."""
        back = [self.orders[i].index(axis) for axis in range(len(self.orders[i]))]
        return x.reshape(self.split[i]).transpose(back)

    def result(self, y: Any) -> Any:
        """The result as a matrix."""
        (*batch, m, _), n = self.shapes[0], self.shapes[1][-1]
        return y.reshape((*batch, m, n))


def _as_matmul(eqn: Any) -> Form | None:
    """How a `dot_general` is to be written as `a @ b`; None if it is one."""
    (left, right), (first, second) = eqn.params["dimension_numbers"]
    left, right, first, second = map(tuple, (left, right, first, second))
    a, b = (v.aval.shape for v in eqn.invars)
    if _is_matmul(len(a), len(b), left, right, first, second):
        return None
    rows = tuple(i for i in range(len(a)) if i not in (*first, *left))
    columns = tuple(i for i in range(len(b)) if i not in (*second, *right))
    orders = (*first, *rows, *left), (*second, *right, *columns)
    size = lambda shape, axes: math.prod(shape[i] for i in axes)  # noqa: E731
    batch = tuple(a[i] for i in first)
    inner = size(a, left)
    shapes = (*batch, size(a, rows), inner), (*batch, inner, size(b, columns))
    split = tuple(a[i] for i in orders[0]), tuple(b[i] for i in orders[1])
    return Form(orders, split, shapes)


def _is_matmul(m: int, n: int, left: Any, right: Any, first: Any, second: Any) -> bool:
    batch = tuple(range(len(first)))
    if first != second or first != batch or left != (m - 1,):
        return False
    if not batch:
        return n <= 2 and right == (max(n - 2, 0),)
    return m == n == len(batch) + 2 and right == (n - 2,)


def _is_pooling(eqn: Any, n: int) -> bool:
    return len(eqn.params["window_dimensions"]) == n + 2


def _no_pooling(eqn: Any) -> str:
    """Why a `reduce_window_max` is no pooling of images whose channels come last."""
    p = eqn.params
    spatial = {p["window_dimensions"][i] for i in (0, -1)} == {1} == {
        p["window_strides"][i] for i in (0, -1)
    }  # fmt: skip
    plain = {*p["base_dilation"], *p["window_dilation"]} == {1}
    if spatial and plain:
        return ""
    return (
        "its windows are not those of a pooling of images whose channels come last; use the key "
        "'reduce_window_max'"
    )


def _pooling(params: Attrs) -> dict[str, Any]:
    return {
        "filter_size": tuple(params["window_dimensions"][1:-1]),
        "strides": tuple(params["window_strides"][1:-1]),
        "pad": tuple(map(tuple, params["padding"][1:-1])),
    }


def _is_convolution(eqn: Any, n: int) -> bool:
    return len(eqn.params["window_strides"]) == n


def _no_convolution(eqn: Any) -> str:
    """Why a `conv_general_dilated` is not one of images whose channels come last."""
    p, n = eqn.params, len(eqn.params["window_strides"])
    last = (0, n + 1, *range(1, n + 1)), (n + 1, n, *range(n)), (0, n + 1, *range(1, n + 1))
    if tuple(map(tuple, p["dimension_numbers"])) != last:
        why = "its channels do not come last (NHWC, HWIO)"
    elif {*p["lhs_dilation"], p["feature_group_count"], p["batch_group_count"]} != {1}:
        why = "it has groups, or is transposed"
    else:
        return ""
    return f"{why}; use the key 'conv_general_dilated', or move the axes in the model"


def _convolution(params: Attrs) -> dict[str, Any]:
    return {
        "strides": tuple(params["window_strides"]),
        "pad": tuple(map(tuple, params["padding"])),
        "dilations": tuple(params["rhs_dilation"]),
    }


def _is_choice(eqn: Any) -> bool:
    return len(eqn.invars) == 3 and eqn.invars[0].aval.dtype == bool


def _reduced(eqns: Sequence[Any], name: str) -> Iterator[Any]:
    for eqn in eqns[:3]:
        if eqn.primitive.name == name:
            yield tuple(eqn.params["axes"])
            return


def _softmax(eqns: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"axis": a[0] if len(a) == 1 else a} for a in _reduced(eqns, "reduce_max")]


def _mean(eqns: Sequence[Any]) -> list[dict[str, Any]]:
    found = _reduced(eqns, "reduce_sum")
    return [{"axis": a, "keepdims": keep} for a in found for keep in (False, True)]


def _gelu(eqns: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"approximate": True}, {"approximate": False}]


def _axes(params: Attrs) -> dict[str, Any]:
    return {"axis": tuple(params["axes"]), "keepdims": False}


def _along(params: Attrs) -> dict[str, Any]:
    return {"axis": params["axis"], "reverse": params["reverse"], "exclusive": False}


def _same(*names: str) -> dict[str, list[Target]]:
    """Op types that are one primitive with the name in lower case."""
    return {name: [Target(name.lower())] for name in names}


TABLE: dict[str, list[Target]] = {
    **_same(
        "Abs", "Sign", "Floor", "Ceil", "Round", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt",
        "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh",
        "Atanh", "Erf", "Erfc", "Lgamma", "Digamma", "Neg", "Sub", "Mul", "Pow", "Atan2", "Real",
        "Imag", "Conj",
    ),
    "AddV2": [Target("add")],
    "RealDiv": [Target("div")],
    "Maximum": [Target("max")],
    "Minimum": [Target("min")],
    "Erfinv": [Target("erf_inv")],
    "Sigmoid": [Target("logistic")],
    "Square": [Target("square"), Target("integer_pow", power=2)],
    "Reciprocal": [Target("integer_pow", power=-1)],
    "Sum": [Target("reduce_sum", _axes)],
    "Max": [Target("reduce_max", _axes)],
    "Min": [Target("reduce_min", _axes)],
    "Prod": [Target("reduce_prod", _axes)],
    "Cumsum": [Target("cumsum", _along)],
    "Cumprod": [Target("cumprod", _along)],
    "MatMul": [
        Target(
            "dot_general",
            lambda params: {"transpose_a": False, "transpose_b": False},
            form=_as_matmul,
        )
    ],
    "StopGradient": [Target("stop_gradient")],
    "Relu": [Target("jax.nn.relu")],
    "Relu6": [Target("jax.nn.relu6")],
    "LeakyRelu": [Target("jax.nn.leaky_relu")],
    "Elu": [Target("jax.nn.elu")],
    "Selu": [Target("jax.nn.selu")],
    "LogSigmoid": [Target("jax.nn.log_sigmoid")],
    "Softplus": [Target("jax.nn.softplus")],
    "Softsign": [Target("jax.nn.soft_sign")],
    "Silu": [Target("jax.nn.silu")],
    "LogSoftmax": [Target("jax.nn.log_softmax", options=_softmax)],
    "Softmax": [Target("jax.nn.softmax", options=_softmax, inlined=True)],
    "Gelu": [Target("jax.nn.gelu", options=_gelu, inlined=True)],
    "Mean": [Target("jax.numpy.mean", options=_mean, inlined=True)],
    "SelectV2": [Target("select_n", when=_is_choice, lies=("condition", "b", "a"))],
    **{
        f"Conv{n}D": [
            Target("conv_general_dilated", _convolution, refused=_no_convolution,
                   when=functools.partial(_is_convolution, n=n))
        ]
        for n in (2, 3)
    },
    **{
        name: [
            Target("reduce_window_max", _pooling, refused=_no_pooling,
                   when=functools.partial(_is_pooling, n=n))
        ]
        for n, name in ((2, "MaxPool"), (3, "MaxPool3D"))
    },
    "ClipByValue": [Target("jax.numpy.clip")],
    "Trunc": [Target("jax.numpy.trunc")],
}  # fmt: skip

INLINED = (
    "leaves no boundary in a JAX program, so no rule could be put on it. Override what it is made "
    "of (see override(f, {}).untouched()), or call jax.jit(f) in the model and use that as the key."
)


class Key:
    """What a key means: which equations, and what the rule's parameters stand for there."""

    label = ""  # for messages and reports
    targets: Sequence[Target] = ()
    codes: Sequence[Any] = ()  # of Python functions that run where the key is differentiated
    call: Any = None  # the code by which JAX calls it, if its derivative may hide it

    def meets(self, other: Key) -> bool:
        """Whether two keys stand for the same thing."""
        return any(a.meets(b) for a in self.targets for b in other.targets)

    def matches(self, eqn: Any) -> bool:
        """Whether an equation is one of those meant."""
        raise NotImplementedError

    def op(self, eqn: Any) -> Op:
        """The op type as the rule sees it."""
        raise NotImplementedError

    def attrs(self, eqn: Any) -> dict[str, Any]:
        """The attributes that are known now."""
        return {}

    def lies(self, eqn: Any) -> Sequence[str]:
        """The name in the op of each operand; those that it does not have are constants."""
        return [i.name for i in self.op(eqn).inputs]

    def refused(self, eqn: Any) -> str:
        """Why no rule can be put on an equation that is one of those meant."""
        return ""

    def form(self, eqn: Any) -> Form | None:
        """How an equation must be written to be one of the op type, if it is not."""
        return None


class PrimitiveKey(Key):
    """A primitive of JAX, under an op type or under its own name."""

    def __init__(self, label: str, targets: Sequence[Target], op: Op | None = None) -> None:
        self.label = label
        self.targets = targets
        self.known = op
        self.ops: dict[Any, Op] = {}

    def matches(self, eqn: Any) -> bool:
        return self._target(eqn) is not None

    def refused(self, eqn: Any) -> str:
        target = self._target(eqn)
        return target.refused(eqn) if self.known is not None and target is not None else ""

    def form(self, eqn: Any) -> Form | None:
        target = self._target(eqn)
        return target.form(eqn) if self.known is not None and target is not None else None

    def lies(self, eqn: Any) -> Sequence[str]:
        target = self._target(eqn)
        return (target is not None and target.lies) or super().lies(eqn)

    def _target(self, eqn: Any) -> Target | None:
        return next((t for t in self.targets if t.fits(eqn)), None)

    def op(self, eqn: Any) -> Op:
        if self.known is not None:
            return self.known
        count, several = len(eqn.invars), len(eqn.outvars) > 1
        names = {1: ["x"], 2: ["a", "b"]}.get(count, [f"x{i}" for i in range(count)])
        found = (count, several)
        if found not in self.ops:
            self.ops[found] = made_op(self.label, names, list(self.attrs(eqn)), several)
        return self.ops[found]

    def attrs(self, eqn: Any) -> dict[str, Any]:
        target = self._target(eqn)
        if self.known is not None and target is not None:
            return target.attrs(eqn.params)
        return {k: v for k, v in eqn.params.items() if k.isidentifier() and k != "y"}


class FunctionKey(Key):
    """A function that JAX compiles or that has a derivative of its own."""

    def __init__(self, function: Any, label: str = "", target: Target | None = None) -> None:
        self.label = label or getattr(function, "__qualname__", None) or function.__name__
        self.name, self.place = written(function)
        self.targets = [Target(f"{self.name} at {self.place}")]
        if isinstance(function, jax.custom_jvp | jax.custom_vjp) and not label:
            self.call = inspect.unwrap(type(function).__call__).__code__
        self.function = function
        self.single = target is not None  # an op type of one input: other operands are attributes
        self.is_inlined = target is not None and target.inlined
        self.options = (target and target.options) or (lambda eqns: [])
        self.given: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.code = _code(function)
        self.wraps = any(map(callable, inspect.getclosurevars(_plain(function)).nonlocals.values()))
        self.bodies: dict[Any, str] = {}
        self.codes = [c for c in map(_code, _parts(function)) if c is not None and c not in SHARED]
        without = getattr(function, "nondiff_argnums", ())
        given = enumerate(inspect.signature(function).parameters)
        self.parameters = [name for i, name in given if i not in without]
        self.ops: dict[Any, Op] = {}

    def matches(self, eqn: Any) -> bool:
        if eqn.primitive.name not in (CALLED if not self.is_inlined else ("closed_call",)):
            return False
        info = body_of(eqn)[0].debug_info.func_src_info or ""
        name, _, where = info.partition(" at ")
        if name == self.name and not where:
            raise GradientError(
                f"override: the program calls a function {name!r} and does not say where it was "
                f"written, so it may or may not be the key {self.label} ({self.place}). Give it a "
                "name of its own, or override what it is made of."
            )
        if (name, where) != (self.name, self.place):
            return False
        self._check_one(eqn)
        return True

    def _check_one(self, eqn: Any) -> None:
        """Refuse two functions that one decorator made: they are written at one place."""
        if not self.wraps:
            return
        body = body_of(eqn)[0]
        kinds = tuple(str(v.aval) for v in eqn.invars)
        if self.bodies.setdefault(kinds, str(body)) != str(body):
            raise GradientError(
                f"override: the key {self.label!r} ({self.place}) is one of several functions in "
                "the program that were written at one place, by a decorator, and cannot be told "
                "from the others. Use functools.wraps in the decorator."
            )

    def lies(self, eqn: Any) -> Sequence[str]:
        """The parameters; what the function closes over comes first, and is called `outer0`."""
        known = list(body_of(eqn)[0].debug_info.arg_names or self.parameters)
        count = len(eqn.invars)
        hidden = eqn.params.get("num_consts", count - len(list(filter(None, known))))
        known = known[len(known) - (count - hidden) :] if len(known) >= count - hidden else []
        known += [""] * (count - hidden - len(known))
        names = [re.sub(r"\W+", "_", n).strip("_") or f"x{i}" for i, n in enumerate(known)]
        return [*(f"outer{i}" for i in range(hidden)), *names]

    def op(self, eqn: Any) -> Op:
        names = [n for n in self.lies(eqn) if not n.startswith("outer")]
        several = len(eqn.outvars) > 1
        found = (*names, several)
        if found not in self.ops:
            inputs, attrs = (names[:1], names[1:]) if self.single else (names, [])
            attrs += self.attrs(eqn)
            self.ops[found] = made_op(self.label, inputs, attrs, several)
        return self.ops[found]

    def attrs(self, eqn: Any) -> dict[str, Any]:
        body = eqn.params.get("call_jaxpr")
        if body in self.given:
            return dict(self.given[body])
        return next(iter(self.options(body_of(eqn)[0].eqns)), {})


def made_op(label: str, inputs: Sequence[str], attrs: Sequence[str], several: bool) -> Op:
    """An op type of JAX's, with parameters of these names."""
    given = [Input(name, "one") for name in inputs]
    return Op(label, label, not_yet, given, attrs, broadcasts=len(given) > 1, several=several)


def _parts(function: Any) -> list[Any]:
    """The functions that run when a function is called, differentiated or not."""
    parts = [getattr(function, name, None) for name in ("fun", "jvp", "fwd", "bwd")]
    return [function, *filter(None, parts)]


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _code(function: Any) -> Any:
    return getattr(_plain(function), "__code__", None)


def _made_by_defjvps() -> Any:
    f = jax.custom_jvp(lambda x: x)
    f.defjvps(lambda dx, y, x: dx)
    return _code(f.jvp)


SHARED = (_made_by_defjvps(),)  # by many functions, which show themselves when differentiated


def written(function: Any) -> tuple[str, str]:
    """A function's name, and `file:line` of where it was written, as JAX notes them."""
    plain = _plain(function)
    code = getattr(plain, "__code__", None)
    if code is None or plain.__name__ == "<lambda>":
        raise ArgumentError(
            f"override: {function!r:.80} cannot be a key: a key is a function with a name and a "
            "place in a file, by which it is found. Write it with def."
        )
    return plain.__name__, f"{code.co_filename}:{code.co_firstlineno}"


# -- finding out what is meant ---------------------------------------------------------------------


def key_for(key: Any) -> Key:
    """What a key of the map means; an error says why it cannot be one."""
    if isinstance(key, str):
        return _named(key)
    if not callable(key):
        raise ArgumentError(
            "override takes a dict of op types, JAX primitives or functions to rules, got the key "
            f"{key!r:.60} ({kind(key)})"
        )
    for op_type, function in _with_options():
        if key is function:
            return _named(op_type)
    _check_boundary(key)
    _check_notes()
    return FunctionKey(key)


@functools.cache
def _with_options() -> list[tuple[str, Any]]:
    """The functions whose arguments are found by what they compute, and their op types."""
    return [(name, ts[0].function) for name, ts in TABLE.items() if ts[0].options is not None]


def closed_call_p() -> Any:
    """JAX's primitive that runs a program, and is differentiated as the program is."""
    from jax._src.core import closed_call_p

    return closed_call_p


def same_thing(key: Key, op_type: str) -> bool:
    """Whether a key stands for just what an op type stands for."""
    if op_type not in TABLE:
        return False
    return {(t.name, t.power) for t in key.targets} == {
        (t.name, t.power) for t in _named(op_type).targets
    }


def _named(name: str) -> Key:
    op_type = canonical(name)
    if op_type in TABLE:
        targets = TABLE[op_type]
        if targets[0].name.startswith("jax."):
            _check_notes()
            return FunctionKey(targets[0].function, op_type, targets[0])
        return PrimitiveKey(op_type, targets, OPS[op_type])
    if op_type in OPS:
        raise UnknownOpError(
            f"override: the op type {name!r} {INLINED} In JAX programs these op types are found: "
            f"{', '.join(sorted(TABLE))}."
        )
    known = primitives()
    if name not in known:
        hint = near(name, [*TABLE, *ALIASES, *known])
        raise UnknownOpError(
            f"override: {name!r} is neither an op type nor the name of a JAX primitive.{hint} "
            f"The op types are {', '.join(sorted(TABLE))}; jax.make_jaxpr(f)(x) shows primitives."
        )
    return PrimitiveKey(name, [Target(name)])


def primitives() -> set[str]:
    """The names of the primitives that JAX can differentiate or batch."""
    return {p.name for p in (*ad.primitive_jvps, *batching.fancy_primitive_batchers)}


def _check_boundary(key: Any) -> None:
    name = getattr(key, "__name__", repr(key))
    info = getattr(key, "_jit_info", None)
    if isinstance(key, jax.custom_jvp | jax.custom_vjp):
        return
    if info is None or getattr(info, "inline", False):
        what = "is compiled with inline=True, and so" if info else "is a plain function; it"
        raise ArgumentError(f"override: {name} {what} {INLINED}")


@functools.cache
def _check_notes() -> None:
    """Refuse function keys if this JAX does not note where functions were written."""
    for probe in _PROBES:
        (eqn,) = jax.make_jaxpr(probe)(1.0).jaxpr.eqns
        if not FunctionKey(probe).matches(eqn):
            raise GradientError(
                f"override: this JAX ({jax.__version__}) does not say in its programs where "
                "functions were written, so functions (and op types that stand for functions) "
                "cannot be keys. Override primitives."
            )


def _probe(x: Any) -> Any:
    return x + 1


_PROBES = [jax.jit(_probe), jax.custom_jvp(_probe), jax.custom_vjp(_probe)]
_PROBES[1].defjvps(lambda dot, y, x: dot)  # pyright: ignore[reportFunctionMemberAccess]
_PROBES[2].defvjp(lambda x: (x, None), lambda _, dy: (dy,))  # pyright: ignore[reportFunctionMemberAccess]
