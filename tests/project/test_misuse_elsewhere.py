"""What newcomers get wrong at the border to PyTorch, JAX and TensorFlow, and what they are told.

As `test_misuse`: each row has the words without which the message would not be good (the function,
what came, what was expected, what to call), and a wrong program, key or rule.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import regrad as rg
import regrad.jax
import regrad.torch
from regrad import errors as e
from tests.helpers.misuses import judge

x = rg.tensor([0.5, -2.0])
j = jnp.array([0.5, -2.0])
STE = {"Sign": "Identity"}
pair = {"of one": lambda a: (a * a, lambda dy: dy)}
tf = rg.v1


def leaf():
    return torch.tensor([0.5, -2.0], requires_grad=True)


def squares(a):
    return rg.sum(a * a)


def torch_signs(a):
    return torch.sign(a).sum()


def jax_signs(a):
    return jnp.sum(jnp.sign(a))


def in_torch(rules, f=torch_signs, **options):
    """The gradient of f under rules."""
    a = leaf()
    with rg.torch.gradient_override_map(rules, **options):
        f(a).backward()
    return a.grad


def in_jax(rules, f=jax_signs, **options):
    """The gradient of f under rules."""
    return jax.grad(rg.jax.override(f, rules, **options))(j)


def with_override(*args):
    with rg.jax.override(*args):
        pass


def torch_scope_around(program):
    with rg.torch.gradient_override_map(STE):
        program()


def torch_scope_around_the_backward_pass():
    y = torch_signs(leaf())
    with rg.torch.gradient_override_map(STE):
        y.backward()


def torch_scope_not_entered():
    rg.torch.gradient_override_map(STE)
    torch_signs(leaf()).backward()


def torch_asked(*keys, grad=True):
    with rg.torch.gradient_override_map(STE) as used, torch.set_grad_enabled(grad):
        y = torch_signs(leaf())
        if grad:
            y.backward()
    used.assert_fired(*keys)


def jax_asked(*keys, original=False):
    ours = rg.jax.override(jax_signs, STE)
    jax.grad(jax_signs if original else ours)(j)
    ours.assert_fired(*keys)


def torch_custom(grad_func):
    rg.torch.custom_grad(lambda a: (a * a, grad_func))(leaf()).sum().backward()


def jax_custom(grad_func):
    jax.grad(lambda a: rg.jax.custom_grad(lambda a: (a * a, grad_func))(a).sum())(j)


NAMES = {  # in which module, and what the message says to use
    "regrad": {"GradientTape": "grad(f)(x)", "conv2d": "regrad.nn.conv2d",
        "Conv2d": "regrad.nn.conv2d", "dropout": "regrad.nn.dropout", "relu": "regrad.nn.relu",
        "ReLU": "regrad.nn.relu", "softmax": "regrad.nn.softmax", "sub": "regrad.subtract",
        "mul": "regrad.multiply", "norm": "regrad.linalg.vector_norm", "cat": "regrad.concat",
        "no_grad": "stop_gradient(x)", "randn": "regrad.random.normal",
        "manual_seed": "takes a seed", "optim": "optax.adam",
        "straight_through": "regrad.rules.straight_through", "reduce_max": "regrad.max",
        "MSELoss": "regrad.losses.mean_squared_error", "override": "rg.jax.override",
        "gradcheck": "regrad.testing.check_gradients", "FloatTensor": "regrad.tensor",
        "custom_vjp": "custom_grad(f)", "convert_to_tensor": "regrad.asarray"},
    "regrad.nn": {"cross_entropy": "regrad.losses.softmax_cross_entropy", "Module": "regrad.Module",
        "CrossEntropyLoss": "regrad.losses.softmax_cross_entropy", "functional": "regrad.nn.relu",
        "Linear": "x @ w + b", "ReLU": "regrad.nn.relu", "HuberLoss": "regrad.losses.huber_loss"},
    "regrad.losses": {"mse": "regrad.losses.mean_squared_error",
        "MSE": "regrad.losses.mean_squared_error"},
    "regrad.train": {"adam": "regrad.train.Optimizer(optax.adam(0.001))", "SGD": "optax.sgd(0.001)",
        "AdamOptimizer": "optax.adam(0.001)", "Trainer": "regrad.train.fit"},
    "regrad.rules": {"StraightThrough": "regrad.rules.straight_through",
        "surrogate": "sigmoid_surrogate",
        "integrated_gradients": "regrad.rules.attribution.integrated",
        "ste": "regrad.rules.straight_through", "grad_reverse": "regrad.rules.reverse_gradient"},
    "regrad.random": {"seed": "takes a seed", "rand": "regrad.random.uniform"},
    "regrad.torch": {"grad": "torch.autograd.grad",
        "override": "gradient_override_map({'Sign': rule})", "Function": "custom_grad(f)",
        "check_gradient": "'check_gradients'",
        "reverse_gradient": "regrad.torch.from_regrad(regrad.rules.reverse_gradient)"},
    "regrad.jax": {"grad": "jax.grad",
        "gradient_override_map": "rg.jax.override(f, {'Relu': rule})",
        "custom_vjp": "custom_grad(f)", "check_grads": "regrad.jax.check_gradients",
        "overide": "Did you mean 'override'?"},
}  # fmt: skip

NET = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
X = torch.ones(2, 3)


def in_net(rules, model=NET):
    with rg.torch.gradient_override_map(rules, model=model):
        model(X).sum().backward()


def around_backward_only():
    y = NET(X).sum()
    with rg.torch.gradient_override_map({"Relu": rg.rules.optional("Identity")}) as used:
        y.backward()
    used.assert_fired("Relu")


def of_no_gradient():
    with rg.torch.gradient_override_map({"Relu": rg.rules.optional("Identity")}) as used:
        torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2))(X).sum().backward()
    used.assert_fired("Relu")


def collected_later():
    kept = rg.gradient_override_map({"Sign": "Identity"})
    del kept


def relevance(*args, **options):
    return rg.rules.lrp.relevance(NET, X, *args, **options)


def in_a_model(path):
    return in_jax({rg.at(path, "Sign"): "Identity"})


def run(program):
    return program()


def by_rule(rule):
    return in_torch({"Sign": rule})


# (how the wrong thing comes in, the class of the error): words of the message, the wrong thing.
# HERE is this file.
MISUSES = {}
MISUSES[by_rule, e.RuleError] = [
    ("takes 'input'|HERE|it may name x, y", lambda dy, input: dy),
    ("returned 0.0, expected a Tensor, got float|HERE|'Sign' at", lambda dy: 0.0),
    ("expected a Tensor, got ndarray|HERE", lambda dy: np.ones(2)),
    ("returned None|rg.rules.no_gradient|HERE", lambda dy: None),
    ("returned the shape (3,), expected (2,)|HERE", lambda dy: torch.ones(3)),
]  # fmt: skip
MISUSES[run, e.UnusedOverrideWarning] = [
    ("'Relu' never ran|rg.rules.optional(rule)", lambda: in_torch({**STE, "Relu": "Identity"})),
    ("nothing|rg.gradient_override_map", lambda: torch_scope_around(lambda: rg.grad(rg.sign)(x))),
    ("matched nothing|rg.jax.override", lambda: torch_scope_around(lambda: jax.grad(jax_signs)(j))),
    ("matched nothing|call the model inside the scope", torch_scope_around_the_backward_pass),
    ("was not entered|write `with gradient_override_map(…):`", torch_scope_not_entered),
    ("'Relu' never ran|rg.rules.optional(rule)", lambda: in_jax({**STE, "Relu": "Identity"})),
    (f"was not entered|was made at {__file__}", collected_later),
    ("override matched nothing|'Relu'|untouched()", lambda: in_jax({"Relu": "Identity"})),
]  # fmt: skip
MISUSES[run, e.ArgumentError] = [
    ("too many|gradient_override_map({'Sign': rule})",
     lambda: rg.torch.gradient_override_map(torch.nn.Linear(2, 2), {"Relu": "Identity"})),
    ("keep expected a list of torch callables|got 'sin'", lambda: in_torch(STE, keep="sin")),
    ("watch is True or False, got str", lambda: in_torch(STE, watch="yes")),
    ("argument 'open'|It takes rules, keep, model, values, order, mate",
     lambda: in_torch(STE, open=[torch.sin])),
    ("assert_fired('Relu')|but 'Sign'", lambda: torch_asked("Relu")),
    ("PyTorch's sin was given a regrad Tensor|Use regrad.sin.",
     lambda: rg.grad(lambda v: torch.sin(v).sum())(x)),
    ("PyTorch's linear was given a regrad Tensor|tools of regrad.torch",
     lambda: rg.grad(torch.nn.Linear(2, 2))(x)),
    ("must be a function|not from_regrad(f(x))", lambda: rg.torch.from_regrad(squares(x))),
    ("from_regrad: <lambda>|called PyTorch on|with regrad's functions",
     lambda: rg.torch.from_regrad(lambda a: torch.sin(a))(leaf())),
    ("from_regrad: <lambda> must return Tensors, got float",
     lambda: rg.torch.from_regrad(lambda a: 1.0)(leaf())),
    ("custom_grad(f) must be a function, got int", lambda: rg.torch.custom_grad(3)),
    ("custom_grad(f) must be a function", lambda: rg.torch.custom_grad(torch.autograd.Function)),
    ("must return {'value': y, 'grad_func': g}|got Tensor(torch.float32",
     lambda: rg.torch.custom_grad(lambda a: a * a)(leaf())),
    ("custom_grad of regrad.torch|a Tensor of regrad|rg.custom_grad",
     lambda: rg.torch.custom_grad(pair["of one"])(x)),
    ("args must be a list, got Tensor|Write check_gradients(f, [x]).",
     lambda: rg.torch.check_gradients(torch.sin, leaf())),
    ("no float tensor of torch|regrad.testing.check_gradients",
     lambda: rg.torch.check_gradients(rg.sin, [x])),
    ("trace_gradients takes a function|got Tensor", lambda: rg.torch.trace_gradients(leaf())),
    ("as its first argument|rg.jax.override(f, {'Relu': rule})", lambda: rg.jax.override(STE)),
    ("as its first argument|jax.grad(ours)", lambda: with_override(STE)),
    ("override is not a scope|jax.grad(ours)", lambda: with_override(jax_signs, STE)),
    ("dict of op types|override(f, {'Relu': rule})|got None", lambda: rg.jax.override(jax_signs)),
    ("override: got an unexpected keyword argument 'Sign'|f, rules, open",
     lambda: rg.jax.override(jax_signs, Sign="Identity")),
    ("override(f) must be a function|not its result", lambda: rg.jax.override(jax_signs(j), STE)),
    ("assert_fired('Relu')|but 'Sign'", lambda: jax_asked("Relu")),
    ("custom_grad of regrad.jax|a JAX array", lambda: rg.jax.custom_grad(pair["of one"])(x)),
    ("args must be a list, got ArrayImpl|Write check_gradients(f, [x]).",
     lambda: rg.jax.check_gradients(jnp.sin, j)),
    ("find_nan(f) must be a function|not find_nan(f(x))", lambda: rg.jax.find_nan(j)),
    ("model|rg.torch.gradient_override_map(rules, model=model)|rg.jax",
     lambda: rg.gradient_override_map(STE, model=NET)),
    ("at('lay.*') names no module|It has '0'",
     lambda: in_net({rg.at("lay.*", "Relu"): "Identity"}, torch.nn.Sequential().append(
        torch.nn.ModuleDict()))),
    ("names no module|It has '0', '1', '2'|* is any name",
     lambda: in_net({rg.at(r"\d+", "Relu"): "Identity"})),
    ("find_nan|It returns a function: find_nan(f)(x)", lambda: rg.torch.find_nan(NET, X)),
    ("trace_gradients|It returns a function: trace_gradients(f)(x)",
     lambda: rg.torch.trace_gradients(NET, X)),
    ("relevance takes a dict|such as epsilon_plus()|got None", lambda: relevance(0)),
    ("such as epsilon_plus() or {F.linear: rule}|got epsilon",
     lambda: relevance(0, rg.rules.lrp.epsilon(0.1))),
    ("such as epsilon_plus();|got epsilon_plus", lambda: relevance(0, rg.rules.lrp.epsilon_plus)),
    ("no module of the model is 'block1'|It has '0', '1', '2'",
     lambda: relevance(0, rg.rules.lrp.epsilon_plus(), ["block1"])),
    ("deep_lift() does|reference=zeros_like(", lambda: relevance(0, rg.rules.lrp.deep_lift())),
    ("of the same shape or of one example|(1, 5)|(2, 3)",
     lambda: relevance(0, rg.rules.lrp.deep_lift(), reference=torch.zeros(1, 5))),
    ("torch.compile", lambda: rg.jit(NET)(X)),
    ("at('layers.0')|takes paths from model=model", lambda: in_a_model("layers.0")),
    ("apply_gradients(zip(gradients, variables))",
     lambda: rg.train.Optimizer(optax.sgd(0.1)).apply_gradients([rg.Variable(x, name="w")], [x])),
    ("needs a name (a string)|@RegisterGradient('Name')", lambda: tf.RegisterGradient(squares)),
    ("for 'Sign' expected|lambda dy, x: dy", lambda: in_torch({"Sign": torch.autograd.Function})),
    ("such as torch.relu|that it calls|'Relu'", lambda: in_torch({torch.nn.ReLU: "Identity"})),
    ("got the function sign|Did you mean 'Sign'?", lambda: in_torch({rg.sign: "Identity"})),
    ("sign is a plain function|untouched()|mean 'Sign'?", lambda: in_jax({torch.sign: "Identity"})),
    ("got the function sign|Did you mean 'Sign'?", lambda: in_jax({rg.sign: "Identity"})),
]  # fmt: skip
MISUSES[run, e.NotFiredError] = [
    ("'Sign' never ran|HERE|Call assert_fired() after", lambda: torch_asked(grad=False)),
    ("'Sign' never ran|no call of the function that override", lambda: jax_asked(original=True)),
    ("'Relu' never ran|Run the model, and not only its backward pass", around_backward_only),
    ("no gradient passed through them|inputs require a gradient", of_no_gradient),
    ("'Sin' never ran|no call of the function that override returned",
     lambda: rg.jax.override(jnp.sin, {"Sin": "Sin"}).assert_fired()),
]  # fmt: skip
MISUSES[run, AttributeError] = [
    ("no attribute 'backward'|grad(f)(x)", lambda: rg.sum(leaf().detach()).backward()),
    ("tf.GradientTape is not covered|regrad.grad", lambda: tf.GradientTape()),
    ("tf.train.Adam is not covered|Did you mean 'AdamOptimizer'?", lambda: tf.train.Adam),
    ("tf.reduce_summ is not covered|Did you mean 'reduce_sum'", lambda: tf.reduce_summ),
    ("a Site has no 'name'|path|module_class",
     lambda: in_net({rg.at(lambda site: site.name == "1", "Relu"): "Identity"})),
]  # fmt: skip
MISUSES[run, e.RuleError] = [
    ("returned the shape (3,), expected (2,)|HERE|input 'a'",
     lambda: torch_custom(lambda dy: torch.ones(3))),
    ("returned float, expected a tensor|HERE", lambda: torch_custom(lambda dy: 1.0)),
    ("expected gradients by a|one entry per argument|HERE",
     lambda: torch_custom(lambda dy: (dy, dy))),
    ("returned None|rg.rules.no_gradient|HERE", lambda: in_jax({"Sign": lambda dy: None})),
    ("the shape (3,), expected (2,)|HERE", lambda: jax_custom(lambda dy: jnp.ones(3))),
    ("returned float, expected an array|HERE", lambda: jax_custom(lambda dy: 1.0)),
]  # fmt: skip
MISUSES[run, e.GradientError] = [
    ("'Sign'|HERE|jax.grad(rg.jax.override(loss, …))",
     lambda: rg.jax.override(jax.grad(jax_signs), STE)(j)),
    ("was given a regrad Tensor|regrad.jax.from_regrad",
     lambda: in_jax(STE, lambda a: rg.sum(rg.sign(a)))),
    ("given a regrad Tensor|Use regrad.sum.|regrad.jax.from_regrad",
     lambda: rg.grad(lambda v: jnp.sum(v**2))(x)),
    ("was given a regrad Tensor|regrad.jax.from_regrad", lambda: jax.jit(squares)(j)),
    ("was given a regrad Tensor|regrad.jax.from_regrad", lambda: jax.grad(squares)(j)),
    ("was given a regrad Tensor|regrad.jax.from_regrad", lambda: jax.vmap(rg.sin)(j)),
    ("got Tensor(float64, (2,))|regrad.testing", lambda: rg.jax.check_gradients(rg.sin, [j])),
]  # fmt: skip
MISUSES[run, e.SignatureError] = [
    ("override|takes (x, dy)|Put dy first.", lambda: in_jax({"Sign": lambda x, dy: dy})),
    ("takes ()|first parameter is dy", lambda: in_torch({"Sign": lambda: 1})),
    ("takes (x, dy)|Put dy first.", lambda: in_torch({"Sign": lambda x, dy: dy})),
    ("takes (input, inplace=False)|first parameter is dy",
     lambda: in_torch({"Sign": torch.nn.functional.relu})),
]  # fmt: skip
MISUSES[run, e.UnknownOpError] = [
    ("'StraightThrough'|rules.straight_through", lambda: in_torch({"Sign": "StraightThrough"})),
    ("ReLU() is not a callable|mean 'Relu'?", lambda: in_torch({torch.nn.ReLU(): "Identity"})),
    ("no op type 'aten::sign'|Did you mean 'Sign'", lambda: in_torch({"aten::sign": "Identity"})),
    ("'ReLU' is neither an op type nor|Did you mean 'Relu'", lambda: in_jax({"ReLU": "Identity"})),
]  # fmt: skip
FEW = [
    (e.DetachedTensorWarning, "torch's gradient ends here|regrad.torch.from_regrad",
     lambda: rg.sum(rg.sin(leaf()))),
]  # fmt: skip

CASES = [
    pytest.param(how, *row, kind, id=f"{kind.__name__}: {row[0]}")
    for (how, kind), rows in MISUSES.items()
    for row in rows
]
CASES += [pytest.param(run, *row, kind, id=f"{kind.__name__}: {row[0]}") for kind, *row in FEW]


@pytest.mark.parametrize(("how", "words", "wrong", "kind"), CASES)
def test_a_misuse_is_told(how, words, wrong, kind):
    judge(lambda: how(wrong), kind, words.replace("HERE", "test_misuse_elsewhere.py:").split("|"))


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [(module, *item) for module, names in NAMES.items() for item in names.items()],
)
def test_a_name_of_another_library_is_told(module, name, instead):
    place = rg
    for part in module.split(".")[1:]:
        place = getattr(place, part)
    said = f"module {module!r} has no attribute {name!r}."
    judge(lambda: getattr(place, name), AttributeError, [said, instead])
