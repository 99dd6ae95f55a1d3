"""A compiled function sees changes behind each name that takes functions, rules or data of a user.

The tables have a case for each public name that takes or returns a callable. Each case makes its
object before the compiled function: only the walk over the closure can see the values behind the
object. The plain function has the right result.
"""

import functools
import importlib
import inspect
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import regrad as rg
from regrad.core.containers import opened
from tests.helpers.paths import DOCS

sys.path.insert(0, str(DOCS / "_ext"))
from public_names import PACKAGES, origins

K = [2.0]  # the functions below read it, and it changes
R = [2.0]  # the same for registered rules: each compiled function sees that change
X = rg.tensor([0.3, 0.7])
ONE = rg.scalar(1.0)
NINE = rg.rules.optional(lambda dy: dy * 9)
names = map("OfClosures{}".format, itertools.count())


def squared(x):
    return x * x * K[0]


def summed(x):
    return rg.sum(squared(x))


def product(x, y):
    return rg.sum(x * y * y * K[0])


def scaled(dy):
    return dy * K[0]


def times(x):
    return x * K[0]


def below(c):
    return rg.sum(c) < 2 * K[0]


of = lambda held, f: functools.partial(f, held)  # noqa: E731
both = lambda f: lambda x: f(x, x)  # noqa: E731
on_arrays = lambda f: lambda x: rg.asarray(f(jnp.asarray(x.data)))  # noqa: E731


def under(rules, **options):
    """A function that opens a scope with rules that were made outside."""

    def f(x):
        with rg.gradient_override_map(rules, **options):
            return rg.sin(x), rg.grad(lambda x: rg.sum(rg.sin(x)))(x)

    return f


def sine(rule, **options):
    return under({"Sin": rule}, **options)


def under_itself(scope):
    def f(x):
        with scope:
            return rg.grad(lambda x: rg.sum(rg.sin(x)))(x)

    return f


def registered():
    name = next(names)
    rg.RegisterGradient(name)(scaled)
    return name


def op_with(*, kernel=lambda xp, x: x * x, rule=lambda dy, x: dy * x, decorator=rg.op):
    """An op of a new type, with its gradient."""
    name = next(names)

    def of_user(xp, x: rg.Tensor, /) -> rg.Tensor:
        """Return what the kernel does."""
        return kernel(xp, x)

    made = decorator(name)(of_user)
    rg.gradient(name)(rule)
    return lambda x: (made(x), rg.grad(lambda x: rg.sum(made(x)))(x))


def elementwise():
    kernel, rule = (lambda xp, x: x * x * R[0]), (lambda dy, x: dy * x * R[0])
    made = rg.extend.elementwise(next(names), "of_user", kernel, "Square.", rule)
    return lambda x: (made(x), rg.grad(lambda x: rg.sum(made(x)))(x))


def jax_custom(kind, *rules):
    f = kind(lambda x: x * x)
    (f.defvjp if kind is jax.custom_vjp else f.defjvp)(*rules)
    return on_arrays(jax.grad(lambda x: f(x).sum()))


def optimizer():
    w = rg.Variable([1.0, 2.0], name="w")
    sgd = rg.train.Optimizer(optax.sgd(0.0))
    sgd.init([w])
    return lambda x: sgd.minimize(lambda: rg.sum(w * x * K[0]))


CASES = {
    "regrad.RegisterGradient": lambda: sine(registered()),
    "regrad.at": lambda: under({rg.at(lambda site: K[0] > 2.5, "Sin"): NINE}),
    "regrad.checkpoint": lambda: rg.checkpoint(squared),
    "regrad.cond": lambda: lambda x: rg.cond(rg.sum(x) > 0, squared, rg.sin, x),
    "regrad.custom_grad": lambda: rg.custom_grad(lambda x: (squared(x), scaled)),
    "regrad.fixed_point": lambda: functools.partial(
        lambda f, x: rg.fixed_point(f, x, x), lambda y, x: x + y * K[0] * 0.1
    ),
    "regrad.host_call": lambda: functools.partial(
        lambda f, x: rg.host_call(f, x, out=x), lambda x: np.asarray(x) * np.float32(K[0])
    ),
    "regrad.fori_loop": lambda: functools.partial(rg.fori_loop, 0, 2, lambda i, c: squared(c)),
    "regrad.grad": lambda: both(rg.grad(product, argnums=(0, 1))),
    "regrad.gradient_override_map": lambda: under_itself(rg.gradient_override_map({"Sin": scaled})),
    "regrad.grads": lambda: of(rg.grads(product), lambda g, x: g([x, x])),
    "regrad.hessian": lambda: rg.hessian(summed),
    "regrad.hvp": lambda: functools.partial(lambda f, x: rg.hvp(f, [x], [x]), summed),
    "regrad.jacfwd": lambda: rg.jacfwd(squared),
    "regrad.jacobian": lambda: both(rg.jacobian(lambda x, y: x * y * K[0], argnums=1)),
    "regrad.jacrev": lambda: rg.jacrev(squared), "regrad.jit": lambda: rg.jit(squared),
    "regrad.jvp": lambda: functools.partial(lambda f, x: rg.jvp(f, [x], [x]), summed),
    "regrad.linearize": lambda: functools.partial(lambda f, x: rg.linearize(f, x)[1](x), summed),
    "regrad.map": lambda: functools.partial(rg.map, squared),
    "regrad.name_scope": lambda: rg.name_scope("part")(squared),
    "regrad.default_dtype": lambda: rg.default_dtype("float32")(squared),
    "regrad.replace": lambda: sine(rg.replace(times), values=True),
    "regrad.scan": lambda: functools.partial(rg.scan, lambda c, x: (c, x * K[0]), ONE),
    "regrad.tree_map": lambda: functools.partial(rg.tree_map, squared),
    "regrad.value_and_grad": lambda: rg.value_and_grad(
        lambda x: (summed(x), times(x)), has_aux=True
    ),
    "regrad.value_and_grads": lambda: of(rg.value_and_grads(product), lambda g, x: g([x, x])),
    "regrad.variable_grads": lambda: of(
        (summed, rg.Variable(1.0)),
        lambda held, x: rg.variable_grads(lambda: held[0](x * held[1]))[0],
    ),
    "regrad.vjp": lambda: functools.partial(lambda f, x: rg.vjp(f, x)[1](ONE), summed),
    "regrad.vmap": lambda: both(rg.vmap(lambda row, by: row * by * K[0], in_axes=(0, None))),
    "regrad.while_loop": lambda: functools.partial(rg.while_loop, below, lambda c: c + 1),
    "regrad.extend.deferrable": lambda: rg.extend.deferrable(squared),
    "regrad.extend.public": lambda: rg.extend.public(squared),
    "regrad.jax.custom_grad": lambda: on_arrays(rg.jax.custom_grad(lambda x: (x * K[0], scaled))),
    "regrad.jax.from_regrad": lambda: on_arrays(rg.jax.from_regrad(squared)),
    "regrad.jax.override": lambda: on_arrays(
        jax.grad(rg.jax.override(lambda x: jnp.sin(x).sum(), {"Sin": lambda dy, x: dy * K[0]}))
    ),
    "regrad.rules.builtin": lambda: sine(of(rg.rules.builtin("Sin"),
                                            lambda own, dy, x: scaled(own(dy, x=x)))),
    "regrad.rules.learns": lambda: sine(
        rg.rules.learns(lambda dy, x, by: (dy * K[0], {"by": dy.sum()}), by=ONE), values=True
    ),
    "regrad.rules.once_differentiable": lambda: sine(rg.rules.once_differentiable(scaled)),
    "regrad.rules.optional": lambda: sine(rg.rules.optional(scaled)),
    "regrad.rules.vjp_of": lambda: sine(rg.rules.vjp_of(times)),
    "regrad.train.Optimizer": optimizer,
}  # fmt: skip
REGISTERED = {  # these read R
    "regrad.gradient": lambda: op_with(rule=lambda dy, x: dy * x * R[0]),
    "regrad.op": lambda: op_with(kernel=lambda xp, x: x * R[0]),
    "regrad.extend.elementwise": elementwise,
    "regrad.extend.op": lambda: op_with(kernel=lambda xp, x: x * R[0], decorator=rg.extend.op),
    "regrad.extend.gradient": lambda: op_with(rule=lambda dy, x: dy * x * R[0]),
}
# Objects in objects, and objects of others.
MORE = {
    "grad of hessian of custom_grad": lambda: rg.grad(of(
        rg.hessian(rg.custom_grad(lambda x: (summed(x), lambda dy: squared(x) * dy))),
        lambda h, x: rg.sum(h(x)),
    ), argnums=0),
    "a scope that decorates": lambda: rg.gradient_override_map({"Sin": scaled})(
        rg.grad(lambda x: rg.sum(rg.sin(x)), argnums=0)
    ),
    "in a dict in a list": lambda: of([{"g": rg.grad(summed, argnums=0)}],
                                      lambda held, x: held[0]["g"](x)),
    "a method": lambda: rg.grad(Layer().total, argnums=0),
    "an object that is called": lambda: rg.value_and_grad(Layer(), argnums=0),
    "override in replace": lambda: under(
        {rg.at(lambda site: True, "Sin"): rg.replace(rg.sin, rg.rules.vjp_of(times))},
        values=True,
    ),
    "a map in a place": lambda: under({rg.at(lambda site: K[0] > 2.5): {"Sin": NINE}}),
    "a name in replace": lambda: sine(rg.replace(rg.sin, registered()), values=True),
    "numpy.vectorize": lambda: of(np.vectorize(lambda k: k * K[0]), lambda f, x: x * float(f(1.0))),
    "jax.custom_vjp": lambda: jax_custom(jax.custom_vjp, lambda x: (x * x, x),
                                         lambda x, dy: (dy * x * K[0],)),
    "jax.custom_jvp": lambda: jax_custom(
        jax.custom_jvp, lambda xs, dxs: (xs[0] * xs[0], dxs[0] * xs[0] * K[0])
    ),
    "jax.vmap": lambda: on_arrays(jax.vmap(times)),
    "jax.grad": lambda: on_arrays(jax.grad(lambda x: jnp.sum(x * x * K[0]))),
}  # fmt: skip
NUMBERS = {"clip": 2, "clip_norm": 1, "reverse": 1, "scale": 1}  # how many numbers they take
# Names that take or return a callable, and have no case.
WITHOUT = {
    # they run the function to report on it, which a compiled function does not do
    "regrad": "compare_gradients draw eval_shape export find_nan gradient_path saved_bytes "
    "trace_gradients",
    "regrad.jax": "check_gradients compare_gradients draw find_nan gradient_path gradient_report "
    "saved_bytes trace_gradients",
    "regrad.plot": "histograms rule saliency",
    "regrad.testing": "Finding check_gradients gradient_report",
    "regrad.train": "fit save",  # `fit` calls the step, and the step is compiled
    # for graphs, and what takes what `elementwise` takes, of a type of the library's own
    "regrad.extend": "shape_of piecewise_constant",
    # for the first four see `test_rules_of_numbers`; the others take Python numbers alone
    "regrad.rules": "clip clip_norm reverse scale arctan_surrogate gaussian rectangle "
    "sigmoid_surrogate superspike triangle blackbox clamped_straight_through",
    # these run a model to report on it; their rules take numbers, and are for other libraries
    "regrad.rules.attribution": "attribute cam tempered",
    "regrad.rules.lrp": "alpha_beta beta_smooth epsilon flat gamma merge_norms relevance "
    "reveal_cancel w_square z_box z_plus",
}  # fmt: skip


class Layer:
    def total(self, x):
        return summed(x)

    def __call__(self, x):
        return self.total(x)


def called(f):
    return np.hstack([np.asarray(leaf.numpy()).ravel() for leaf in opened(f(X))[0]])


@pytest.mark.slow(but=15)
@pytest.mark.parametrize("name", [*CASES, *REGISTERED, *MORE])
def test_a_change_behind_a_wrapper_is_seen(name):
    read = R if name in REGISTERED else K
    read[0] = 2.0
    f = {**CASES, **REGISTERED, **MORE}[name]()
    compiled = rg.jit(f)
    before = [called(compiled) for _ in range(3)][-1]
    assert compiled.cache_info().traces == 1, f"traced again for {compiled._change()}"
    np.testing.assert_allclose(before, called(f), 1e-5)
    read[0] = 3.0
    due = called(f)
    assert not np.allclose(due, before), "the case reads what has changed"
    np.testing.assert_allclose(called(compiled), due, 1e-5)


@pytest.mark.parametrize("name", NUMBERS)
def test_rules_of_numbers(name):
    """A rule may be made of a Variable, whose value at the call counts."""
    k = rg.Variable(0.3)
    rule = getattr(rg.rules, name)(*[-k, k][-NUMBERS[name] :])

    def f(x):
        with rg.gradient_override_map({"Sin": rule}):
            return rg.grad(lambda x: rg.sum(rg.sin(x)))(x)

    compiled = rg.jit(f)
    before = [called(compiled) for _ in range(2)][-1]
    k.assign(0.9)
    np.testing.assert_allclose(called(compiled), called(f), 1e-5)
    assert not np.allclose(called(f), before) and compiled.cache_info().traces == 1


CALLABLE = re.compile(r"Callable|Rule\b|\bF\b|Mapping")
ROLES = {"f", "fun", "rule", "rules", "gradient", "forward", "where", "transformation", "model"}


def takes_callables(value):
    """Return whether a public name takes or returns functions, by its signatures."""
    for f in [value, *([vars(value).get("__call__")] if inspect.isclass(value) else [])]:
        try:
            signature = inspect.signature(f)
        except (TypeError, ValueError):
            continue
        given = signature.parameters.values()
        annotations = [*(p.annotation for p in given), signature.return_annotation]
        if ROLES.intersection(signature.parameters) or any(
            CALLABLE.search(str(a)) for a in annotations
        ):
            return True
    return False


@pytest.mark.slow
def test_every_public_name_that_takes_callables_has_a_case():
    found = {}
    for package in PACKAGES:
        if package not in ("regrad.errors", "regrad.torch"):  # (the rules of torch run in torch)
            module = importlib.import_module(package)
            taking = {n for n in origins(package) if takes_callables(getattr(module, n))}
            found |= {f"{package}.{n}": n in WITHOUT.get(package, "").split() for n in taking}
    assert {name for name, without in found.items() if not without} == {*CASES, *REGISTERED}
    assert {f"{p}.{n}" for p, each in WITHOUT.items() for n in each.split()} <= {*found}
