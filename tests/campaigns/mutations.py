"""F4: the tests see it when a rule is broken.

The built-in rule of every op type is broken in all ways that are listed here, one at a time. Some
change what the rule answers: its sign, a factor of 2 or of 1.001, zeros, a transposition, entries
in reverse, swapped inputs, a conjugate; some cut a path, so that only higher orders are wrong.
Others change its code: an operator, a comparison, a number, a function for its neighbour. Then the
suite's own check, gradients of the samples against differences, runs on the rows of that op type. A
mutant is *refused* if the check fails or the rule cannot run, *explained* if it returns what the
rule returns on every input tried, edges among them, to third order: then it is the same rule.
Otherwise it survives, and is *silent*.
"""

import dis
import functools
import itertools
import json
import subprocess
import sys
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import regrad as rg
from regrad.core import registry
from regrad.core.registry import OPS
from regrad.core.rule import Rule, parameters
from regrad.core.rule_forms import BoundFunction, Entwined, Joint, PerInput
from regrad.core.tensor import Tensor
from regrad.testing import gradient_report
from tests.campaigns.proof_page import table
from tests.campaigns.records import RESULTS
from tests.campaigns.verdicts import EXPLAINED, REFUSED, SILENT, Verdict
from tests.helpers import sample_runs as runs
from tests.helpers.paths import ROOT
from tests.samples import Sample

TITLE = "broken rules"

Function = Callable[..., Any]


# -- where rules are -------------------------------------------------------------------------------


class Site(NamedTuple):
    """One function of a rule, and how another is put in its place."""

    op_type: str
    wrt: str  # the input whose gradient it gives, "all" or "together"
    rule: Rule
    function: Function


def sites(op_type: str) -> list[Site]:
    """The functions of which an op type's own rule consists."""
    rule = OPS[op_type].shipped
    rule = getattr(rule, "rule", rule)  # what a holomorphic op's wrapper conjugates
    if isinstance(rule, Joint):
        return [Site(op_type, "all", rule, rule.function)]  # pyright: ignore[reportArgumentType]
    if not isinstance(rule, PerInput):
        return []
    found = [Site(op_type, wrt, rule, f) for wrt, f in rule.functions.items() if not is_none(f)]
    if isinstance(rule, Entwined):
        found.append(Site(op_type, "together", rule, rule.of_both))
    return found


def is_none(function: Function) -> bool:
    """Return whether a rule says that there is no gradient: `lambda dy: None`."""
    steps = {step.opname for step in dis.get_instructions(function)}
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and code.co_consts == (None,)
        and steps <= {"RESUME", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
    )


@contextmanager
def broken(site: Site, mutant: Function) -> Iterator[None]:
    """Put a mutant in the place of a rule's function, and the function back afterwards."""
    rule, op = site.rule, OPS[site.op_type]
    part = BoundFunction(mutant, op, site.op_type)
    if isinstance(rule, Joint):
        before, rule.part = rule.part, part
        put_back = functools.partial(setattr, rule, "part", before)
    elif site.wrt == "together":
        assert isinstance(rule, Entwined)
        former, rule.together = rule.together, part
        put_back = functools.partial(setattr, rule, "together", former)
    else:
        assert isinstance(rule, PerInput)
        index = [entry.name for entry in op.inputs].index(site.wrt)
        parts, pulls, short = dict(rule.parts), rule.pulls, rule.short
        rule.parts[index], rule.short = part, part.short
        if pulls is not None:
            rule.pulls = [part.pull if i == index else pull for i, pull in enumerate(pulls)]

        def put_back() -> None:
            rule.parts, rule.pulls, rule.short = parts, pulls, short

        rule.made.clear()
    registry._count_change(op, first=False)
    try:
        yield
    finally:
        put_back()
        if isinstance(rule, PerInput):
            rule.made.clear()
        registry._count_change(op, first=False)


# -- mutants of an answer --------------------------------------------------------------------------


def _turned(dx: Any) -> Any:
    """A transposed gradient, of square matrices; of others with the elements in reverse."""
    if dx.ndim > 1 and dx.shape[-1] == dx.shape[-2]:
        return rg.matrix_transpose(dx)
    return rg.flip(dx)


CONJUGATED, SWAPPED = "conjugated", "inputs swapped"
ANSWERS: dict[str, Function] = {
    "sign": lambda dx: -dx, "factor of 2": lambda dx: 2 * dx,
    "factor of 1.001": lambda dx: 1.001 * dx, "zeros": rg.zeros_like,
    "transposed or reversed": _turned, CONJUGATED: rg.conj, "first order only": rg.stop_gradient,
    "mean for sum": lambda dx: dx * 0 + rg.mean(dx) if dx.ndim else dx * dx,
}  # fmt: skip


def of_answers(site: Site) -> Iterator[tuple[str, Function]]:
    """Mutants that change what a rule answers, or what it is given."""
    function, inputs = site.function, [entry.name for entry in OPS[site.op_type].inputs]
    is_complex = any(a.dtype.kind == "c" for row in rows_of(site.op_type) for a in row.inputs)
    for what, change in ANSWERS.items():
        if what != CONJUGATED or is_complex:
            yield what, like(function, functools.partial(_changed, function, change))
    if isinstance(site.rule, Joint) and len(inputs) > 1:
        yield SWAPPED, like(function, functools.partial(_swapped, function))
    for name in parameters(function):
        if name in ("dy", "y", *inputs):
            yield f"stale {name}", like(function, functools.partial(_stale, function, name))


def like(function: Function, mutant: Function) -> Function:
    """A mutant with the parameters of the function, by which a rule is called."""
    call = lambda *args, **names: mutant(args, names)  # noqa: E731
    return functools.wraps(function)(call)


def _changed(function: Function, change: Function, args: Any, names: Any) -> Any:
    return _each(change, function(*args, **names))


def _each(change: Function, answer: Any) -> Any:
    if isinstance(answer, list | tuple):
        return [_each(change, dx) for dx in answer]
    return change(answer) if isinstance(answer, Tensor) else answer


def _swapped(function: Function, args: Any, names: Any) -> Any:
    answer = function(*args, **names)
    return answer[::-1] if isinstance(answer, list | tuple) else answer


def _stale(function: Function, name: str, args: Any, names: Any) -> Any:
    given = dict(zip(parameters(function), args, strict=False)) | names
    given[name] = _each(rg.stop_gradient, given[name])
    return function(**given)


# -- mutants of code -------------------------------------------------------------------------------

OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "**": "*", "@": "*", "//": "/", "%": "/"}
COMPARISONS = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "!=", "!=": "=="}
BOUNDS = {"<": "<=", ">": ">=", "<=": "<", ">=": ">"}
NAMES = {
    "sin": "cos", "cos": "sin", "sinh": "cosh", "cosh": "sinh", "tan": "tanh", "tanh": "tan",
    "exp": "expm1", "expm1": "exp", "log": "log1p", "log1p": "log", "sqrt": "square",
    "square": "sqrt", "real": "imag", "imag": "real", "maximum": "minimum",
    "minimum": "maximum", "floor": "ceil", "ceil": "floor",
    "sum": "mean", "mean": "sum", "tril": "triu", "triu": "tril",
    "argmax": "argmin", "argmin": "argmax", "logical_and": "logical_or", "rsqrt": "sqrt",
    "logical_or": "logical_and", "greater": "less", "less": "greater", "sign": "ones_like",
    "zeros_like": "ones_like", "ones_like": "zeros_like",
}  # fmt: skip


LEFT_OUT = {
    "sum_to", "broadcast_to", "permute_dims", "reshape", "flip", "matrix_transpose", "_adjoint",
    "conj", "real", "clip", "abs", "stop_gradient", "reciprocal", "tril", "triu",
    "cumulative_sum", "expand_dims", "roll", "pad", "astype", "squeeze", "take_along_axis",
    "_or_zero", "or_zero", "swapaxes", "moveaxis",
}  # fmt: skip


def of_code(function: Function) -> Iterator[tuple[str, Function]]:
    """Mutants that differ in one instruction, one number or one name."""
    code = getattr(function, "__code__", None)
    if not isinstance(function, types.FunctionType) or code is None:
        return
    for what, mutated, extra in [*_instructions(code), *_numbers(code), *_names(code)]:
        scope = {**function.__globals__, **extra}
        mutant = types.FunctionType(
            mutated, scope, function.__name__, function.__defaults__, function.__closure__
        )
        mutant.__kwdefaults__ = function.__kwdefaults__
        yield what, mutant


Code = tuple[str, types.CodeType, dict[str, Any]]


def _instructions(code: types.CodeType) -> Iterator[Code]:
    symbols = {name: i for i, (_, name) in enumerate(dis._nb_ops)}  # pyright: ignore
    for step in dis.get_instructions(code):
        at = step.positions
        where = f"line {at.lineno}:{at.col_offset}" if at else f"at {step.offset}"
        if step.opname == "BINARY_OP" and (other := OPERATORS.get(step.argrepr)):
            what = f"{step.argrepr} to {other}"
            yield _with_byte(code, step.offset + 1, symbols[other], what, where)
        elif step.opname == "COMPARE_OP":
            for table in (COMPARISONS, BOUNDS):
                if other := table.get(step.argrepr):
                    byte = step.arg + _comparison(other) - _comparison(step.argrepr)
                    what = f"{step.argrepr} to {other}"
                    yield _with_byte(code, step.offset + 1, byte, what, where)
        elif step.opname == "UNARY_NEGATIVE":
            yield _with_byte(code, step.offset, dis.opmap["NOP"], "- left out", where)


@functools.cache
def _comparison(symbol: str) -> int:
    """How this version of Python encodes a comparison."""
    code = compile(f"a {symbol} b", "", "eval")
    return next(s.arg for s in dis.get_instructions(code) if s.opname == "COMPARE_OP") or 0


def _with_byte(code: types.CodeType, place: int, byte: int, what: str, where: str) -> Code:
    raw = bytearray(code.co_code)
    raw[place] = byte
    return f"{what}, {where}", code.replace(co_code=bytes(raw)), {}


def _numbers(code: types.CodeType) -> Iterator[Code]:
    for i, value in enumerate(code.co_consts):
        if type(value) in (int, float) and (i or code.co_consts[0] is not None):
            for other in {value + 1, 2 * value, -value} - {value}:
                consts = (*code.co_consts[:i], type(value)(other), *code.co_consts[i + 1 :])
                yield f"{value} to {other}", code.replace(co_consts=consts), {}
        elif isinstance(value, bool):
            consts = (*code.co_consts[:i], not value, *code.co_consts[i + 1 :])
            yield f"{value} to {not value}", code.replace(co_consts=consts), {}


def _names(code: types.CodeType) -> Iterator[Code]:
    """Another function for a name, or none; branches and parameters swapped."""
    for i, name in enumerate(code.co_names):
        others: dict[str, Function] = {}
        if name in LEFT_OUT:
            others["left out"] = _first
        if name == "where":
            others["swapped"] = lambda condition, a, b: rg.where(condition, b, a)
        if other := NAMES.get(name):
            others[f"to {other}"] = getattr(rg, other)
        names = (*code.co_names[:i], "mutant", *code.co_names[i + 1 :])
        for what, function in others.items():
            yield f"{name} {what}", code.replace(co_names=names), {"mutant": function}
    given = code.co_varnames[: code.co_argcount]
    for i, j in itertools.combinations(range(1, len(given)), 2):
        variables = list(code.co_varnames)
        variables[i], variables[j] = variables[j], variables[i]
        # (a rule asks by name, and its body finds its variables by place)
        yield f"{given[i]} for {given[j]}", code.replace(co_varnames=tuple(variables)), {}


def _first(x: Any, *args: Any, **options: Any) -> Any:
    return x


# -- the check -------------------------------------------------------------------------------------


def rows_of(op_type: str) -> list[Sample]:
    """The samples of an op type, smallest first."""
    rows = [row for row in runs.ROWS if row.order and op_type in row.covers]
    return sorted(rows, key=lambda row: sum(a.size for a in row.inputs))


def checks(row: Sample) -> Iterator[tuple[int, Function, Sequence[np.ndarray]]]:
    """Yield the checks of a row against differences: the order, a function, its inputs."""
    for order in range(1, row.order + 1):
        yield order, row.f, row.inputs
        if order == 2:
            yield order, runs.squared(row), row.inputs
            yield from ((order, one.f, one.inputs) for one in runs.alone(row))


def caught(op_type: str) -> str:
    """The first check of the suite that fails, in words; nothing if all pass."""
    rows = rows_of(op_type)
    found = sorted(
        ((*check, row.rtol) for row in rows for check in checks(row)), key=lambda c: c[0]
    )
    for order, f, inputs, rtol in found:
        try:
            xs = [rg.asarray(a) for a in inputs]
            if not gradient_report(f, xs, order=order, rtol=rtol).ok:
                return f"differences at order {order}"
        except Exception as error:
            return f"{type(error).__name__} at order {order}"
    return ""


def is_same(site: Site, mutant: Function) -> bool:
    """Return whether a mutant runs, and does what the rule does on the samples and around them."""
    cases = [
        (each, xs)
        for row in rows_of(site.op_type)
        for each in (row, replace(row, f=runs.squared(row)), *runs.alone(row))
        for xs in variants(each)
    ]
    due = [*map(_gradients, cases)]
    calls = Counter[str]()

    def counted(args: Any, names: Any) -> Any:
        calls["of the mutant"] += 1
        return mutant(*args, **names)

    with broken(site, like(mutant, counted)):
        same = all(_equal(_gradients(case), d) for case, d in zip(cases, due, strict=True))
    return same and bool(calls)


def variants(row: Sample) -> Iterator[list[np.ndarray]]:
    """The inputs, and others: at random, all equal, at zero, rounded, large, negative."""
    rng = np.random.default_rng(4)
    yield list(row.inputs)
    for change in (
        lambda a: a + rng.normal(size=a.shape).astype(a.dtype),
        lambda a: a * 0 + a.dtype.type(0.5),
        lambda a: a * 0,
        np.round,
        lambda a: a * a.dtype.type(30),
        lambda a: -a,
    ):
        yield [change(a) if runs.is_float(a) else a for a in row.inputs]


def _gradients(case: tuple[Sample, list[np.ndarray]]) -> list[np.ndarray] | str:
    row, xs = case
    found: list[np.ndarray] = []
    try:
        for order in range(1, min(row.order, 2) + 1):
            found += runs.gradients(row, list(xs), order)
    except Exception as error:
        return type(error).__name__
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return all(
        np.allclose(x, y, rtol=1e-9, atol=1e-12, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


# -- the campaign ----------------------------------------------------------------------------------


def jobs(quick: bool = False) -> list[str]:
    """The op types that have a rule of their own and samples to check it."""
    names = [name for name in sorted(OPS) if name[0] != "_" and sites(name) and rows_of(name)]
    return [name for name in names if name not in survivors()][::40] if quick else names


def survivors() -> set[str]:
    """The op types of which a mutant survived in the recorded run; the page lists them.

    The quick run is to find what is new, and leaves them to the whole one.
    """
    record = json.loads((RESULTS / "F4.json").read_text(encoding="utf-8"))
    silent = [each["cases"] for each in record["classes"] if each["outcome"] == SILENT]
    return {case.partition(",")[0] for cases in silent for case in cases}


def mutants(site: Site) -> Iterator[tuple[str, Function]]:
    yield from of_answers(site)
    yield from of_code(site.function)


def run(job: str, quick: bool = False) -> Iterator[Verdict]:
    """Break the rule of an op type in every way."""
    for site in sites(job):
        for what, mutant in mutants(site):
            yield judge(site, what, mutant)


def judge(site: Site, what: str, mutant: Function) -> Verdict:
    case = f"{site.op_type}, {site.wrt}: {what}"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            with broken(site, mutant):
                found = caught(site.op_type)
        except rg.errors.RegradError as error:  # the mutant asks for a name that there is not
            found = type(error).__name__
        if found:
            return Verdict(case, REFUSED, found)
        if is_same(site, mutant):
            return Verdict(case, EXPLAINED, "the same rule")
    if conventions_fail(case):
        return Verdict(case, REFUSED, CONVENTIONS)
    return Verdict(case, SILENT, "survived")


# What gradients are at kinks, ties and singular points is no derivative, and has tests of its own.
FILES = (
    "tests/core/test_conventions.py", "tests/ops/test_nn.py", "tests/ops/test_axes.py",
    "tests/ops/test_linalg.py", "tests/ops/test_degenerate.py", "tests/ops/test_elements.py",
)  # fmt: skip
CONVENTIONS = "a test of conventions"


def conventions_fail(case: str) -> bool:
    """Return whether one of these tests fails under a mutant, in a process of its own."""
    command = [sys.executable, "-m", "tests.campaigns.mutations", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return done.returncode == 1


def main(case: str) -> int:
    """Run the tests of conventions with one mutant in force."""
    op_type, _, wrt = case.partition(": ")[0].partition(", ")
    site = next(site for site in sites(op_type) if site.wrt == wrt)
    mutant = dict(mutants(site))[case.partition(": ")[2]]
    with broken(site, mutant):
        return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *FILES])


def kind_of(case: str) -> str:
    what = case.partition(": ")[2]
    if what.startswith("stale "):
        return "stale value"
    return what if what in (*ANSWERS, SWAPPED) else "code"


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """The kind of mutant and the check that caught it; survivors one by one."""
    kind = kind_of(case)
    return (f"{kind}: {case}", case) if outcome == SILENT else (f"{kind}: {detail}", case)


# -- the page --------------------------------------------------------------------------------------


def tables(classes: Sequence[Mapping[str, Any]]) -> str:
    """Return the score: mutants by kind, and what has caught them."""
    columns = [*(f"differences at order {n}" for n in (1, 2, 3)), CONVENTIONS, "an error"]
    columns += [SILENT, EXPLAINED]
    titles = ["order 1", "order 2", "order 3", "conventions", "an error", "survived", "the same"]
    every: dict[str, Counter[str]] = defaultdict(Counter)
    for each in classes:
        kind, _, detail = each["class"].partition(": ")
        found = detail if detail in columns else "an error"
        every[kind][found if each["outcome"] == REFUSED else each["outcome"]] += each["count"]
    total = sum(every.values(), Counter())
    rows = [
        [kind, *[f"{counts[c]:,}" for c in columns]]
        for kind, counts in [*every.items(), ("**all**", total)]
    ]
    different = sum(total.values()) - total[EXPLAINED]
    score = 100 * (different - total[SILENT]) / different if different else 100
    text = table(["mutants", *titles], rows, numbers=len(titles))
    return f"Caught: {score:.2f} % of {different:,} mutants that differ from the rule.\n\n{text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
