"""The programs that `peers` runs: ways to give an op another gradient, and places to use it in.

A `Way` is a library's mechanism. Its setup is source code, in which `NAME` is the op's name in that
library, `FORWARD` what the function computes, and `ANSWER` what the rule returns, which is
`dy * (3 * x + 7)` unless the place says otherwise. It defines `f`, through which the op is called.

A `Place` is a program that calls `f` on x, or spells the op in another way, and leaves a derivative
in `got`; `due` is what must come, as NumPy computes it, or `ERROR` where only an error is right.
`before` runs before the setup. `made(w)` runs the setup anew, where w is a name that it may use.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

ERROR = "an error"
RULE = "3 * x + 7"
RIGHT = f"dy * ({RULE})"
SECOND = "3 + 0 * x"
IMPORTED = "imported before the rule came"

# -- the ops ---------------------------------------------------------------------------------------

# The op type, and its name in PyTorch, jax.numpy, and regrad. (All have a reverse mode in each.)
OPS = {
    "Neg": "negative", "Abs": "abs", "Square": "square", "Sqrt": "sqrt",
    "Reciprocal": "reciprocal", "Exp": "exp", "Expm1": "expm1", "Log": "log", "Log1p": "log1p",
    "Log2": "log2", "Log10": "log10", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin",
    "Acos": "acos", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh", "Tanh": "tanh",
    "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Sign": "sign", "Floor": "floor",
    "Ceil": "ceil", "Round": "round",
}  # fmt: skip
# autograd has NumPy's older names.
OLD = {f"a{n}": f"arc{n}" for n in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
# Another name of the same function.
TORCH_ALIASES = {
    "negative": "torch.neg", "abs": "torch.absolute", "asin": "torch.arcsin",
    "acos": "torch.arccos", "atan": "torch.arctan", "asinh": "torch.arcsinh",
    "acosh": "torch.arccosh", "atanh": "torch.arctanh", "expm1": "torch.special.expm1",
    "log1p": "torch.special.log1p", "round": "torch.special.round",
    "tanh": "torch.nn.functional.tanh",
}  # fmt: skip
JAX_ALIASES = {
    "negative": "jax.lax.neg", "abs": "jax.lax.abs", "sqrt": "jax.lax.sqrt", "exp": "jax.lax.exp",
    "expm1": "jax.lax.expm1", "log": "jax.lax.log", "log1p": "jax.lax.log1p", "sin": "jax.lax.sin",
    "cos": "jax.lax.cos", "tan": "jax.lax.tan", "asin": "jax.lax.asin", "acos": "jax.lax.acos",
    "atan": "jax.lax.atan", "sinh": "jax.lax.sinh", "cosh": "jax.lax.cosh", "tanh": "jax.nn.tanh",
    "asinh": "jax.lax.asinh", "acosh": "jax.lax.acosh", "atanh": "jax.lax.atanh",
    "sign": "jax.lax.sign", "floor": "jax.lax.floor", "ceil": "jax.lax.ceil",
}  # fmt: skip
OPERATORS = {"negative": "-x", "abs": "abs(x)", "round": "round(x)"}


class Way(NamedTuple):
    """A mechanism: its setup, whether it acts on ops as models spell them, how to undo it."""

    name: str
    setup: str
    replaces: bool = False
    undo: str = ""


class Place(NamedTuple):
    """A program: its text, what is due, what comes before, and what the rule returns."""

    name: str
    program: str
    due: str = RULE
    before: str = ""
    answer: str = ""
    forward: str = ""
    spelled: bool = False  # only where a way acts on ops as models spell them
    own: bool = False  # only where a way defines a function of its own


class Library(NamedTuple):
    """A library's ways and places; `start` comes first."""

    name: str
    start: str
    ways: list[Way]
    places: list[Place]


def spelled(name: str, program: str, before: str = "") -> Place:
    """A place where a way acts on ops as models spell them."""
    return Place(name, program, before=before, spelled=True)


def closing(what: str, program: str) -> Place:
    """A place where the function that has the rule takes w from around it."""
    name = f"{what} in the closure, its gradient"
    return Place(name, program, "own(x) + 3", forward="(own(x) + 2) * w", own=True)


def answers(gradient: Callable[[str], str], stack: str, integers: str) -> Iterator[Place]:
    """Places where the rule's own answer is wrong, but for None."""
    for name, answer in {
        "a shape that is too small": f"({RIGHT})[:1]",
        "a shape that is too large": f"{stack}([{RIGHT}] * 2)",
        "integers": integers.format(f"({RIGHT})"),
        "None, for no gradient": "None",
        "two for one input": f"({RIGHT}, dy)",
    }.items():
        y, expected = ("(f(x) + x)", "1 + 0 * x") if answer == "None" else ("f(x)", ERROR)
        yield Place(f"answer: {name}", gradient(y), expected, answer=answer)


# -- PyTorch ---------------------------------------------------------------------------------------

FUNCTION = """
class Rule(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return FORWARD

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return ANSWER
"""
HOOK = """
class Layer(torch.nn.Module):
    def forward(self, x):
        return FORWARD

def hook(layer, dxs, dys):
    dy, x = dys[0], layer.x
    answer = ANSWER
    return answer if isinstance(answer, tuple) else (answer,)

f = Layer()
f.register_forward_pre_hook(lambda layer, inputs: setattr(layer, "x", inputs[0]))
f.register_full_backward_hook(hook)
"""
CUSTOM_OP = """
@torch.library.custom_op("proof::NAMESERIAL", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor:
    return FORWARD

@f.register_fake
def _(x):
    return torch.empty_like(x)

def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)

def backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return ANSWER

f.register_autograd(backward, setup_context=setup_context)
"""
TORCH_SCOPE = """
scope = regrad.torch.gradient_override_map({"TYPE": lambda dy, x: ANSWER})
scope.__enter__()
f = lambda x: torch.NAME(x)
"""
COMPILED = 'g = torch.compile({}, backend="aot_eager")\n'
POOL = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as pool:\n    "


def torch_grad(y: str) -> str:
    return f"x.requires_grad_()\n(got,) = torch.autograd.grad({y}.sum(), x)"


TORCH = Library(
    "PyTorch",
    "import torch\nimport regrad.torch\nx = torch.tensor(x)\nown = torch.NAME\n",
    [
        Way("`autograd.Function`", FUNCTION + "\nf = Rule.apply"),
        Way("`torch.library` custom op", CUSTOM_OP),
        Way("full backward hook of a module", HOOK),
        Way("`Function` in place of the name",
            FUNCTION + "\ntorch.NAME = Rule.apply\nf = lambda x: torch.NAME(x)", True,
            "torch.NAME = own"),
        Way("`regrad.torch`", TORCH_SCOPE, True, "scope.__exit__(None, None, None)"),
    ],
    [
        Place("called directly", torch_grad("f(x)")),
        spelled("as a method: `x.tanh()`", torch_grad("x.NAME()")),
        spelled("as an operator: `-x`", torch_grad("(OPERATOR)")),
        spelled("in place: `x.tanh_()`", torch_grad("x.clone().NAME_()")),
        spelled("under another name: `torch.special`, …", torch_grad("ALIAS(x)")),
        spelled(IMPORTED, torch_grad("g(x)"), "from torch import NAME as g\n"),
        Place("`torch.func.grad`", "got = torch.func.grad(lambda x: f(x).sum())(x)"),
        Place("`vmap` of `grad`", "got = torch.func.vmap(torch.func.grad(f))(x)"),
        Place("forward mode", "got = torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]"),
        Place("second order",
              "x.requires_grad_()\n(dx,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)\n"
              "(got,) = torch.autograd.grad(dx.sum(), x)", SECOND),
        Place("compiled", COMPILED.format("f") + torch_grad("g(x)")),
        spelled("compiled, and run, before the rule came", torch_grad("g(x)"),
                COMPILED.format("lambda x: torch.NAME(x)") + "g(x.clone().requires_grad_())\n"),
        Place("`torch.jit.trace`", "g = torch.jit.trace(f, x)\n" + torch_grad("g(x)")),
        Place("checkpoint", "from torch.utils.checkpoint import checkpoint\n"
              + torch_grad("checkpoint(f, x, use_reentrant=False)")),
        Place("in another thread", POOL + "y = pool.submit(f, x.requires_grad_()).result()\n"
              "(got,) = torch.autograd.grad(y.sum(), x)"),
        Place("under `no_grad`", "x.requires_grad_()\nwith torch.no_grad():\n    y = f(x)\n"
              "(got,) = torch.autograd.grad((x + y).sum(), x)", "1 + 0 * x"),
        closing("a tensor", "w = torch.full_like(x, 2.0).requires_grad_()\n"
                "(got,) = torch.autograd.grad((made(w)(x) + w).sum(), w)"),
        *answers(torch_grad, "torch.stack", "{}.to(torch.int64)"),
    ],
)  # fmt: skip

# -- JAX -------------------------------------------------------------------------------------------

CUSTOM_VJP = """
@jax.custom_vjp
def f(x):
    return FORWARD

def forward(x):
    return f(x), x

def backward(x, dy):
    answer = ANSWER
    return answer if isinstance(answer, tuple) else (answer,)

f.defvjp(forward, backward)
"""
CUSTOM_JVP = """
@jax.custom_jvp
def f(x):
    return FORWARD

@f.defjvp
def _(primals, tangents):
    (x,), (dy,) = primals, tangents
    return f(x), ANSWER
"""
CUSTOM_GRADIENT = """
@jax.custom_gradient
def f(x):
    return FORWARD, lambda dy: ANSWER
"""
JAX_SCOPE = """
rules = {"TYPE": lambda dy, x: ANSWER}
f = regrad.jax.override(lambda x: jnp.NAME(x), rules)
over = lambda g: regrad.jax.override(g, rules)
"""


def jax_grad(y: str) -> str:
    """A scope of regrad.jax is around a function, so the program goes into `over`."""
    return f"got = jax.grad(over(lambda x: {y}.sum()))(x)"


JAX = Library(
    "JAX",
    "import jax, jax.numpy as jnp\nimport regrad.jax\n"
    "x = jnp.asarray(x)\nown = jnp.NAME\nover = lambda g: g\n",
    [
        Way("`custom_vjp`", CUSTOM_VJP),
        Way("`custom_jvp`", CUSTOM_JVP),
        Way("`custom_gradient`", CUSTOM_GRADIENT),
        Way("`custom_vjp` in place of the name",
            CUSTOM_VJP + "\nrule = f\njnp.NAME = rule\nf = lambda x: jnp.NAME(x)", True,
            "jnp.NAME = own"),
        Way("`regrad.jax`", JAX_SCOPE, True),
    ],
    [
        Place("called directly", jax_grad("f(x)")),
        spelled("as a method: `x.round()`", jax_grad("x.NAME()")),
        spelled("as an operator: `-x`", jax_grad("(OPERATOR)")),
        spelled("under another name: `jax.lax`, …", jax_grad("ALIAS(x)")),
        spelled(IMPORTED, jax_grad("g(x)"), "from jax.numpy import NAME as g\n"),
        Place("`vmap` of `grad`", "got = jax.vmap(jax.grad(f))(x)"),
        Place("forward mode", "got = jax.jvp(f, (x,), (jnp.ones_like(x),))[1]"),
        Place("second order",
              "got = jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(x)", SECOND),
        Place("`jit`", "got = jax.jit(jax.grad(lambda x: f(x).sum()))(x)"),
        spelled("jitted, and run, before the rule came", jax_grad("g(x)"),
                "g = jax.jit(lambda x: jnp.NAME(x))\njax.grad(lambda x: g(x).sum())(x)\n"),
        Place("`checkpoint`", "got = jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x)"),
        Place("`scan`", "got = jax.grad("
              "lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, x)[0])(x)"),
        Place("`cond`",
              "got = jax.grad(lambda x: jax.lax.cond(x[0] < 9, f, lambda x: x, x).sum())(x)"),
        Place("in another thread",
              POOL + "got = pool.submit(jax.grad(lambda x: f(x).sum()), x).result()"),
        Place("under `stop_gradient`",
              "got = jax.grad(lambda x: (x + jax.lax.stop_gradient(f(x))).sum())(x)", "1 + 0 * x"),
        closing("an array",
                "got = jax.grad(lambda w: (made(w)(x) + w).sum())(jnp.full_like(x, 2.0))"),
        *answers(jax_grad, "jnp.stack", "{}.astype(int)"),
    ],
)  # fmt: skip

# -- HIPS autograd, and regrad's own functions -----------------------------------------------------

PRIMITIVE = """
f = primitive(lambda x: FORWARD)
defvjp(f, lambda y, x: lambda dy: ANSWER)
"""
DEFVJP = """
defvjp(anp.NAME, lambda y, x: lambda dy: ANSWER)
f = lambda x: anp.NAME(x)
"""


def old_grad(y: str) -> str:
    return f"got = grad(lambda x: anp.sum({y}))(x)"


AUTOGRAD = Library(
    "HIPS autograd",
    "import autograd.numpy as anp, numpy as np\n"
    "from autograd import checkpoint, grad, make_jvp\n"
    "from autograd.extend import defvjp, primitive\n"
    "from autograd.core import primitive_vjps\nfrom autograd.tracer import getval\n"
    "own = anp.NAME\nkept = dict(primitive_vjps)\n",
    [
        Way("`primitive` and `defvjp`", PRIMITIVE),
        Way("`defvjp` of an existing op", DEFVJP, True, "primitive_vjps.update(kept)"),
    ],
    [
        Place("called directly", old_grad("f(x)")),
        spelled("as an operator: `-x`", old_grad("(OPERATOR)")),
        spelled("NumPy's own function: `np.tanh(x)`", old_grad("np.NAME(x)")),
        spelled(IMPORTED, old_grad("g(x)"), "from autograd.numpy import NAME as g\n"),
        Place("forward mode", "got = make_jvp(f)(x)(np.ones_like(x))[1]"),
        Place("second order",
              "got = grad(lambda x: anp.sum(grad(lambda x: anp.sum(f(x)))(x)))(x)", SECOND),
        Place("checkpoint", old_grad("checkpoint(f)(x)")),
        Place("in another thread",
              POOL + "got = pool.submit(grad(lambda x: anp.sum(f(x))), x).result()"),
        Place("after `getval`", old_grad("x + f(getval(x))"), "1 + 0 * x"),
        closing("an array",
                "got = grad(lambda w: anp.sum(made(w)(x) + w))(np.full_like(x, 2.0))"),
        *answers(old_grad, "anp.stack", "{}.astype(int)"),
    ],
)  # fmt: skip

CUSTOM_GRAD = """
@rg.custom_grad
def f(x, save):
    save([x])
    return FORWARD, lambda dy, saved: rule(dy, saved[0])

def rule(dy, x):
    return ANSWER
"""
SCOPE = """
scope = rg.gradient_override_map({"TYPE": lambda dy, x: ANSWER})
scope.__enter__()
f = lambda x: rg.NAME(x)
"""


def own_grad(y: str) -> str:
    return f"got = rg.grad(lambda x: rg.sum({y}))(x)"


REGRAD = Library(
    "regrad",
    "import regrad as rg, numpy as np\nx = rg.asarray(x)\nown = rg.NAME\n",
    [
        Way("`custom_grad`", CUSTOM_GRAD),
        Way("`gradient_override_map`", SCOPE, True, "scope.__exit__(None, None, None)"),
    ],
    [
        Place("called directly", own_grad("f(x)")),
        spelled("as a method: `x.tanh()`", own_grad("x.NAME()")),
        spelled("as an operator: `-x`", own_grad("(OPERATOR)")),
        spelled("NumPy's own function: `np.tanh(x)`", own_grad("np.NAME(x)")),
        spelled(IMPORTED, own_grad("g(x)"), "from regrad import NAME as g\n"),
        Place("`vmap` of `grad`", "got = rg.vmap(rg.grad(f))(x)"),
        Place("forward mode", "got = rg.jvp(f, [x], [rg.ones_like(x)])[1]"),
        Place("second order",
              "got = rg.grad(lambda x: rg.sum(rg.grad(lambda x: rg.sum(f(x)))(x)))(x)", SECOND),
        Place("`jit`", "got = rg.jit(rg.grad(lambda x: rg.sum(f(x))))(x)"),
        spelled("jitted, and run, before the rule came", own_grad("g(x)"),
                "g = rg.jit(lambda x: rg.NAME(x))\nrg.grad(lambda x: rg.sum(g(x)))(x)\n"),
        Place("checkpoint", own_grad("rg.checkpoint(f)(x)")),
        Place("`scan`", "zero = np.float64(0.0)\n"
              "got = rg.grad(lambda x: rg.scan(lambda c, x: (c + f(x), c), zero, x)[0])(x)"),
        Place("`cond`", own_grad("rg.cond(x[0] < 9, f, lambda x: x, x)")),
        Place("in another thread",
              POOL + "got = pool.submit(rg.grad(lambda x: rg.sum(f(x))), x).result()"),
        Place("under `stop_gradient`", own_grad("x + rg.stop_gradient(f(x))"), "1 + 0 * x"),
        closing("a Tensor",
                "got = rg.grad(lambda w: rg.sum(made(w)(x) + w))(rg.full_like(x, 2.0))"),
        *answers(own_grad, "rg.stack", "rg.astype({}, 'int64')"),
    ],
)  # fmt: skip

LIBRARIES = [TORCH, JAX, AUTOGRAD, REGRAD]
