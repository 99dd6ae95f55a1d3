"""What newcomers get wrong at the border to PyTorch, JAX and TensorFlow, and what they are told.

As `test_misuse`: each entry has a wrong program, the class of its error, and the words without
which the message would not be good: the function, what came, what was expected, what to call.
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

HERE = "test_misuse_elsewhere.py:"
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


TORCH_RULES = {
    "no parameters": (lambda: in_torch({"Sign": lambda: 1}),
        e.SignatureError, ["takes ()", "first parameter is dy"]),
    "PyTorch's name of the input": (lambda: in_torch({"Sign": lambda dy, input: dy}),
        e.RuleError, ["asks for 'input'", HERE, "it may name x, y"]),
    "dy comes second": (lambda: in_torch({"Sign": lambda x, dy: dy}),
        e.SignatureError, ["takes (x, dy)", "Put dy first."]),
    "a float": (lambda: in_torch({"Sign": lambda dy: 0.0}),
        e.RuleError, ["returned 0.0, expected a Tensor, got float", HERE, "'Sign' at"]),
    "NumPy's array": (lambda: in_torch({"Sign": lambda dy: np.ones(2)}),
        e.RuleError, ["expected a Tensor, got ndarray", HERE]),
    "nothing": (lambda: in_torch({"Sign": lambda dy: None}),
        e.RuleError, ["returned None", "rg.rules.no_gradient", HERE]),
    "another shape": (lambda: in_torch({"Sign": lambda dy: torch.ones(3)}),
        e.RuleError, ["returned the shape (3,), expected (2,)", HERE]),
    "PyTorch's function": (lambda: in_torch({"Sign": torch.nn.functional.relu}),
        e.SignatureError, ["takes (input, inplace=False)", "first parameter is dy"]),
    "an autograd.Function": (lambda: in_torch({"Sign": torch.autograd.Function}),
        e.ArgumentError, ["for 'Sign' expected", "lambda dy, x: dy"]),
    "the name of a class": (lambda: in_torch({"Sign": "StraightThrough"}),
        e.UnknownOpError, ["'StraightThrough'", "regrad.rules.straight_through"]),
}  # fmt: skip

TORCH = {
    "a class of layers as key": (lambda: in_torch({torch.nn.ReLU: "Identity"}),
        e.ArgumentError, ["such as torch.relu", "function that it calls", "'Relu'"]),
    "a layer as key": (lambda: in_torch({torch.nn.ReLU(): "Identity"}),
        e.UnknownOpError, ["ReLU() is not a callable", "Did you mean 'Relu'?"]),
    "regrad's function as key": (lambda: in_torch({rg.sign: "Identity"}),
        e.ArgumentError, ["got the function sign", "Did you mean 'Sign'?"]),
    "a dotted name as key": (lambda: in_torch({"aten::sign": "Identity"}),
        e.UnknownOpError, ["no op type 'aten::sign'", "Did you mean 'Sign'"]),
    "a dead key": (lambda: in_torch({**STE, "Relu": "Identity"}),
        e.UnusedOverrideWarning, ["'Relu' never ran", "rg.rules.optional(rule)"]),
    "the model for the map": (
        lambda: rg.torch.gradient_override_map(torch.nn.Linear(2, 2), {"Relu": "Identity"}),
        e.ArgumentError, ["too many", "gradient_override_map({'Sign': rule})"]),
    "keep is a name": (lambda: in_torch(STE, keep="sin"),
        e.ArgumentError, ["keep expected a list of torch callables", "got 'sin'"]),
    "open, which is JAX's": (lambda: in_torch(STE, open=[torch.sin]),
        e.ArgumentError, ["argument 'open'", "It takes rules, keep, model, values, order, mate"]),
    "a scope around regrad's code": (lambda: torch_scope_around(lambda: rg.grad(rg.sign)(x)),
        e.UnusedOverrideWarning, ["matched nothing", "rg.gradient_override_map"]),
    "a scope around JAX's code": (lambda: torch_scope_around(lambda: jax.grad(jax_signs)(j)),
        e.UnusedOverrideWarning, ["matched nothing", "rg.jax.override"]),
    "a scope around backward() alone": (torch_scope_around_the_backward_pass,
        e.UnusedOverrideWarning, ["matched nothing", "call the model inside the scope"]),
    "a scope that is not entered": (torch_scope_not_entered,
        e.UnusedOverrideWarning, ["was not entered", "write `with gradient_override_map(…):`"]),
    "asked for another key": (lambda: torch_asked("Relu"),
        e.ArgumentError, ["assert_fired('Relu')", "but 'Sign'"]),
    "asked without a gradient": (lambda: torch_asked(grad=False),
        e.NotFiredError, ["'Sign' never ran", HERE, "Ask after the gradient"]),
    "a Tensor in torch.sin": (lambda: rg.grad(lambda v: torch.sin(v).sum())(x),
        e.ArgumentError, ["PyTorch's sin was given a regrad Tensor", "Use regrad.sin."]),
    "a Tensor in a module": (lambda: rg.grad(torch.nn.Linear(2, 2))(x),
        e.ArgumentError, ["PyTorch's linear was given a regrad Tensor", "tools of regrad.torch"]),
    "a tensor that requires grad": (lambda: rg.sum(rg.sin(leaf())),
        e.DetachedTensorWarning, ["torch's gradient ends here", "regrad.torch.from_regrad"]),
    "backward() of regrad's result": (lambda: rg.sum(leaf().detach()).backward(),
        AttributeError, ["no attribute 'backward'", "grad(f)(x)"]),
    "from_regrad of a value": (lambda: rg.torch.from_regrad(squares(x)),
        e.ArgumentError, ["from_regrad(f) must be a function", "not from_regrad(f(x))"]),
    "from_regrad of PyTorch's code": (lambda: rg.torch.from_regrad(lambda a: torch.sin(a))(leaf()),
        e.ArgumentError, ["from_regrad: <lambda>", "called PyTorch on", "with regrad's functions"]),
    "from_regrad of a number": (lambda: rg.torch.from_regrad(lambda a: 1.0)(leaf()),
        e.ArgumentError, ["from_regrad: <lambda> must return Tensors, got float"]),
    "custom_grad of a number": (lambda: rg.torch.custom_grad(3),
        e.ArgumentError, ["custom_grad(f) must be a function, got int"]),
    "custom_grad of a Function": (lambda: rg.torch.custom_grad(torch.autograd.Function),
        e.ArgumentError, ["custom_grad(f) must be a function, got"]),
    "custom_grad without a gradient": (lambda: rg.torch.custom_grad(lambda a: a * a)(leaf()),
        e.ArgumentError, ["must return {'value': y, 'grad_func': g}", "got Tensor(torch.float32"]),
    "custom_grad of a Tensor": (lambda: rg.torch.custom_grad(pair["of one"])(x),
        e.ArgumentError, ["custom_grad of regrad.torch", "a Tensor of regrad", "rg.custom_grad"]),
    "custom_grad of another shape": (lambda: torch_custom(lambda dy: torch.ones(3)),
        e.RuleError, ["returned the shape (3,), expected (2,)", HERE, "input 'a'"]),
    "custom_grad with a float": (lambda: torch_custom(lambda dy: 1.0),
        e.RuleError, ["returned float, expected a tensor", HERE]),
    "custom_grad with two gradients": (lambda: torch_custom(lambda dy: (dy, dy)),
        e.RuleError, ["expected gradients by a", "one entry per argument", HERE]),
    "args of a check not in a list": (lambda: rg.torch.check_gradients(torch.sin, leaf()),
        e.ArgumentError, ["args is a list, got Tensor", "Write check_gradients(f, [x])."]),
    "a check of regrad's function": (lambda: rg.torch.check_gradients(rg.sin, [x]),
        e.ArgumentError, ["no torch tensor of floats", "regrad.testing.check_gradients"]),
    "a trace of a value": (lambda: rg.torch.trace_gradients(leaf()),
        e.ArgumentError, ["trace_gradients takes a function or a module", "got Tensor"]),
}  # fmt: skip

JAX = {
    "override without f": (lambda: rg.jax.override(STE),
        e.ArgumentError, ["takes the function first", "rg.jax.override(f, {'Relu': rule})"]),
    "override as a scope": (lambda: with_override(STE),
        e.ArgumentError, ["override takes the function first", "jax.grad(ours)"]),
    "override of f as a scope": (lambda: with_override(jax_signs, STE),
        e.ArgumentError, ["override is not a scope", "jax.grad(ours)"]),
    "override without rules": (lambda: rg.jax.override(jax_signs),
        e.ArgumentError, ["takes a dict of op types", "override(f, {'Relu': rule})", "got None"]),
    "override by keywords": (lambda: rg.jax.override(jax_signs, Sign="Identity"),
        e.ArgumentError, ["override: got an unexpected keyword argument 'Sign'", "f, rules, open"]),
    "override of a value": (lambda: rg.jax.override(jax_signs(j), STE),
        e.ArgumentError, ["override(f) must be a function", "and not its result"]),
    "override around jax.grad": (lambda: rg.jax.override(jax.grad(jax_signs), STE)(j),
        e.GradientError, ["'Sign'", HERE, "jax.grad(rg.jax.override(loss, …))"]),
    "override of regrad's code": (lambda: in_jax(STE, lambda a: rg.sum(rg.sign(a))),
        e.GradientError, ["was given a regrad Tensor", "regrad.jax.from_regrad"]),
    "PyTorch's function as key": (lambda: in_jax({torch.sign: "Identity"}),
        e.ArgumentError, ["sign is a plain function", "untouched()", "Did you mean 'Sign'?"]),
    "a key misspelt": (lambda: in_jax({"ReLU": "Identity"}),
        e.UnknownOpError, ["'ReLU' is neither an op type nor", "Did you mean 'Relu'"]),
    "regrad's function as key": (lambda: in_jax({rg.sign: "Identity"}),
        e.ArgumentError, ["got the function sign", "Did you mean 'Sign'?"]),
    "a dead key": (lambda: in_jax({**STE, "Relu": "Identity"}),
        e.UnusedOverrideWarning, ["'Relu' never ran", "rg.rules.optional(rule)"]),
    "nothing but a dead key": (lambda: in_jax({"Relu": "Identity"}),
        e.UnusedOverrideWarning, ["override matched nothing", "'Relu'", "untouched()"]),
    "a rule that returns nothing": (lambda: in_jax({"Sign": lambda dy: None}),
        e.RuleError, ["returned None", "rg.rules.no_gradient", HERE]),
    "a rule without dy": (lambda: in_jax({"Sign": lambda x, dy: dy}),
        e.SignatureError, ["override", "takes (x, dy)", "Put dy first."]),
    "asked for another key": (lambda: jax_asked("Relu"),
        e.ArgumentError, ["assert_fired('Relu')", "but 'Sign'"]),
    "the gradient of the original": (lambda: jax_asked(original=True),
        e.NotFiredError, ["'Sign' never ran", "no call of the function that override returned"]),
    "a Tensor in jnp.sum": (lambda: rg.grad(lambda v: jnp.sum(v**2))(x),
        e.GradientError, ["given a regrad Tensor", "Use regrad.sum.", "regrad.jax.from_regrad"]),
    "jax.jit of regrad's function": (lambda: jax.jit(squares)(j),
        e.GradientError, ["was given a regrad Tensor", "regrad.jax.from_regrad"]),
    "jax.grad of regrad's function": (lambda: jax.grad(squares)(j),
        e.GradientError, ["was given a regrad Tensor", "regrad.jax.from_regrad"]),
    "jax.vmap of regrad's function": (lambda: jax.vmap(rg.sin)(j),
        e.GradientError, ["was given a regrad Tensor", "regrad.jax.from_regrad"]),
    "custom_grad of a Tensor": (lambda: rg.jax.custom_grad(pair["of one"])(x),
        e.ArgumentError, ["custom_grad of regrad.jax", "expected an array of JAX"]),
    "custom_grad of another shape": (lambda: jax_custom(lambda dy: jnp.ones(3)),
        e.RuleError, ["(3,)", ", expected float", "(2,)", HERE]),
    "custom_grad with a float": (lambda: jax_custom(lambda dy: 1.0),
        e.RuleError, ["returned float, expected an array", HERE]),
    "args of a check not in a list": (lambda: rg.jax.check_gradients(jnp.sin, j),
        e.ArgumentError, ["args is a list, got ArrayImpl", "Write check_gradients(f, [x])."]),
    "a check of regrad's function": (lambda: rg.jax.check_gradients(rg.sin, [j]),
        e.GradientError, ["got Tensor(float64, (2,))", "regrad.testing"]),
    "a search for NaN in a value": (lambda: rg.jax.find_nan(j),
        e.ArgumentError, ["find_nan(f) must be a function", "not find_nan(f(x))"]),
}  # fmt: skip

TF = {
    "a part of a later TensorFlow": (lambda: tf.GradientTape(),
        AttributeError, ["tf.GradientTape is not covered", "regrad.grad"]),
    "Keras's optimizer": (lambda: tf.train.Adam,
        AttributeError, ["tf.train.Adam is not covered", "Did you mean 'AdamOptimizer'?"]),
    "a name misspelt": (lambda: tf.reduce_summ,
        AttributeError, ["tf.reduce_summ is not covered", "Did you mean 'reduce_sum'"]),
}  # fmt: skip

NAMES = {  # in which module, and what the message says to use
    "regrad": {
        "GradientTape": "grad(f)(x)", "conv2d": "regrad.nn.conv2d", "Conv2d": "regrad.nn.conv2d",
        "dropout": "regrad.nn.dropout", "relu": "regrad.nn.relu", "ReLU": "regrad.nn.relu",
        "softmax": "regrad.nn.softmax", "sub": "regrad.subtract", "mul": "regrad.multiply",
        "norm": "regrad.linalg.vector_norm", "cat": "regrad.concat", "no_grad": "stop_gradient(x)",
        "randn": "regrad.random.normal", "manual_seed": "takes a seed", "optim": "optax.adam",
        "straight_through": "regrad.rules.straight_through", "reduce_max": "regrad.max",
        "MSELoss": "regrad.losses.mean_squared_error", "override": "rg.jax.override",
        "gradcheck": "regrad.testing.check_gradients", "FloatTensor": "regrad.tensor",
        "custom_vjp": "custom_grad(f)", "convert_to_tensor": "regrad.asarray",
    },
    "regrad.nn": {
        "cross_entropy": "regrad.losses.softmax_cross_entropy", "Module": "regrad.Module",
        "CrossEntropyLoss": "regrad.losses.softmax_cross_entropy", "functional": "regrad.nn.relu",
        "Linear": "x @ w + b", "ReLU": "regrad.nn.relu", "HuberLoss": "regrad.losses.huber_loss",
    },
    "regrad.losses": {
        "mse": "regrad.losses.mean_squared_error", "MSE": "regrad.losses.mean_squared_error",
    },
    "regrad.train": {
        "adam": "regrad.train.Optimizer(optax.adam(0.001))", "SGD": "optax.sgd(0.001)",
        "AdamOptimizer": "optax.adam(0.001)", "Trainer": "regrad.train.fit",
    },
    "regrad.rules": {
        "StraightThrough": "regrad.rules.straight_through", "surrogate": "sigmoid_surrogate",
        "integrated_gradients": "regrad.rules.attribution.integrated",
        "ste": "regrad.rules.straight_through", "grad_reverse": "regrad.rules.reverse_gradient",
    },
    "regrad.random": {"seed": "takes a seed", "rand": "regrad.random.uniform"},
    "regrad.torch": {
        "grad": "torch.autograd.grad", "override": "gradient_override_map({'Sign': rule})",
        "Function": "custom_grad(f)", "check_gradient": "'check_gradients'",
        "reverse_gradient": "regrad.torch.from_regrad(regrad.rules.reverse_gradient)",
    },
    "regrad.jax": {
        "grad": "jax.grad", "gradient_override_map": "rg.jax.override(f, {'Relu': rule})",
        "custom_vjp": "custom_grad(f)", "check_grads": "regrad.jax.check_gradients",
        "overide": "Did you mean 'override'?",
    },
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


NEWCOMERS = {
    "a model for regrad's own scope": (lambda: rg.gradient_override_map(STE, model=NET),
        e.ArgumentError, ["model", "rg.torch.gradient_override_map(rules, model=model)", "rg.jax"]),
    "a path that is near": (lambda: in_net({rg.at("lay.*", "Relu"): "Identity"},
                            torch.nn.Sequential().append(torch.nn.ModuleDict())),
        e.ArgumentError, ["at('lay.*') names no module", "It has '0'"]),
    "a regular expression": (lambda: in_net({rg.at(r"\d+", "Relu"): "Identity"}),
        e.ArgumentError, ["names no module", "It has '0', '1', '2'", "* is any name"]),
    "a site has no name": (
        lambda: in_net({rg.at(lambda site: site.name == "1", "Relu"): "Identity"}),
        AttributeError, ["a Site has no 'name'", "path", "module_class"]),
    "find_nan of f and x": (lambda: rg.torch.find_nan(NET, X),
        e.ArgumentError, ["find_nan", "It returns a function: find_nan(f)(x)"]),
    "trace_gradients of f and x": (lambda: rg.torch.trace_gradients(NET, X),
        e.ArgumentError, ["trace_gradients", "It returns a function: trace_gradients(f)(x)"]),
    "a scope around backward": (around_backward_only,
        e.NotFiredError, ["'Relu' never ran", "Run the model, and not only its backward pass"]),
    "no input requires a gradient": (of_no_gradient,
        e.NotFiredError, ["no gradient passed them", "inputs that require a gradient"]),
    "a scope that is collected": (collected_later,
        e.UnusedOverrideWarning, ["was not entered", f"was made at {__file__}"]),
    "relevance without rules": (lambda: relevance(0),
        e.ArgumentError, ["relevance takes a dict", "such as epsilon_plus()", "got None"]),
    "relevance by one rule": (lambda: relevance(0, rg.rules.lrp.epsilon(0.1)),
        e.ArgumentError, ["such as epsilon_plus() or {F.linear: rule}", "got epsilon"]),
    "relevance by a composite's name": (lambda: relevance(0, rg.rules.lrp.epsilon_plus),
        e.ArgumentError, ["such as epsilon_plus();", "got epsilon_plus"]),
    "a layer that is none": (lambda: relevance(0, rg.rules.lrp.epsilon_plus(), ["block1"]),
        e.ArgumentError, ["no module of the model is 'block1'", "It has '0', '1', '2'"]),
    "deep_lift without a reference": (lambda: relevance(0, rg.rules.lrp.deep_lift()),
        e.ArgumentError, ["deep_lift() does", "reference=zeros_like(inputs)"]),
    "a reference of another shape": (
        lambda: relevance(0, rg.rules.lrp.deep_lift(), reference=torch.zeros(1, 5)),
        e.ArgumentError, ["of its shape or of one example", "(1, 5)", "(2, 3)"]),
    "jit of a torch module": (lambda: rg.jit(NET)(X),
        e.ArgumentError, ["torch.compile"]),
    "an override that nobody called": (
        lambda: rg.jax.override(jnp.sin, {"Sin": "Sin"}).assert_fired(),
        e.NotFiredError, ["'Sin' never ran", "no call of the function that override returned"]),
    "a path without a model": (lambda: in_a_model("layers.0"),
        e.ArgumentError, ["at('layers.0')", "paths are those in model=model"]),
    "variables before gradients": (
        lambda: rg.train.Optimizer(optax.sgd(0.1)).apply_gradients([rg.Variable(x, name="w")], [x]),
        e.ArgumentError, ["apply_gradients(zip(gradients, variables))"]),
    "a registration without a name": (lambda: tf.RegisterGradient(squares),
        e.ArgumentError, ["must be a string", "@tf.RegisterGradient('Name')"]),
}  # fmt: skip

TABLES = {
    "torch rule": TORCH_RULES, "torch": TORCH, "jax": JAX, "tf": TF, "newcomer": NEWCOMERS,
}  # fmt: skip
CASES = [
    pytest.param(*case, id=f"{kind}: {what}")
    for kind, table in TABLES.items()
    for what, case in table.items()
]


@pytest.mark.parametrize(("program", "kind", "words"), CASES)
def test_a_misuse_is_told(program, kind, words):
    judge(program, kind, words)


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
