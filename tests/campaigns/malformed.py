"""F12: a call that makes no sense is refused by an error of regrad's that says which and why.

Functions of the catalogue are called rightly but for one argument, which is replaced by what it
cannot be (`BAD`), left out, given twice or by a name that there is none of; in every mode that
applies. Beside them stands a list of calls written by hand, some of which must not be accepted.

A call is *delivered* if it is accepted, *refused* if the error names the function and the argument,
*refused, unnamed* if it does not, *explained* if Python itself refuses the arguments of a function
that has no room for such an answer, *silent* if it must be refused and is not, and *broken* if
another error comes, or no end, or the end of the process.
"""

import functools
import inspect
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.core.registry import OPS
from regrad.errors import RegradError
from regrad.graph.graph import is_symbolic
from regrad.v1.errors import OpError
from tests.campaigns.malformed_calls import CALLS, CRASHES
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT, UNNAMED, WRONG
from tests.campaigns.verdicts import Verdict, shown

TITLE = "malformed calls"

Function = Callable[..., Any]
LIMIT = 20  # seconds for a call
SPACES: dict[str, ModuleType] = {
    "rg": rg, "rg.nn": rg.nn, "rg.linalg": rg.linalg, "rg.losses": rg.losses,
    "rg.random": rg.random, "tf": tf, "tf.nn": tf.nn, "tf.math": tf.math, "tf.losses": tf.losses,
    "tf.image": tf.image,
}  # fmt: skip
# They keep what they are given, or run nothing but the user's function.
RUN_NOTHING = {
    "rg.op", "rg.RegisterGradient", "rg.gradient", "rg.not_differentiable", "rg.tree_map",
}  # fmt: skip

# -- arguments -------------------------------------------------------------------------------------


def cyclic() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [1.0]
    found.append(found)
    return found


def an_object() -> object:
    return object()


BAD: dict[str, Function] = {
    "None": lambda: None, "text": lambda: "a", "object": an_object, "dict": lambda: {"x": 1.0},
    "empty list": list, "function": lambda: an_object, "fraction": lambda: 1.5,
    "negative": lambda: -7, "huge": lambda: 10**18, "beyond": lambda: 10**400,
    "complex": lambda: 1j, "nan": lambda: float("nan"), "texts": lambda: np.array(["a", "b"]),
    "objects": lambda: np.array([object(), None]),
    "masked": lambda: np.ma.array([1.0, 1000.0], mask=[False, True]),
    "ragged": lambda: [[1.0], [2.0, 3.0]], "cyclic": cyclic,
    "array of rank 5": lambda: np.ones((1, 2, 1, 2, 1), np.float32),
    "no elements": lambda: np.ones((0, 3), np.float32), "bytes": lambda: b"a",
    "a type": lambda: dict,
}  # fmt: skip
MATRIX = np.array([[2.0, 0.5, 0.25], [0.5, 3.0, 0.75], [0.25, 0.75, 4.0]], np.float32)
IMAGE = np.linspace(0.1, 1.0, 96, dtype=np.float32).reshape(2, 4, 4, 3)
TENSORS = {"x", "a", "b", "values", "labels", "predictions", "logits", "losses", "y", "q", "k", "v"}
RIGHT: dict[str, Any] = {
    **dict.fromkeys(TENSORS, MATRIX),
    **dict.fromkeys(["indices", "ids", "repeats"], np.array([0, 1, 2])),
    **dict.fromkeys(["shape", "size", "output_shape"], (3, 3)),
    **dict.fromkeys(["axis", "axis1", "source", "index", "lower", "start", "low", "n", "shift"], 1),
    **dict.fromkeys(["axis2", "destination", "seed", "begin"], 0),
    **dict.fromkeys(["num", "depth", "num_segments", "stop", "high", "upper", "n_rows"], 3),
    **dict.fromkeys(["sections_or_sizes", "k_"], 3),
    **dict.fromkeys(["strides", "stride", "filter_size"], 1),
    **{name: [MATRIX, MATRIX] for name in ("arrays", "xs", "inputs", "tensors")},
    "pad": "same", "paddings": 1, "fill_value": 2.0, "dtype": "float32", "repetitions": (1, 2),
    "mean": 0.5, "variance": 1.5, "decay": MATRIX, "condition": MATRIX > 1, "rate": 0.5,
    "subscripts": "ij,jk->ik", "table": MATRIX, "x1": MATRIX[0], "x2": MATRIX[0],
    "updates": MATRIX, "init": MATRIX[0], "pred": True, "w": IMAGE[:1, :3, :3],
}  # fmt: skip
FUNCTIONS: dict[str, Function] = {
    "f": lambda x: x * 2.0, "true_fn": lambda *xs: xs, "false_fn": lambda *xs: xs,
    "cond_fn": lambda x: rg.sum(x) < 3.0, "body_fn": lambda *xs: xs[-1] + 1.0,
}  # fmt: skip


def is_array(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype.kind in "fib"


# -- modes -----------------------------------------------------------------------------------------
#
# A mode makes the call `f(*tensors)` on arrays.


def eager(library: str) -> Function:
    def run(f: Function, arrays: Sequence[np.ndarray]) -> Any:
        return f(*[rg.asarray(FROM[library](a)) for a in arrays])

    return run


def to_jax(array: np.ndarray) -> Any:
    import jax.numpy

    return jax.numpy.asarray(array)


def to_torch(array: np.ndarray) -> Any:
    import torch

    return torch.tensor(array)


FROM: dict[str, Function] = {"numpy": np.array, "jax": to_jax, "torch": to_torch}


def jitted(f: Function, arrays: Sequence[np.ndarray]) -> Any:
    return rg.jit(f)(*map(rg.asarray, arrays))


def again(f: Function, arrays: Sequence[np.ndarray]) -> Any:
    xs = [rg.asarray(a) for a in arrays]
    floats = [i for i, x in enumerate(xs) if x.dtype.kind == "f"]
    if not floats:
        return rg.checkpoint(f)(*xs)

    def part(x: Any) -> Any:
        y = rg.checkpoint(f)(*[x if i == floats[0] else other for i, other in enumerate(xs)])
        return rg.sum(y) if isinstance(y, rg.Tensor) else rg.sum(x)

    return rg.grad(part)(xs[floats[0]])


def in_graph(
    f: Function, arrays: Sequence[np.ndarray], jit: bool = False, ranks: bool = True
) -> Any:
    with tf.Graph().as_default():
        ps = [tf.placeholder(a.dtype, a.shape if ranks else None) for a in arrays]
        y = f(*ps)
        if not (isinstance(y, tf.Tensor) or (isinstance(y, rg.Tensor) and is_symbolic(y))):
            return y
        with tf.Session(jit=jit) as session:
            return session.run(y, dict(zip(ps, arrays, strict=True)))


MODES: dict[str, Function] = {
    "numpy": eager("numpy"), "jax": eager("jax"), "torch": eager("torch"), "checkpoint": again,
    "jit": jitted, "graph": in_graph, "graph, no rank": functools.partial(in_graph, ranks=False),
    "Session(jit=True)": functools.partial(in_graph, jit=True),
}  # fmt: skip

# -- the calls -------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A function, and the arguments that are wrong for it."""

    name: str  # rg.nn.relu
    fault: str
    args: Sequence[Any]
    options: dict[str, Any]
    wrong: str = ""  # the parameter

    def made(self, *tensors: Any) -> Any:
        """The call, with these tensors in the places of the arrays."""
        given = iter(tensors)
        args = [next(given) if is_array(a) and a is not None else a for a in self.args]
        options = {k: next(given) if is_array(v) else v for k, v in self.options.items()}
        return function_of(self.name)(*args, **options)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [a for a in [*self.args, *self.options.values()] if is_array(a)]


def function_of(name: str) -> Function:
    space, _, function = name.rpartition(".")
    return getattr(SPACES[space], function)


def names() -> list[str]:
    """The functions of the catalogue."""
    found = {}
    for space, module in SPACES.items():
        functions = [n for n, f in vars(module).items() if type(f) is FunctionType and n[0] != "_"]
        public = getattr(module, "__all__", functions)
        for name in [n for n in functions if n in public]:
            if f"{space}.{name}" not in RUN_NOTHING and is_ours(getattr(module, name)):
                found.setdefault(getattr(module, name), f"{space}.{name}")
    return sorted(found.values())


def is_ours(f: Function) -> bool:
    """Whether a function belongs to the catalogue, and not to the means by which it is made."""
    module = f.__module__
    return module.startswith("regrad.") and module not in HELPERS


HELPERS = {
    *[f"regrad.core.{name}" for name in ("backends", "dispatch", "signatures", "dims", "op")],
    *[f"regrad.core.{name}" for name in ("shapes", "tensor", "numbers")],
    "regrad.errors", "regrad.graph.deferred", "regrad.graph.graph", "regrad.graph.size_ops",
    "regrad.shapes.sizes", "regrad.shapes.table", "regrad.v1.namespaces",
    *[f"regrad.v1.graph.{name}" for name in ("conversion", "forms", "kinds", "row_docs", "rows")],
    *[f"regrad.v1.graph.{name}" for name in ("tensors", "values", "tf_names")],
}  # fmt: skip


def parameters(f: Function) -> list[inspect.Parameter]:
    return list(inspect.signature(f, follow_wrapped=True).parameters.values())


# Loops that have no end as they are written.
ENDLESS = {
    ("while_loop", "init", "no elements"), ("fori_loop", "upper", "huge"),
    ("fori_loop", "upper", "beyond"), ("fori_loop", "lower", "negative"),
}  # fmt: skip


def right(p: inspect.Parameter) -> Any:
    """What does for a parameter, as far as its name tells."""
    return FUNCTIONS.get(p.name, RIGHT.get(p.name, MATRIX))


def base(f: Function) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that must be given."""
    args, options = [], {}
    for p in parameters(f):
        if p.kind is p.VAR_POSITIONAL:
            args += [MATRIX, MATRIX]
        elif p.default is p.empty and p.kind is p.KEYWORD_ONLY:
            options[p.name] = right(p)
        elif p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            args.append(right(p))
    return args, options


def calls(name: str) -> Iterator[Call]:
    """A function's malformed calls."""
    f = function_of(name)
    args, options = base(f)
    yield Call(name, "no such keyword", args, {**options, "dimension_": 0}, "dimension_")
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters(f)):
        yield Call(name, "too many", [*args, *[MATRIX] * 12], options)
    if args and not any(p.kind is p.VAR_POSITIONAL for p in parameters(f)):
        yield Call(name, "nothing", [], options)
    for i, p in enumerate(parameters(f)):
        for fault, bad in BAD.items():
            if p.kind is p.VAR_KEYWORD or (f.__name__, p.name, fault) in ENDLESS:
                continue
            if i < len(args) and p.kind is not p.KEYWORD_ONLY:
                changed = [*args[:i], bad(), *args[i + 1 :]]
                yield Call(name, f"{p.name} {fault}", changed, options, p.name)
            elif p.kind is not p.POSITIONAL_ONLY:
                yield Call(name, f"{p.name} {fault}", args, {**options, p.name: bad()}, p.name)


# -- verdicts --------------------------------------------------------------------------------------


def stopped(seconds: int, action: Function) -> Any:
    """The result, or the error, of something that may not end."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before, left = signal.signal(signal.SIGALRM, stop), signal.alarm(seconds)
    try:
        return action()
    except Exception as error:
        return error
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(left)


def verdict(call: Call, mode: str) -> Verdict:
    """One call in one mode."""
    got = stopped(LIMIT, lambda: MODES[mode](call.made, call.arrays))
    return told(f"{call.name} {mode}: {call.fault}", call.name, call.wrong, got)


def told(case: str, name: str, wrong: str, got: Any) -> Verdict:
    """What came of a call, by the words of its error."""
    if not isinstance(got, Exception):
        return Verdict(case, DELIVERED)
    if not isinstance(got, RegradError | OpError):
        return Verdict(case, EXPLAINED if is_explained(got) else BROKEN, shown(got))
    text = " ".join([str(got), *getattr(got, "__notes__", [])])
    named = any(re.search(rf"\b{re.escape(n)}", text) for n in known_as(name))
    argument = not wrong or re.search(rf"\b{re.escape(wrong)}\b", text) or says_what(text)
    return Verdict(case, REFUSED if named and argument else UNNAMED, shown(got))


def is_explained(error: Exception) -> bool:
    """Whether an error is Python's own, at the call of a function, or of a body defined here.

    On the road that ops of one or two tensors take nothing stands between Python and the kernel.
    Python's error names the function and the argument.
    """
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return last.f_code.co_filename == __file__ and isinstance(error, TypeError)


def says_what(text: str) -> bool:
    """Whether a message says what came, which tells the argument as well as its name."""
    return bool(
        re.search(r"\bgot\b|the number|complex|\(\d*(, ?\d+)*,?\)|shapes?\b|dtype|rank|given", text)
    )


def known_as(name: str) -> set[str]:
    """What a function is called in messages: its name, and the op type behind it."""
    short = name.rpartition(".")[2]
    f = function_of(name) if name.rpartition(".")[0] in SPACES else None
    types = {o.type for o in OPS.values() if o.function is f or o.name == short}
    return {short, short.strip("_"), *types, getattr(f, "__name__", short)}


def crashed(name: str, code: str) -> Verdict:
    """What may end the process, in one of its own."""
    script = f"from tests.campaigns.malformed import survived\nsurvived({code!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return Verdict(f"process: {name}", BROKEN, "no end after 120 s")
    refused = done.returncode == 0 and done.stdout.startswith("refused")
    return Verdict(
        f"process: {name}", REFUSED if refused else BROKEN, (done.stdout + done.stderr)[-300:]
    )


def survived(code: str) -> None:
    """Run a call; say whether it was refused."""
    got = stopped(60, lambda: executed(code))
    print("refused" if isinstance(got, RegradError) else "broken", repr(got)[:200])


def given() -> dict[str, Any]:
    """What the calls of the list have besides the libraries."""
    square, ones = [[1.0, 2.0], [3.0, 4.0]], np.ones((2, 2))
    shapes = {"p": (2, 2), "u": None, "v": (3,), "s": ()}
    return {
        "cyclic": cyclic, "to_jax": to_jax, "to_torch": to_torch, "x": rg.tensor(square),
        "m": np.array([True, False, True]), "ones": ones,
        **{name: tf.placeholder(tf.float32, shape) for name, shape in shapes.items()},
        "one": tf.placeholder(tf.int32, (1,)), "two": tf.placeholder(tf.int32, (2,)),
        "a": tf.placeholder(tf.int32), "b": tf.placeholder(tf.int64),
        "run": lambda *args: tf.Session().run(*args),
    }  # fmt: skip


def executed(code: str) -> Any:
    """Run statements, the last of which is the call; it may stand in a mode."""
    *lines, last = code.strip().split("\n")
    with tf.Graph().as_default():
        space = {"rg": rg, "tf": tf, "np": np, **given()}
        exec("\n".join(lines), space)
        return eval(last, space)


def written(entry: tuple[str, str | None]) -> Verdict:
    """A call of the list: its code, and what the message must hold; None if it is accepted."""
    code, words = entry
    got = stopped(LIMIT, lambda: executed(code))
    if not isinstance(got, Exception):
        return Verdict(code, DELIVERED if words is None else SILENT, f"accepted: {got!r}"[:200])
    if words is None or not isinstance(got, RegradError | OpError):
        return Verdict(code, BROKEN, shown(got))
    text = " ".join([str(got), *getattr(got, "__notes__", [])])
    named = all(word in text for word in words.split("|"))
    return Verdict(code, REFUSED if named else UNNAMED, shown(got))


# -- the campaign ----------------------------------------------------------------------------------


def jobs(quick: bool = False) -> list[str]:
    """One for each function and mode, and those of the list."""
    made = [f"{name}/{mode}" for name in names() for mode in MODES if applies(name, mode)]
    return ["list", *made[::29]] if quick else ["list", "process", *made]


def applies(name: str, mode: str) -> bool:
    """Functions of TensorFlow 1 build graphs; the others take whatever there is."""
    return not name.startswith("tf") or "raph" in mode or mode.startswith("Session")


def run(job: str, quick: bool = False) -> list[Verdict]:
    """The verdicts of a job."""
    if job == "list":
        return [written(entry) for entry in CALLS]
    if job == "process":
        return [crashed(name, code) for name, code in CRASHES.items()]
    name, _, mode = job.partition("/")
    step = 7 if quick else 4 if "jit" in mode else 1
    return [verdict(call, mode) for call in list(calls(name))[::step]]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    function, _, fault = case.partition(": ")
    parameter, _, kind = fault.partition(" ")
    if outcome in WRONG or kind not in BAD:
        return fault, function
    return kind, f"{function}: {parameter}"
