"""What users of other libraries write, and what to write here: the ends of messages."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from regrad.errors import near, snake_case

# -- arguments of our functions --------------------------------------------------------------------

_FUNCTIONS = "Gradients are of functions: grad(f)(x), or variable_grads(f) for Variables."
_CLOSE_OVER = "Let f reach what is not differentiated by a closure: {api}(lambda x: f(x, option))."
_UNCONNECTED = "Say what an input without a path gets by unconnected='raise', 'zero' or 'none'."
_ORDERS = "Leave it out: what {api} returns can be differentiated again, to any order."
KEYWORDS = {
    "allow_int": "Integers have no gradient; make floats of them, astype(x, rg.float32).",
    "allow_unused": _UNCONNECTED,
    "argnum": "Differentiate by one argument of several with {api}(lambda a: f(a, b)).",
    "argnums": "Differentiate by one argument of several with {api}(lambda a: f(a, b)), by all "
    "with {all}.",
    "axis_name": "Axes have no names: f sees single examples. Sum or average the results of vmap.",
    "batch_size": "Nothing is done in batches here; vmap does all at once.",
    "create_graph": _ORDERS,
    "grad_outputs": "It is called dy here, and goes to the gradient function: grad(f)(x, dy=dy).",
    "has_aux": "grad, value_and_grad, jacobian, jacfwd, hessian and vjp take it; here f returns "
    "just what is differentiated.",
    "holomorphic": "Leave it out: complex inputs are differentiated as they are, by TensorFlow's "
    "convention (the conjugate of JAX's).",
    "in_dims": "It is called in_axes here.",
    "loop_vars": "It is called init here.",
    "nondiff_argnums": _CLOSE_OVER,
    "operands": "Give them by position: cond(pred, true_fn, false_fn, *operands).",
    "out_dims": "It is called out_axes here.",
    "primals": "Its arguments are called xs and dxs here: jvp(f, [x], [dx]).",
    "requires_grad": _FUNCTIONS,
    "retain_graph": _ORDERS,
    "static_argnames": _CLOSE_OVER,
    "static_argnums": _CLOSE_OVER,
    "tangents": "Its arguments are called xs and dxs here: jvp(f, [x], [dx]).",
    "unconnected_gradients": _UNCONNECTED,
    "unroll": "Leave it out; the compiler decides.",
    "variables": "It is called var_list here.",
}
KEYWORDS["operand"] = KEYWORDS["operands"]
KEYWORDS["axis_size"] = KEYWORDS["spmd_axis_name"] = KEYWORDS["axis_name"]

RENAMED = {  # arguments of ops in other libraries
    "dim": "axis",
    "dims": "axis",
    "keep_dims": "keepdims",
    "keepdim": "keepdims",
    "newshape": "shape",
    "perm": "axes",
    "size": "shape",
}

ALL = {  # how each differentiates by all arguments of f
    "grad": "grads(f)([a, b])",
    "grads": "grads(f)([a, b])",
    "value_and_grad": "value_and_grads(f)([a, b])",
    "value_and_grads": "value_and_grads(f)([a, b])",
    "variable_grads": "grads(f)([a, b])",
    "vjp": "vjp(f, a, b)",
    "jvp": "jvp(f, [a, b], [da, db])",
    "linearize": "linearize(f, a, b)",
    "hvp": "hvp(f, [a, b], [da, db])",
}


def of_keyword(api: str, keyword: str, known: Sequence[str]) -> str:
    """Return what to write instead of a keyword that a function does not have."""
    if api.endswith("(f)"):  # what it returned
        name = api.removesuffix("(f)")
        return f"Bind it in a closure: {name}(lambda x: f(x, {keyword}={keyword}))(x)."
    if RENAMED.get(keyword) in known:
        return f"It is called {RENAMED[keyword]} here."
    if keyword in KEYWORDS:
        return KEYWORDS[keyword].format(api=api, all=_all(api))
    return f"It takes {', '.join(known)}.{near(keyword, known)}"


def of_arguments(api: str) -> str:
    """Return what to write instead of more arguments than a function takes."""
    name = api.removesuffix("(f)")
    if api != name:
        return of_passed(name)
    if name in ("grad", "value_and_grad", "jacobian", "jacfwd", "hessian"):
        return f"It returns a function: {name}(f)(x)."
    if name in ("grads", "value_and_grads"):
        return f"It returns a function of a list: {name}(f)([a, b])."
    if name == "variable_grads":
        return "Its f takes no arguments: variable_grads(lambda: f(x))."
    return f"help(regrad.{name}) says what it takes."


def of_passed(api: str) -> str:
    """Return what to write for an f that takes other arguments than a gradient function passes."""
    name = api.partition("(")[0]
    if name == "variable_grads":
        return "Close over the data: variable_grads(lambda: f(x))."
    if name in ("grads", "value_and_grads"):
        return f"{name}(f)([a, b]) passes it one argument for each entry of the list."
    if name == "export":
        return "Give its arguments, or arrays of their shapes: export(f, x)."
    if name == "check_gradients":
        return "args has one entry for each argument of f: check_gradients(f, [[1.0, 2.0]])."
    if name in ("vjp", "jvp", "linearize", "hvp"):
        return f"{_all(name)} passes it one argument for each input."
    if name in ("jacobian", "jacfwd", "hessian"):
        return f"{name}(f, argnums=(0, 1))(a, b) passes it both, and differentiates by both."
    one = "(f, argnums=0)(a, b)" if name in ALL else "(lambda a: f(a, b))(a)"
    hint = f"Differentiate by one argument with {name}{one}, by all with "
    is_dy = f" In {name}(f)(x, dy), dy is the gradient that arrives, and no argument of f."
    return f"{hint}{_all(name)}.{is_dy if name in ALL else ''}"


def _all(api: str) -> str:
    return ALL.get(api, f"{api}(lambda ab: f(*ab))((a, b))")


# -- values that are not tensors -------------------------------------------------------------------


def of_name(name: str, known: Sequence[str]) -> str:
    """Return what a name is called here that a module does not have: ours, or a foreign one."""
    ours = snake_case(name).lower().removesuffix("_optimizer")
    if name in NAMES:
        return f" {NAMES[name]}"
    if ours in OPTIMIZERS:
        return f" Use regrad.train.Optimizer(optax.{ours}(0.001))."
    if same := SAME.get(name, SAME.get(ours, _place_of(ours))):
        return f" Use regrad.{same}."
    return near(ours, known)


def _place_of(name: str) -> str | None:
    """Return where the package has a name: `nn.relu`."""
    for part in ("", *SEARCHED):
        if name in public_in(f"regrad.{part}".rstrip(".")):
            return f"{part}.{name}".lstrip(".")
    return None


def public_in(module: str) -> Sequence[str]:
    """Return the names of what users call in a module, if it is loaded."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    engine = ("regrad.core", "regrad.errors")
    own = [n for n, v in names.items() if n[0] != "_" and _home(v).startswith("regrad.")]
    return names.get("__all__") or [n for n in own if not _home(names[n]).startswith(engine)]


def _home(value: object) -> str:
    return getattr(value, "__module__", None) or ""


def hint_in(*modules: str) -> None:
    """Have modules say what to call for a name that they do not have."""
    for module in modules:
        sys.modules[module].__getattr__ = partial(_refuse, module)


def _refuse(module: str, name: str) -> object:
    hint = "" if name.startswith("__") else of_name(name, public_in(module))
    raise unknown(f"module {module!r} has no attribute {name!r}.{hint}", module)


def unknown(message: str, owner: object) -> AttributeError:
    """Return the error of a missing attribute, without a guess of Python's at its end."""
    return AttributeError(message, obj=owner)


def of_rule(function: Callable[..., Any]) -> str:
    """Return what to do with a function that is given as a rule and does not look like one."""
    names = [*inspect.signature(function).parameters]
    name = getattr(function, "__name__", type(function).__name__)
    if "dy" in names:
        return " Put dy first."
    if _home(function).startswith("regrad.") and names[0] == "x":
        return f" {name} is a function of a tensor, which the model calls: y = {name}(x)."
    return f" If it makes rules, call it: {name}(…)." if names else ""


def makes_rules(function: Callable[..., Any]) -> bool:
    """Return whether all parameters have defaults, so that it may make rules, and is not one."""
    try:
        defaults = [p.default for p in inspect.signature(function).parameters.values()]
    except ValueError:  # a builtin without a signature
        return False
    return bool(defaults) and inspect.Parameter.empty not in defaults


def of_rule_name(name: str) -> str:
    """Return which function of `regrad.rules` a name means."""
    ours = snake_case(name).lower()
    known = ours in public_in("regrad.rules")
    return f" Did you mean the function regrad.rules.{ours}?" if known else ""


def of_value(value: object) -> str:
    """Return what to do with a value that an op cannot take."""
    if value is None:
        return " Has a function no return statement? (Write `x is None`, not `x == None`.)"
    if isinstance(value, dict):
        return " Give the op one of its entries, or differentiate by the whole of it with grad."
    if isinstance(value, set | frozenset) or hasattr(value, "__next__"):
        return " Make a list of it first."
    if isinstance(value, str):
        return " Tensors hold no strings."
    if callable(value):
        return " Call it first."
    if hasattr(value, "toarray"):
        return " Sparse arrays are made dense by value.toarray()."
    return ""


# -- names of other libraries ----------------------------------------------------------------------

_CHANGES = "A Tensor never changes: make a new one, by x + y or by regrad.at_set."
ATTRIBUTES = {  # of a Tensor
    "backward": _FUNCTIONS,
    "clamp": "Use regrad.clip(x, low, high).",
    "contiguous": "Leave it out.",
    "cpu": "Use x.numpy() for NumPy's data; device_put moves JAX's.",
    "cuda": "Use device_put(x, device), with data of JAX.",
    "detach_": "Use stop_gradient(x).",
    "dim": "Use x.ndim.",
    "double": "Use x.cast(regrad.float64).",
    "fill": "A Tensor never changes; use full_like(x, value).",
    "float": "Use x.cast(regrad.float32).",
    "grad": _FUNCTIONS,
    "grad_fn": _FUNCTIONS,
    "half": "Use x.cast(regrad.float16).",
    "index_select": "Use x.gather(indices, axis).",
    "int": "Use x.cast(regrad.int32).",
    "is_leaf": _FUNCTIONS,
    "long": "Use x.cast(regrad.int64).",
    "nelement": "Use x.size.",
    "numel": "Use x.size.",
    "permute": "Use x.transpose(axes).",
    "register_hook": "To see or change a gradient on its way, use custom_grad or "
    "gradient_override_map.",
    "requires_grad": _FUNCTIONS,
    "requires_grad_": _FUNCTIONS,
    "retain_grad": _FUNCTIONS,
    "scatter_add": "Use at_add(x, index, value).",
    "t": "Use x.T.",
    "to": "Use x.cast(dtype), or device_put(x, device) with data of JAX.",
    "type": "Use x.cast(dtype), or x.dtype.",
    "unsqueeze": "Use x.expand_dims(axis).",
    "view": "Use x.reshape(shape).",
    "zero_": "A Tensor never changes; use zeros_like(x).",
    "add_": _CHANGES,
    "arraySync": "Use x.tolist().",
    "array_sync": "Use x.tolist().",
    "asScalar": "Use x.item() for the number.",
    "as1D": "Use x.flatten().",
    "as2D": "Use x.reshape(rows, columns).",
    "bool": "Use x.cast(regrad.bool).",
    "bufferSync": "A Tensor never changes; x.numpy() is a view of its values.",
    "byte": "Use x.cast(regrad.uint8).",
    "chunk": "Use x.split(number, axis).",
    "compress": "Use x[mask].",
    "conj": "Use regrad.conj(x).",
    "cummax": "Use regrad.cumulative_max(x).",
    "dataSync": "Use x.numpy().",
    "data_sync": "Use x.numpy().",
    "diagonal": "Use regrad.linalg.diagonal(x).",
    "dispose": "Leave it out: Python frees what nobody holds.",
    "expand": "Use x.broadcast_to(shape).",
    "fill_": _CHANGES,
    "get_shape": "Use x.shape.",
    "imag": "Use regrad.imag(x).",
    "isDisposed": "Leave it out: Python frees what nobody holds.",
    "matMul": "It is called matmul here, or @.",
    "masked_fill": "Use regrad.where(mask, value, x).",
    "mm": "Use x @ y.",
    "mul_": _CHANGES,
    "narrow": "Use x[start:stop].",
    "nonzero": "Use regrad.nonzero(x).",
    "outer": "Use regrad.linalg.outer(x, y).",
    "ptp": "Use x.max() - x.min().",
    "put": _CHANGES,
    "real": "Use regrad.real(x).",
    "resize": "Use x.reshape(shape).",
    "searchsorted": "Use regrad.searchsorted(x, values).",
    "set_shape": "A Tensor knows its shape.",
    "sub_": _CHANGES,
    "trace": "Use regrad.linalg.trace(x).",
    "tril": "Use regrad.tril(x).",
    "triu": "Use regrad.triu(x).",
}
NAMES = {  # of the package
    "GradientTape": _FUNCTIONS,
    "Session": "It is in regrad.v1, with the rest of TensorFlow 1.",
    "array": "Use regrad.asarray, or regrad.tensor, whose numbers are float32.",
    "arccos": "It is called acos, as in the Array API standard.",
    "arcsin": "It is called asin, as in the Array API standard.",
    "arctan": "It is called atan, as in the Array API standard.",
    "autograd": _FUNCTIONS,
    "backward": _FUNCTIONS,
    "cat": "Use regrad.concat.",
    "concatenate": "Use regrad.concat.",
    "constant": "Use regrad.tensor, or regrad.v1.constant.",
    "cumprod": "It is called cumulative_prod, as in the Array API standard.",
    "cumsum": "It is called cumulative_sum, as in the Array API standard.",
    "custom_gradient": "Use regrad.custom_grad.",
    "custom_vjp": "Use regrad.custom_grad.",
    "detach": "Use regrad.stop_gradient.",
    "dot": "Use regrad.matmul, vecdot or tensordot.",
    "enable_grad": _FUNCTIONS,
    "from_numpy": "Use regrad.asarray.",
    "function": "Use regrad.jit.",
    "lax": "scan, cond, while_loop, fori_loop and map are regrad's own: regrad.scan.",
    "no_grad": "Nothing is differentiated outside grad and its kin; inside, use stop_gradient(x).",
    "numpy": "NumPy's functions are regrad's own: regrad.sum. x.numpy() returns NumPy data.",
    "pmap": "Use regrad.jit with sharded data, see device_put.",
    "Linear": "Layers are functions here: x @ w + b, of Variables in a regrad.Module.",
    "Parameter": "Use regrad.Variable.",
    "Sequential": "Layers are functions here: call one after the other.",
    "power": "It is called pow, as in the Array API standard.",
    "reduce_mean": "Use regrad.mean, or regrad.v1.reduce_mean.",
    "reduce_sum": "Use regrad.sum, or regrad.v1.reduce_sum.",
    "remat": "Use regrad.checkpoint.",
    "transpose": "Use regrad.permute_dims or matrix_transpose.",
    "tree_util": "Use regrad.tree_map, or optree, which knows regrad's containers.",
}
OPTIMIZERS = ("adam", "adamw", "adagrad", "adadelta", "lamb", "lion", "rmsprop", "sgd")
SEARCHED = ("nn", "losses", "linalg", "random", "rules", "fft")  # for names that others lack
SAME = {  # names of other libraries (and of parts that are loaded on use), and those here
    "MSELoss": "losses.mean_squared_error", "absolute": "abs", "amax": "max", "amin": "min",
    "avg_pool2d": "nn.avg_pool", "batch_normalization": "nn.batch_norm",
    "bce": "losses.sigmoid_cross_entropy", "binary_cross_entropy": "losses.sigmoid_cross_entropy",
    "bmm": "matmul", "check_gradients": "testing.check_gradients",
    "check_grads": "testing.check_gradients", "clamp": "clip", "clip_by_value": "clip",
    "cross_entropy": "losses.softmax_cross_entropy", "div": "divide", "fft2": "fft.fftn",
    "fit": "train.fit", "flatten": "reshape", "gather": "take",
    "gradcheck": "testing.check_gradients", "gradient_report": "testing.gradient_report",
    "inverse": "linalg.inv", "l1_loss": "losses.absolute_difference", "load": "train.restore",
    "max_pool2d": "nn.max_pool", "mm": "matmul", "mod": "remainder",
    "mse": "losses.mean_squared_error", "mse_loss": "losses.mean_squared_error",
    "mul": "multiply", "neg": "negative", "norm": "linalg.vector_norm",
    "optimizer": "train.Optimizer", "permute": "permute_dims", "rand": "random.uniform",
    "randn": "random.normal", "range": "arange", "save": "train.save",
    "softmax_cross_entropy_with_logits": "losses.softmax_cross_entropy", "sub": "subtract",
    "swish": "nn.silu", "true_divide": "divide", "unsqueeze": "expand_dims", "view": "reshape",
}  # fmt: skip


class Hint:
    """Stands for an attribute that Tensors do not have; who asks is told what to use."""

    def __init__(self, name: str, hint: str) -> None:
        self.name = name
        self.hint = hint

    def __get__(self, instance: object, owner: type) -> object:
        said = f"{owner.__name__!r} object has no attribute {self.name!r}. {self.hint}"
        raise unknown(said, owner)
