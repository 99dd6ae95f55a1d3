"""What newcomers get wrong, and what they are told: regrad's own functions.

A good message names the function, says what came and what was expected, and what to call instead.
Each entry of the tables has a wrong program, the class of its error (or warning), and the words
without which the message would not be good. A class of Python's own stands only where the
message is ours: AttributeError, for names.
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

HERE = "test_misuse.py:"
x = rg.tensor([0.5, -2.0])
V = rg.Variable(x, name="V")
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


CUSTOM_NODE = "must return {'value': y, 'grad_func': g} or (y, g)"

RULES = {
    "no parameters": (lambda: under({"Sign": lambda: 1}),
        e.SignatureError, ["takes ()", "first parameter is dy", "def rule(dy, x)"]),
    "a parameter that the op lacks": (lambda: under({"Sign": lambda dy, x, foo: dy}),
        e.RuleError, ["asks for 'foo'", "'Sign'", HERE, "it may name x, y, x_shape, x_dtype"]),
    "PyTorch's name of the input": (lambda: under({"Sign": lambda dy, input: dy}),
        e.RuleError, ["asks for 'input'", "it may name x, y"]),
    "dy comes second": (lambda: under({"Sign": lambda x, dy: dy}),
        e.SignatureError, ["takes (x, dy)", "Put dy first."]),
    "one parameter of another name": (lambda: under({"Sign": lambda grad: grad}),
        e.SignatureError, ["takes (grad)", "call it dy"]),
    "another shape": (lambda: under({"Sign": lambda dy: rg.ones(3)}),
        e.RuleError, ["returned the shape (3,), expected (2,)", HERE, "'Sign' at", "input 'x'"]),
    "a float": (lambda: under({"Sign": lambda dy: 1.0}),
        e.RuleError, ["returned 1.0, expected a Tensor, got float", HERE, "zeros_like(dy)"]),
    "nothing": (lambda: under({"Sign": lambda dy: None}),
        e.RuleError, ["returned None", "forget its return", "rg.rules.no_gradient", HERE]),
    "NumPy's array": (lambda: under({"Sign": lambda dy: dy.numpy() * 2}),
        e.RuleError, ["expected a Tensor, got ndarray(float32, (2,))", HERE]),
    "integers": (lambda: under({"Sign": lambda dy: rg.astype(dy, "int32")}),
        e.RuleError, ["returned the dtype int32, expected float32", "astype(dx, x.dtype)"]),
    "wider floats": (lambda: under({"Sign": lambda dy: rg.astype(dy, "float64")}),
        e.RuleError, ["returned the dtype float64, expected float32", "astype(dx, x.dtype)"]),
    "a string": (lambda: under({"Sign": lambda dy: "dy"}),
        e.RuleError, ["returned 'dy', expected a Tensor, got str"]),
    "two gradients for one input": (lambda: under({"Sign": lambda dy: (dy, dy)}),
        e.RuleError, ["returned 2 gradients for one input", HERE]),
    "one gradient for two inputs": (lambda: under({"Mul": lambda dy, a, b: dy * b}, squares),
        e.RuleError, ["returned 1, and the op has 2 inputs", "one gradient per input", HERE]),
    "fails": (lambda: under({"Sign": lambda dy: dy / undefined}),  # noqa: F821
        NameError, ["undefined", "in the rule", "'Sign' at", HERE]),
    "too many inputs in TensorFlow's form": (lambda: under({"Sign": lambda op, dy: op.inputs[3]}),
        IndexError, ["in the rule", "'Sign' at", HERE]),
    "PyTorch's ctx": (lambda: under({"Sign": lambda ctx, g: g * ctx.saved_tensors[0]}),
        AttributeError, ["no attribute 'saved_tensors'", "op.inputs", "in the rule", HERE]),
    "a function of tensors": (lambda: under({"Sign": rg.sign}),
        e.SignatureError, ["takes (x, /)", "sign is a function of a tensor", "y = sign(x)"]),
    "a function for the model": (lambda: under({"Sign": rg.rules.reverse_gradient}),
        e.SignatureError, ["which the model calls: y = reverse_gradient(x)"]),
    "a factory that nobody called": (lambda: under({"Sign": rg.rules.superspike}),
        e.SignatureError, ["takes (beta=10.0)", "call it: superspike(…)"]),
    "PyTorch's function": (lambda: under({"Sign": torch.nn.functional.relu}),
        e.SignatureError, ["takes (input, inplace=False)", "first parameter is dy"]),
    "a class": (lambda: under({"Sign": torch.autograd.Function}),
        e.ArgumentError, ["for 'Sign' expected", "got <class", "lambda dy, x: dy"]),
    "a number": (lambda: under({"Sign": 3}),
        e.ArgumentError, ["for 'Sign' expected a registered name or a function, got 3", "lambda"]),
    "None": (lambda: under({"Sign": None}),
        e.ArgumentError, ["for 'Sign' expected", "got None", "rg.rules.no_gradient"]),
    "a list": (lambda: under({"Sign": [rg.rules.straight_through]}),
        e.ArgumentError, ["for 'Sign' expected", "An op type has one rule."]),
    "the name of a class": (lambda: under({"Sign": "StraightThrough"}),
        e.UnknownOpError, ["'StraightThrough'", "regrad.rules.straight_through"]),
    "an abbreviation": (lambda: under({"Sign": "ste"}),
        e.UnknownOpError, ["'ste'", "'Sign'", "regrad.rules.straight_through"]),
    "a slope that is a word": (lambda: rg.rules.superspike("steep"),
        e.ArgumentError, ["superspike: beta is a number of 0 or more, got 'steep'"]),
    "a negative slope": (lambda: rg.rules.triangle(-1.0),
        e.ArgumentError, ["triangle: width is a number of 0 or more, got -1.0"]),
    "another paper's parameter": (lambda: rg.rules.superspike(alpha=3),
        e.ArgumentError, ["superspike: got an unexpected keyword argument 'alpha'", "takes beta"]),
    "registered twice": (lambda: rg.RegisterGradient("Misused")(lambda dy: dy),
        e.RegistrationError, ["'Misused' is taken already by registered", "Choose another name"]),
    "registered without a name": (lambda: rg.RegisterGradient(signs),
        e.ArgumentError, ["RegisterGradient needs a name (a string), got"]),
    "for an input that the op lacks": (lambda: rg.gradient("Relu", "q")(lambda dy: dy),
        e.RuleError, ["'Relu' has no input 'q'", "Its inputs are x."]),
}  # fmt: skip

SCOPES = {
    "an op type of no op": (lambda: under({"Singn": "Identity"}),
        e.UnknownOpError, ["there is no op type 'Singn'", "Did you mean 'Sign'", "op_types()"]),
    "lower case": (lambda: under({"sign": "Identity"}),
        e.UnknownOpError, ["there is no op type 'sign'", "Did you mean 'Sign'"]),
    "with the name of a library": (lambda: under({"torch.sign": "Identity"}),
        e.UnknownOpError, ["there is no op type 'torch.sign'", "Did you mean 'Sign'"]),
    "a function": (lambda: under({rg.sign: "Identity"}),
        e.ArgumentError, ["a string, got the function sign", "Did you mean 'Sign'?"]),
    "PyTorch's function": (lambda: under({torch.sign: "Identity"}),
        e.ArgumentError, ["an op type is a string", "got <built-in method", "mean 'Sign'?"]),
    "NumPy's function": (lambda: under({np.sign: "Identity"}),
        e.ArgumentError, ["an op type is a string", "got <ufunc 'sign'>", "mean 'Sign'?"]),
    "a class of layers": (lambda: under({torch.nn.ReLU: "Identity"}),
        e.ArgumentError, ["an op type is a string", "Did you mean 'Relu'?"]),
    "a layer": (lambda: under({torch.nn.ReLU(): "Identity"}),
        e.ArgumentError, ["an op type is a string", "got ReLU()", "Did you mean 'Relu'?"]),
    "several in one key": (lambda: under({("Sign", "Relu"): "Identity"}),
        e.ArgumentError, ["got ('Sign', 'Relu')", "Give each op type an entry of its own."]),
    "a list for the map": (lambda: under(["Sign"]),
        e.ArgumentError, ["takes a dict", "gradient_override_map({'Sign': rule})", "got ['Sign']"]),
    "no map": (lambda: rg.gradient_override_map(),
        e.ArgumentError, ["gradient_override_map: missing a required argument: 'rules'"]),
    "two arguments for the map": (lambda: rg.gradient_override_map("Sign", "Identity"),
        e.ArgumentError, ["too many", "It takes a dict: gradient_override_map({'Sign': rule})"]),
    "a decorator without its map": (lambda: rg.gradient_override_map(signs),
        e.ArgumentError, ["takes a dict of op types to rules", "got <function signs"]),
    "a class decorated": (lambda: rg.gradient_override_map({"Sign": "Identity"})(rg.Module),
        e.ArgumentError, ["decorates functions; this is the class Module. Decorate its methods."]),
    "not entered": (not_entered,
        e.UnusedOverrideWarning, ["not entered", "write `with gradient_override_map(…):`"]),
    "called after it": (called_after_the_scope,
        e.UnusedOverrideWarning, ["matched nothing", "'Sign'", "call the model inside the scope"]),
    "a dead key beside a live one": (lambda: under({"Sign": "Identity", "Relu": "Identity"}),
        e.UnusedOverrideWarning, ["'Relu' never ran", "rg.rules.optional(rule)"]),
    "around PyTorch's code": (lambda: under({"Sign": "Identity"}, squares),
        e.UnusedOverrideWarning, ["regrad.torch.gradient_override_map", "rg.jax.override"]),
    "left open": (left_open,
        e.OpenScopeWarning, ["was never left", HERE, "Enter it with `with`"]),
    "left out of turn": (left_out_of_turn,
        e.ArgumentError, ["left out of turn", "scopes must nest", "open it where it is used"]),
    "entered twice": (entered_twice,
        e.ArgumentError, ["this gradient_override_map is open already", "make a new one"]),
    "asked for a key of another map": (lambda: asked("Relu"),
        e.ArgumentError, ["assert_fired('Relu')", "but 'Sign'", "Name one of these"]),
    "asked for a key misspelt": (lambda: asked("Singn"),
        e.UnknownOpError, ["no op type 'Singn'", "Did you mean 'Sign'"]),
    "asked for a function": (lambda: asked(rg.sign),
        e.ArgumentError, ["got the function sign", "Did you mean 'Sign'?"]),
    "asked for a list": (lambda: asked(["Sign"]),
        e.ArgumentError, ["got ['Sign']", "an entry of its own"]),
    "asked before the gradient": (asked_too_early,
        e.NotFiredError, ["'Identity'", "'Sign' never ran", HERE, "Ask after the gradient"]),
    "a report of another name": (lambda: rg.gradient_override_map({}).fired,
        AttributeError, ["no attribute 'fired'", "hits or table(); assert_fired()"]),
}  # fmt: skip

GRADIENTS = {
    "argnums too large": (lambda: rg.grad(lambda a, b: rg.sum(a * b), argnums=2)(x, x),
        e.ArgumentError, ["grad(f): argnums=2", "called with 2 positional arguments", "from 0"]),
    "argnums is a name": (lambda: rg.grad(squares, argnums="a"),
        e.ArgumentError, ["grad(f, argnums=…)", "an int or a sequence of ints, got 'a'"]),
    "wrt": (lambda: rg.grad(squares, wrt=0),
        e.ArgumentError, ["grad: got an unexpected keyword argument 'wrt'", "grad(lambda a:"]),
    "the input too": (lambda: rg.grad(squares, x),
        e.ArgumentError, ["grad: too many", "It returns a function: grad(f)(x)."]),
    "no input": (lambda: rg.grad(squares)(),
        e.ArgumentError, ["grad(f): missing a required argument"]),
    "None as input": (lambda: rg.grad(lambda a: rg.sum(a))(None),
        e.ArgumentError, ["grad(f) differentiates by Tensors, arrays and numbers", "got None"]),
    "a string as input": (lambda: rg.grad(squares)("a"),
        e.ArgumentError, ["grad(f) differentiates by Tensors", "got str: 'a'", "by a closure"]),
    "integers": (lambda: rg.grad(squares)(rg.asarray([1, 2])),
        e.GradientError, ["the input of grad(f) is int64", "astype(x, rg.float32)", "1.0"]),
    "f returns a tuple": (lambda: rg.grad(lambda a: (a, a))(x),
        e.ArgumentError, ["in grad(f) must return a Tensor, got tuple", "vjp or jacobian"]),
    "f returns nothing": (lambda: rg.grad(lambda a: None)(x),
        e.ArgumentError, ["must return a Tensor, got None", "forget its return statement?"]),
    "f returns a float": (lambda: rg.grad(lambda a: 1.0)(x),
        e.ArgumentError, ["must return a Tensor, got float", "with regrad's ops"]),
    "f returns a bool": (lambda: rg.grad(lambda a: rg.sum(a) > 0)(x),
        e.GradientError, ["grad(f)", "f returned bool ()", "A comparison or a cast"]),
    "has_aux without a pair": (lambda: rg.grad(squares, has_aux=True)(x),
        e.ArgumentError, ["has_aux=True f must return a pair (y, aux), got Tensor(float32, ())"]),
    "the value for f": (lambda: rg.grad(rg.sum(x)),
        e.ArgumentError, ["must be a function, got Tensor", "grad(f), not grad(f(x))"]),
    "not a list of inputs": (lambda: rg.grads(squares)(x),
        e.ArgumentError, ["grads(f)(args)", "must be a list", "Write grads(f)([x])"]),
    "math.sin": (lambda: rg.grad(lambda a: __import__("math").sin(a))(rg.scalar(1.0)),
        e.ArgumentError, ["must return a Tensor, got float", "with regrad's ops"]),
    "float(x) on the way": (lambda: rg.grad(lambda a: rg.scalar(float(a)) * 2)(rg.scalar(1.0)),
        e.GradientError, ["no path leads", "float(x), x.item()", "unconnected='zero'"]),
    "x.numpy() on the way": (lambda: rg.grad(lambda a: rg.sum(rg.asarray(a.numpy())))(x),
        e.GradientError, ["numpy() of a Tensor that is being differentiated", "stop_gradient(x)"]),
    "dy of another shape": (lambda: rg.grad(squares)(x, dy=rg.ones(3)),
        e.ShapeError, ["dy must have the shape of f(x), (), got (3,)", "broadcast_to"]),
    "x.backward()": (lambda: x.sum().backward(),
        AttributeError, ["no attribute 'backward'", "grad(f)(x), or variable_grads(f)"]),
    "x.grad": (lambda: x.grad,
        AttributeError, ["no attribute 'grad'", "grad(f)(x), or variable_grads(f)"]),
    "v.grad": (lambda: V.grad,
        AttributeError, ["no attribute 'grad'", "grad(f)(x), or variable_grads(f)"]),
    "requires_grad": (lambda: rg.tensor([1.0], requires_grad=True),
        e.ArgumentError, ["tensor: got an unexpected keyword", "'requires_grad'", "grad(f)(x)"]),
    "jvp without lists": (lambda: rg.jvp(rg.sin, x, x),
        e.ArgumentError, ["xs and dxs are lists", "Write jvp(f, [x], [dx])."]),
    "vjp without inputs": (lambda: rg.vjp(rg.sin),
        e.ArgumentError, ["vjp(f, *xs)", "give the inputs of f"]),
    "hessian of a vector": (lambda: rg.hessian(rg.sin)(x),
        e.ShapeError, ["must return a scalar Tensor, got (2,)", "jacobian(jacobian(f))"]),
    "custom_grad without a gradient": (lambda: rg.custom_grad(lambda a: a * a)(x),
        e.ArgumentError, [CUSTOM_NODE, "got Tensor(float32, (2,))"]),
    "custom_grad without return": (lambda: rg.custom_grad(lambda a, save: None)(x),
        e.ArgumentError, [CUSTOM_NODE, "got None"]),
    "custom_grad in the wrong order": (lambda: rg.custom_grad(lambda a: (lambda dy: dy, a))(x),
        e.ArgumentError, [CUSTOM_NODE, "its grad_func is Tensor(float32, (2,))"]),
    "custom_grad of two functions": (lambda: rg.custom_grad(rg.sin, rg.cos),
        e.ArgumentError, ["custom_grad: too many", "custom_grad(lambda x: (y, lambda dy: dx))"]),
    "custom_grad of a class": (lambda: rg.custom_grad(torch.autograd.Function),
        e.ArgumentError, ["custom_grad(f) must be a function, got FunctionMeta"]),
    "custom_grad that saved nothing": (
        lambda: rg.grad(rg.custom_grad(lambda a: (a * a, lambda dy, saved: dy * saved[0])))(x),
        e.ArgumentError, ["What f saved is nothing", "call save([a, b]) in f"]),
    "custom_grad that saved another name": (
        lambda: rg.grad(rg.custom_grad(
            lambda a, save: (save(a=a), (a * a, lambda dy, saved: dy * saved.b))[1]))(x),
        e.ArgumentError, ["What f saved is by name (a)", "save(a=a) for saved.a"]),
    "custom_grad with a float": (
        lambda: rg.grad(rg.custom_grad(lambda a: (a * a, lambda dy: 1.0)))(x),
        e.RuleError, ["'CustomGrad'", HERE, "input 'a'", "expected a Tensor, got float"]),
    "a wrong gradient checked": (
        lambda: check_gradients(rg.custom_grad(lambda a: (a * a, lambda dy: dy)), [[1.0, 2.0]]),
        GradientCheckError, ["the rules give 1, differences give", HERE, "input 'a'"]),
    "args of a check not in a list": (lambda: check_gradients(rg.sin, x),
        e.ArgumentError, ["args is a list, got Tensor", "Write check_gradients(f, [x])."]),
    "args of a check for two inputs": (lambda: check_gradients(rg.sin, [1.0, 2.0]),
        e.ArgumentError, ["takes (x, /)", "called with 2 arguments", "check_gradients(f, [["]),
    "eps of a check": (lambda: check_gradients(rg.sin, [x], eps=1e-3),
        e.ArgumentError, ["check_gradients: got an unexpected", "'eps'", "called step"]),
    "a trace of a value": (lambda: rg.trace_gradients(x),
        e.ArgumentError, ["trace_gradients(f) must be a function", "not trace_gradients(f(x))"]),
    "a trace with its input": (lambda: rg.trace_gradients(squares, x),
        e.ArgumentError, ["trace_gradients: too many", "trace_gradients(f)(x)"]),
}  # fmt: skip

TRANSFORMS = {
    "an if in jit": (lambda: rg.jit(lambda a: a if a.sum() > 0 else -a)(x),
        e.TraceError, ["a traced Tensor (bool, shape ())", "where(condition, a, b) or cond"]),
    "numpy() in jit": (lambda: rg.jit(lambda a: a.numpy())(x),
        e.TraceError, ["a traced Tensor (float32, shape (2,))", ".numpy()", "static_argnames"]),
    "print(float(x)) in jit": (lambda: rg.jit(lambda a: print(float(a.sum())))(x),
        e.TraceError, ["float()", "return what is to be looked at"]),
    "a set as an argument of jit": (lambda: rg.jit(lambda a, c: a)(x, {"a": {1}}),
        e.ArgumentError, ["the argument c['a'] is set", "expected Tensors", "static_argnames"]),
    "a Generator in jit": (
        lambda: rg.jit(lambda a: a + rg.random.normal(np.random.default_rng(0), (2,)))(x),
        e.ArgumentError, ["normal: a NumPy Generator", "under jit", "jax.random.key(0)"]),
    "jit with the input": (lambda: rg.jit(squares, x),
        e.ArgumentError, ["jit: too many", "It returns a function: jit(f)(x)."]),
    "jit of jnp's function": (lambda: rg.jit(lambda a: jnp.sin(a))(x),
        e.GradientError, ["JAX was given a regrad Tensor", "regrad.jax.from_regrad"]),
    "vmap along an axis too many": (lambda: rg.vmap(lambda a: a, in_axes=3)(x),
        e.AxisError, ["vmap(f): axis 3 is out of range for a Tensor of rank 1"]),
    "vmap with the input": (lambda: rg.vmap(rg.sin, x),
        e.ArgumentError, ["vmap: in_axes are ints, got Tensor(float32, (2,))", "vmap(f)(x)"]),
    "checkpoint with the input": (lambda: rg.checkpoint(squares, x),
        e.ArgumentError, ["checkpoint: too many", "It returns a function: checkpoint(f)(x)."]),
    "scan without a pair": (lambda: rg.scan(lambda c, v: c + v, rg.scalar(0.0), x),
        e.ArgumentError, ["scan: f must return a pair (carry, y)", "it returned Tensor"]),
    "cond of values": (lambda: rg.cond(True, x, x),
        e.ArgumentError, ["must be a function, got Tensor", "cond(pred, true_fn, false_fn"]),
    "while_loop in another order": (lambda: rg.while_loop(x, rg.sin, rg.sin),
        e.ArgumentError, ["must be a function, got Tensor", "while_loop(cond_fn, body_fn, init)"]),
    "map in another order": (lambda: rg.map(x, rg.sin),
        e.ArgumentError, ["must be a function, got Tensor", "map(f, xs)"]),
}  # fmt: skip


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


TRAINING = {
    "no variables": (lambda: ADAM.minimize(lambda: rg.scalar(1.0)),
        e.GradientError, ["no path leads from any", "Read the variables inside"]),
    "a value for the loss": (lambda: ADAM.minimize(squares(V)),
        e.ArgumentError, ["must be a function, got Tensor(float32, ())", "not its result"]),
    "a loss that takes the data": (lambda: ADAM.minimize(squares),
        e.ArgumentError, ["takes (a)", "called with no argument", "variable_grads(lambda: f(x))"]),
    "a loss that is a vector": (lambda: ADAM.minimize(lambda: V * V),
        e.ShapeError, ["must return a scalar", "shape (2,)", "sum() or mean()"]),
    "the name of an optimizer": (lambda: rg.train.Optimizer("adam"),
        e.ArgumentError, ["Optimizer takes an optax", "optax.adam(1e-3)", "'adam'"]),
    "PyTorch's optimizer": (
        lambda: rg.train.Optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)),
        e.ArgumentError, ["Optimizer takes an optax", "optax.adam(1e-3)", "got SGD"]),
    "an optimizer that nobody called": (lambda: rg.train.Optimizer(optax.adam),
        e.ArgumentError, ["Optimizer takes an optax", "Call it: Optimizer(optax.adam(…))"]),
    "a learning rate": (lambda: rg.train.Optimizer(lr=0.1),
        e.ArgumentError, ["Optimizer: got an unexpected keyword argument 'lr'", "optax.adam(lr)"]),
    "optimizer.step()": (lambda: ADAM.step(),
        AttributeError, ["no attribute 'step'", "optimizer.minimize(lambda: loss(x))"]),
    "optimizer.zero_grad()": (lambda: ADAM.zero_grad(),
        AttributeError, ["no attribute 'zero_grad'", "leave it out"]),
    "variable_grads without variables": (lambda: rg.variable_grads(lambda: rg.sum(x)),
        e.GradientError, ["variable_grads: no path leads", "Read the variables inside f"]),
    "variable_grads by names": (lambda: rg.variable_grads(lambda: squares(V), ["V"]),
        e.ArgumentError, ["a list of Variables, got str", "module.trainable_variables"]),
    "two variables of one name": (
        lambda: (lambda a, b: rg.variable_grads(lambda: rg.sum(a * b)).grads)(
            rg.Variable(x, name="w"), rg.Variable(x, name="w")),
        e.GradientError, ["two different variables are called 'w'", "names of their own"]),
    "v += 1": (added_in_place,
        e.ArgumentError, ["would bind the name to a Tensor", "v.assign_add(x)"]),
    "v[0] = 1": (lambda: set_in_place(rg.Variable(x)),
        e.ArgumentError, ["v[index] = value is not possible", "v.assign(at_set(v, index, value))"]),
    "v.value = x": (lambda: setattr(V, "value", x),
        e.ArgumentError, ["v.value = x is not possible", "v.assign(x)"]),
    "assigned nothing": (lambda: V.assign(None),
        e.ArgumentError, ["assign to the variable 'V'", "got None", "no return statement?"]),
    "optimizer.lr": (lambda: ADAM.lr,
        AttributeError, ["no attribute 'lr'", "optax.inject_hyperparams"]),
    "fit without a step": (lambda: rg.train.fit(ADAM, [1.0], 1),
        e.ArgumentError, ["must be a function, got Optimizer", "fit(step, batches, epochs)"]),
    "module.w = module.w - 0.1": (lambda: replaced(Scale()),
        e.ArgumentError, ["Scale.w = x", "in the place of a Variable", "w.assign(x)"]),
    "assigned another shape": (lambda: V.assign(rg.ones(3)),
        e.ShapeError, ["'V'", "its shape is (2,), got (3,)", "make a new Variable"]),
    "assigned another dtype": (lambda: V.assign(rg.asarray([1, 2])),
        e.DTypeError, ["'V'", "its dtype is float32, got int64", "astype(value, v.dtype)"]),
    "module(x) without __call__": (lambda: Scale()(x),
        AttributeError, ["'Scale'", "Define __call__", "PyTorch's forward"]),
    "module.parameters()": (lambda: Scale().parameters(),
        AttributeError, ["no attribute 'parameters'", "module.trainable_variables"]),
    "module.state_dict()": (lambda: Scale().state_dict(),
        AttributeError, ["no attribute 'state_dict'", "module.variables", "regrad.train.save"]),
    "module.eval()": (lambda: Scale().eval(),
        AttributeError, ["no attribute 'eval'", "training=True"]),
    "a module for variables": (lambda: rg.train.save("w.safetensors", Scale()),
        e.ArgumentError, ["save(path, variables)", "got Scale", "give module.variables"]),
    "the arguments of save swapped": (lambda: rg.train.save([V], "w.safetensors"),
        e.ArgumentError, ["save(path, variables): expected the name of a file", "got list"]),
    "saved as a folder": (lambda: rg.train.save("/", [V]),
        e.CheckpointError, ["/ is not a regular file", "give the name of a file"]),
    "saved in a folder that is not there": (lambda: rg.train.save("/no/such/w.safetensors", [V]),
        FileNotFoundError, ["there is no folder /no/such", "os.makedirs"]),
    "restored from a folder": (lambda: rg.train.restore("/", [V]),
        e.CheckpointError, ["/ is damaged, or no safetensors file", "not a regular file"]),
}  # fmt: skip

TENSORS = {
    "sizes of a product": (lambda: x @ rg.ones((3, 4)),
        e.ShapeError, ["matmul", "the inner sizes differ, 2 and 3"]),
    "sizes of a sum": (lambda: x + rg.ones(3),
        e.ShapeError, ["regrad.add got float32 (2,) and float32 (3,)", "equal, or one of them 1"]),
    "channels first": (
        lambda: rg.nn.conv2d(rg.ones((1, 3, 8, 8)), rg.ones((4, 3, 3, 3)), 1, "same"),
        e.ShapeError, ["conv2d", "8 channels", "layout batch, height, width, channels"]),
    "an axis too many": (lambda: rg.sum(x, axis=2),
        e.AxisError, ["sum: axis 2 is out of range for a Tensor of rank 1"]),
    "dim": (lambda: rg.sum(x, dim=0),
        e.ArgumentError, ["sum: got an unexpected keyword argument 'dim'", "called axis here"]),
    "keepdim": (lambda: rg.sum(x, axis=0, keepdim=True),
        e.ArgumentError, ["sum: got an unexpected keyword argument 'keepdim'", "called keepdims"]),
    "an axis by position": (lambda: rg.sum(x, 0),
        e.ArgumentError, ["sum: too many", "by name axis, dtype, keepdims", "sum(x, axis=…)"]),
    "sizes by position": (lambda: rg.zeros(2, 3),
        e.ArgumentError, ["zeros: too many", "Give shape as one: zeros([a, b])"]),
    "sizes of reshape by position": (lambda: rg.reshape(x, 1, 2),
        e.ArgumentError, ["reshape: too many", "reshape(x, [a, b])"]),
    "arrays by position": (lambda: rg.concat(x, x),
        e.ArgumentError, ["concat: too many", "Give arrays as one: concat([a, b])"]),
    "a device": (lambda: rg.tensor([1.0], device="cuda"),
        e.ArgumentError, ["tensor: got an unexpected keyword argument 'device'", "device_put"]),
    "numbers by position": (lambda: rg.tensor(2.0, 3.0),
        e.ArgumentError, ["tensor: expected a shape", "got 3.0"]),
    "an index too large": (lambda: x[5],
        e.IndexRangeError, ["x[...]: the index 5 is out of range for axis 0 of the shape (2,)"]),
    "a float for an index": (lambda: x[1.5],
        e.DTypeError, ["an index is made of integers", "astype(index, rg.int64)"]),
    "a class too many": (lambda: rg.losses.sparse_softmax_cross_entropy([7], rg.ones((1, 3))),
        e.IndexRangeError, ["sparse_softmax_cross_entropy", "index 7 is out of bounds", "size 3"]),
    "a string": (lambda: rg.tensor("abc"),
        e.ArgumentError, ["tensor: expected a Tensor, an array or a number, got str: 'abc'"]),
    "rows of different lengths": (lambda: rg.tensor([[1, 2], [3]]),
        e.ShapeError, ["tensor: a list of unequal rows", "Pad them to one length"]),
    "None in a list": (lambda: rg.tensor([None, 1.0]),
        e.DTypeError, ["tensor: a Tensor holds numbers or bools", "[None, 1.0]", "rg.nan"]),
    "a sparse matrix": (lambda: rg.tensor(__import__("scipy.sparse").sparse.eye(2)),
        e.ArgumentError, ["tensor: expected a Tensor", "value.toarray()"]),
    "data of two libraries": (lambda: rg.tensor(jnp.ones(2)) + rg.tensor(torch.ones(2)),
        e.ArgumentError, ["cannot mix data of jax and torch", "tensor(np.asarray(x))"]),
    "t[0] = 1": (lambda: set_in_place(x),
        e.ArgumentError, ["Tensors do not change", "at_set(t, index, value)"]),
    "np.add.at": (lambda: np.add.at(x, [0], 1.0),
        e.ArgumentError, ["np.add.at has no counterpart for Tensors", "at_add(x, index, y)"]),
    "np.copyto": (lambda: np.copyto(x, 1.0),
        e.InvalidValueError, ["np.copyto would write into a Tensor", "at_set(x, index, y)"]),
    "out=x": (lambda: np.sin(np.ones(2), out=x),
        e.InvalidValueError, ["np.sin would write into a Tensor", "at_set(x, index, y)"]),
    "x.requires_grad = True": (lambda: setattr(x, "requires_grad", True),
        AttributeError, ["no attribute 'requires_grad'", "grad(f)(x), or variable_grads(f)"]),
    "x.abs_()": (lambda: x.abs_(),
        AttributeError, ["no attribute 'abs_'", "A Tensor never changes"]),
    "x.add_(1)": (lambda: x.add_(1),
        AttributeError, ["no attribute 'add_'", "A Tensor never changes", "regrad.at_set"]),
    "x.cuda()": (lambda: x.cuda(),
        AttributeError, ["no attribute 'cuda'", "device_put(x, device)"]),
    "the truth of several": (lambda: bool(x > 0),
        e.ArgumentError, ["the truth of a Tensor of shape (2,) is ambiguous", "any(x) or all(x)"]),
    "float() of several": (lambda: float(x),
        e.ArgumentError, ["reads a single number", "shape (2,)", "tolist() reads them all"]),
    "~ of floats": (lambda: ~x,
        e.DTypeError, ["regrad.bitwise_invert is not defined for float32 (2,)", "astype"]),
    "no value": (lambda: x + None,
        e.ArgumentError, ["add: b: expected a Tensor", "got None", "no return statement?"]),
    "an activation that nobody called": (lambda: rg.sin(rg.nn.relu),
        e.ArgumentError, ["sin: x: expected a Tensor", "got function", "Call it first."]),
    "a dtype misspelt": (lambda: rg.arange(3, dtype="flaot32"),
        e.DTypeError, ["arange: expected a dtype such as regrad.float32", "got 'flaot32'"]),
    "floats as classes": (lambda: rg.one_hot(x, 3),
        e.DTypeError, ["one_hot: indices must be integers, got float32 (2,)", "rg.int64"]),
}  # fmt: skip

TABLES = {
    "rule": RULES, "scope": SCOPES, "gradient": GRADIENTS, "transform": TRANSFORMS,
    "training": TRAINING, "tensor": TENSORS,
}  # fmt: skip
CASES = [
    pytest.param(*case, id=f"{kind}: {what}")
    for kind, table in TABLES.items()
    for what, case in table.items()
]


@pytest.mark.parametrize(("program", "kind", "words"), CASES)
def test_a_misuse_is_told(program, kind, words):
    judge(program, kind, words)
    assert x.tolist() == [0.5, -2.0]


def test_what_looks_like_a_misuse_and_is_none():
    assert np.isnan(under({"Sign": lambda dy: dy * np.nan}).numpy()).all()  # `find_nan` tells
    assert rg.jit(lambda a: [a, "a"])(x)[1] == "a"
    assert rg.grad(squares)(V).tolist() == [1.0, -4.0]
    assert rg.variable_grads(lambda: squares(V), V).grads["V"].tolist() == [1.0, -4.0]
