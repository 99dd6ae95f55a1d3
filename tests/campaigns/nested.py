"""Nested programs: expressions in which every construct holds every other.

Their data are vectors and numbers, in containers: dicts, tuples in tuples, leaves that are None.
Functions close over what is around them, call themselves, open scopes; functions with a gradient
of their own are in every construct, and every construct is in them. The twin is the same text run
by JAX (see `in_jax`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.campaigns.sources import Source

PRELUDE = """
import functools

NESTED_RULES = {
    "Sin": lambda dy, x: dy * rg.cos(2.0 * x),
    "Tanh": lambda dy, x: dy * rg.sin(x) * 0.7,
    "Atan": lambda dy, x: dy * (1.5 + x * x) * 0.3,
    "Square": lambda dy, x: dy * rg.tanh(x),
}

def under(op_type, f):
    with rg.gradient_override_map({op_type: NESTED_RULES[op_type]}):
        return f()

def placed(name, op_type, f, g):
    with rg.gradient_override_map({rg.at(f"**.{name}", op_type): NESTED_RULES[op_type]}):
        with rg.name_scope(name):
            y = 0.9 * f()
        return y + g()

def again(n, f, x):
    return x if n == 0 else f(lambda y: again(n - 1, f, y), x)

def saving(f, k):
    def call(*xs, save):
        save(list(xs))
        return f(*xs), lambda dy, saved: [k * dx for dx in rg.vjp(f, *saved)[1](dy)]
    return rg.custom_grad(call)

def closing(f, k):
    def call(x):
        return f(x), lambda dy: k * rg.grad(lambda p: rg.sum(f(p) * dy))(x)
    return rg.custom_grad(call)

def halfway(f, k):
    def call(x, save):
        slope = rg.cos(x) * k
        save(slope=slope, x=x)
        y = rg.sin(x)
        return (y, f(x)), lambda dy, s: dy[0] * s.slope + rg.vjp(f, s.x)[1](dy[1])[0]
    return rg.custom_grad(call)

def of_dicts(f, k):
    def call(d, save):
        save(p=d["p"], q=d["q"][0])
        def back(dy, s):
            dp, dq = rg.vjp(f, s.p, s.q)[1](dy["y"][0])
            return {"p": k * dp + dy["z"] * s.p, "q": (k * dq, None), "n": None}
        y = f(d["p"], d["q"][0])
        return {"y": (y, None), "z": 0.5 * d["p"] * d["p"]}, back
    return rg.custom_grad(call)
""".strip()

# `[[v]]` is an expression for a vector, `[[s]]` for a number; `|` adds names to those in scope, and
# `!` takes all others away. @1, @2 and @3 are parameters, K a number, OP an op type with a rule.
VECTORS = {
    "scan": "rg.scan(lambda @1, @2: ({'a': [[v|@1['a']:v,@1['b'][0]:s,@2:s]], 'b': "
        "([[s|@1['a']:v,@1['b'][0]:s,@2:s]], None)}, @1['b'][0] * @2), {'a': [[v]], 'b': ([[s]], "
        "None)}, [[v]])[0]['a']",
    "scan, results": "rg.scan(lambda @1, @2: ((@1[0] + 0.5 * @2['x'], (None,)), {'y': "
        "[[s|@1[0]:s,@2['x']:s,@2['w'][0]:s]], 'n': None}), ([[s]], (None,)), {'x': [[v]], 'w': "
        "([[v]], None)}, reverse=True)[1]['y']",
    "scan, checkpoint": "rg.scan(lambda @1, _: (([[v|@1[0]:v]], @1[1]), None), ([[v]], None), "
        "length=2, checkpoint=True)[0][0]",
    "cond": "rg.cond(rg.sum([[v]]) > K, lambda @1: {'y': ([[v|@1['p']:v]], None)}, lambda @2: "
        "{'y': (@2['p'] * [[s|@2['p']:v]], None)}, {'p': [[v]], 'n': None})['y'][0]",
    "cond, closure": "rg.cond([[s]] > K, lambda: [[v]], lambda: [[v]])",
    "while_loop": "rg.while_loop(lambda @1: @1['i'] < 2.0, lambda @2: {'i': @2['i'] + 1.0, 'y': "
        "([[v|@2['y'][0]:v]], None)}, {'i': number(0.5), 'y': ([[v]], None)}, max_steps=3)['y'][0]",
    "fori_loop": "rg.fori_loop(0, 2, lambda _, @1: ([[v|@1[0]:v,@1[1][0]:s]], "
        "([[s|@1[0]:v,@1[1][0]:s]], None)), ([[v]], ([[s]], None)))[0]",
    "map": "rg.map(lambda @1: [[s|@1:s]], [[v]])",
    "vmap": "rg.vmap(lambda @1: {'y': ([[s|@1['r']:s,@1['q'][0]:s]], None)})({'r': [[v]], 'q': "
        "([[v]], None)})['y'][0]",
    "vmap, axes": "rg.vmap(lambda @1, @2: [[s|@1:s,@2['w']:v]], in_axes=(0, None))([[v]], {'w': "
        "[[v]]})",
    "checkpoint": "rg.checkpoint(lambda @1: ([[v|@1['p']:v,@1['q'][0]:v]], None))({'p': [[v]], "
        "'q': ([[v]], None)})[0]",
    "jit": "rg.jit(lambda @1, @2: {'y': ([[v|@1['p']:v,@2[0]:s]], None)})({'p': [[v]], 'n': None}, "
        "([[s]], None))['y'][0]",
    "grad": "rg.grad(lambda @1: rg.sum([[v|@1:v]] * @1))([[v]])",
    "grad, dict": "rg.grad(lambda @1: rg.sum([[v|@1['p']:v,@1['q'][0]:v]] * @1['p'] * "
        "@1['q'][0]))({'p': [[v]], 'q': ([[v]], None)})['p']",
    "vjp": "rg.vjp(lambda @1: {'y': ([[v|@1['p']:v]] * @1['p'], None)}, {'p': [[v]], 'n': "
        "None})[1]({'y': ([[v]], None)})[0]['p']",
    "jvp": "rg.jvp(lambda @1, @2: [[v|@1:v,@2:v]] + @1 * @2, [[[v]], [[v]]], [[[v]], [[v]]])[1]",
    "override": "under(OP, lambda: [[v]])",
    "override, at a place": "placed('@1', OP, lambda: [[v]], lambda: [[v]])",
    "override, of a function": "(lambda @1: under(OP, lambda: @1([[v]])))(lambda @2: [[v|@2:v]])",
    "recursion": "again(2, lambda @1, @2: @1([[v|@2:v]]) * 0.5 + [[v|@2:v]], [[v]])",
    "recursion, closure": "again(2, lambda @1, @2: rg.cond(rg.sum(@2) > K, lambda: [[v|@2:v]], "
        "lambda: @1(@2)), [[v]])",
    "used twice": "(lambda @1: [[v|@1:v]] * rg.sum(@1) + [[v|@1:v]])([[v]])",
    "closure": "(lambda @1: lambda @2: [[v|@1:v,@2:v]])([[v]])([[v]])",
    "partial": "functools.partial(lambda @1, @2: [[v|@1:v,@2['p']:v]], [[v]])({'p': [[v]]})",
    "custom_grad": "saving(lambda @1, @2: [[v!@1:v,@2:v]], K)([[v]], [[v]])",
    "custom_grad, closing": "closing(lambda @1: [[v!@1:v]], K)([[v]])",
    "custom_grad, halfway": "rg.sum(rg.stack(halfway(lambda @1: [[v!@1:v]], K)([[v]])), axis=0)",
    "custom_grad, dicts": "(lambda @3: @3['y'][0] + @3['z'])(of_dicts(lambda @1, @2: "
        "[[v!@1:v,@2:v]], K)({'p': [[v]], 'q': ([[v]], None), 'n': None}))",
    "custom_grad, true": "saving(lambda @1, @2: [[v!@1:v,@2:v]], 1.0)([[v]], [[v]])",
}  # fmt: skip
NUMBERS = {
    "sum": "rg.sum([[v]]) * 0.4",
    "scan, number": "rg.scan(lambda @1, @2: ([[s|@1:s,@2:s]], None), [[s]], [[v]])[0]",
    "cond, number": "rg.cond([[s]] > K, lambda @1: [[s|@1:s]], lambda _: [[s]], [[s]])",
    "checkpoint, number": "rg.checkpoint(lambda @1, @2: [[s|@1:s,@2:v]])([[s]], [[v]])",
    "jit, number": "rg.jit(lambda @1: ([[s|@1[0]:s]], None))(([[s]], None))[0]",
    "grad, number": "rg.grad(lambda @1: [[s|@1:s]] * @1)([[s]])",
    "override, number": "under(OP, lambda: [[s]])",
    "custom_grad, number": "closing(lambda @1: [[s!@1:s]], K)([[s]])",
    "custom_grad, two": "saving(lambda @1, @2: rg.sum([[v!@1:s,@2:v]]), K)([[s]], [[v]])",
}  # fmt: skip
PLAIN = [
    "rg.sin([[k]])", "rg.tanh([[k]])", "rg.atan([[k]])", "rg.square(rg.sin([[k]]))",
    "rg.cos([[k]])", "rg.exp(rg.tanh([[k]]))", "rg.sqrt(rg.square([[k]]) + 0.3)",
    "[[k]] / (1.0 + rg.square([[k]]))", "[[k]] * [[s]]", "[[k]] + [[k]]", "[[k]] - [[k]]",
    "[[k]] * rg.sin([[k]])", "rg.where([[k]] > 0.1, [[k]], rg.sin([[k]]))", "0.5 * [[k]]",
]  # fmt: skip
RULES = ("Sin", "Tanh", "Atan", "Square")
SLOT = re.compile(r"\[\[([vs])(?:([|!])(.*?:[vs]))?\]\]")


class Expr(NamedTuple):
    """An expression, and the name of the construct that it is."""

    parts: tuple["str | Expr", ...]
    kind: str = "op"

    @property
    def text(self) -> str:
        return "".join(p if isinstance(p, str) else f"({p.text})" for p in self.parts)

    @property
    def inner(self) -> Iterator["Expr"]:
        return (p for p in self.parts if isinstance(p, Expr))

    @property
    def kinds(self) -> set[str]:
        return {self.kind}.union(*[e.kinds for e in self.inner])


class Writer:
    """Random expressions; parameters have names that occur once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.count = 0

    def expr(self, kind: str, names: Mapping[str, str], depth: int) -> Expr:
        """An expression of a kind, by names in scope, with so many constructs within each other."""
        what = self.source.integer(0, 19)
        if what < (12 if depth <= 0 else 2):
            return Expr((self.leaf(kind, names),))
        if what < 7 or depth <= 0:
            plain = self.source.choice(PLAIN).replace("[[k]]", f"[[{kind}]]")
            return self.filled("op", plain, names, depth)
        constructs = VECTORS if kind == "v" else NUMBERS
        scopes = [name for name in constructs if name.startswith("override")]
        label = self.source.choice(scopes if self.source.chance(25) else list(constructs))
        return self.filled(label, constructs[label], names, depth)

    def filled(self, label: str, text: str, names: Mapping[str, str], depth: int) -> Expr:
        """A construct with expressions in its slots, one of them as deep as it may be."""
        for i in (1, 2, 3):
            if f"@{i}" in text:
                self.count += 1
                text = text.replace(f"@{i}", f"p{self.count}")
        text = re.sub(r"\bK\b", lambda _: str(self.source.number(0.3, 1.6)), text)
        text = re.sub(r"\bOP\b", lambda _: repr(self.source.choice(RULES)), text)
        slots = [*SLOT.finditer(text)]
        deep = self.source.choice(slots)
        parts: list[str | Expr] = []
        end = 0
        for slot in slots:
            parts.append(text[end : slot.start()])
            inside = {} if slot[2] == "!" else dict(names)
            inside.update(entry.split(":") for entry in (slot[3] or "").split(",") if entry)
            deeper = slot is deep or label == "op"
            parts.append(self.expr(slot[1], inside, depth - 1 if deeper else 0))
            end = slot.end()
        return Expr((*parts, text[end:]), label)

    def leaf(self, kind: str, names: Mapping[str, str]) -> str:
        """A name in scope, those of parameters more often."""
        own = [n for n, of in names.items() if of == kind]
        if own:
            return self.source.weighed(own, [1 + 2 * n.startswith("p") for n in own])
        name = self.leaf("v" if kind == "s" else "s", names)
        return f"rg.sum({name}) * 0.4" if kind == "s" else f"{name} + rg.asarray(np.zeros(3))"
