"""Planted faults in functions of regrad, JAX and PyTorch: the tools name the op and the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import regrad as rg
from regrad.testing import gradient_report
from tests.helpers.hosts import Functions
from tests.helpers.marks import marked_lines
from tests.helpers.optional import ABSENT

LINES = marked_lines(__file__)
X = np.array([0.3, -0.7, 1.2])
W = np.array([[0.4, -1.1, 0.3], [0.2, 0.9, -0.5], [1.3, 0.1, 0.6]])


class Host(NamedTuple):
    """A library: its functions, its arrays, and the tools of regrad for it."""

    functions: Any
    array: Callable[[Any], Any]
    tools: Any
    by_check: Callable[..., Any]


def of_regrad() -> Host:
    def custom(f, back, kept=lambda *xs: xs):
        @rg.custom_grad  # here: op
        def op(*xs, save):
            save(list(kept(*xs)))
            return f(*xs), lambda dy, saved: list(back(*saved, dy))

        return op

    def by_check(f, x):
        cause = gradient_report(f, [x], order=2).causes[0]
        return cause.rule.split("'")[1], cause.rule.rpartition(", ")[2].rstrip(")")

    own = {"custom": custom, "override": rg.gradient_override_map}
    own |= {"X": X, "W": rg.tensor(W), "weight": 2}
    functions = Functions(rg, rg.nn, **own)
    return Host(functions, rg.tensor, rg, by_check)


def of_jax() -> Host:
    import jax
    import jax.numpy as jnp

    def custom(f, back, kept=lambda *xs: xs):
        @jax.custom_vjp
        def op(*xs):
            return f(*xs)

        op.defvjp(lambda *xs: (f(*xs), kept(*xs)), lambda saved, dy: tuple(back(*saved, dy)))
        return op

    def by_check(f, x):
        cause = rg.jax.gradient_report(f, [x], order=2).causes[0]
        return cause.op_type, cause.rule.rpartition("run at ")[2]

    functions = Functions(
        jnp, jax.nn, jax.lax, custom=custom, W=jnp.asarray(W), X=X, weight=2, jax=jax
    )
    return Host(functions, jnp.asarray, rg.jax, by_check)


def of_torch() -> Host:
    import torch

    import regrad.torch as rt
    from tests.torch.common import bare_function, function

    made = {}  # one class for all calls

    def custom(f, back, kept=lambda *xs: xs):
        own = function(f, lambda dy, *xs: tuple(back(*kept(*xs), dy)), "op")
        return made.setdefault(f.__code__, own).apply

    def by_check(f, x):
        cause = rt.gradient_report(f, [x], order=2).causes[0]
        return cause.op_type, cause.line, cause.kind

    def keep(ctx, x):
        ctx.x = x
        return x.square()

    cached = bare_function("Cached", keep, lambda ctx, dy: 2 * ctx.x * dy).apply
    own = {"custom": custom, "X": torch.tensor(X), "W": torch.tensor(W), "cached": cached}
    own |= {"override": rt.gradient_override_map, "custom_grad": rt.custom_grad, "torch": torch}
    own |= {"weight": torch.ones(3, requires_grad=True), "stop_gradient": torch.Tensor.detach}
    functions = Functions(torch, **own)
    return Host(functions, lambda x: torch.tensor(x, requires_grad=True), rt, by_check)


# -- rules that are wrong --------------------------------------------------------------------------


def wrong_factor(o, x):
    cube = o.custom(lambda x: x**3, lambda x, dy: (2 * dy * x**2,))
    return o.sum(o.sin(cube(x)))  # here: wrong_factor


def missing_sum(o, x):
    shift = o.custom(lambda x, b: x + b, lambda x, b, dy: (dy, dy[0]))
    return o.sum(shift(o.reshape(x, (3, 1)) * x, x) ** 2)  # here: missing_sum


def surrogate_off_by_its_scale(o, x):
    slope = lambda x: o.sigmoid(x) * (1 - o.sigmoid(x))  # noqa: E731
    soft = o.custom(lambda x: o.sigmoid(4 * x), lambda x, dy: (dy * slope(4 * x),))
    return o.sum(x * soft(x))  # here: surrogate_off_by_its_scale


def stale_saved_value(o, x):
    square = o.custom(lambda x: x * x, lambda old, dy: (2 * dy * old,), lambda x: (x - 0.1,))
    return o.sum(square(x))  # here: stale_saved_value


def swapped_inputs(o, x):
    product = o.custom(lambda a, b: a * b, lambda a, b, dy: (dy * a, dy * b))
    return o.sum(product(o.sin(x), x))  # here: swapped_inputs


def transposed_matrix_gradient(o, w):
    matmul = o.custom(lambda x, w: x @ w, lambda x, w, dy: (dy @ w.T, (x.T @ dy).T))
    return o.sum(o.tanh(matmul(o.W, w)))  # here: transposed_matrix_gradient


def wrong_sign(o, x):
    with o.override({"Cos": lambda dy, x: dy * rg.sin(x)}):
        return o.sum(x * o.cos(x))  # here: wrong_sign


def wrong_sign_of_a_tangent(o, x):
    cosine = o.jax.custom_jvp(lambda x: o.cos(x))
    cosine.defjvp(lambda xs, ts: (o.cos(xs[0]), ts[0] * o.sin(xs[0])))
    return o.sum(x * cosine(x))  # here: wrong_sign_of_a_tangent


def wrong_at_second_order(o, x):
    cos = lambda x: (o.stop_gradient(o.cos(x)),)  # noqa: E731
    sine = o.custom(lambda x: o.sin(x), lambda slope, dy: (dy * slope,), cos)
    return o.sum(x * sine(x))  # here: wrong_at_second_order


def mean_for_sum(o, x):
    total = o.custom(lambda x: o.sum(x), lambda x, dy: (0 * x + dy / 3,))
    return total(x * x)  # here: mean_for_sum


def wrong_sign_of_a_custom_gradient(o, x):
    cosine = o.custom_grad(lambda x: (o.cos(x), lambda dy: dy * o.sin(x)))
    return o.sum(x * cosine(x))  # here: wrong_sign_of_a_custom_gradient


def stale_buffer(o, x):
    h = 3 * x
    y = o.cached(h)  # here: stale_buffer
    with o.torch.no_grad():
        h.clamp_(-1, 1)  # a buffer that is used again
    return y


def stale_data(o, x):
    h = 1 * x
    y = o.sin(h)  # here: stale_data
    h.data.mul_(2)
    return y + h.detach()


def changed_in_place(o, x):
    h = o.exp(x)  # here: changed_in_place
    y = h * 2
    h.add_(1)
    return o.sum(y) + o.sum(h)


def override_without_chain(o, x):
    return o.sum(o.tanh(x) * x)  # here: override_without_chain


# -- gradients that die, grow and fade -------------------------------------------------------------


def clipped_to_zero(o, x):
    careful = o.custom(lambda x: 2 * x, lambda x, dy: (2 * o.clip(dy, 0, 0),))
    return o.sum(careful(x) * x)  # here: clipped_to_zero


def dead_relu(o, w):
    hidden = o.relu(o.W @ w - 100)  # here: dead_relu
    return o.sum(3 * hidden)


def rounded_without_surrogate(o, x):
    with o.override({"Round": lambda dy: 0 * dy}):
        return o.sum(o.round(x) * 2)  # here: rounded_without_surrogate


def stop_gradient_left_in(o, x):
    features = o.tanh(x)
    target = o.stop_gradient(features)  # here: stop_gradient_left_in
    return o.sum(target * o.weight)


def under_no_grad(o, x):
    with o.torch.no_grad():
        h = o.tanh(x)  # here: under_no_grad
    return o.sum(h * o.weight)


def path_cut_by_a_cast(o, x):
    return o.sum(x.astype(int) * o.W)  # here: path_cut_by_a_cast


def exploding_recurrent_step(o, x):
    for _ in range(9):
        x = 6 * x  # here: exploding_recurrent_step
    return o.sum(x)


def exploding_in_a_scan(o, x):
    def step(h, _):
        return 6 * h, None  # here: exploding_in_a_scan

    return o.sum(o.scan(step, x, length=9)[0])


def vanishing_sigmoid_stack(o, x):
    for _ in range(9):
        x = o.sigmoid(x)  # here: vanishing_sigmoid_stack
    return o.sum(x)


# -- what is not finite ----------------------------------------------------------------------------


def nan_behind_a_where(o, x):
    logs = o.log(x - 0.3)  # here: nan_behind_a_where
    return o.sum(o.where(x > 0.3, logs, 0.0))


def log_of_zero(o, x):
    p = o.relu(x)
    return -o.sum(o.log(p))  # here: log_of_zero


def sqrt_at_zero_in_a_norm(o, x):
    return o.sqrt(o.sum(o.square(x - o.X)))  # here: sqrt_at_zero_in_a_norm


def division_by_zero(o, x):
    return o.sum(x / (x - X[1]))  # here: division_by_zero


def overflow_of_exp(o, x):
    weights = o.exp(1e4 * x)  # here: overflow_of_exp
    return o.sum(weights / o.sum(weights))


def masked_row(o, x):
    scores = x.masked_fill(x == x, -o.inf)
    return o.sum(o.softmax(scores, 0) ** 2)  # here: masked_row


def arccos_at_one(o, x):
    return o.sum(o.acos(x / o.max(x)))  # here: arccos_at_one


# -- the tools -------------------------------------------------------------------------------------


def by_check(host, f, x):
    return host.by_check(f, x)


def by_trace(host, f, x):
    found = host.tools.trace_gradients(f)(x).worst()[0]
    return found.step.op_type, found.step.line, found.kind


def by_nan(host, f, x):
    found = host.tools.find_nan(f)(x)
    return found.op_type, found.line, found.phase


def by_comparison(host, f, x):
    worst = host.tools.compare_gradients(f)(x).worst()
    row = next(row for row in worst if row.kind == "op")
    return row.op_type, row.line


def by_error(host, f, x):
    with pytest.raises(RuntimeError, match="inplace") as caught:
        host.tools.trace_gradients(f)(x)
    (note,) = caught.value.__notes__
    words = note.removeprefix("in the backward pass of ").removesuffix(", or after it")
    return words.split(" at ")


HOSTS = {"regrad": of_regrad, "jax": of_jax, "torch": of_torch}
MEAN = "scaled by 0.3333, a mean instead of a sum?"
FAULTS = [  # the tool, the op, and what else is said: in regrad, in JAX, in PyTorch
    (wrong_factor, X, (by_comparison, "op"), (by_check, "op"),
     (by_check, "op", "scaled by 0.6667")),
    (missing_sum, X, (by_comparison, "op"), (by_comparison, "op"),
     (by_check, "op", "a missing sum")),
    (surrogate_off_by_its_scale, X, (by_comparison, "op"), (by_check, "op"),
     (by_check, "op", "scaled by 0.25")),
    (stale_saved_value, X, (by_comparison, "op"), (by_check, "op"), (by_check, "op")),
    (swapped_inputs, X, (by_comparison, "op"), (by_comparison, "op"),
     (by_check, "op", "the gradient by 'b'")),
    (transposed_matrix_gradient, W, (by_comparison, "op"), (by_check, "op"),
     (by_check, "op", "transposed")),
    (wrong_sign, X, (by_comparison, "Cos"), None, (by_comparison, "cos")),
    (wrong_sign_of_a_tangent, X, None, (by_check, "<lambda>"), None),
    (wrong_sign_of_a_custom_gradient, X, None, None, (by_check, "<lambda>", "wrong sign")),
    (wrong_at_second_order, X, (by_check, "op"), (by_check, "op"), (by_check, "op", "missing")),
    (mean_for_sum, X, (by_comparison, "op"), (by_comparison, "op"), (by_check, "op", MEAN)),
    (override_without_chain, X, (by_comparison, "Tanh"), (by_comparison, "tanh"),
     (by_comparison, "tanh")),
    (stale_buffer, X, None, None, (by_check, "Cached", "stale value")),
    (stale_data, X, None, None, (by_check, "sin", "stale value")),
    (changed_in_place, X, None, None, (by_error, "exp")),
    (clipped_to_zero, X, (by_trace, "op"), (by_trace, "op"), None),
    (dead_relu, X, (by_trace, "Relu"), (by_trace, "relu"), (by_trace, "relu", "dead")),
    (rounded_without_surrogate, X, (by_trace, "Round"), None, (by_trace, "round", "dead")),
    (stop_gradient_left_in, X, (by_trace, "StopGradient"), (by_trace, "stop_gradient"),
     (by_trace, "detach", "cut")),
    (under_no_grad, X, None, None, (by_trace, "tanh", "cut")),
    (path_cut_by_a_cast, X, None, (by_trace, "convert_element_type"), None),
    (exploding_recurrent_step, X, (by_trace, "Mul"), (by_trace, "mul"), (by_trace, "mul", "grows")),
    (exploding_in_a_scan, X, None, (by_trace, "mul"), None),
    (vanishing_sigmoid_stack, X, (by_trace, "Sigmoid"), (by_trace, "logistic"),
     (by_trace, "sigmoid", "decays")),
    (nan_behind_a_where, X, (by_nan, "Log"), (by_nan, "log"), (by_nan, "log", "backward")),
    (log_of_zero, X, (by_nan, "Log"), (by_nan, "log"), (by_nan, "log", "forward")),
    (sqrt_at_zero_in_a_norm, X, (by_nan, "Sqrt"), (by_nan, "sqrt"), (by_nan, "sqrt", "backward")),
    (division_by_zero, X, (by_nan, "RealDiv"), (by_nan, "div"), (by_nan, "div", "forward")),
    (overflow_of_exp, X, (by_nan, "Exp"), (by_nan, "exp"), (by_nan, "exp", "forward")),
    (masked_row, X, None, None, (by_nan, "softmax", "forward")),
    (arccos_at_one, X, (by_nan, "Acos"), (by_nan, "acos"), (by_nan, "acos", "backward")),
]  # fmt: skip
CASES = [
    pytest.param(f, x, host, *named, id=f"{f.__name__}-{host}")
    for f, x, *each in FAULTS
    for host, named in zip(HOSTS, [[e[0], list(e[1:])] if e else None for e in each], strict=True)
    if named and host not in ABSENT
]


def under_its_rule(host, f):
    rules = {"Tanh": lambda dy, y: 1 - y * y}
    if host == "jax":
        return rg.jax.override(f, rules)

    def overridden(x):
        with HOSTS[host]().functions.override(rules):
            return f(x)

    return overridden


@pytest.mark.slow(but=6)
@pytest.mark.versions
@pytest.mark.parametrize(("fault", "x", "host", "tool", "named"), CASES)
def test_the_tool_names_op_and_line(fault, x, host, tool, named):
    made = HOSTS[host]()
    f = lambda x: fault(made.functions, x)  # noqa: E731
    f = under_its_rule(host, f) if fault is override_without_chain else f
    op_type, line, *said = tool(made, f, made.array(x))
    place = "op" if (host, tool) == ("regrad", by_check) else fault.__name__
    assert [op_type, *said][: len(named)] == named
    assert line == LINES[place]


def test_there_are_twenty():
    assert len({LINES[f.__name__] for f, *_ in FAULTS}) >= 20
