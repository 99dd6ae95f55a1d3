"""What newcomers get wrong, and what they are told: regrad's own functions.

A good message names the function, says what came and what was expected, and what to call instead.
Each row of the tables has the words without which the message would not be good, and a wrong
program; or the rule or key that is wrong in one. The tables are by the class of the error (or
warning). A class of Python's own stands only where the message is ours: AttributeError, for names.
"""

import gc

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import regrad as rg
from regrad import errors as e
from regrad.testing import GradientCheckError, check_gradients
from tests.helpers.misuses import judge

x = rg.tensor([0.5, -2.0])
V = rg.Variable(x, name="V")
STE = {"Sign": "Identity"}
ADAM = rg.train.Optimizer(optax.adam(0.1))


def signs(a):
    return rg.sum(rg.sign(a))


def squares(a):
    return rg.sum(a * a)


def under(rules, f=signs):
    """The gradient of f under rules."""
    with rg.gradient_override_map(rules):
        return rg.grad(f)(x)


def asked(*op_types):
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        rg.grad(rg.sign)(x)
    used.assert_fired(*op_types)


def asked_too_early():
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        rg.sign(x)
    used.assert_fired()


def not_entered():
    rg.gradient_override_map({"Sign": "Identity"})
    rg.grad(signs)(x)


def called_after_the_scope():
    with rg.gradient_override_map({"Sign": "Identity"}):
        gradient = rg.grad(signs)
    gradient(x)


def left_open():
    def opens():
        scope = rg.gradient_override_map({"Sign": "Identity"})
        scope.__enter__()
        rg.grad(signs)(x)

    opens()
    gc.collect()


def left_out_of_turn():
    outer = rg.gradient_override_map({"Sign": "Identity"})
    inner = rg.gradient_override_map({"Relu": rg.rules.optional("Identity")})
    outer.__enter__()
    inner.__enter__()
    try:
        outer.__exit__(None, None, None)
    finally:
        inner.__exit__(None, None, None)


def entered_twice():
    scope = rg.gradient_override_map({"Sign": rg.rules.optional("Identity")})
    with scope, scope:
        pass


@rg.RegisterGradient("Misused")
def registered(dy):
    return dy


def added_in_place():
    v = rg.Variable(x)
    v += 1


def set_in_place(t):
    t[0] = 1.0


def replaced(module):
    module.w = module.w - 0.1


class Scale(rg.Module):
    """Has no `__call__`, as PyTorch's modules have none of their own."""

    def __init__(self):
        self.w = rg.Variable([1.0])


def run(program):
    return program()


def by_rule(rule):
    return under({"Sign": rule})


def by_key(key):
    return under({key: "Identity"})


# (how the wrong thing comes in, the class of the error): words of the message, the wrong thing.
# HERE is this file.
MISUSES = {}
MISUSES[by_rule, e.SignatureError] = [
    ("takes ()|first parameter is dy|def rule(dy, x)", lambda: 1),
    ("takes (x, dy)|Put dy first.", lambda x, dy: dy),
    ("takes (grad)|call it dy", lambda grad: grad),
    ("takes (x, /)|sign is a function of a tensor|y = sign(x)", rg.sign),
    ("which the model calls: y = reverse_gradient(x)", rg.rules.reverse_gradient),
    ("takes (beta=10.0)|call it: superspike(…)", rg.rules.superspike),
    ("takes (input, inplace=False)|first parameter is dy", torch.nn.functional.relu),
]  # fmt: skip
MISUSES[by_rule, e.RuleError] = [
    ("takes 'foo'|'Sign'|HERE|it may name x, y, x_shape, x_dtype", lambda dy, x, foo: dy),
    ("takes 'input'|it may name x, y", lambda dy, input: dy),
    ("returned the shape (3,), expected (2,)|HERE|'Sign' at|input 'x'", lambda dy: rg.ones(3)),
    ("returned 1.0, expected a Tensor, got float|HERE|zeros_like(dy)", lambda dy: 1.0),
    ("returned None|forget its return|rg.rules.no_gradient|HERE", lambda dy: None),
    ("expected a Tensor, got ndarray(float32, (2,))|HERE", lambda dy: dy.numpy() * 2),
    ("the dtype int32, expected float32|astype(dx, x.dtype)", lambda dy: rg.astype(dy, "int32")),
    ("dtype float64, expected float32|astype(dx, x.dtype)", lambda dy: rg.astype(dy, "float64")),
    ("returned 'dy', expected a Tensor, got str", lambda dy: "dy"),
    ("returned 2 gradients for one input|HERE", lambda dy: (dy, dy)),
]  # fmt: skip
MISUSES[run, e.RuleError] = [
    ("returned 1, and the op has 2 inputs|one gradient per input|HERE",
     lambda: under({"Mul": lambda dy, a, b: dy * b}, squares)),
    ("'Relu' has no input 'q'|Its inputs are x.", lambda: rg.gradient("Relu", "q")(lambda dy: dy)),
    ("'CustomGrad'|HERE|input 'a'|expected a Tensor, got float",
     lambda: rg.grad(rg.custom_grad(lambda a: (a * a, lambda dy: 1.0)))(x)),
]  # fmt: skip
MISUSES[by_rule, e.ArgumentError] = [
    ("for 'Sign' expected|got <class|lambda dy, x: dy", torch.autograd.Function),
    ("for 'Sign' expected a registered name or a function, got 3|lambda", 3),
    ("for 'Sign' expected|got None|rg.rules.no_gradient", None),
    ("for 'Sign' expected|An op type has one rule.", [rg.rules.straight_through]),
]  # fmt: skip
MISUSES[run, e.ArgumentError] = [
    ("superspike: beta is a number of 0 or more, a Tensor or an array (default 10.0), got 'a'",
     lambda: rg.rules.superspike("a")),
    ("triangle: width is a number above 0|got -1.0", lambda: rg.rules.triangle(-1.0)),
    ("superspike: got an unexpected keyword argument 'alpha'|takes beta",
     lambda: rg.rules.superspike(alpha=3)),
    ("RegisterGradient needs a name (a string), got", lambda: rg.RegisterGradient(signs)),
    ("takes a dict|gradient_override_map({'Sign': rule})|got ['Sign']", lambda: under(["Sign"])),
    ("map: missing a required argument: 'rules'", lambda: rg.gradient_override_map()),
    ("too many|It takes a dict: gradient_override_map({'Sign': rule})",
     lambda: rg.gradient_override_map("Sign", "Identity")),
    ("a dict of op types to rules|got <function signs", lambda: rg.gradient_override_map(signs)),
    ("decorates functions; this is the class Module. Decorate its methods.",
     lambda: rg.gradient_override_map({"Sign": "Identity"})(rg.Module)),
    ("exited out of order|scopes must nest|open it where it is used", left_out_of_turn),
    ("this gradient_override_map is open already|make a new one", entered_twice),
    ("assert_fired('Relu')|but 'Sign'|Name one of these", lambda: asked("Relu")),
    ("got the function sign|Did you mean 'Sign'?", lambda: asked(rg.sign)),
    ("got ['Sign']|Write one entry for each op type", lambda: asked(["Sign"])),
    ("grad(f): argnums=2|called with 2 positional arguments|from 0",
     lambda: rg.grad(lambda a, b: rg.sum(a * b), argnums=2)(x, x)),
    ("grad(f, argnums=…)|or a sequence of ints, got 'a'", lambda: rg.grad(squares, argnums="a")),
    ("grad: got an unexpected keyword argument 'wrt'|grad(lambda", lambda: rg.grad(squares, wrt=0)),
    ("grad: too many|It returns a function: grad(f)(x).", lambda: rg.grad(squares, x)),
    ("grad(f): missing a required argument", lambda: rg.grad(squares)()),
    ("grad(f) differentiates by Tensors, arrays and numbers|got None",
     lambda: rg.grad(lambda a: rg.sum(a))(None)),
    ("grad(f) differentiates by Tensors|got str: 'a'|in a closure", lambda: rg.grad(squares)("a")),
    ("grad(f) must return a Tensor, got tuple|jacobian", lambda: rg.grad(lambda a: (a, a))(x)),
    ("must return a Tensor, got None|its return statement?", lambda: rg.grad(lambda a: None)(x)),
    ("must return a Tensor, got float|with regrad's ops", lambda: rg.grad(lambda a: 1.0)(x)),
    ("has_aux=True f must return a pair (y, aux), got Tensor(float32, ())",
     lambda: rg.grad(squares, has_aux=True)(x)),
    ("must be a function, got Tensor|grad(f), not grad(f(x))", lambda: rg.grad(rg.sum(x))),
    ("grads(f)(args)|must be a list|Write grads(f)([x])", lambda: rg.grads(squares)(x)),
    ("must return a Tensor, got float|with regrad's ops",
     lambda: rg.grad(lambda a: __import__("math").sin(a))(rg.scalar(1.0))),
    ("tensor: got an unexpected keyword|'requires_grad'|grad(f)(x)",
     lambda: rg.tensor([1.0], requires_grad=True)),
    ("xs and dxs must be lists|Write jvp(f, [x], [dx]).", lambda: rg.jvp(rg.sin, x, x)),
    ("vjp(f, *xs)|pass the inputs of f", lambda: rg.vjp(rg.sin)),
    ("must return {'value': y, 'grad_func': g} or (y, g)|got Tensor(float32, (2,))",
     lambda: rg.custom_grad(lambda a: a * a)(x)),
    ("must return {'value': y, 'grad_func': g} or (y, g)|got None",
     lambda: rg.custom_grad(lambda a, save: None)(x)),
    ("must return {'value': y, 'grad_func': g} or (y, g)|its grad_func is Tensor(float32, (2,))",
     lambda: rg.custom_grad(lambda a: (lambda dy: dy, a))(x)),
    ("custom_grad: too many|custom_grad(lambda x: (y, lambda dy: dx))",
     lambda: rg.custom_grad(rg.sin, rg.cos)),
    ("custom_grad(f) must be a function", lambda: rg.custom_grad(torch.autograd.Function)),
    ("f saved nothing|call save([a, b]) in f",
     lambda: rg.grad(rg.custom_grad(lambda a: (a * a, lambda dy, saved: dy * saved[0])))(x)),
    ("f saved by name (a)|save(a=a) for saved.a",
     lambda: rg.grad(rg.custom_grad(lambda a, save: (save(a=a), (
        a * a, lambda dy, saved: dy * saved.b))[1]))(x)),
    ("args must be a list, got Tensor|check_gradients(f, [x]).",
     lambda: check_gradients(rg.sin, x)),
    ("takes (x, /)|called with 2 arguments|check_gradients(f, [[",
     lambda: check_gradients(rg.sin, [1.0, 2.0])),
    ("got an unexpected|'eps'|called step", lambda: check_gradients(rg.sin, [x], eps=1e-3)),
    ("trace_gradients(f) must be a function|trace_gradients(f(x))", lambda: rg.trace_gradients(x)),
    ("trace_gradients: too many|trace_gradients(f)(x)", lambda: rg.trace_gradients(squares, x)),
    ("the argument c['a'] is set|expected Tensors|static_argnames",
     lambda: rg.jit(lambda a, c: a)(x, {"a": {1}})),
    ("normal: a NumPy Generator|under jit|jax.random.key(0)",
     lambda: rg.jit(lambda a: a + rg.random.normal(np.random.default_rng(0), (2,)))(x)),
    ("jit: too many|It returns a function: jit(f)(x).", lambda: rg.jit(squares, x)),
    ("vmap: in_axes must be integers, got Tensor(float32, (2,))|vmap(f)(x)",
     lambda: rg.vmap(rg.sin, x)),
    ("checkpoint: too many|a function: checkpoint(f)(x).", lambda: rg.checkpoint(squares, x)),
    ("scan: f must return a pair (carry, y)|it returned Tensor",
     lambda: rg.scan(lambda c, v: c + v, rg.scalar(0.0), x)),
    ("must be a function, got Tensor|cond(pred, true_fn, false_fn", lambda: rg.cond(True, x, x)),
    ("must be a function, got Tensor|while_loop(cond_fn, body_fn, init)",
     lambda: rg.while_loop(x, rg.sin, rg.sin)),
    ("must be a function, got Tensor|map(f, xs)", lambda: rg.map(x, rg.sin)),
    ("be a function, got Tensor(float32, ())|not its result", lambda: ADAM.minimize(squares(V))),
    ("takes (a)|called with no|variable_grads(lambda: f(x))", lambda: ADAM.minimize(squares)),
    ("Optimizer takes an optax|optax.adam(1e-3)|'adam'", lambda: rg.train.Optimizer("adam")),
    ("Optimizer takes an optax|optax.adam(1e-3)|got SGD",
     lambda: rg.train.Optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1))),
    ("Optimizer takes an optax|Call it: Optimizer(optax", lambda: rg.train.Optimizer(optax.adam)),
    ("unexpected keyword argument 'lr'|optax.adam(lr)", lambda: rg.train.Optimizer(lr=0.1)),
    ("a list of Variables, got str|module.trainable_variables",
     lambda: rg.variable_grads(lambda: squares(V), ["V"])),
    ("would bind the name to a Tensor|v.assign_add(x)", added_in_place),
    ("v[index] = value is not possible|v.assign(at_set(v, index, value))",
     lambda: set_in_place(rg.Variable(x))),
    ("v.value = x is not possible|v.assign(x)", lambda: setattr(V, "value", x)),
    ("assign to the variable 'V'|got None|no return statement?", lambda: V.assign(None)),
    ("be a function, got Optimizer|fit(step, batches", lambda: rg.train.fit(ADAM, [1.0], 1)),
    ("Scale.w = x|in the place of a Variable|w.assign(x)", lambda: replaced(Scale())),
    ("save(path, variables)|got Scale|pass module.variables",
     lambda: rg.train.save("w.safetensors", Scale())),
    ("save(path, variables): expected the name of a file|got list",
     lambda: rg.train.save([V], "w.safetensors")),
    ("sum: got an unexpected keyword argument 'dim'|called axis here", lambda: rg.sum(x, dim=0)),
    ("sum: got an unexpected keyword argument 'keepdim'|called keepdims",
     lambda: rg.sum(x, axis=0, keepdim=True)),
    ("sum: too many|by name axis, dtype, keepdims|sum(x, axis=…)", lambda: rg.sum(x, 0)),
    ("zeros: too many|Pass shape as one argument: zeros([a, b])", lambda: rg.zeros(2, 3)),
    ("reshape: too many|reshape(x, [a, b])", lambda: rg.reshape(x, 1, 2)),
    ("concat: too many|Pass arrays as one argument: concat([a, b])", lambda: rg.concat(x, x)),
    ("tensor: got an unexpected keyword argument 'device'|device_put",
     lambda: rg.tensor([1.0], device="cuda")),
    ("tensor: expected a shape|got 3.0", lambda: rg.tensor(2.0, 3.0)),
    ("tensor: expected a Tensor, an array or a number, got str: 'abc'", lambda: rg.tensor("abc")),
    ("tensor: expected a Tensor|value.toarray()",
     lambda: rg.tensor(__import__("scipy.sparse").sparse.eye(2))),
    ("cannot mix data of jax and torch|tensor(np.asarray(x))",
     lambda: rg.tensor(jnp.ones(2)) + rg.tensor(torch.ones(2))),
    ("Tensors do not change|at_set(t, index, value)", lambda: set_in_place(x)),
    ("np.add.at has no counterpart|at_add(x, index, y)", lambda: np.add.at(x, [0], 1.0)),
    ("the truth of a Tensor of shape (2,) is ambiguous|any(x) or all(x)", lambda: bool(x > 0)),
    ("reads a single number|shape (2,)|tolist() reads them all", lambda: float(x)),
    ("add: b: expected a Tensor|got None|no return statement?", lambda: x + None),
    ("sin: x: expected a Tensor|got function|Call it first.", lambda: rg.sin(rg.nn.relu)),
]  # fmt: skip
MISUSES[by_key, e.ArgumentError] = [
    ("a string, but got the function sign|Did you mean 'Sign'?", rg.sign),
    ("an op type is a string|got <built-in method|mean 'Sign'?", torch.sign),
    ("an op type is a string|got <ufunc 'sign'>|mean 'Sign'?", np.sign),
    ("an op type is a string|Did you mean 'Relu'?", torch.nn.ReLU),
    ("an op type is a string|got ReLU()|Did you mean 'Relu'?", torch.nn.ReLU()),
    ("got ('Sign', 'Relu')|Write one entry for each op type.", ("Sign", "Relu")),
]  # fmt: skip
MISUSES[run, e.UnusedOverrideWarning] = [
    ("not entered|write `with gradient_override_map(…):`", not_entered),
    ("matched nothing|'Sign'|call the model inside the scope", called_after_the_scope),
    ("'Relu' never ran|rg.rules.optional(rule)", lambda: under({**STE, "Relu": "Identity"})),
    ("regrad.torch.gradient_override_map|rg.jax.override", lambda: under(STE, squares)),
]  # fmt: skip
MISUSES[run, e.UnknownOpError] = [
    ("no op type 'Singn'|Did you mean 'Sign'", lambda: asked("Singn")),
    ("'StraightThrough'|regrad.rules.straight_through", lambda: under({"Sign": "StraightThrough"})),
    ("'ste'|'Sign'|regrad.rules.straight_through", lambda: under({"Sign": "ste"})),
    ("no op type 'Singn'|Did you mean 'Sign'|op_types()", lambda: under({"Singn": "Identity"})),
    ("there is no op type 'sign'|Did you mean 'Sign'", lambda: under({"sign": "Identity"})),
    ("no op type 'torch.sign'|Did you mean 'Sign'", lambda: under({"torch.sign": "Identity"})),
]  # fmt: skip
MISUSES[run, AttributeError] = [
    ("attribute 'fired'|hits or table(); assert_fired", lambda: rg.gradient_override_map({}).fired),
    ("no attribute 'backward'|grad(f)(x), or variable_grads(f)", lambda: x.sum().backward()),
    ("no attribute 'grad'|grad(f)(x), or variable_grads(f)", lambda: x.grad),
    ("no attribute 'grad'|grad(f)(x), or variable_grads(f)", lambda: V.grad),
    ("no attribute 'step'|optimizer.minimize(lambda: loss(x))", lambda: ADAM.step()),
    ("no attribute 'zero_grad'|leave it out", lambda: ADAM.zero_grad()),
    ("no attribute 'lr'|optax.inject_hyperparams", lambda: ADAM.lr),
    ("'Scale'|Define __call__|PyTorch's forward", lambda: Scale()(x)),
    ("no attribute 'parameters'|module.trainable_variables", lambda: Scale().parameters()),
    ("no attribute 'state_dict'|module.variables|regrad.train.save", lambda: Scale().state_dict()),
    ("no attribute 'eval'|training=True", lambda: Scale().eval()),
    ("no attribute 'requires_grad'|grad(f)(x), or variable_grads(f)",
     lambda: setattr(x, "requires_grad", True)),
    ("no attribute 'abs_'|A Tensor never changes", lambda: x.abs_()),
    ("no attribute 'add_'|A Tensor never changes|regrad.at_set", lambda: x.add_(1)),
    ("no attribute 'cuda'|device_put(x, device)", lambda: x.cuda()),
    ("no attribute 'saved_tensors'|op.inputs|in the rule|HERE",
     lambda: under({"Sign": lambda ctx, g: g * ctx.saved_tensors[0]})),
]  # fmt: skip
MISUSES[run, e.GradientError] = [
    ("input of grad(f) is int64|rg.float32|1.0", lambda: rg.grad(squares)(rg.asarray([1, 2]))),
    ("grad(f)|f returned bool|comparison or a cast", lambda: rg.grad(lambda a: rg.sum(a) > 0)(x)),
    ("no path leads|float(x), x.item()|unconnected='zero'",
     lambda: rg.grad(lambda a: rg.scalar(float(a)) * 2)(rg.scalar(1.0))),
    ("numpy() of a Tensor that is being differentiated|stop_gradient(x)",
     lambda: rg.grad(lambda a: rg.sum(rg.asarray(a.numpy())))(x)),
    ("JAX was given a regrad|regrad.jax.from_regrad", lambda: rg.jit(lambda a: jnp.sin(a))(x)),
    ("no path leads from|Read the variables inside", lambda: ADAM.minimize(lambda: rg.scalar(1.0))),
    ("variable_grads: no path leads|Read the variables inside f",
     lambda: rg.variable_grads(lambda: rg.sum(x))),
    ("two different variables are called 'w'|different names",
     lambda: (lambda a, b: rg.variable_grads(lambda: rg.sum(a * b)).grads)(rg.Variable(
        x, name="w"), rg.Variable(x, name="w"))),
]  # fmt: skip
MISUSES[run, e.ShapeError] = [
    ("the shape of f(x), (), got (3,)|broadcast_to", lambda: rg.grad(squares)(x, dy=rg.ones(3))),
    ("must return a scalar Tensor, got (2,)|jacobian(jacobian(f))", lambda: rg.hessian(rg.sin)(x)),
    ("must return a scalar|shape (2,)|sum() or mean()", lambda: ADAM.minimize(lambda: V * V)),
    ("'V'|its shape is (2,), got (3,)|make a new Variable", lambda: V.assign(rg.ones(3))),
    ("matmul|the inner sizes differ, 2 and 3", lambda: x @ rg.ones((3, 4))),
    ("regrad.add got float32 (2,) and float32 (3,)|or one of them 1", lambda: x + rg.ones(3)),
    ("conv2d|8 channels|layout batch, height, width, channels",
     lambda: rg.nn.conv2d(rg.ones((1, 3, 8, 8)), rg.ones((4, 3, 3, 3)), 1, "same")),
    ("tensor: a list of unequal rows|Pad them to one length", lambda: rg.tensor([[1, 2], [3]])),
]  # fmt: skip
MISUSES[run, e.TraceError] = [
    ("a traced Tensor (bool, shape ())|where(condition, a, b) or cond",
     lambda: rg.jit(lambda a: a if a.sum() > 0 else -a)(x)),
    ("a traced Tensor (float32, shape (2,))|.numpy()|static_argnames",
     lambda: rg.jit(lambda a: a.numpy())(x)),
    ("float()|return the values to inspect", lambda: rg.jit(lambda a: print(float(a.sum())))(x)),
]  # fmt: skip
MISUSES[run, e.DTypeError] = [
    ("'V'|dtype is float32, got int64|astype(value, v.dtype", lambda: V.assign(rg.asarray([1, 2]))),
    ("an index consists of integers|astype(index, rg.int64)", lambda: x[1.5]),
    ("tensor: a Tensor holds numbers or bools|[None, 1.0]|rg.nan", lambda: rg.tensor([None, 1.0])),
    ("regrad.bitwise_invert is not defined for float32 (2,)|astype", lambda: ~x),
    ("arange: expected a dtype such as|got 'flaot32'", lambda: rg.arange(3, dtype="flaot32")),
    ("one_hot: indices must be integers, got float32 (2,)|rg.int64", lambda: rg.one_hot(x, 3)),
]  # fmt: skip
FEW = [
    (e.RegistrationError, "'Misused' is taken already by registered|Choose another name",
     lambda: rg.RegisterGradient("Misused")(lambda dy: dy)),
    (e.OpenScopeWarning, "was never exited|HERE|Enter it with `with`", left_open),
    (e.NotFiredError, "'Identity'|'Sign' never ran|HERE|Call assert_fired()", asked_too_early),
    (GradientCheckError, "the rules give 1, differences give|HERE|input 'a'",
     lambda: check_gradients(rg.custom_grad(lambda a: (a * a, lambda dy: dy)), [[1.0, 2.0]])),
    (e.AxisError, "vmap(f): axis 3 is out of range for a Tensor of rank 1",
     lambda: rg.vmap(lambda a: a, in_axes=3)(x)),
    (e.AxisError, "sum: axis 2 is out of range for a Tensor of rank 1", lambda: rg.sum(x, axis=2)),
    (e.CheckpointError, "not a regular file|the name of a file", lambda: rg.train.save("/", [V])),
    (e.CheckpointError, "/ is damaged, or not a safetensors file|not a regular file",
     lambda: rg.train.restore("/", [V])),
    (FileNotFoundError, "there is no folder /no/such|os.makedirs",
     lambda: rg.train.save("/no/such/w.safetensors", [V])),
    (e.IndexRangeError, "the index 5 is out of range for axis 0 of the shape (2,)", lambda: x[5]),
    (e.IndexRangeError, "sparse_softmax_cross_entropy|index 7 is out of bounds|size 3",
     lambda: rg.losses.sparse_softmax_cross_entropy([7], rg.ones((1, 3)))),
    (e.InvalidValueError, "np.copyto would write into a Tensor|at_set(x, index, y)",
     lambda: np.copyto(x, 1.0)),
    (e.InvalidValueError, "np.sin would write into a Tensor|at_set(x, index, y)",
     lambda: np.sin(np.ones(2), out=x)),
    (NameError, "undefined|in the rule|'Sign' at|HERE",
     lambda: under({"Sign": lambda dy: dy / undefined})),  # noqa: F821
    (IndexError, "in the rule|'Sign' at|HERE",
     lambda: under({"Sign": lambda op, dy: op.inputs[3]})),
]  # fmt: skip

CASES = [
    pytest.param(how, *row, kind, id=f"{kind.__name__}: {row[0]}")
    for (how, kind), rows in MISUSES.items()
    for row in rows
]
CASES += [pytest.param(run, *row, kind, id=f"{kind.__name__}: {row[0]}") for kind, *row in FEW]


@pytest.mark.parametrize(("how", "words", "wrong", "kind"), CASES)
def test_a_misuse_is_told(how, words, wrong, kind):
    judge(lambda: how(wrong), kind, words.replace("HERE", "test_misuse.py:").split("|"))
    assert x.tolist() == [0.5, -2.0]


def test_what_looks_like_a_misuse_and_is_none():
    assert np.isnan(under({"Sign": lambda dy: dy * np.nan}).numpy()).all()  # `find_nan` tells
    assert rg.jit(lambda a: [a, "a"])(x)[1] == "a"
    assert rg.grad(squares)(V).tolist() == [1.0, -4.0]
    assert rg.variable_grads(lambda: squares(V), V).grads["V"].tolist() == [1.0, -4.0]
