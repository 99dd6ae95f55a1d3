"""The hints that end messages: they map names of other libraries to regrad's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from regrad.core.names import FUNCTIONS, NAMES, OPTIMIZERS, SAME, SEARCHED
from regrad.errors import near, snake_case

# -- arguments of regrad's functions ---------------------------------------------------------------

_CLOSE_OVER = "Bind arguments without a gradient in a closure: {api}(lambda x: f(x, option))."
_BY_ONE = (
    "Differentiate by one argument of several with {api}(lambda a: f(a, b)), by all with {all}."
)
_BY_POSITION = "Pass them by position: cond(pred, true_fn, false_fn, *operands)."
_NO_NAMES = "Axes have no names: f gets single examples. Sum or average the results of vmap."
_OF_JVP = "Its arguments are called xs and dxs here: jvp(f, [x], [dx])."
_UNCONNECTED = "Choose how to treat an input without a path: unconnected='raise', 'zero' or 'none'."
_ORDERS = "Leave it out: the gradients that {api} returns are differentiable again, to any order."
KEYWORDS = {
    "allow_int": "Integers have no gradient; convert them to floats, astype(x, rg.float32).",
    **dict.fromkeys(["allow_unused", "unconnected_gradients"], _UNCONNECTED),
    "argnum": "Differentiate by one argument of several with {api}(lambda a: f(a, b)).",
    **dict.fromkeys(["argnums", "wrt"], _BY_ONE),
    **dict.fromkeys(["axis_name", "axis_size", "spmd_axis_name"], _NO_NAMES),
    "batch_size": "vmap does not work in batches; it processes all examples at once.",
    **dict.fromkeys(["create_graph", "retain_graph"], _ORDERS),
    "device": "device_put(x, device) moves JAX's data, asarray keeps PyTorch's where they are.",
    "eps": "It is called step here.",
    "grad_outputs": "It is called dy here, and goes to the gradient function: grad(f)(x, dy=dy).",
    "has_aux": "grad, value_and_grad, jacobian, jacfwd, hessian and vjp take it; here f returns "
    "only the value that is differentiated.",
    "holomorphic": "Leave it out: complex inputs are differentiated directly, by TensorFlow's "
    "convention (the conjugate of JAX's).",
    "in_dims": "It is called in_axes here.",
    "loop_vars": "It is called init here.",
    "lr": "The rate is the optax optimizer's: Optimizer(optax.adam(lr)).",
    "learning_rate": "The rate is the optax optimizer's: Optimizer(optax.adam(learning_rate)).",
    **dict.fromkeys(["nondiff_argnums", "static_argnames", "static_argnums"], _CLOSE_OVER),
    **dict.fromkeys(["operand", "operands"], _BY_POSITION),
    "model": "Scopes of regrad's own functions have no model. For PyTorch write "
    "rg.torch.gradient_override_map(rules, model=model), for JAX rg.jax.override(f, rules).",
    "out_dims": "It is called out_axes here.",
    **dict.fromkeys(["primals", "tangents"], _OF_JVP),
    "requires_grad": FUNCTIONS,
    "unroll": "Leave it out; the compiler decides.",
    "variables": "It is called var_list here.",
}

RENAMED = {  # argument names of ops in other libraries
    "dim": "axis", "dims": "axis", "keep_dims": "keepdims", "keepdim": "keepdims",
    "newshape": "shape", "perm": "axes", "size": "shape",
}  # fmt: skip

ALL = {  # how to differentiate by all arguments of f, by function
    **dict.fromkeys(["grad", "grads", "variable_grads"], "grads(f)([a, b])"),
    **dict.fromkeys(["value_and_grad", "value_and_grads"], "value_and_grads(f)([a, b])"),
    "vjp": "vjp(f, a, b)",
    "jvp": "jvp(f, [a, b], [da, db])",
    "linearize": "linearize(f, a, b)",
    "hvp": "hvp(f, [a, b], [da, db])",
}

RETURN_FUNCTIONS = {
    "checkpoint", "compare_gradients", "find_nan", "grad", "hessian", "jacfwd", "jacobian",
    "jacrev", "jit", "saved_bytes", "trace_gradients", "value_and_grad", "vmap",
}  # fmt: skip
CALLS = {  # how to call functions that are often called with too many arguments
    "custom_grad": "It takes f alone, which returns the value and its gradient function: "
    "custom_grad(lambda x: (y, lambda dy: dx)).",
    "gradient_override_map": "It takes a dict: gradient_override_map({'Sign': rule}).",
    "variable_grads": "Its f takes no arguments: variable_grads(lambda: f(x)).",
}


def of_keyword(api: str, keyword: str, known: Sequence[str], by_position: bool) -> str:
    """Return the hint for a keyword that a function does not have."""
    if api.endswith("(f)"):  # the function that it returned
        name = api.removesuffix("(f)")
        if not by_position:  # (an argument by which to differentiate)
            return f"Pass it by position: {api}({keyword})."
        return f"Bind it in a closure: {name}(lambda x: f(x, {keyword}={keyword}))(x)."
    if RENAMED.get(keyword) in known:
        return f"It is called {RENAMED[keyword]} here."
    if keyword in KEYWORDS:
        return KEYWORDS[keyword].format(api=api, all=_all(api))
    return f"It takes {', '.join(known)}.{near(keyword, known)}"


def of_arguments(api: str, parameters: Sequence[inspect.Parameter] = ()) -> str:
    """Return the hint for a call with more arguments than a function takes."""
    name = api.removesuffix("(f)")
    if api != name:
        return of_passed(name)
    if name in RETURN_FUNCTIONS:
        return f"It returns a function: {name}(f)(x)."
    if name in ("grads", "value_and_grads"):
        return f"It returns a function of a list: {name}(f)([a, b])."
    if name in CALLS:
        return CALLS[name]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    plain = [p.name for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    said = f"It takes {', '.join(plain) or 'none'}"
    said += f", and by name {', '.join(by_name)}." if by_name else "."
    if plain[-1:] and plain[-1] in ("shape", "arrays", "axes"):  # one argument, a sequence
        said += f" Pass {plain[-1]} as one argument: {name}({', '.join([*plain[:-1], '[a, b]'])})."
    elif by_name:
        said += f" Write {name}({', '.join([*plain, f'{by_name[0]}=…'])})."
    return said


def of_passed(api: str) -> str:
    """Return the hint for an f with other parameters than a gradient function passes."""
    name = api.partition("(")[0]
    if name == "variable_grads":
        return "Close over the data: variable_grads(lambda: f(x))."
    if name in ("grads", "value_and_grads"):
        return f"{name}(f)([a, b]) passes it one argument for each entry of the list."
    if name == "export":
        return "Pass its arguments, or arrays of their shapes: export(f, x)."
    if name == "check_gradients":
        return "args has one entry for each argument of f: check_gradients(f, [[1.0, 2.0]])."
    if name in ("vjp", "jvp", "linearize", "hvp"):
        return f"{_all(name)} passes it one argument for each input."
    if name in ("jacobian", "jacfwd", "hessian"):
        return f"{name}(f, argnums=(0, 1))(a, b) passes it both, and differentiates by both."
    one = "(f, argnums=0)(a, b)" if name in ALL else "(lambda a: f(a, b))(a)"
    hint = f"Differentiate by one argument with {name}{one}, by all with "
    is_dy = f" In {name}(f)(x, dy), dy is the incoming gradient, not an argument of f."
    return f"{hint}{_all(name)}.{is_dy if name in ALL else ''}"


def _all(api: str) -> str:
    return ALL.get(api, f"{api}(lambda ab: f(*ab))((a, b))")


# -- values that are not tensors -------------------------------------------------------------------


def of_name(name: str, known: Sequence[str], host: str = "") -> str:
    """Return the hint for a name that a module does not have: a name of regrad or another library.

    `host` is the library whose arrays the module's functions take, if they are not Tensors.
    """
    ours = snake_case(name).lower().removeprefix("reduce_")
    plain = _plain(ours).removesuffix("optimizer")
    if name in NAMES:
        return f" {NAMES[name]}"
    if plain in OPTIMIZERS:
        return f" Use regrad.train.Optimizer(optax.{plain}(0.001))."
    if not (same := PLAIN.get(plain) or PLAIN.get(plain.removesuffix("loss")) or _place_of(plain)):
        return near(ours, known)
    if not host:
        return f" Use regrad.{same}."
    last = last_name(same)
    return f" Use regrad.{host}.{last if last in known else f'from_regrad(regrad.{same})'}."


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _place_of(plain: str) -> str | None:
    """Return where the package has a name, in any spelling: `nn.relu` for `ReLU`."""
    for part in ("", *SEARCHED):
        for name in public_in(f"regrad.{part}".rstrip(".")):
            if _plain(name) == plain:
                return f"{part}.{name}".lstrip(".")
    return None


def public_in(module: str) -> Sequence[str]:
    """Return the names of a regrad module that users call. Imports the module."""
    names = vars(import_module(module))
    engine = ("regrad.core", "regrad.errors")
    own = [n for n, v in names.items() if n[0] != "_" and _home(v).startswith("regrad.")]
    own = [n for n in own if not _home(names[n]).startswith(engine)]
    return names.get("__all__") or [*own, *names.get("_TOOLS", ())]


def _home(value: object) -> str:
    return getattr(value, "__module__", None) or ""


def hint_in(*modules: str) -> None:
    """Let modules raise an error with a hint for a name that they do not have."""
    for module in modules:
        sys.modules[module].__getattr__ = partial(refuse_name, module)


def refuse_name(module: str, name: str) -> NoReturn:
    """Raise AttributeError for a name that a module does not have, with a hint."""
    host = module.removeprefix("regrad.") if module in ("regrad.jax", "regrad.torch") else ""
    hint = ""
    if not name.startswith("__"):
        places = () if not host or name in NAMES else (host, f"{host}.autograd", f"{host}.func")
        own = [p for p in places if p in sys.modules and hasattr(sys.modules[p], name)]
        hint = f" Use {own[0]}.{name}." if own else of_name(name, public_in(module), host)
        if (host, name) == ("jax", "gradient_override_map"):
            hint = " For JAX programs use rg.jax.override(f, {'Relu': rule})."
    raise unknown(f"module {module!r} has no attribute {name!r}.{hint}", module)


def unknown(message: str, owner: object) -> AttributeError:
    """Return the error of a missing attribute, without Python's own suggestion at its end."""
    return AttributeError(message, obj=owner)


def of_rule(function: Callable[..., Any]) -> str:
    """Return the hint for a function that is passed as a rule and does not look like one."""
    names = [*inspect.signature(function).parameters]
    name = getattr(function, "__name__", type(function).__name__)
    if "dy" in names:
        return " Put dy first."
    if _home(function).startswith("regrad.") and names[0] == "x":
        return f" {name} is a function of a tensor, which the model calls: y = {name}(x)."
    if len(names) == 1 and not _home(function).startswith("regrad."):
        return f" If {names[0]} is the incoming gradient, call it dy."
    return f" If it makes rules, call it: {name}(…)." if names else ""


def of_no_rule(value: object) -> str:
    """Return the hint for a value that is passed as a rule and cannot be one."""
    if value is None:
        return " For no gradient pass rg.rules.no_gradient."
    if isinstance(value, type):
        return " Pass a function such as lambda dy, x: dy. An autograd.Function can only be a key."
    if isinstance(value, list | tuple):
        return " An op type has one rule."
    return " Pass a function such as lambda dy, x: dy, or 'Identity'."


def last_name(name: str) -> str:
    """Return the last part of a name: `sign` of `torch.sign`, `nn.sign` and `aten::sign`."""
    return name.rpartition(".")[2].rpartition(":")[2]


def of_result(value: object, api: str) -> str:
    """Return the hint for a value that is passed in place of a function."""
    if api in ORDER:
        return f" Its arguments are {ORDER[api]}."
    called = api.partition("(")[0]
    return f" Pass the function itself, not its result: {called}(f), not {called}(f(x))."


ORDER = {  # the arguments of functions that take several, in order
    "check_gradients": "check_gradients(f, [x])",
    "cond": "cond(pred, true_fn, false_fn, *operands), with functions of the operands",
    "fit": "fit(step, batches, epochs), with step(batch) a function that returns the loss",
    "fori_loop": "fori_loop(lower, upper, body_fn, init)",
    "map": "map(f, xs)",
    "override": "override(f, {'Relu': rule}), with f the function itself and not its result",
    "scan": "scan(f, init, xs)",
    "while_loop": "while_loop(cond_fn, body_fn, init)",
}


def makes_rules(function: Callable[..., Any]) -> bool:
    """Return whether all parameters have defaults: the function may make rules, and is not one."""
    try:
        defaults = [p.default for p in inspect.signature(function).parameters.values()]
    except ValueError:  # a builtin without a signature
        return False
    return bool(defaults) and inspect.Parameter.empty not in defaults


def of_rule_name(name: str) -> str:
    """Return the function of `regrad.rules` that a name probably means, as a hint."""
    plain = _plain(name)
    known = {_plain(rule): f"rules.{rule}" for rule in public_in("regrad.rules")}
    found = known.get(plain) or PLAIN.get(plain, "")
    return f" Did you mean the function regrad.{found}?" if found.startswith("rules.") else ""


def of_value(value: object) -> str:
    """Return the hint for a value that an op cannot take."""
    if value is None:
        return " Has a function no return statement? (Write `x is None`, not `x == None`.)"
    if isinstance(value, dict):
        return " Pass the op one of its entries, or differentiate by all of it with grad."
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

PLAIN = {_plain(name): ours for name, ours in SAME.items()}


def hint_at(owner: type, hints: dict[str, str]) -> None:
    """Let objects of a class raise an error with a hint for attributes that they do not have."""
    for name, hint in hints.items():
        if name not in vars(owner):
            setattr(owner, name, Hint(name, hint))
    owner.__dir__ = _dir_without_hints  # pyright: ignore[reportAttributeAccessIssue]


def _dir_without_hints(self: object) -> list[str]:
    found = object.__dir__(self)
    return [n for n in found if not isinstance(inspect.getattr_static(self, n, None), Hint)]


class Hint:
    """A descriptor for an attribute that Tensors lack. Access raises an error with a hint."""

    def __init__(self, name: str, hint: str) -> None:
        self.name = name
        self.hint = hint

    def __set__(self, instance: object, value: object) -> None:
        if not hasattr(instance, "__dict__"):  # (otherwise the object may have its own attribute)
            self.__get__(None, type(instance))
        vars(instance)[self.name] = value

    def __get__(self, instance: object, owner: type) -> object:
        if self.name in getattr(instance, "__dict__", ()):
            return vars(instance)[self.name]
        said = f"{owner.__name__!r} object has no attribute {self.name!r}. {self.hint}"
        raise unknown(said, owner)
