"""Twenty planted faults in functions of regrad: the tools name the op and the line."""

import pytest

import regrad as rg
from regrad.testing import gradient_report
from tests.helpers.marks import marked_lines

LINES = marked_lines(__file__)
X = rg.tensor([0.3, -0.7, 1.2])
W = rg.tensor([[0.4, -1.1, 0.3], [0.2, 0.9, -0.5], [1.3, 0.1, 0.6]])


def custom(f, back):
    """A custom function with the value of f and the rule `back(dy, *xs)`."""

    @rg.custom_grad
    def op(*xs, save):
        save(list(xs))
        return f(*xs), lambda dy, saved: back(dy, *saved)

    return op


# -- rules that are wrong --------------------------------------------------------------------------


def wrong_factor(x):
    cube = custom(lambda x: x * x * x, lambda dy, x: [2 * dy * x * x])
    return rg.sum(rg.sin(cube(x)))  # here: wrong_factor


def missing_sum(x):
    shift = custom(lambda x, b: x + b, lambda dy, x, b: [dy, dy[0]])
    return rg.sum(shift(rg.reshape(x, (3, 1)) * x, x) ** 2)  # here: missing_sum


def surrogate_off_by_its_scale(x):
    slope = lambda x: rg.nn.sigmoid(x) * (1 - rg.nn.sigmoid(x))  # noqa: E731
    soft = custom(lambda x: rg.nn.sigmoid(4 * x), lambda dy, x: [dy * slope(4 * x)])
    return rg.sum(x * soft(x))  # here: surrogate_off_by_its_scale


def stale_saved_value(x):
    @rg.custom_grad
    def square(x, save):
        save([x - 0.1])
        return x * x, lambda dy, saved: 2 * dy * saved[0]

    return rg.sum(square(x))  # here: stale_saved_value


def swapped_inputs(x):
    product = custom(lambda a, b: a * b, lambda dy, a, b: [dy * a, dy * b])
    return rg.sum(product(rg.sin(x), x))  # here: swapped_inputs


def transposed_matrix_gradient(w):
    matmul = custom(lambda x, w: x @ w, lambda dy, x, w: [dy @ w.T, (x.T @ dy).T])
    return rg.sum(rg.tanh(matmul(W, w)))  # here: transposed_matrix_gradient


def wrong_sign(x):
    with rg.gradient_override_map({"Cos": lambda dy, x: dy * rg.sin(x)}):
        return rg.sum(x * rg.cos(x))  # here: wrong_sign


def wrong_at_second_order(x):
    @rg.custom_grad  # here: wrong_at_second_order
    def sine(x, save):
        save([rg.stop_gradient(rg.cos(x))])
        return rg.sin(x), lambda dy, saved: dy * saved[0]

    return rg.sum(x * sine(x))


def mean_for_sum(x):
    mean = custom(rg.mean, lambda dy, x: [rg.zeros_like(x) + dy])
    return mean(x * x)  # here: mean_for_sum


def override_without_chain(x):
    with rg.gradient_override_map({"Tanh": lambda dy, y: 1 - y * y}):
        return rg.sum(rg.tanh(x) * x)  # here: override_without_chain


# -- gradients that die, grow and fade -------------------------------------------------------------


def clipped_to_zero(x):
    careful = custom(lambda x: 2 * x, lambda dy, x: [2 * rg.clip(dy, 0, 0)])
    return rg.sum(careful(x) * x)  # here: clipped_to_zero


def dead_relu(w):
    hidden = rg.nn.relu(W @ w - 100)  # here: dead_relu
    return rg.sum(3 * hidden)


def rounded_without_surrogate(x):
    with rg.gradient_override_map({"Round": lambda dy: 0 * dy}):
        return rg.sum(rg.round(x) * 2)  # here: rounded_without_surrogate


def stop_gradient_left_in(x):
    target = rg.stop_gradient(rg.tanh(x))  # here: stop_gradient_left_in
    return rg.sum(target * W)


def exploding_recurrent_step(x):
    for _ in range(9):
        x = 6 * x  # here: exploding_recurrent_step
    return rg.sum(x)


def vanishing_sigmoid_stack(x):
    for _ in range(9):
        x = rg.nn.sigmoid(x)  # here: vanishing_sigmoid_stack
    return rg.sum(x)


# -- what is not finite ----------------------------------------------------------------------------


def nan_behind_a_where(x):
    logs = rg.log(x - 0.3)  # here: nan_behind_a_where
    return rg.sum(rg.where(x > 0.3, logs, 0.0))


def log_of_zero(x):
    p = rg.nn.relu(x)
    return -rg.sum(rg.log(p))  # here: log_of_zero


def sqrt_at_zero_in_a_norm(x):
    return rg.sqrt(rg.sum(rg.square(x - X)))  # here: sqrt_at_zero_in_a_norm


def division_by_zero(x):
    return rg.sum(x / (x - X[1]))  # here: division_by_zero


def overflow_of_exp(x):
    weights = rg.exp(1e4 * x)  # here: overflow_of_exp
    return rg.sum(weights / rg.sum(weights))


def arccos_at_one(x):
    return rg.sum(rg.acos(x / rg.max(x)))  # here: arccos_at_one


# -- the tools -------------------------------------------------------------------------------------


def by_check(f, x):
    cause = gradient_report(f, [x], order=2).causes[0]
    return cause.rule.split("'")[1], cause.rule.rpartition(", ")[2].rstrip(")")


def by_trace(f, x):
    step = rg.trace_gradients(f)(x).worst()[0].step
    return step.op_type, step.line


def by_nan(f, x):
    found = rg.find_nan(f)(x)
    return found.op_type, found.line


def by_comparison(f, x):
    worst = next(row for row in rg.compare_gradients(f)(x).worst() if row.kind == "op")
    return worst.op_type, worst.line


FAULTS = [
    (wrong_factor, X, by_comparison, "op"),
    (missing_sum, X, by_comparison, "op"),
    (surrogate_off_by_its_scale, X, by_comparison, "op"),
    (stale_saved_value, X, by_comparison, "square"),
    (swapped_inputs, X, by_comparison, "op"),
    (transposed_matrix_gradient, W, by_comparison, "op"),
    (wrong_sign, X, by_comparison, "Cos"),
    (wrong_at_second_order, X, by_check, "sine"),
    (mean_for_sum, X, by_comparison, "op"),
    (override_without_chain, X, by_comparison, "Tanh"),
    (clipped_to_zero, X, by_trace, "op"),
    (dead_relu, X, by_trace, "Relu"),
    (rounded_without_surrogate, X, by_trace, "Round"),
    (stop_gradient_left_in, X, by_trace, "StopGradient"),
    (exploding_recurrent_step, X, by_trace, "Mul"),
    (vanishing_sigmoid_stack, X, by_trace, "Sigmoid"),
    (nan_behind_a_where, X, by_nan, "Log"),
    (log_of_zero, X, by_nan, "Log"),
    (sqrt_at_zero_in_a_norm, X, by_nan, "Sqrt"),
    (division_by_zero, X, by_nan, "RealDiv"),
    (overflow_of_exp, X, by_nan, "Exp"),
    (arccos_at_one, X, by_nan, "Acos"),
]


@pytest.mark.parametrize(
    ("f", "x", "tool", "op_type"), FAULTS, ids=[f.__name__ for f, *_ in FAULTS]
)
def test_the_tool_names_op_and_line(f, x, tool, op_type):
    assert tool(f, x) == (op_type, LINES[f.__name__])


def test_there_are_twenty():
    assert len({LINES[f.__name__] for f, *_ in FAULTS}) >= 20
