"""Random programs, as text: every program can be printed and run.

A program is a list of statements over float64 tensors. A *flat* one has a twin, in which overridden
ops and custom gradients are written out by `stop_gradient` alone; it needs no override and no
`custom_grad`, and its value and derivatives of every order are those of the program. A *nested*
one is made of a few expressions as `nested` writes them. JAX runs its twin, and the same text runs
under the overrides of `regrad.torch` and `regrad.jax` as well.

All choices are whole numbers from a `Source`: hypothesis draws them, and so makes a program that
fails smaller.
"""

import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from tests.campaigns import nested
from tests.campaigns.sources import Source

PRELUDE = """
import numpy as np
import regrad as rg

def w(y):
    return rg.asarray(np.cos(np.arange(int(np.prod(y.shape)))).reshape(tuple(y.shape)) + 1.5)

def sur(y, g):
    return rg.stop_gradient(y) + (g - rg.stop_gradient(g))

def nudged(x, by):
    return x + by * rg.stop_gradient(x) * np.cos(3.0 * np.arange(x.size) + 1.0).reshape(x.shape)

flipped = rg.custom_grad(lambda x: (rg.where(x == 0, -x, x), lambda dy: dy))

def number(x):
    return rg.asarray(np.float64(x))

def twin_sign(x): return sur(rg.sign(x), 2.0 * x)
def twin_round(x): return sur(rg.round(x), rg.sin(x))
def twin_relu(x): return sur(rg.nn.relu(x), rg.nn.softplus(x))
def twin_tanh(x): return sur(rg.tanh(x), 0.5 * x * x)
def twin_identity(x): return sur(rg.identity(x), 3.0 * x)
def twin_sum(x): return sur(rg.sum(x), 0.5 * rg.sum(x * x))
def twin_abs(x): return sur(rg.abs(x), rg.atan(x))
def twin_multiply(a, b): return sur(a * b, a * a + rg.sin(b) + 0.0 * (a * b))

RULES = {
    "Sign": lambda dy: dy * 2.0,
    "Round": lambda dy, x: dy * rg.cos(x),
    "Relu": lambda dy, x: dy * rg.nn.sigmoid(x),
    "Tanh": lambda op, grad: grad * op.inputs[0],
    "Identity": lambda dy: dy * 3.0,
    "Sum": lambda dy, x: dy * x,
    "Abs": lambda dy, x: dy / (1.0 + x * x),
    "Mul": lambda dy, a, b: [dy * 2.0 * a, dy * rg.cos(b)],
}

def rule(op_type):
    return rg.gradient_override_map({op_type: RULES[op_type]})

def _kept(x, save):
    save([x])
    return rg.sin(x), lambda dy, saved: dy * rg.cos(saved[0])

def _pair(a, b, save):
    save(a=a, b=b)
    return a * b, lambda dy, saved: [dy * saved.b, dy * saved.a]

def _surrogate(x, save):
    save([x])
    return x * x, lambda dy, saved: dy * rg.cos(saved[0])

kept_sin = rg.custom_grad(_kept)
closed_tanh = rg.custom_grad(lambda x: (rg.tanh(x), lambda dy: dy * (1.0 - rg.square(rg.tanh(x)))))
pair = rg.custom_grad(_pair)
surrogate = rg.custom_grad(_surrogate)
steps = rg.custom_grad(lambda x: (rg.floor(x), lambda dy: dy * rg.exp(-x * x)))

def twin_kept_sin(x): return rg.sin(x)
def twin_closed_tanh(x): return rg.tanh(x)
def twin_pair(a, b): return a * b
def twin_surrogate(x): return sur(x * x, rg.sin(x))
def twin_steps(x): return sur(rg.floor(x), rg.erf(x) * (np.pi ** 0.5 / 2))

""".lstrip()
PRELUDE += nested.PRELUDE

UNARY = """
-{a}; rg.abs({a}); rg.square({a}); rg.sqrt(rg.square({a}) + 0.3); rg.exp(rg.tanh({a}))
rg.log(rg.abs({a}) + 0.5); rg.log1p(rg.square({a})); rg.sin({a}); rg.cos({a}); rg.tanh({a})
rg.atan({a}); rg.asinh({a}); rg.erf({a}); rg.nn.sigmoid({a}); rg.nn.softplus({a}); rg.nn.relu({a})
rg.sign({a}); rg.floor({a}); rg.round({a}); rg.clip({a}, -0.8, 0.9); 1.0 / (1.0 + rg.square({a}))
rg.rsqrt(rg.square({a}) + 0.4); rg.nn.gelu({a}); rg.nn.elu({a}); rg.expm1(rg.sin({a}))
rg.tan(rg.sin({a})); rg.asin(rg.sin({a}) * 0.9); rg.acosh(rg.square({a}) + 1.2)
rg.sinh(rg.sin({a})); rg.where({a} > 0.1, rg.sin({a}), {a} * {a}); rg.pow(rg.abs({a}) + 0.3, 1.7)
{a} ** 3; rg.reciprocal(rg.square({a}) + 0.6); rg.identity({a}); rg.nn.softsign({a})
rg.lgamma(rg.abs({a}) + 0.5); rg.stop_gradient({a}) * {a}; rg.remainder({a}, 1.3)
rg.digamma(rg.square({a}) + 0.7)
"""
BINARY = """
{a} + {b}; {a} - {b}; {a} * {b}; {a} / (rg.square({b}) + 0.5); rg.maximum({a}, {b})
rg.minimum({a}, {b}); rg.hypot({a}, {b} + 3.0); rg.atan2({a}, rg.square({b}) + 0.4)
rg.logaddexp({a}, {b}); rg.squared_difference({a}, {b}); rg.where({a} > {b}, {a} * 2.0, {b})
rg.pow(rg.abs({a}) + 0.4, {b} * 0.5); rg.copysign({a}, {b})
"""
SHAPED = """
rg.sum({a}); rg.mean({a}); rg.sum({a}, axis=0); rg.mean({a}, axis=-1, keepdims=True)
rg.max({a}, axis=-1); rg.min({a}); rg.prod({a}, axis=0); rg.std({a}); rg.var({a}, axis=0)
rg.reshape({a}, (-1,)); rg.expand_dims({a}, axis=0); rg.flip({a}); rg.roll({a}, 1)
rg.squeeze({a}, 0); rg.concat([{a}, {a} * 2.0]); rg.stack([{a}, {b}]); rg.matrix_transpose({a})
rg.sort({a}); {a}[0]; {a}[..., -1]; {a}[::-1]; {a}[None]
rg.take({a}, np.array([0, 1, 0]), axis=0); rg.cumulative_sum({a}, axis=0); rg.nn.softmax({a})
rg.nn.log_softmax({a}); rg.logsumexp({a}); rg.broadcast_to({a}, (2, 3)); rg.matmul({a}, {b})
rg.einsum("i,j->ij", {a}, {b}); rg.linalg.vector_norm({a} + 2.0); rg.tile({a}, (2,))
rg.at_set({a}, 0, rg.sum({b})); rg.diff({a}); rg.add_n([{a}, {b}, {a}]); rg.repeat({a}, 2)
rg.tensordot({a}, {b}, axes=1)
rg.linalg.inv(rg.matmul({a}, rg.matrix_transpose({a})) + 2.0 * np.eye(2))
"""

# Statements with functions in them. U and Q stand for a unary expression of what is in brackets.
REGIONS = {
    "cond": "rg.cond(rg.sum({a}) > {k}, lambda p: U(p), lambda p: Q(p) + {b}, {a})",
    "cond, closure": "rg.cond(rg.sum({a}) > {k}, lambda: U({a}) * 1.5, lambda: Q({b}) + {a})",
    "cond, returns": "rg.cond(rg.sum({a}) > {k}, lambda: {a}, lambda: {b} + {a} * 0.0)",
    "scan": "rg.scan(lambda c, x: (U(c) + 0.5 * x, Q(c * x)), rg.sum({a}, axis=0) * 0.1, {a})[1]",
    "scan, carry": "rg.scan(lambda c, x: (U(c) + x, None), {b}, rg.stack([{a}, {b}]))[0]",
    "scan, closure": "rg.scan(lambda c, _: (U(c * {b}), None), {a}, length=3)[0]",
    "scan, checkpoint": "rg.scan(lambda c, _: (U(c + {b}), None), {a}, length=2, checkpoint=True, "
        "reverse=True)[0]",
    "while_loop": "rg.while_loop(lambda s: s[0] < 3.0, lambda s: (s[0] + 1.0, U(s[1] + {b})), "
        "(number(0.5), {a}), max_steps=4)[1]",
    "fori_loop": "rg.fori_loop(0, 3, lambda i, c: U(c) + {b} * 0.3, {a})",
    "map": "rg.map(lambda r: U(r) * Q(rg.sum(r)), {a})",
    "vmap": "rg.vmap(lambda r: U(r) * Q(rg.sum(r)))({a})",
    "vmap, closure": "rg.vmap(lambda r: U(r) * rg.sum({b}))({a})",
    "checkpoint": "rg.checkpoint(lambda p: U(p) * Q({b}))({a})",
    "checkpoint, pair": "rg.checkpoint(lambda p, q: U(p) + Q(q))({a}, {b})",
    "jit": "rg.jit(lambda p: U(p) * {b})({a})",
    "jit, pair": "rg.jit(lambda p, q: (Q(p * q), p))({a}, {b})[0]",
    "grad": "rg.grad(lambda p: rg.sum(U(p * {b})))({a})",
    "grad of grad": "rg.grad(lambda p: rg.sum(Q(rg.grad(lambda q: rg.sum(U(q * p)))({b}))))({a})",
    "vjp": "rg.vjp(lambda p: U(p) * {b}, {a})[1](Q({a}))",
    "jvp": "rg.jvp(lambda p: U(p) * {b}, [{a}], [Q({a})])[1]",
}  # fmt: skip
# Regions whose derivatives are taken inside: only expressions that can be differentiated there.
INNER = ("grad", "grad of grad", "vjp", "jvp")

OVERRIDES = {
    "Sign": "sign", "Round": "round", "Relu": "nn.relu", "Tanh": "tanh", "Identity": "identity",
    "Sum": "sum", "Abs": "abs", "Mul": "multiply",
}  # fmt: skip
CUSTOM = {
    "kept_sin": 1, "closed_tanh": 1, "pair": 2, "surrogate": 1, "steps": 1,
}  # fmt: skip
SURROGATES = ("surrogate", "steps")


def listed(text: str) -> list[str]:
    return [t.strip() for line in text.strip().splitlines() for t in line.split(";") if t.strip()]


class Stmt(NamedTuple):
    """`target = …`, as the program says it and as its twin does."""

    target: str
    kind: str
    lines: tuple[str, ...]
    twin: tuple[str, ...]
    uses: tuple[str, ...]
    surrogate: bool = False


def followed(stmt: Stmt, line: str) -> Stmt:
    """A statement with one more line."""
    return stmt._replace(lines=(*stmt.lines, line), twin=(*stmt.twin, line))


@dataclass(frozen=True)
class Program:
    """Inputs, statements, and the names whose weighed sum is the result."""

    inputs: tuple[tuple[str, np.ndarray], ...]
    stmts: tuple[Stmt, ...]
    outputs: tuple[str, ...]
    is_nested: bool = False

    @property
    def kinds(self) -> list[str]:
        return sorted({s.kind for s in self.stmts})

    @property
    def has_surrogate(self) -> bool:
        return any(s.surrogate for s in self.stmts)

    @property
    def xs(self) -> list[np.ndarray]:
        return [x for _, x in self.inputs]

    def text(self, twin: bool = False) -> str:
        """The source of `f`."""
        lines = [f"def f({', '.join(n for n, _ in self.inputs)}):"]
        if "variable" in self.kinds:
            lines.append("    V.assign(number(0.3))")
        for s in self.stmts:
            lines += ["    " + line for line in (s.twin if twin else s.lines)]
        total = " + ".join(f"rg.sum({y} * w({y}))" for y in self.outputs)
        return "\n".join([*lines, f"    return {total}"])

    def nudged(self, by: float) -> "Program":
        """The program in which the result of each statement is moved, relatively, by so much."""
        return self._with("nudged({}, " + f"{by!r})")

    def flipped(self) -> "Program":
        """The program in which zeros among the results of the statements have the other sign."""
        return self._with("flipped({})")

    def _with(self, call: str) -> "Program":
        """The program in which the result of each statement goes through a call."""
        last = [f"{s.target} = {call.format(s.target)}" for s in self.stmts]
        pairs = zip(self.stmts, last, strict=True)
        return replace(self, stmts=tuple(followed(s, line) for s, line in pairs))

    def function(self, library: Any = rg, twin: bool = False) -> Any:
        """`f`, with definitions of its own."""
        space = definitions(library)
        exec(compile(self.text(twin), "<program>", "exec"), space)
        return space["f"]

    def runnable(self) -> str:
        """The program as a script: the prelude, f, the inputs."""
        array = [f"np.array({x.tolist()})" for x in self.xs]
        return f"{needed(self.text())}\n\n{self.text()}\n\nxs = [{', '.join(array)}]"


SERIAL = itertools.count()


def definitions(library: Any = rg) -> dict[str, Any]:
    """What a program finds around itself: the prelude, by a library, and two variables."""
    space: dict[str, Any] = {"rg": library, "np": np, "serial": next(SERIAL)}
    exec(PRELUDE_CODE, space)
    if library is not rg:
        library.define(space)
    return space


VARIABLES = """
V = rg.Variable(np.float64(0.3), name=f"V{serial}")

W = rg.Variable(np.float64(0.7), name=f"W{serial}")
"""
PRELUDE_CODE = compile(PRELUDE.replace("import regrad as rg", "") + VARIABLES, "<prelude>", "exec")


def needed(text: str) -> str:
    """The parts of the prelude that a text uses."""
    variables = re.sub(r'f"(\w)\{serial\}"', r'"\1"', VARIABLES)
    parts = re.split(r"\n\n|\n(?=def twin|\w+ = )", PRELUDE + "\n" + variables)
    found, total = [], text
    for part in reversed(parts):
        names = re.findall(r"^(?:def |import )?(\w+)(?:\(| =|$)", part, re.M)
        if part.startswith("import numpy") or any(re.search(rf"\b{n}\b", total) for n in names):
            found.append(part.strip())
            total += part
    return "\n\n".join(reversed(found)) + "\n"


# -- making them -----------------------------------------------------------------------------------


class Maker:
    """Statement by statement, each run at once in eager mode to learn its shape."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[str, Any] = {}
        self.space = definitions()
        self.stmts: list[Stmt] = []

    def flat(self) -> Program:
        """A program of statements, each of which the shapes allow."""
        shapes = [(3,), (2, 3), (), (1, 3), (2, 1), (2, 2)]
        inputs = self.inputs([self.source.choice(shapes) for _ in self.source.times(1, 3)])
        for _ in self.source.times(1, 7):
            for _ in range(4):
                if self.grow():
                    break
        return self.whole(inputs)

    def nested(self) -> Program:
        """A program of expressions that hold each other; one that raises is kept, and found."""
        writer = nested.Writer(self.source)
        inputs = self.inputs(
            [(3,), *[self.source.choice([(3,), ()]) for _ in self.source.times(0, 2)]]
        )
        for _ in self.source.times(1, 3):
            target = f"t{len(self.stmts)}"
            if self.source.chance(15):
                (a,) = self.names(1)
                self.take(self.variable(target, a))
            else:
                names = {n: "v" if x.shape else "s" for n, x in self.values.items()}
                expr = writer.expr("v", names | {"rg.identity(W)": "s"}, self.source.integer(2, 4))
                self.take(nested_stmt(target, expr), keep=True)
        return replace(self.whole(inputs), is_nested=True)

    def inputs(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[str, np.ndarray], ...]:
        found = []
        for i, shape in enumerate(shapes):
            numbers = [self.source.number(-2, 2) for _ in range(int(np.prod(shape)))]
            found.append((f"x{i}", np.reshape(numbers, shape)))
        self.values = {n: rg.asarray(x) for n, x in found}
        return tuple(found)

    def whole(self, inputs: tuple[tuple[str, np.ndarray], ...]) -> Program:
        """The program whose results are the statements that no other uses."""
        used = {name for s in self.stmts for name in s.uses}
        last = [s.target for s in self.stmts if s.target not in used] or ["x0"]
        return Program(inputs, tuple(self.stmts), tuple(last))

    def grow(self) -> bool:
        makers = self.basic, self.shaped, self.region, self.override, self.custom, self.variable
        make = self.source.weighed(makers, [6, 4, 8, 9, 4, 2])
        return self.take(make(f"t{len(self.stmts)}"))

    def take(self, stmt: Stmt, keep: bool = False) -> bool:
        """Run a statement, and keep it if there is something to compare."""
        space = {**self.space, **self.values}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                exec("\n".join(stmt.lines), space)
            except Exception:
                self.stmts += [stmt] * keep
                return keep  # the shapes do not fit; (a fault in other modes alone is found there)
        y = space[stmt.target]
        data = y.numpy() if isinstance(y, rg.Tensor) else np.zeros(0)
        fits = data.dtype == np.float64 and 0 < data.size <= 24 and np.abs(data).max() < 100
        if fits:
            self.values[stmt.target] = y
            self.stmts.append(stmt)
        return bool(fits)

    def names(self, count: int) -> list[str]:
        """Operands; those made last come more often."""
        every = list(self.values)
        return [self.source.weighed(every, range(1, len(every) + 1)) for _ in range(count)]

    def alike(self, a: str) -> str:
        """An operand of the same shape, or of rank 0."""
        shape = self.values[a].shape
        return self.source.choice([n for n, v in self.values.items() if v.shape in (shape, ())])

    def unary(self) -> str:
        return self.source.choice(listed(UNARY))

    def plain(self, target: str, kind: str, text: str, uses: Sequence[str]) -> Stmt:
        lines = (f"{target} = {text}",)
        cut = "stop_gradient" in text  # differences see what the gradient is told not to
        return Stmt(target, kind, lines, lines, tuple(dict.fromkeys(uses)), surrogate=cut)

    def basic(self, target: str) -> Stmt:
        a, b = self.names(2)
        text = self.source.choice(listed(UNARY) + listed(BINARY) * 2)
        return self.plain(target, "op", text.format(a=a, b=b), [a, b] if "{b}" in text else [a])

    def shaped(self, target: str) -> Stmt:
        (a,), text = self.names(1), self.source.choice(listed(SHAPED))
        b = self.alike(a)
        return self.plain(target, "op", text.format(a=a, b=b), [a, b] if "{b}" in text else [a])

    def region(self, target: str) -> Stmt:
        kind = self.source.choice(list(REGIONS))
        (a,) = self.names(1)
        text, uses = self.filled(REGIONS[kind], a)
        return self.plain(target, kind, text, uses)

    def filled(self, text: str, a: str, op: str = "") -> tuple[str, list[str]]:
        """A region with its expressions; `op` is applied within the first."""
        b, k = self.alike(a), self.source.number(-1.5, 1.5)
        inside = {"U": self.unary(), "Q": self.unary()}
        for letter, unary in inside.items():
            text = substituted(text, letter, unary, op if letter == "U" else "")
        return text.format(a=a, b=b, k=k), [a, b] if "{b}" in text else [a]

    def override(self, target: str) -> Stmt:
        op_type = self.source.choice(list(OVERRIDES))
        name = OVERRIDES[op_type]
        (a,) = self.names(1)
        if op_type in ("Mul", "Sum") or self.source.chance(40):
            b = self.alike(a)
            args = f"{a}, {b}" if op_type == "Mul" else a
            text, uses = f"OP({args})", [a, b] if op_type == "Mul" else [a]
            kind = "override"
        else:
            region = self.source.choice(
                [r for r in REGIONS if r not in INNER and "U(" in REGIONS[r]]
            )
            text, uses = self.filled(REGIONS[region], a, "OP")
            kind = f"override of {region}"
            if any(f"rg.{n}(" in text for n in (name, "sum", "mean")) and op_type in ("Sum", "Mul"):
                return self.basic(target)
        text = text.replace(f"rg.{name}(", "OP(")  # (it binds those, too)
        scope = f'with rule("{op_type}"):'
        lines = (scope, f"    {target} = {text.replace('OP(', f'rg.{name}(')}")
        twin_name = f"twin_{name.rpartition('.')[2]}("
        twin = (f"{target} = {text.replace('OP(', twin_name)}",)
        return Stmt(target, kind, lines, twin, tuple(dict.fromkeys(uses)), surrogate=True)

    def custom(self, target: str) -> Stmt:
        name = self.source.choice(list(CUSTOM))
        (a,) = self.names(1)
        b = self.source.choice(
            [n for n, v in self.values.items() if v.shape == self.values[a].shape]
        )
        uses = [a, b][: CUSTOM[name]]
        text = f"{target} = FUN({', '.join(uses)})"
        return Stmt(
            target, "custom_grad", (text.replace("FUN", name),),
            (text.replace("FUN", f"twin_{name}"),), tuple(dict.fromkeys(uses)),
            surrogate=name in SURROGATES,
        )  # fmt: skip

    def variable(self, target: str, a: str = "") -> Stmt:
        a = a or self.names(1)[0]
        written = f"V.assign(rg.sin(rg.sum({a})))"
        lines = (
            f"{target} = rg.identity(V) * rg.identity(W) * {a}", written,
            f"{target} = {target} + rg.identity(V)",
        )  # fmt: skip
        return Stmt(target, "variable", lines, lines, (a,))


def nested_stmt(target: str, expr: nested.Expr) -> Stmt:
    kinds = sorted(expr.kinds - {"op"})
    lines = (f"{target} = {expr.text}",)
    uses = dict.fromkeys(re.findall(r"\b[tx]\d+\b", expr.text))
    surrogate = any(k.startswith(("override", "custom_grad")) and "true" not in k for k in kinds)
    kind = "nested: " + "; ".join(kinds)
    return Stmt(target, kind, lines, lines, tuple(uses), surrogate)


def substituted(text: str, letter: str, unary: str, op: str) -> str:
    """`U(…)` written out; with `op`, of `OP(…)`."""
    while (i := text.find(f"{letter}(")) >= 0 and not text[i - 1].isalnum():
        depth, j = 1, i + 2
        while depth:
            depth += {"(": 1, ")": -1}.get(text[j], 0)
            j += 1
        inner = f"({text[i + 2 : j - 1]})"
        inner = f"{op}{inner}" if op else inner
        text = text[:i] + "(" + unary.replace("{a}", inner) + ")" + text[j:]
    return text
