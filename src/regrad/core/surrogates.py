"""Values in a map of rules: gradients of other functions, rules with parameters, other values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from regrad.core import containers
from regrad.core.builtin import derivative
from regrad.core.call import OwnOfLearning
from regrad.core.dispatch import lift
from regrad.core.foreign import asks_for
from regrad.core.pullback import or_zeros, pulled
from regrad.core.registry import Input, Op, bind, resolve
from regrad.core.replacing import Replace
from regrad.core.rule import (
    EXTRAS,
    Extra,
    MapRule,
    Rule,
    called,
    identity_of,
    place,
)
from regrad.core.rule import parameters as names_of
from regrad.core.signatures import helpful
from regrad.core.tape import Record
from regrad.core.tensor import Readable, Tensor
from regrad.errors import ArgumentError, RuleError, kind


@helpful("vjp_of")
def vjp_of(g: Callable[..., Any]) -> VjpOf:
    """Return a rule that uses the gradient of another function, at the inputs of the op.

    Args:
        g: The function. Its parameters name inputs and attributes of the op, like a rule's
            parameters, or they are the inputs, in order. It returns one result of the shape of
            the op's result. Write it with regrad's functions, or with the library in whose
            programs the rule applies.

    The value of the op is unchanged. An input that g does not take has no gradient. Derivatives of
    higher order are the derivatives of g.

    Returns:
        A rule for `gradient_override_map` and `rg.jax.override`.

    Raises:
        ArgumentError: g is not a function.
        RuleError: g takes a name that the op does not have (when the rule is applied), or its
            result differs from the op's in kind or shape.

    Source: the `BasicHook` of zennit (Anders et al., "Software for Dataset-wide XAI", 2021).
    `vjp_of` corresponds to the part that differentiates.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Step": rg.rules.vjp_of(rg.nn.sigmoid)}):
    ...     print(rg.grad(rg.step)(rg.tensor([0.0])).tolist())
    [0.25]
    """
    if not callable(g) or isinstance(g, type):
        raise ArgumentError(f"vjp_of expected a function, got {kind(g)}")
    return VjpOf(g)


class VjpOf(MapRule):
    """A rule that is the gradient of a function. See `vjp_of`."""

    closes_over: tuple[str, ...] = ("g",)
    is_surrogate: bool = True

    def __init__(self, g: Callable[..., Any]) -> None:
        self.g = g
        self.__name__: str = f"vjp_of({called(g)})"
        self.asks: list[str] = names_of(g)

    def bound_to(self, op: Op) -> Rule:
        """Return the rule for an op, which has the names that g takes."""
        inputs = [i.name for i in op.inputs]
        asked, by_name = self._asked(op, inputs)
        moving = [n for n in inputs if n in asked]

        def rule(dy: Any, vjp: Any, *values: Any) -> Any:
            given = dict(zip(asked, values, strict=True))
            found = self._pull(vjp, given, moving, by_name, dy)
            return [found.get(n) for n in inputs] if len(inputs) > 1 else found[inputs[0]]

        every = [inspect.Parameter(n, POSITIONAL) for n in ("dy", "vjp_", *asked)]
        rule.__signature__ = inspect.Signature(every)  # pyright: ignore
        rule.__name__, rule.__wrapped__ = self.__name__, self.g  # pyright: ignore
        bound: Any = bind(rule, op, self.__name__)
        bound.function = self.g  # for the names that its code reads, and for messages
        if hasattr(bound, "functions"):
            bound.functions = dict.fromkeys(bound.functions, self.g)
        return bound

    def _asked(self, op: Op, inputs: Sequence[str]) -> tuple[list[str], bool]:
        """Return the names that g takes, and whether it takes them by name."""
        try:
            found = inspect.signature(self.g).parameters.values()
        except ValueError:  # (a function that is not written in Python)
            return [*inputs], False
        known = op.names()
        needed = [p for p in found if p.default is p.empty and p.kind not in STARS]
        names = [p.name for p in needed]
        elsewhere = any(n in inputs and inputs[i : i + 1] != [n] for i, n in enumerate(names))
        if not {*names} <= {*known} and len(names) == len(inputs) and not elsewhere:
            return [*inputs], False
        if any(p.kind is p.POSITIONAL_ONLY for p in needed):
            return [p.name for p in needed], False
        return [p.name for p in found if p in needed or p.name in known], True

    def _pull(
        self, vjp: Any, given: dict[str, Any], moving: Sequence[str], by_name: bool, dy: Any
    ) -> dict[str, Any]:
        flat, rebuild = containers.flatten([given[n] for n in moving])

        def f(xs: Sequence[Any]) -> Sequence[Any]:
            every = given | dict(zip(moving, rebuild(xs), strict=True))
            y = self.g(**every) if by_name else self.g(*every.values())
            return [self._checked(y, dy)]

        return dict(zip(moving, rebuild(vjp(f, flat, [dy])), strict=True))

    def _checked(self, y: Any, dy: Any) -> Any:
        if isinstance(y, list | tuple) or not hasattr(y, "shape"):
            raise RuleError(f"{self!r}: expected one result, like the op's, got {kind(y)}.")
        if isinstance(y, Tensor) and not isinstance(dy, Tensor):
            raise TypeError("a function of Tensors got arrays")  # the caller then passes Tensors
        if tuple(y.shape) != tuple(dy.shape):
            raise RuleError(
                f"{self!r} returned the shape {tuple(y.shape)}, expected the shape of the op's "
                f"result, {tuple(dy.shape)}."
            )
        return y

    @property
    def identity(self) -> Any:
        return identity_of(self.g)

    def __repr__(self) -> str:
        return f"vjp_of({place(self.g)})"


@helpful("learns")
def learns(rule: Any, /, **parameters: Any) -> Learns:
    """Return a rule with parameters that get their own gradients.

    A rule that reads a parameter (a step size, a threshold, the slope of a surrogate) is a function
    of the parameter, and so is the gradient that it returns. But the op does not depend on the
    parameter. So the parameter gets a gradient only if the rule returns one.

    Args:
        rule: A function that takes the parameters by the names used here. After the gradients of
            the inputs it returns a dict with the gradients of the parameters:
            `(dx, {"step": dstep})`. Or a `vjp_of(g)` whose g takes the parameters: their gradients
            are the gradients of g.
        parameters: The parameters, by name: in regrad Variables or Tensors (in a graph, its
            variables and tensors), in PyTorch tensors that require a gradient, in JAX arrays. In
            JAX they are arguments of the differentiated function, which has to call `override`.

    The parameters become inputs of the op, at every order, also in checkpoints, loops and branches.
    If `rg.replace` replaces the op's value, its `forward` may name the parameters, too.

    Returns:
        A rule for `gradient_override_map` (also in `regrad.torch`) and `rg.jax.override`.

    Raises:
        ArgumentError: there is no parameter, or one has the wrong type (when the rule is applied);
            the key is for whole calls (in regrad).
        RuleError: the rule does not take a parameter, or does not return its gradient; the op has
            an input or attribute of the same name; the op type returns several results (in regrad).
        GradientError: a parameter is an integer; a `custom_grad` function around the op, which has
            its own gradient, closes over the parameter; the op is inside of a construct that takes
            no further inputs (in JAX: `shard_map`, a linear solve).
        PassedOverError: in PyTorch, the program calls an `autograd.Function` by an `apply` that it
            read before the scope was opened; torch.compile adds a function to its program without
            consulting the scope.

    Source: Esser et al., "Learned Step Size Quantization" (2020); Choi et al., "PACT: Parameterized
    Clipping Activation for Quantized Neural Networks" (2018).

    PACT's clipping function, with the value of `minimum(relu(x), alpha)`:

    >>> import regrad as rg
    >>> alpha = rg.Variable(2.0, name="alpha")
    >>> def clipped(x, alpha):
    ...     return rg.minimum(rg.nn.relu(x), alpha)
    >>> def pact(dy, x, alpha):
    ...     dx = rg.where((x > 0) & (x < alpha), dy, 0.0)
    ...     return dx, {"alpha": rg.sum(rg.where(x >= alpha, dy, 0.0))}
    >>> rules = {"Relu": rg.replace(clipped, rg.rules.learns(pact, alpha=alpha))}
    >>> with rg.gradient_override_map(rules, values=True):
    ...     rg.variable_grads(lambda: rg.sum(rg.nn.relu(rg.tensor([1.0, 3.0, 5.0])))).grads
    {'alpha': Tensor(2., dtype=float32)}

    In PyTorch, the slope of a surrogate:

    >>> import torch
    >>> import regrad.torch
    >>> slope = torch.nn.Parameter(torch.tensor(2.0))
    >>> smooth = rg.rules.vjp_of(lambda x, slope: torch.tanh(slope * x))
    >>> surrogate = rg.rules.learns(smooth, slope=slope)
    >>> x = torch.tensor([0.0, 0.5], requires_grad=True)
    >>> with regrad.torch.gradient_override_map({"Sign": surrogate}):
    ...     torch.sign(x).sum().backward()
    >>> x.grad, slope.grad
    (tensor([2.0000, 0.8399]), tensor(0.2100))

    In JAX the parameter is an argument:

    >>> import jax, jax.numpy as jnp
    >>> smooth = rg.rules.vjp_of(lambda x, slope: jnp.tanh(slope * x))
    >>> def loss(slope, x):
    ...     rules = {"Sign": rg.rules.learns(smooth, slope=slope)}
    ...     return rg.jax.override(jnp.sign, rules)(x).sum()
    >>> print(jax.grad(loss)(2.0, jnp.array([0.0, 0.5])).round(4))
    0.21
    """
    if not (callable(rule) and not isinstance(rule, type)) or isinstance(rule, Learns):
        raise ArgumentError(f"learns expected a rule, got {kind(rule)}")
    if not parameters:
        raise ArgumentError("learns needs a parameter. Write learns(rule, step=step)")
    return Learns(rule, parameters)


class Learns(MapRule):
    """A rule with parameters that have gradients. See `learns`."""

    closes_over: tuple[str, ...] = ("rule", "parameters")

    def __init__(self, rule: Any, parameters: dict[str, Any]) -> None:
        self.rule = rule
        self.parameters = parameters
        self.__name__: str = called(rule)
        self.asks: list[str] = asks_for(rule)
        if idle := [name for name in parameters if name not in self.asks]:
            raise RuleError(
                f"learns: the rule {self.__name__!r} does not take its parameter {idle[0]!r}. "
                f"Name it after dy: def rule(dy, x, {idle[0]})."
            )

    def check(self, may_learn: Callable[[Any], bool], expected: str) -> None:
        """Raise for parameters that are not trainable in the library of the scope."""
        for name, x in self.parameters.items():
            if not may_learn(x):
                raise ArgumentError(f"learns: {name} expected {expected}, got {kind(x)}")

    def extended(self, op: Op) -> Op:
        """Return an op with the parameters as further inputs."""
        known = [*[i.name for i in op.inputs], *op.attrs]
        if taken := [name for name in self.parameters if name in known]:
            raise RuleError(
                f"learns: {op.type!r} has a {taken[0]!r} of its own, so the rule {self.__name__!r} "
                f"cannot tell its parameter from it. Rename the parameter: my_{taken[0]}."
            )
        inputs = [*op.inputs, *[Input(name, "one") for name in self.parameters]]
        made = Op(op.type, op.name, op.function, inputs, op.attrs, broadcasts=op.broadcasts)
        made.several, made.holomorphic, made.function = op.several, op.holomorphic, op.function
        made.rule, made.replaced = OwnOfLearning(op, [*self.parameters]), op.shipped
        return made

    def bound_to(self, op: Op) -> Rule:
        """Return the rule for an op of regrad with the parameters as further inputs."""
        self.check(lambda x: isinstance(x, Tensor | Readable), "a Variable or a Tensor of regrad")
        return resolve(self.rule, self.extended(op))

    @property
    def identity(self) -> Any:
        held = sorted(self.parameters.items())
        return identity_of(self.rule), *[(name, id(value)) for name, value in held]

    def __repr__(self) -> str:
        return f"learns({self.__name__}, {', '.join(self.parameters)})"


class LearnsDerivative(Learns):
    """The derivative of a function that replaces an op's value, also by its parameters."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.rule = derivative
        self.parameters = parameters
        self.asks: list[str] = []  # (the names are in the function)
        self.__name__: str = ", ".join(parameters)


POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _vjp(record: Record, f: Any, xs: Sequence[Any], dys: Any) -> Sequence[Any]:
    """Return the gradients of a function of Tensors, or of arrays of the record's library.

    The dys may be a function of the results.
    """
    given = xs if callable(dys) else dys
    if record.own is not None and not isinstance(given[0], Tensor):
        return record.own.vjp(f, xs, dys)
    xs = [*map(lift, xs)]
    dys = dys if callable(dys) else [*map(lift, dys)]
    _, found = pulled(f, xs, range(len(xs)), dys)
    return [or_zeros(dx, x) for dx, x in zip(found, xs, strict=True)]


EXTRAS["vjp_"] = Extra(lambda record: partial(_vjp, record), runs_op=True)


# -- values --------------------------------------------------------------------------------------


def replace(forward: Callable[..., Any], gradient: Any = None, **parameters: Any) -> Replace:
    """Return a value for a map of rules that replaces the value of an op, and its gradient.

    Args:
        forward: The function to compute in place of the op. Its parameters are names, like a
            rule's parameters after `dy`: the op's inputs (`x`; `a`, `b`; `x`, `w`, `bias`),
            attributes, shapes and dtypes, the `site` of the call, `y` (the op's own value),
            `forward` (the op itself as a function of its inputs), and the parameters of a gradient
            by `rules.learns`. It must return the shape and dtype of the op's own result. Write it
            with the library's functions, or with regrad's. For a key without an op, `at("head")`,
            it computes the call of the module, and also names the module's parameters.
        gradient: A rule as usual. Its `y` is the replaced value, and its `builtin` and `forward`
            belong to the function `forward`. None: the derivative of `forward`, computed by its
            library.
        parameters: Parameters that `forward` names and that get their own gradients, as in
            `rules.learns`: `replace(f, step=step)` also differentiates f with respect to `step`.
            With a `gradient` it is `replace(f, learns(gradient, step=step))`.

    Returns:
        A value for the map of a scope with `values=True`: `gradient_override_map` (also in
        `regrad.torch`) and `regrad.jax.override`. Without `values=True`, the scope raises for a map
        that replaces values.

    Raises:
        ArgumentError: `forward` is not a function, or `gradient` is not a rule; a parameter belongs
            to another library (when the map is applied).
        RuleError: `forward` does not name a parameter.

    Reports show the hits of this rule as `replace(…)`. Some calls cannot take a replaced value
    (calls with `out=`, views, ops that update buffers). They raise an error that names the call.

    Source: quantization-aware training, Jacob et al., "Quantization and Training of Neural Networks
    for Efficient Integer-Arithmetic-Only Inference" (2018).

    >>> import regrad as rg
    >>> def quantised(a, b, forward):
    ...     return forward(rg.round(a * 8) / 8, rg.round(b * 8) / 8)
    >>> def straight_through(dy, a, b):
    ...     return dy @ rg.matrix_transpose(b), rg.matrix_transpose(a) @ dy
    >>> rules = {"MatMul": rg.replace(quantised, straight_through)}
    >>> with rg.gradient_override_map(rules, values=True):
    ...     y, da = rg.value_and_grad(lambda a: (a @ [[1.0], [0.3]]).sum())(rg.tensor([[0.3, 1.0]]))
    >>> print(y.tolist(), da.tolist())
    0.5 [[1.0, 0.30000001192092896]]

    A trainable step size, in PyTorch:

    >>> import torch
    >>> import regrad.torch
    >>> def stepped(x, step):
    ...     return step * (torch.round(x / step) + (x / step) - (x / step).detach())
    >>> step, x = torch.nn.Parameter(torch.tensor(0.5)), torch.tensor([0.7], requires_grad=True)
    >>> rules = {"Tanh": rg.replace(stepped, step=step)}
    >>> with regrad.torch.gradient_override_map(rules, values=True):
    ...     torch.tanh(x).sum().backward()
    >>> print(x.grad, step.grad)
    tensor([1.]) tensor(-0.4000)
    """
    if not callable(forward) or isinstance(forward, type):
        raise ArgumentError(
            f"replace: forward expected a function of the op's inputs, got {kind(forward)}"
        )
    if isinstance(gradient, Replace) or not (
        gradient is None or isinstance(gradient, str) or callable(gradient)
    ):
        raise ArgumentError(
            "replace: gradient expected a rule (a function, or the name of one), or None for the "
            f"derivative of forward, got {kind(gradient)}"
        )
    if parameters and gradient is not None:
        gradient = learns(gradient, **parameters)
    elif parameters:
        gradient = LearnsDerivative(parameters)
        if idle := [name for name in parameters if name not in names_of(forward)]:
            raise RuleError(
                f"replace: the function {called(forward)!r} does not take its parameter "
                f"{idle[0]!r}. Name it after the inputs: def forward(x, {idle[0]})."
            )
    return Replace(forward, gradient)
