"""What users of other libraries write, and what to write here: the ends of messages."""

from __future__ import annotations

from collections.abc import Sequence

from regrad.errors import near

# -- arguments of our functions --------------------------------------------------------------------

_CLOSE_OVER = "Let f reach what is not differentiated by a closure: {api}(lambda x: f(x, option))."
_UNCONNECTED = "Say what an input without a path gets by unconnected='raise', 'zero' or 'none'."
_ORDERS = "Leave it out: what {api} gives can be differentiated again, to any order."
KEYWORDS = {
    "allow_int": "Integers have no gradient; make floats of them, astype(x, rg.float32).",
    "allow_unused": _UNCONNECTED,
    "argnum": "Differentiate by one argument of several with {api}(lambda a: f(a, b)).",
    "argnums": "Differentiate by one argument of several with {api}(lambda a: f(a, b)), by all "
    "with {all}.",
    "axis_name": "Axes have no names: f sees single examples. Sum or average the results of vmap.",
    "batch_size": "Nothing is done in batches here; vmap does all at once.",
    "create_graph": _ORDERS,
    "grad_outputs": "It is called dy here, and goes to the gradient function: grad(f)(x, dy).",
    "has_aux": "f returns just what is differentiated. With more results use vjp: "
    "(y, aux), back = vjp(f, x); (dx,) = back((ones_like(y), zeros_like(aux))).",
    "holomorphic": "Leave it out: complex inputs are differentiated as they are, by TensorFlow's "
    "convention (the conjugate of JAX's).",
    "in_dims": "It is called in_axes here.",
    "loop_vars": "It is called init here.",
    "nondiff_argnums": _CLOSE_OVER,
    "operands": "Give them by position: cond(pred, true_fn, false_fn, *operands).",
    "out_dims": "It is called out_axes here.",
    "primals": "Its arguments are called xs and dxs here: jvp(f, [x], [dx]).",
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

ALL = {  # how each differentiates by all arguments of f
    "grad": "grads(f)([a, b])",
    "grads": "grads(f)([a, b])",
    "value_and_grad": "value_and_grads(f)([a, b])",
    "value_and_grads": "value_and_grads(f)([a, b])",
    "variable_grads": "grads(f)([a, b])",
    "vjp": "vjp(f, a, b)",
    "jvp": "jvp(f, [a, b], [da, db])",
}


def of_keyword(api: str, keyword: str, known: Sequence[str]) -> str:
    """What to write instead of a keyword that a function does not have."""
    if api.endswith("(f)"):  # what it returned
        name = api.removesuffix("(f)")
        return f"Bind it in a closure: {name}(lambda x: f(x, {keyword}={keyword}))(x)."
    if keyword in KEYWORDS:
        return KEYWORDS[keyword].format(api=api, all=_all(api))
    return f"It takes {', '.join(known)}.{near(keyword, known)}"


def of_arguments(api: str) -> str:
    """What to write instead of more arguments than a function takes."""
    name = api.removesuffix("(f)")
    if api != name:
        return of_passed(name)
    if name in ("grad", "value_and_grad", "jacobian", "hessian"):
        return f"It gives a function: {name}(f)(x)."
    if name in ("grads", "value_and_grads"):
        return f"It gives a function of a list: {name}(f)([a, b])."
    if name == "variable_grads":
        return "Its f takes no arguments: variable_grads(lambda: f(x))."
    return f"help(regrad.{name}) says what it takes."


def of_passed(api: str) -> str:
    """What to write for an f that takes other arguments than a gradient function gives it."""
    name = api.partition("(")[0]
    if name == "variable_grads":
        return "Close over the data: variable_grads(lambda: f(x))."
    if name in ("grads", "value_and_grads"):
        return f"{name}(f)([a, b]) gives it one argument for each entry of the list."
    if name in ("vjp", "jvp"):
        return f"{_all(name)} gives it one argument for each input."
    hint = f"Differentiate by one argument with {name}(lambda a: f(a, b))(a), by all with "
    is_dy = f" In {name}(f)(x, dy), dy is the gradient that arrives, and no argument of f."
    return f"{hint}{_all(name)}.{is_dy if name in ALL else ''}"


def _all(api: str) -> str:
    return ALL.get(api, f"{api}(lambda ab: f(*ab))((a, b))")
