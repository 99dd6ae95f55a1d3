"""Twenty planted faults in JAX programs: the tools name the op and the line."""

import jax
import jax.numpy as jnp
import pytest

import regrad as rg
from tests.helpers.marks import marked_lines

LINES = marked_lines(__file__)
X = jnp.array([0.3, -0.7, 1.2])
W = jnp.array([[0.4, -1.1, 0.3], [0.2, 0.9, -0.5], [1.3, 0.1, 0.6]])


def custom(f, back, save=lambda *xs: xs):
    """A `jax.custom_vjp` of f by the rule `back(*saved, dy)`."""

    @jax.custom_vjp
    def op(*xs):
        return f(*xs)

    op.defvjp(lambda *xs: (f(*xs), save(*xs)), lambda saved, dy: back(*saved, dy))
    return op


# -- rules that are wrong --------------------------------------------------------------------------


def wrong_factor(x):
    cube = custom(lambda x: x**3, lambda x, dy: (2 * dy * x**2,))
    return jnp.sum(jnp.sin(cube(x)))  # here: wrong_factor


def missing_sum(x):
    shift = custom(lambda x, b: x + b, lambda x, b, dy: (dy, dy[0]))
    return jnp.sum(shift(jnp.outer(x, x), x) ** 2)  # here: missing_sum


def surrogate_off_by_its_scale(x):
    soft = custom(lambda x: jax.nn.sigmoid(4 * x), lambda x, dy: (dy * slope(4 * x),))
    slope = lambda x: jax.nn.sigmoid(x) * (1 - jax.nn.sigmoid(x))  # noqa: E731
    return jnp.sum(x * soft(x))  # here: surrogate_off_by_its_scale


def stale_saved_value(x):
    square = custom(lambda x: x * x, lambda old, dy: (2 * dy * old,), save=lambda x: (x - 0.1,))
    return jnp.sum(square(x))  # here: stale_saved_value


def swapped_inputs(x):
    product = custom(lambda a, b: a * b, lambda a, b, dy: (dy * a, dy * b))
    return jnp.sum(product(jnp.sin(x), x))  # here: swapped_inputs


def transposed_matrix_gradient(w):
    matmul = custom(lambda x, w: x @ w, lambda x, w, dy: (dy @ w.T, (x.T @ dy).T))
    return jnp.sum(jnp.tanh(matmul(W, w)))  # here: transposed_matrix_gradient


def wrong_sign(x):
    @jax.custom_jvp
    def cosine(x):
        return jnp.cos(x)

    cosine.defjvp(lambda xs, ts: (jnp.cos(xs[0]), ts[0] * jnp.sin(xs[0])))
    return jnp.sum(x * cosine(x))  # here: wrong_sign


def wrong_at_second_order(x):
    stop = jax.lax.stop_gradient
    sine = custom(jnp.sin, lambda x, dy: (dy * stop(jnp.cos(x)),))
    return jnp.sum(x * sine(x))  # here: wrong_at_second_order


def mean_for_sum(x):
    mean = custom(jnp.mean, lambda x, dy: (jnp.full_like(x, dy),))
    return mean(x**2)  # here: mean_for_sum


def override_without_chain(x):
    return jnp.sum(jnp.tanh(x) * x)  # here: override_without_chain


# -- gradients that die, grow and fade -------------------------------------------------------------


def clipped_to_zero(x):
    careful = custom(lambda x: 2 * x, lambda x, dy: (2 * jnp.clip(dy, 0, 0),))
    return jnp.sum(careful(x) ** 2)  # here: clipped_to_zero


def dead_relu(w):
    hidden = jax.nn.relu(W @ w - 100)  # here: dead_relu
    return jnp.sum(3 * hidden)


def stop_gradient_left_in(x):
    features = jnp.tanh(x)
    target = jax.lax.stop_gradient(features)  # here: stop_gradient_left_in
    return jnp.sum(target * 2)


def path_cut_by_a_cast(x):
    return jnp.sum(x.astype(int) * W)  # here: path_cut_by_a_cast


def exploding_recurrent_step(x):
    def step(h, _):
        return 6 * h, None  # here: exploding_recurrent_step

    return jnp.sum(jax.lax.scan(step, x, length=9)[0])


def vanishing_sigmoid_stack(x):
    for _ in range(9):
        x = jax.nn.sigmoid(x)  # here: vanishing_sigmoid_stack
    return jnp.sum(x)


# -- what is not finite ----------------------------------------------------------------------------


def nan_behind_a_where(x):
    logs = jnp.log(x - 0.3)  # here: nan_behind_a_where
    return jnp.sum(jnp.where(x > 0.3, logs, 0.0))


def log_of_zero(x):
    p = jax.nn.relu(x)
    return -jnp.sum(jnp.log(p))  # here: log_of_zero


def sqrt_at_zero_in_a_norm(x):
    return jnp.linalg.norm(x - X)  # here: sqrt_at_zero_in_a_norm


def division_by_zero(x):
    return jnp.sum(x / (x - X[1]))  # here: division_by_zero


def overflow_of_exp(x):
    weights = jnp.exp(1e4 * x)  # here: overflow_of_exp
    return jnp.sum(weights / jnp.sum(weights))


def arccos_at_one(x):
    return jnp.sum(jnp.arccos(x / jnp.max(x)))  # here: arccos_at_one


# -- the tools -------------------------------------------------------------------------------------


def by_check(f, x):
    cause = rg.jax.gradient_report(f, [x], order=2).causes[0]
    return cause.op_type, cause.rule.rpartition("run at ")[2]


def by_trace(f, x):
    step = rg.jax.trace_gradients(f)(x).worst()[0].step
    return step.op_type, step.line


def by_nan(f, x):
    found = rg.jax.find_nan(f)(x)
    return found.op_type, found.line


def by_comparison(f, x):
    worst = next(row for row in rg.jax.compare_gradients(f)(x).worst() if row.kind == "op")
    return worst.op_type, worst.line


OVERRIDDEN = rg.jax.override(override_without_chain, {"Tanh": lambda dy, y: 1 - y * y})
FAULTS = [
    (wrong_factor, X, by_check, "op"),
    (missing_sum, X, by_comparison, "op"),
    (surrogate_off_by_its_scale, X, by_check, "op"),
    (stale_saved_value, X, by_check, "op"),
    (swapped_inputs, X, by_comparison, "op"),
    (transposed_matrix_gradient, W, by_check, "op"),
    (wrong_sign, X, by_check, "cosine"),
    (wrong_at_second_order, X, by_check, "op"),
    (mean_for_sum, X, by_comparison, "op"),
    (OVERRIDDEN, X, by_comparison, "tanh"),
    (clipped_to_zero, X, by_trace, "op"),
    (dead_relu, X, by_trace, "relu"),
    (stop_gradient_left_in, X, by_trace, "stop_gradient"),
    (path_cut_by_a_cast, X, by_trace, "convert_element_type"),
    (exploding_recurrent_step, X, by_trace, "mul"),
    (vanishing_sigmoid_stack, X, by_trace, "logistic"),
    (nan_behind_a_where, X, by_nan, "log"),
    (log_of_zero, X, by_nan, "log"),
    (sqrt_at_zero_in_a_norm, X, by_nan, "sqrt"),
    (division_by_zero, X, by_nan, "div"),
    (overflow_of_exp, X, by_nan, "exp"),
    (arccos_at_one, X, by_nan, "acos"),
]


@pytest.mark.versions
@pytest.mark.parametrize(
    ("f", "x", "tool", "op_type"), FAULTS, ids=[f.__name__ for f, *_ in FAULTS]
)
def test_the_tool_names_op_and_line(f, x, tool, op_type):
    assert tool(f, x) == (op_type, LINES[f.__name__])


def test_there_are_twenty():
    assert len({LINES[f.__name__] for f, *_ in FAULTS}) >= 20
