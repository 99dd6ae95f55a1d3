"""The programs that `peers` runs: ways to give an op another gradient, and places to use it in.

A `Way` is a library's mechanism. Its setup is source code, in which `NAME` is the op's name in that
library, `FORWARD` what the function computes, and `ANSWER` what the rule returns, which is
`dy * (3 * x + 7)` unless the place says otherwise. It defines `f`, through which the op is called.

A `Place` is a program that calls `f` on x, or spells the op in another way, and leaves a derivative
in `got`; `due` is what must come, as NumPy computes it, or `ERROR` where only an error is right.
`before` runs before the setup. `made(w)` runs the setup anew, where w is a name that it may use.
"""

from __future__ import annotations

from typing import NamedTuple

ERROR = "an error"
RULE = "3 * x + 7"

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
    """A library's ways and places; `start` comes first, and `good` is what a rule returns."""

    name: str
    start: str
    ways: list[Way]
    places: list[Place]


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
GRAD = "x.requires_grad_()\n(got,) = torch.autograd.grad({}.sum(), x)"
COMPILED = 'g = torch.compile(lambda x: torch.NAME(x), backend="aot_eager")\n'

TORCH = Library(
    "PyTorch",
    "import torch\nimport regrad.torch\nx = torch.tensor(x)\nown = torch.NAME\n",
    [
        Way("`autograd.Function`", FUNCTION + "\nf = Rule.apply"),
        Way("`torch.library` custom op", CUSTOM_OP),
        Way("full backward hook of a module", HOOK),
        Way(
            "`Function` in place of the name",
            FUNCTION + "\ntorch.NAME = Rule.apply\nf = lambda x: torch.NAME(x)",
            replaces=True,
            undo="torch.NAME = own",
        ),
        Way("`regrad.torch`", TORCH_SCOPE, True, "scope.__exit__(None, None, None)"),
    ],
    [
        Place("called directly", GRAD.format("f(x)")),
        Place("as a method: `x.tanh()`", GRAD.format("x.NAME()"), spelled=True),
        Place("as an operator: `-x`", GRAD.format("(OPERATOR)"), spelled=True),
        Place("in place: `x.tanh_()`", GRAD.format("x.clone().NAME_()"), spelled=True),
        Place("under another name: `torch.special`, …", GRAD.format("ALIAS(x)"), spelled=True),
        Place(
            "imported before the rule came",
            GRAD.format("g(x)"),
            before="from torch import NAME as g\n",
            spelled=True,
        ),
        Place("`torch.func.grad`", "got = torch.func.grad(lambda x: f(x).sum())(x)"),
        Place("`vmap` of `grad`", "got = torch.func.vmap(torch.func.grad(f))(x)"),
        Place("forward mode", "got = torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]"),
        Place(
            "second order",
            "x.requires_grad_()\n"
            "(dx,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)\n"
            "(got,) = torch.autograd.grad(dx.sum(), x)",
            "3 + 0 * x",
        ),
        Place("compiled", 'g = torch.compile(f, backend="aot_eager")\n' + GRAD.format("g(x)")),
        Place(
            "compiled, and run, before the rule came",
            GRAD.format("g(x)"),
            before=COMPILED + "g(x.clone().requires_grad_())\n",
            spelled=True,
        ),
        Place("`torch.jit.trace`", "g = torch.jit.trace(f, x)\n" + GRAD.format("g(x)")),
        Place(
            "checkpoint",
            "from torch.utils.checkpoint import checkpoint\n"
            + GRAD.format("checkpoint(f, x, use_reentrant=False)"),
        ),
        Place(
            "in another thread",
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor() as pool:\n"
            "    y = pool.submit(f, x.requires_grad_()).result()\n"
            "(got,) = torch.autograd.grad(y.sum(), x)",
        ),
        Place(
            "under `no_grad`",
            "x.requires_grad_()\nwith torch.no_grad():\n    y = f(x)\n"
            "(got,) = torch.autograd.grad((x + y).sum(), x)",
            "1 + 0 * x",
        ),
        Place(
            "a tensor in the closure, its gradient",
            "w = torch.full_like(x, 2.0).requires_grad_()\n"
            "(got,) = torch.autograd.grad((made(w)(x) + w).sum(), w)",
            "own(x) + 3",
            forward="(own(x) + 2) * w",
            own=True,
        ),
        Place("answer: a shape that is too small", GRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7))[:1]"),
        Place("answer: a shape that is too large", GRAD.format("f(x)"), ERROR,
              answer="torch.stack([dy * (3 * x + 7)] * 2)"),
        Place("answer: integers", GRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7)).to(torch.int64)"),
        Place("answer: None, for no gradient", GRAD.format("(f(x) + x)"), "1 + 0 * x",
              answer="None"),
        Place("answer: two for one input", GRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7), dy)"),
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
JGRAD = "got = jax.grad(over(lambda x: {}.sum()))(x)"
# A scope of regrad.jax is around a function, so the program that spells the op is put into `over`.

JAX = Library(
    "JAX",
    "import jax, jax.numpy as jnp\nimport regrad.jax\n"
    "x = jnp.asarray(x)\nown = jnp.NAME\nover = lambda g: g\n",
    [
        Way("`custom_vjp`", CUSTOM_VJP),
        Way("`custom_jvp`", CUSTOM_JVP),
        Way("`custom_gradient`", CUSTOM_GRADIENT),
        Way(
            "`custom_vjp` in place of the name",
            CUSTOM_VJP + "\nrule = f\njnp.NAME = rule\nf = lambda x: jnp.NAME(x)",
            replaces=True,
            undo="jnp.NAME = own",
        ),
        Way("`regrad.jax`", JAX_SCOPE, True),
    ],
    [
        Place("called directly", JGRAD.format("f(x)")),
        Place("as a method: `x.round()`", JGRAD.format("x.NAME()"), spelled=True),
        Place("as an operator: `-x`", JGRAD.format("(OPERATOR)"), spelled=True),
        Place("under another name: `jax.lax`, …", JGRAD.format("ALIAS(x)"), spelled=True),
        Place(
            "imported before the rule came",
            JGRAD.format("g(x)"),
            before="from jax.numpy import NAME as g\n",
            spelled=True,
        ),
        Place("`vmap` of `grad`", "got = jax.vmap(jax.grad(f))(x)"),
        Place("forward mode", "got = jax.jvp(f, (x,), (jnp.ones_like(x),))[1]"),
        Place(
            "second order",
            "got = jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(x)",
            "3 + 0 * x",
        ),
        Place("`jit`", "got = jax.jit(jax.grad(lambda x: f(x).sum()))(x)"),
        Place(
            "jitted, and run, before the rule came",
            JGRAD.format("g(x)"),
            before="g = jax.jit(lambda x: jnp.NAME(x))\njax.grad(lambda x: g(x).sum())(x)\n",
            spelled=True,
        ),
        Place("`checkpoint`", "got = jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x)"),
        Place(
            "`scan`",
            "got = jax.grad(lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, x)[0])(x)",
        ),
        Place(
            "`cond`",
            "got = jax.grad(lambda x: jax.lax.cond(x[0] < 9, f, lambda x: x, x).sum())(x)",
        ),
        Place(
            "in another thread",
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor() as pool:\n"
            "    got = pool.submit(jax.grad(lambda x: f(x).sum()), x).result()",
        ),
        Place(
            "under `stop_gradient`",
            "got = jax.grad(lambda x: (x + jax.lax.stop_gradient(f(x))).sum())(x)",
            "1 + 0 * x",
        ),
        Place(
            "an array in the closure, its gradient",
            "got = jax.grad(lambda w: (made(w)(x) + w).sum())(jnp.full_like(x, 2.0))",
            "own(x) + 3",
            forward="(own(x) + 2) * w",
            own=True,
        ),
        Place("answer: a shape that is too small", JGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7))[:1]"),
        Place("answer: a shape that is too large", JGRAD.format("f(x)"), ERROR,
              answer="jnp.stack([dy * (3 * x + 7)] * 2)"),
        Place("answer: integers", JGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7)).astype(int)"),
        Place("answer: None, for no gradient", JGRAD.format("(f(x) + x)"), "1 + 0 * x",
              answer="None"),
        Place("answer: two for one input", JGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7), dy)"),
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
AGRAD = "got = grad(lambda x: anp.sum({}))(x)"
THREAD = (
    "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor() as pool:\n    got = pool.submit({}).result()"
)

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
        Place("called directly", AGRAD.format("f(x)")),
        Place("as an operator: `-x`", AGRAD.format("(OPERATOR)"), spelled=True),
        Place("NumPy's own function: `np.tanh(x)`", AGRAD.format("np.NAME(x)"), spelled=True),
        Place(
            "imported before the rule came",
            AGRAD.format("g(x)"),
            before="from autograd.numpy import NAME as g\n",
            spelled=True,
        ),
        Place("forward mode", "got = make_jvp(f)(x)(np.ones_like(x))[1]"),
        Place(
            "second order",
            "got = grad(lambda x: anp.sum(grad(lambda x: anp.sum(f(x)))(x)))(x)",
            "3 + 0 * x",
        ),
        Place("checkpoint", AGRAD.format("checkpoint(f)(x)")),
        Place("in another thread", THREAD.format("grad(lambda x: anp.sum(f(x))), x")),
        Place("after `getval`", AGRAD.format("x + f(getval(x))"), "1 + 0 * x"),
        Place(
            "an array in the closure, its gradient",
            "got = grad(lambda w: anp.sum(made(w)(x) + w))(np.full_like(x, 2.0))",
            "own(x) + 3",
            forward="(own(x) + 2) * w",
            own=True,
        ),
        Place("answer: a shape that is too small", AGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7))[:1]"),
        Place("answer: a shape that is too large", AGRAD.format("f(x)"), ERROR,
              answer="anp.stack([dy * (3 * x + 7)] * 2)"),
        Place("answer: integers", AGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7)).astype(int)"),
        Place("answer: None, for no gradient", AGRAD.format("f(x) + x"), "1 + 0 * x",
              answer="None"),
        Place("answer: two for one input", AGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7), dy)"),
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
RGRAD = "got = rg.grad(lambda x: rg.sum({}))(x)"

REGRAD = Library(
    "regrad",
    "import regrad as rg, numpy as np\nx = rg.asarray(x)\nown = rg.NAME\n",
    [
        Way("`custom_grad`", CUSTOM_GRAD),
        Way("`gradient_override_map`", SCOPE, True, "scope.__exit__(None, None, None)"),
    ],
    [
        Place("called directly", RGRAD.format("f(x)")),
        Place("as a method: `x.tanh()`", RGRAD.format("x.NAME()"), spelled=True),
        Place("as an operator: `-x`", RGRAD.format("(OPERATOR)"), spelled=True),
        Place("NumPy's own function: `np.tanh(x)`", RGRAD.format("np.NAME(x)"), spelled=True),
        Place(
            "imported before the rule came",
            RGRAD.format("g(x)"),
            before="from regrad import NAME as g\n",
            spelled=True,
        ),
        Place("`vmap` of `grad`", "got = rg.vmap(rg.grad(f))(x)"),
        Place("forward mode", "got = rg.jvp(f, [x], [rg.ones_like(x)])[1]"),
        Place(
            "second order",
            "got = rg.grad(lambda x: rg.sum(rg.grad(lambda x: rg.sum(f(x)))(x)))(x)",
            "3 + 0 * x",
        ),
        Place("`jit`", "got = rg.jit(rg.grad(lambda x: rg.sum(f(x))))(x)"),
        Place(
            "jitted, and run, before the rule came",
            RGRAD.format("g(x)"),
            before="g = rg.jit(lambda x: rg.NAME(x))\nrg.grad(lambda x: rg.sum(g(x)))(x)\n",
            spelled=True,
        ),
        Place("checkpoint", RGRAD.format("rg.checkpoint(f)(x)")),
        Place(
            "`scan`",
            "zero = np.float64(0.0)\n"
            "got = rg.grad(lambda x: rg.scan(lambda c, x: (c + f(x), c), zero, x)[0])(x)",
        ),
        Place("`cond`", RGRAD.format("rg.cond(x[0] < 9, f, lambda x: x, x)")),
        Place("in another thread", THREAD.format("rg.grad(lambda x: rg.sum(f(x))), x")),
        Place("under `stop_gradient`", RGRAD.format("x + rg.stop_gradient(f(x))"), "1 + 0 * x"),
        Place(
            "a Tensor in the closure, its gradient",
            "got = rg.grad(lambda w: rg.sum(made(w)(x) + w))(rg.full_like(x, 2.0))",
            "own(x) + 3",
            forward="(own(x) + 2) * w",
            own=True,
        ),
        Place("answer: a shape that is too small", RGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7))[:1]"),
        Place("answer: a shape that is too large", RGRAD.format("f(x)"), ERROR,
              answer="rg.stack([dy * (3 * x + 7)] * 2)"),
        Place("answer: integers", RGRAD.format("f(x)"), ERROR,
              answer="rg.astype(dy * (3 * x + 7), 'int64')"),
        Place("answer: None, for no gradient", RGRAD.format("f(x) + x"), "1 + 0 * x",
              answer="None"),
        Place("answer: two for one input", RGRAD.format("f(x)"), ERROR,
              answer="(dy * (3 * x + 7), dy)"),
    ],
)  # fmt: skip

LIBRARIES = [TORCH, JAX, AUTOGRAD, REGRAD]
