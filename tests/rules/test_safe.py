"""`rules.safe` against derivatives by hand and by complex steps, on each host, to second order."""

import copy
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.jax
import regrad.torch
from regrad.errors import ArgumentError, RuleError
from tests.helpers.hosts import HOSTS, weights

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning",
                                        "ignore:invalid value:RuntimeWarning")  # fmt: skip
safe = rg.rules.safe
X = np.array([-1.0, 0.0, 0.25, 4.0])
A, B = np.array([[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]]), np.array([0.0, 0.5, 2.0])
ALL = (*HOSTS,)


class Row(NamedTuple):
    """A program, its derivatives by each input, and where these are finite."""

    key: str
    program: Any
    xs: tuple[np.ndarray, ...]
    slopes: tuple[Any, ...]
    good: tuple[Any, ...]
    hosts: tuple[str, ...] = ALL


ROWS = {
    "sqrt": Row("Sqrt", lambda o, x: o.sqrt(x), (X,), (lambda x: 0.5 / np.sqrt(x),), (X > 0,)),
    "rsqrt": Row("Rsqrt", lambda o, x: o.rsqrt(x), (X,), (lambda x: -0.5 * x**-1.5,), (X > 0,),
                 ("regrad", "regrad, jit", "v1", "torch")),
    "log": Row("Log", lambda o, x: o.log(x), (X,), (lambda x: 1 / x,), (X > 0,)),
    "log1p": Row("Log1p", lambda o, x: o.log1p(x), (X,), (lambda x: 1 / (1 + x),), (X > -1,)),
    "acos": Row("Acos", lambda o, x: o.acos(x), (X[:3],),
                (lambda x: -1 / np.sqrt(1 - x * x),), (abs(X[:3]) < 1,)),
    "acosh": Row("Acosh", lambda o, x: o.acosh(x), (X + 1,),
                 (lambda x: 1 / np.sqrt(x * x - 1),), (X > 0,)),
    "atanh": Row("Atanh", lambda o, x: o.atanh(x), (X[:3],),
                 (lambda x: 1 / (1 - x * x),), (abs(X[:3]) < 1,)),
    "a / b": Row("RealDiv", lambda o, a, b: a / b, (A, B),
                 (lambda a, b: 1 / b, lambda a, b: -a / b**2), (B != 0, B != 0)),
    "1 / x": Row("RealDiv", lambda o, b: 2.0 / b, (X,), (lambda b: -2 / b**2,), (X != 0,)),
    "atan2": Row("Atan2", lambda o, a, b: o.atan2(a, b), (A[1:] * 0 + [0.0, 0.0, 2.0], A[:1]),
                 (lambda a, b: b / (a**2 + b**2), lambda a, b: -a / (a**2 + b**2)),
                 ([[True, False, True]], [[True, False, True]]),
                 ("regrad", "regrad, jit", "v1", "torch")),
    "a ** b": Row("Pow", lambda o, a, b: a**b, (np.array([0.0, 0.0, 0.0, 4.0, -1.0]),
                                                 np.array([0.5, 2.0, 1.5, 0.5, 0.5])),
                  (lambda a, b: b * a ** (b - 1), lambda a, b: a**b * np.log(a)),
                  (np.array([0, 1, 1, 1, 0]) > 0, np.array([0, 0, 0, 1, 0]) > 0)),
    "x ** 2": Row("Pow", lambda o, x: x**2, (X,), (lambda x: 2 * x,), (X < 9,),
                  ("regrad", "regrad, jit", "v1", "torch")),
    "xlogy": Row("Xlogy", lambda o, a, b: o.xlogy(a, b), (A[0], B * [0, 0, 1]),
                 (lambda a, b: np.log(b), lambda a, b: a / b),
                 (B > 1, B > 1), ("regrad", "regrad, jit", "torch")),
}  # fmt: skip
RUNS = [(name, host) for name, row in ROWS.items() for host in row.hosts]


def summed(dx: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an input was broadcast."""
    dx = dx.sum(tuple(range(dx.ndim - len(shape))))
    return dx.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


def by_complex_step(f, xs, j):
    """The derivative of a formula by an input; 0 where it has none."""
    given = [x + 0j for x in xs]
    given[j] = given[j] + 1e-30j
    found = f(*given).imag / 1e-30
    return np.where(np.isfinite(found) & (abs(found) < 1e6), found, 0.0)


def due(row, order):
    xs = row.xs
    w = weights([np.empty(np.broadcast_shapes(*[x.shape for x in xs]))])[0]
    goods = [np.asarray(good) for good in row.good]
    if order == 1:
        found = [np.where(g, f(*xs), 0.0) for f, g in zip(row.slopes, goods, strict=True)]
    else:
        pairs = [*zip(row.slopes, goods, strict=True)]
        found = [
            sum(np.where(g, by_complex_step(f, xs, j), 0.0) for f, g in pairs)
            for j in range(len(xs))
        ]
    return [summed(w * dx, x.shape) for dx, x in zip(found, xs, strict=True)]


@pytest.mark.slow(but=30)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(("name", "host"), RUNS)
def test_the_true_gradient_and_zero(name, host, order):
    row = ROWS[name]
    with jax.enable_x64(True):
        _, found, used = HOSTS[host](row.program, lambda o: {row.key: safe()}, row.xs, order)
    for dx, expected in zip(found, due(row, order), strict=True):
        np.testing.assert_allclose(np.asarray(dx), expected, rtol=1e-9, atol=1e-12)
    used.assert_fired()


@pytest.mark.parametrize("host", HOSTS)
def test_another_value(host):
    row = ROWS["sqrt"]
    with jax.enable_x64(True):
        _, (dx,), _ = HOSTS[host](row.program, lambda o: {"Sqrt": safe(3)}, row.xs)
    expected = weights([X])[0] * np.where(X > 0, 0.5 / np.sqrt(abs(X) + (X == 0)), 3.0)
    np.testing.assert_allclose(dx, expected)


# -- what the rule does not hide -------------------------------------------------------------------


def test_gradients_that_arrive_stay_visible():
    with rg.gradient_override_map({"Sqrt": safe()}):
        _, pull = rg.vjp(rg.sqrt, rg.tensor([0.0, 0.0, 4.0, 4.0, 0.0]))
        _, by_one = rg.vjp(rg.sqrt, rg.tensor([0.0, 4.0]))
    (dx,) = pull(rg.tensor([np.inf, np.nan, np.inf, np.nan, 5.0]))
    assert np.isnan(dx.numpy()[[0, 1, 3]]).all() and dx.tolist()[2:5:2] == [np.inf, 0.0]
    (dx,) = by_one(rg.tensor([1.0, np.inf]))
    assert dx.tolist() == [0.0, np.inf]
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    with regrad.torch.gradient_override_map({"Sqrt": safe()}):
        y = torch.sqrt(x)
    assert not torch.isfinite(torch.autograd.grad(y, x, torch.full((2,), torch.inf))[0]).any()


# -- dtypes, compiled programs, norms --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_stay(dtype):
    rules = dict.fromkeys(["Sqrt", "Log", "RealDiv"], safe())
    x = torch.tensor([0.0, 4.0], dtype=getattr(torch, dtype), requires_grad=True)
    with regrad.torch.gradient_override_map(rules):
        (torch.sqrt(x) + torch.log(x) + x / torch.tensor([0, 2]) + 2 / x).sum().backward()
    assert x.grad is not None and x.grad.dtype == x.dtype
    assert x.grad.tolist() == [0.0, 0.25 + 0.25 + 0.5 - 0.125]
    f = rg.jax.override(lambda x: (jnp.sqrt(x) + jnp.log(x) + 2 / x).sum(), rules)
    dx = jax.jit(jax.grad(f))(jnp.array([0.0, 4.0], dtype=dtype))
    assert dx.dtype == dtype and dx.tolist() == [0.0, 0.375]


def test_operands_of_two_dtypes():
    a = torch.tensor([0.0, 4.0], requires_grad=True)
    b = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    with regrad.torch.gradient_override_map({"RealDiv": safe()}):
        (a / b).sum().backward()
    assert a.grad is not None and b.grad is not None
    assert (a.grad.dtype, a.grad.tolist()) == (torch.float32, [0.0, 0.5])
    assert (b.grad.dtype, b.grad.tolist()) == (torch.float64, [0.0, -1.0])


def test_complex_numbers_keep_the_own_gradient():
    z = torch.tensor([0.0, 4.0 + 3.0j], requires_grad=True)
    own = torch.autograd.grad(torch.sqrt(z).abs().sum(), z)[0]
    with regrad.torch.gradient_override_map({"Sqrt": safe()}):
        y = torch.sqrt(z)
    found = torch.autograd.grad(y.abs()[1], z)[0]
    assert torch.allclose(found[1], own[1]) and found[0] == 0


def test_compiled_by_torch():
    def f(a, b):
        return (1 / a + torch.sqrt(a) + torch.log(a) + a**b).sum()

    xs = [torch.tensor(v, requires_grad=True) for v in ([0.0, 4.0], [0.5, 0.5])]
    with regrad.torch.gradient_override_map(
        dict.fromkeys(["RealDiv", "Sqrt", "Log", "Pow"], safe())
    ):
        found = torch.autograd.grad(torch.compile(f, backend="aot_eager", fullgraph=True)(*xs), xs)
    expected = [[0.0, -1 / 16 + 1 / 4 + 1 / 4 + 1 / 4], [0.0, 2 * np.log(4)]]
    for dx, each in zip(found, expected, strict=True):
        np.testing.assert_allclose(dx, each, rtol=1e-6)


def test_a_transform_of_torch():
    x = torch.tensor([0.0, 4.0], dtype=torch.float64)
    with regrad.torch.gradient_override_map({"Sqrt": safe()}):
        f = lambda x: torch.sqrt(x).sum()  # noqa: E731
        hessian = torch.func.jacrev(torch.func.grad(f))(x)
        each = torch.vmap(torch.func.grad(torch.sqrt))(x)
    assert hessian.tolist() == [[0.0, 0.0], [0.0, -1 / 32]] and each.tolist() == [0.0, 0.25]


@pytest.mark.parametrize(
    "norm",
    [torch.norm, torch.linalg.norm, torch.linalg.vector_norm],
    ids=["torch.norm", "linalg.norm", "linalg.vector_norm"],
)
@pytest.mark.parametrize("value", [0.0, 2.0])
def test_norms_of_torch(norm, value):
    rows = np.array([[0.0, 0.0], [3.0, 4.0]])
    x = torch.tensor(rows, requires_grad=True)
    with regrad.torch.gradient_override_map({norm: safe(value)}) as used:
        y = norm(x, dim=1)
    (dx,) = torch.autograd.grad(y, x, torch.tensor([1.0, 2.0]).double(), create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    with jax.enable_x64(True):
        of_row = lambda x: 2 * jnp.linalg.norm(x)  # noqa: E731
        first, twice = (d(of_row)(jnp.array(rows[1])) for d in (jax.grad, jax.hessian))
    np.testing.assert_allclose(dx.detach(), [[value, value], first])
    np.testing.assert_allclose(second, [[0.0, 0.0], twice.sum(0)], atol=1e-15)
    used.assert_fired()


def test_a_norm_in_jax_is_made_of_a_root():
    f = rg.jax.override(jnp.linalg.norm, {"Sqrt": safe()})
    assert jax.grad(f)(jnp.zeros(2)).tolist() == [0.0, 0.0]
    assert jax.jit(jax.hessian(f))(jnp.zeros(2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_forward_mode():
    with rg.gradient_override_map({"Sqrt": safe()}):
        _, dy = rg.jvp(rg.sqrt, [rg.tensor([0.0, 4.0])], [rg.tensor([1.0, 1.0])])
    f = rg.jax.override(jnp.sqrt, {"Sqrt": safe()})
    _, in_jax = jax.jvp(f, (jnp.array([0.0, 4.0]),), (jnp.ones(2),))
    assert dy.tolist() == in_jax.tolist() == [0.0, 0.25]


def test_the_derivative_by_an_input_that_is_not_wanted_spoils_nothing():
    """(Also without `safe`: a rule that calls `forward` with several inputs.)"""

    def rule(dy, a, b, forward, vjp_):
        dx = vjp_(lambda xs: [forward(xs[0], b)], [a], [rg.ones_like(dy)])[0]
        return dy * dx, None

    a = torch.tensor([0.0, 3.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
    with regrad.torch.gradient_override_map({"Pow": rule}):
        y = a**b
    (dx,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    assert torch.autograd.grad(dx.sum(), a)[0].tolist() == [2.0, 2.0]


# -- reports, misuse -------------------------------------------------------------------------------

FINDERS = {
    "regrad": lambda: rg.find_nan(lambda x: rg.sum(rg.sqrt(x)))(rg.tensor([0.0, 4.0])),
    "torch": lambda: rg.torch.find_nan(lambda x: torch.sqrt(x).sum())(
        torch.tensor([0.0, 4.0], requires_grad=True)
    ),
    "jax": lambda: rg.jax.find_nan(lambda x: jnp.sqrt(x).sum())(jnp.array([0.0, 4.0])),
}


@pytest.mark.parametrize("host", FINDERS)
def test_find_nan_names_the_rule(host):
    assert "use rg.rules.safe() for 'Sqrt'" in str(FINDERS[host]())


def test_find_nan_names_the_rule_for_what_begins_in_a_gradient_only():
    f = lambda x: rg.sum(rg.where(x > 0, rg.sqrt(x), 0.0))  # noqa: E731
    assert "use rg.rules.safe() for 'Sqrt'" in str(rg.find_nan(f)(rg.tensor([0.0, 4.0])))
    with rg.gradient_override_map({"Sqrt": safe()}):
        assert rg.find_nan(f)(rg.tensor([0.0, 4.0])) is None
    assert "safe()" not in str(rg.find_nan(lambda x: rg.sum(rg.log(x)))(rg.tensor([0.0])))


@rg.extend.op("SafeOfTests", elementwise=True, to_float=True, real=True)
def root(xp, x: rg.Tensor, /) -> rg.Tensor:
    return xp.sqrt(x)


rg.extend.gradient("SafeOfTests")(lambda dy, y: dy / (2 * y))


def test_an_op_of_the_user():
    with rg.gradient_override_map({"SafeOfTests": safe()}):
        assert rg.grad(root)(rg.tensor([0.0, 4.0])).tolist() == [0.0, 0.25]


def test_a_rule_is_data():
    assert safe(2) == pickle.loads(pickle.dumps(safe(2))) == copy.deepcopy(safe(2)) != safe()
    assert repr(safe(2)) == "safe(value=2)"


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: safe("1"), ArgumentError, "safe: value is a finite number, got '1'"),
    (lambda: safe(np.inf), ArgumentError, "safe: value is a finite number"),
    (lambda: safe(1, 2), ArgumentError, "safe: too many positional arguments"),
    (lambda: safe()(1.0), RuleError, "is a value in a map of rules, and cannot be called"),
])  # fmt: skip
def test_bad_parameters_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


SCOPES = {
    "Relu": rg.gradient_override_map, "MatMul": rg.gradient_override_map,
    torch.std: regrad.torch.gradient_override_map, torch.relu: regrad.torch.gradient_override_map,
    torch.nn.functional.normalize: regrad.torch.gradient_override_map,
}  # fmt: skip


@pytest.mark.parametrize("key", SCOPES, ids=lambda key: getattr(key, "__name__", key))
def test_other_ops_are_refused(key):
    words = "safe is for ops whose gradient is infinite or NaN at some inputs .* is not one"
    with pytest.raises(RuleError, match=words), SCOPES[key]({key: safe()}):
        pass
