"""F3: what a rule or a grad_func answers is refused by name unless it is a gradient.

A function of two inputs, a and b, whose rule answers wrongly, in every form that a rule can take
and in every mode. The answer must be *refused* by an error that names the rule or the op type
(and the input, where one entry is at fault). It is *delivered* where the library takes it for
the gradients that were meant, *silent* where it goes on with other numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.errors import RegradError
from tests.campaigns import graphs
from tests.campaigns.verdicts import REFUSED, UNNAMED, Verdict, judged, shown
from tests.helpers import sample_runs as runs

TITLE = "wrong answers"

Function = Callable[..., Any]
Answer = Callable[[Sequence[Any]], Any]  # of the right gradients

A, B = np.array([0.5, -1.5, 2.0]), np.array([1.5, 0.25, -0.75])
W = np.array([1.0, 2.0, 4.0])  # dy
RIGHT = [W * B, W * A]

# -- wrong answers ---------------------------------------------------------------------------------
#
# Wrong for one input: what stands in the place of the last gradient.

ENTRIES: dict[str, Function] = {
    "a string": lambda g: "dy", "a number": lambda g: 2.5,
    "a list of numbers": lambda g: [1.0, 2.0, 3.0], "an object": lambda g: object(),
    "a function": lambda g: lambda: g, "a generator": lambda g: (x for x in [g]),
    "a dict": lambda g: {"x": g}, "a set of names": lambda g: {"a"},
    "a NumPy array, float32": lambda g: np.ones(3, np.float32),
    "a NumPy array, int64": lambda g: np.ones(3, np.int64),
    "a NumPy array of strings": lambda g: np.array(["a", "b", "c"]),
    "the shape (1, 3)": lambda g: rg.reshape(g, (1, 3)),
    "the shape (3, 1)": lambda g: rg.reshape(g, (3, 1)),
    "the shape (2, 3)": lambda g: rg.stack([g, g]), "the shape (2,)": lambda g: g[:2],
    "the shape ()": lambda g: rg.sum(g), "the shape (0,)": lambda g: g[:0],
    "the dtype float32": lambda g: rg.astype(g, np.float32),
    "the dtype int64": lambda g: rg.astype(g, np.int64), "the dtype bool": lambda g: g > 0,
    "the dtype complex128": lambda g: rg.astype(g, np.complex128),
    "nested lists": lambda g: [[g * 2, g]], "an empty list": lambda g: [],
}  # fmt: skip

# Wrong as a whole.
WHOLES: dict[str, Answer] = {
    "too few": lambda gs: list(gs[:-1]), "too many": lambda gs: [*gs, gs[0] * 5],
    "nothing in a list": lambda gs: [], "twice over": lambda gs: [*gs, *gs],
    "a string per input": lambda gs: "ab"[: len(gs)],
    "one Tensor stacked": lambda gs: rg.stack([g * 2 for g in gs]),
    "a generator of gradients": lambda gs: (g for g in gs),
    "a dict by other names": lambda gs: {"p": gs[0] * 3, "q": gs[-1] * 5},
    "a list in a list": lambda gs: [[*gs, gs[0]]],
    "Nones, too many": lambda gs: [None] * (len(gs) + 1) + [gs[0]],
    "an exception class": lambda gs: ValueError,
}  # fmt: skip

# Right: the harness must see these pass.
LEGITIMATE: dict[str, Answer] = {
    "a list": list, "a tuple": tuple, "infinite and NaN": lambda gs: [g * np.nan for g in gs],
    "None for the last": lambda gs: [*gs[:-1], rg.rules.no_gradient(gs[-1])],
}  # fmt: skip


def with_last(entry: Function, gs: Sequence[Any]) -> Any:
    """The right gradients, but for the last; without a list if there is only one."""
    answers = [*gs[:-1], entry(gs[-1])]
    return answers[0] if len(answers) == 1 else answers


class Fault(NamedTuple):
    """A wrong answer, and whether one input is to blame."""

    name: str
    answer: Answer
    of_one_input: bool


FAULTS = [
    *[Fault(name, partial(with_last, entry), True) for name, entry in ENTRIES.items()],
    *[Fault(name, answer, False) for name, answer in WHOLES.items()],
]

# -- forms -----------------------------------------------------------------------------------------
#
# Each makes a function of a and b out of an answer; for `products`, the right gradients are those
# of a * b.


def products(dy: Any, a: Any, b: Any) -> list[Any]:
    return [rg.asarray(dy) * rg.asarray(b), rg.asarray(dy) * rg.asarray(a)]


def overridden(rule: Any, op_type: str = "Mul", op: Function = rg.multiply) -> Function:
    def run(*xs: Any) -> Any:
        with rg.gradient_override_map({op_type: rule}):
            return op(*xs)

    return run


def native(answer: Answer) -> Function:
    def faulty(dy: Any, a: Any, b: Any) -> Any:
        return answer(products(dy, a, b))

    return overridden(faulty)


def tensorflows(answer: Answer) -> Function:
    def faulty(op: Any, grad: Any) -> Any:
        return answer(products(grad, *op.inputs))

    return overridden(faulty)


def registered(answer: Answer) -> Function:
    """A rule by its name; each gets one of its own, as names cannot be given up again."""
    name = f"faulty{next(NUMBERS)}"

    @rg.RegisterGradient(name)
    def rule(dy: Any, a: Any, b: Any) -> Any:
        return answer(products(dy, a, b))

    return overridden(name)


def one_input(answer: Answer) -> Function:
    """One input, and so an answer that need not be a list."""

    def faulty(dy: Any, x: Any) -> Any:
        return answer([rg.asarray(dy) * rg.cos(x)])

    sine = overridden(faulty, "Sin", rg.sin)
    return lambda a, b: sine(b) + a * 0.0


def per_input(answer: Answer) -> Function:
    """An op of our own, whose rule for its second input is at fault."""
    op_type = f"Faulty{next(NUMBERS)}"

    @rg.op(op_type)
    def product(xp: Any, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
        return a * b

    @rg.gradient(op_type, "a")
    def _(dy: Any, b: Any) -> Any:
        return dy * b

    @rg.gradient(op_type, "b")
    def _(dy: Any, a: Any) -> Any:
        return answer([dy * a])

    return product


def sequence(answer: Answer) -> Function:
    """An op of a sequence of tensors."""

    def faulty(dy: Any) -> Any:
        return answer([rg.asarray(dy) * 1.0, rg.asarray(dy) * 1.0])

    return overridden(faulty, "AddN", lambda a, b: rg.add_n([a, b]))


def custom(answer: Answer) -> Function:
    @rg.custom_grad
    def faulty(a: Any, b: Any) -> Any:
        return a * b, lambda dy: answer(products(dy, a, b))

    return faulty


def custom_of_one(answer: Answer) -> Function:
    @rg.custom_grad
    def faulty(b: Any) -> Any:
        return rg.sin(b), lambda dy: answer([rg.asarray(dy) * rg.cos(b)])

    return lambda a, b: faulty(b) + a * 0.0


def custom_of_dict(answer: Answer) -> Function:
    """One argument that holds both inputs; a right answer has its structure."""

    @rg.custom_grad
    def faulty(p: Any) -> Any:
        return p["a"] * p["b"], lambda dy: answer(products(dy, p["a"], p["b"]))

    return lambda a, b: faulty({"a": a, "b": b})


NUMBERS = iter(range(10**9))
FORMS: dict[str, Function] = {
    "native": native, "native, one input": one_input, "TensorFlow's": tensorflows,
    "registered": registered, "per input": per_input, "a sequence": sequence, "custom_grad": custom,
    "custom_grad, one input": custom_of_one, "custom_grad of a dict": custom_of_dict,
}  # fmt: skip
DUE = {
    "native, one input": [A * 0, W * np.cos(B)], "custom_grad, one input": [A * 0, W * np.cos(B)],
    "a sequence": [W, W],
}  # fmt: skip

# Structures: what custom_grad may be given for a dict of a and b.
STRUCTURES: dict[str, Answer] = {
    "a list for a dict": list,
    "a tuple for a dict, the wrong way round": lambda gs: tuple(gs[::-1]),
    "a missing key": lambda gs: {"a": gs[0]},
    "an extra key": lambda gs: {"a": gs[0], "b": gs[1], "c": gs[0]},
    "other keys": lambda gs: {"z": gs[0], "y": gs[1]},
    "by the argument's name": lambda gs: {"p": gs},
    "one key, one container": lambda gs: {"a": gs[0], "b": {"b": gs[1] * 3}},
    "a list of dicts, too many": lambda gs: [{"a": gs[0], "b": gs[1]}, {"a": gs[0], "b": gs[1]}],
    "a generator of pairs": lambda gs: (p for p in zip("ab", gs, strict=True)),
}
RIGHT_STRUCTURES: dict[str, Answer] = {
    "a dict": lambda gs: {"a": gs[0], "b": gs[1]},
    "a dict, the other order": lambda gs: {"b": gs[1], "a": gs[0]},
    "a list of a dict": lambda gs: [{"a": gs[0], "b": gs[1]}],
    "a dict, None in it": lambda gs: {"a": gs[0], "b": None},
}  # fmt: skip

# -- modes -----------------------------------------------------------------------------------------


def in_library(library: str, wrap: Function = lambda f: f) -> Function:
    def run(f: Function) -> Any:
        xs = [rg.asarray(runs.arrays_of(library, x)) for x in (A, B)]
        dy = rg.asarray(runs.arrays_of(library, W))
        return rg.grads(wrap(f), unconnected="zero")(xs, dy)

    return run


def within(f: Function) -> Any:
    return rg.jit(lambda a, b: rg.grads(f, unconnected="zero")([a, b], W))(A, B)


def mapped(f: Function) -> Function:
    return lambda a, b: rg.vmap(f)(rg.stack([a, a]), rg.stack([b, b]))[0]


def scanned(f: Function, **options: Any) -> Function:
    return lambda a, b: rg.scan(lambda c, _: (c, f(a, b)), None, length=2, **options)[1][0]


def in_branch(f: Function) -> Function:
    return lambda a, b: rg.cond(rg.sum(a) > -99, f, lambda a, b: a, a, b)


def in_graph(f: Function) -> Any:
    def dxs(*xs: Any) -> Any:
        y = tf.convert_to_tensor(f(*map(rg.asarray, xs)))
        return list(tf.gradients(y, xs, grad_ys=[W], unconnected_gradients="zero"))

    return graphs.in_graph(dxs, (A, B))


MODES: dict[str, Function] = {
    "eager NumPy": in_library("numpy"), "eager JAX": in_library("jax"),
    "eager torch": in_library("torch"), "checkpoint": in_library("numpy", rg.checkpoint),
    "vmap": in_library("numpy", mapped), "vmap, JAX": in_library("jax", mapped),
    "scan": in_library("numpy", scanned), "graph": in_graph, "jit": within,
    "around jit": in_library("numpy", rg.jit), "jit of scan": lambda f: within(scanned(f)),
    "jit of checkpointed scan": lambda f: within(scanned(f, checkpoint=True)),
    "jit of vmap": lambda f: within(mapped(f)), "jit of cond": lambda f: within(in_branch(f)),
    "jit of checkpoint": lambda f: within(rg.checkpoint(f)),
}  # fmt: skip
QUICK = ("eager NumPy", "eager torch", "checkpoint", "scan", "graph", "jit")

# -- verdicts --------------------------------------------------------------------------------------


def named(error: Exception, form: str, fault: Fault) -> bool:
    """Whether the message says whose answer it was, and for which input."""
    text = str(error)
    whose = "aulty" in text or "'Mul'" in text or "'Sin'" in text or "'AddN'" in text
    inputs = ("'x'", "'b'", "xs[1]") if "one input" not in form else ("'x'", "'b'")
    which = any(n in text for n in inputs) or "['b']" in text
    return whose and (which or not fault.of_one_input or "number of gradients" in text)


def verdict(form: str, mode: str, fault: Fault) -> Verdict:
    case = f"{form} {mode}: {fault.name}"
    got = attempt(MODES[mode], FORMS[form](fault.answer))
    if isinstance(got, RegradError):
        is_named = named(got, form, fault)
        return Verdict(case, REFUSED) if is_named else Verdict(case, UNNAMED, shown(got))
    return judged(case, got, DUE.get(form, RIGHT))


def faults(form: str) -> list[Fault]:
    if form == "custom_grad of a dict":
        return [*FAULTS, *[Fault(n, a, False) for n, a in STRUCTURES.items()]]
    return FAULTS


def rights(form: str) -> Iterator[tuple[Fault, list[np.ndarray]]]:
    """Answers that must pass, with what comes of them."""
    due = DUE.get(form, RIGHT)
    lists = RIGHT_STRUCTURES if form == "custom_grad of a dict" else LEGITIMATE
    for name, answer in lists.items():
        fault = Fault(f"right: {name}", answer, False)
        if "None" in name:
            yield fault, [due[0], due[1] * 0]
        elif "NaN" in name:
            one = "one input" in form or form == "per input"
            yield fault, [due[0] if one else due[0] * np.nan, due[1] * np.nan]
        else:
            yield fault, due


def jobs(quick: bool = False) -> list[str]:
    return list(FORMS)


def run(job: str, quick: bool = False) -> list[Verdict]:
    """What comes of every answer in one form, in all modes."""
    found = []
    for mode in QUICK if quick else MODES:
        found += [verdict(job, mode, fault) for fault in faults(job)[:: 3 if quick else 1]]
        for fault, due in rights(job):
            if job == "per input" or "one input" in job:
                fault = fault._replace(answer=partial(alone, fault.answer))
            got = attempt(MODES[mode], FORMS[job](fault.answer))
            found.append(passed(judged(f"{job} {mode}: {fault.name}", got, due)))
    return found


def alone(answer: Answer, gs: Sequence[Any]) -> Any:
    """The answer for one input, not in a list."""
    return next(iter(answer(gs)))


def passed(verdict: Verdict) -> Verdict:
    """A right answer that is refused is a fault too."""
    if verdict.outcome == REFUSED:
        return verdict._replace(outcome="broken", detail="a right answer: " + verdict.detail)
    return verdict


def attempt(f: Function, *args: Any) -> Any:
    try:
        return f(*args)
    except Exception as error:
        return error


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    place, _, fault = case.partition(": ")
    return fault, place
