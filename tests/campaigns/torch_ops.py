"""F13: every op of torch's own sample database, under every override that concerns it.

A plain call runs first, under the oracle of `torch_samples`, which sees the ATen ops that autograd
records. For each op type among them, for those that a fused kernel holds (`INSIDE`), and for some
that the call has nothing to do with, the call runs again in a scope with a rule for that type, and
in many ways (`WAYS`): eagerly, in a thread or a checkpoint, transformed, scripted, compiled; and
eagerly with special values, in all dtypes (`FILLS`). A rule that writes into all that it is given
takes turns with it. One of these must come of it:

* delivered: autograd kept no op of the type to itself (the oracle says so of an eager call), and
  the gradients by all inputs are the sentinels of the rule, carried on (in other ways they are
  those of the eager call); or it is untouched: the type is not there, and every gradient is torch's
  own, to the bit;
* refused: PassedOverError, where the type is concerned;
* silent: an op of the type kept torch's own gradient, or a rule went elsewhere than in the eager
  call, or a value was not torch's own to the bit, as the eager kernel has it or as this way does,
  in which torch may take ops apart (up to rounding where `inductor` writes kernels);
* broken: an error that the plain call in the same way does not raise, or a refusal where the type
  is not concerned.

How far it holds: a call counts if it can be repeated to the bit and differentiated, without any
override, and if the way returns what the eager call returns. An op counts where autograd records it
and a gradient of the result passes it; what a fused kernel computes inside (`gelu` of tanh,
`logsumexp` of exp) and `INSIDE` does not name is its own op here. Softsign and Step (torch has no
derivative of `heaviside`) are never recorded as ATen ops of their own, and Square only as a power:
`tests/torch/test_ops.py` has them.
"""

import random
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import regrad.torch
from regrad.errors import PassedOverError
from regrad.torch.optypes import families
from tests.campaigns import torch_samples
from tests.campaigns.outcomes import BROKEN, DELIVERED, REFUSED, SILENT, WRONG
from tests.campaigns.torch_samples import (
    INSIDE,
    Call,
    Case,
    Recorded,
    cases,
    close,
    compare,
    differentiated,
    flat,
    is_tensor,
    is_wanted,
    load,
    weights,
    written,
)
from tests.campaigns.verdicts import Verdict, shown

TITLE = "torch's sample database"
CUDA = torch_samples.DEVICE == "cuda"  # where gradients are summed in any order
SAMPLES = 2  # of each op
OTHERS = 1  # op types that do not concern a call
FIRED, UNTOUCHED = "the rule fired", "untouched"

# -- rules ----------------------------------------------------------------------------------------


def places(op: Any, grad: Any) -> Any:
    """A rule that fits every op type: 1 for each element of the first input, 2 of the second, …"""
    return one(*[sentinel(x, i + 1.0) for i, x in enumerate(op.inputs)])


def pair(dy: Any, a: Any, b: Any) -> Any:
    return sentinel(a, 1.0), sentinel(b, 2.0)


def one(*dxs: Any) -> Any:
    return dxs[0] if len(dxs) == 1 else list(dxs)


def sentinel(x: Any, value: float) -> Any:
    return torch.full_like(x, value) if is_tensor(x) else None


# Results that torch's functions change in place: a rule had better not ask for them.
RULES: dict[str, Callable[..., Any]] = {
    "Identity": lambda dy: torch.ones_like(dy),
    **{t: pair for t, f in families().items() if [n for n, _ in f.parameters] == ["input",
        "other"]},
}  # fmt: skip


def writing(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The same rule, which has written into all that it was given when it answers."""

    @wraps(rule)
    def written_over(*given: Any) -> Any:
        answer = rule(*given)
        for each in given:
            for x in [each] if is_tensor(each) else [*each.inputs, *each.outputs]:
                if is_tensor(x):
                    x.zero_()
        return answer

    return written_over


def scope(op_type: str | None, writes: bool = False) -> Any:
    if op_type is None:
        return nullcontext()
    rule = RULES.get(op_type, places)
    return regrad.torch.gradient_override_map({op_type: writing(rule) if writes else rule})


# -- eagerly --------------------------------------------------------------------------------------


class Plain(NamedTuple):
    """What a call gives without any override, and the op types that autograd records in it."""

    ys: Any
    dxs: list[Any]
    types: set[str]
    hidden: set[str]


def plain(case: Case) -> Plain | None:
    """None if the call fails, or cannot be repeated."""
    try:
        call, again = Call(case), Call(case)
        expected, run = again(), call.ready()  # (which sets the seed)
        with Recorded() as seen:
            ys = run()
        dxs = differentiated(ys, call.xs)
        repeated = compare(ys, expected) == "same"
        repeated &= close(differentiated(expected, again.xs), dxs)
    except Exception:
        return None
    types = written(seen.types(ys), case.name)
    return Plain(ys, dxs, types, seen.hidden) if repeated else None


def eager(case: Case, known: Plain, op_type: str, writes: bool = False) -> tuple[str, str]:
    """What comes of a call in a scope with a rule for one op type."""
    call, is_recorded = Call(case), op_type in known.types
    may_be = op_type in known.types | known.hidden | inside(case)
    run = call.ready()
    try:
        with scope(op_type, writes) as used, Recorded() as seen:
            ys = run()
        given = [x.detach().clone() for x in call.xs]
        dxs = differentiated(ys, call.xs)
        if compare([x.detach() for x in call.xs], given) != "same":
            return SILENT, "an input was written into"
    except PassedOverError as error:
        return (REFUSED if may_be else BROKEN), shown(error)
    except Exception as error:
        return BROKEN, shown(error)
    if compare(ys, known.ys) != "same":
        return (SILENT, "the value is another") if repeats(case, known) else (DELIVERED, FIRED)
    if is_recorded and op_type in written(seen.types(ys), case.name):
        return SILENT, "autograd recorded an op of the type"
    if not used.hits:
        kept = compare(dxs, known.dxs) == "same" or (CUDA and close(dxs, known.dxs))
        return (DELIVERED, UNTOUCHED) if kept else (SILENT, "gradient")
    if is_recorded and not any(hit.ran for hit in used.hits) and any(map(is_wanted, flat(ys))):
        return SILENT, "the rule did not run"
    return DELIVERED, FIRED


def repeats(case: Case, known: Plain) -> bool:
    """Whether torch gives the same bits every time (its LAPACK does not, now and then)."""
    return all(compare(Call(case)(), known.ys) == "same" for _ in range(20))


def inside(case: Case) -> set[str]:
    """The op types that a fused callable may hold."""
    return {*INSIDE.get(case.name.partition(":")[0], "").split()}


def op_types(case: Case, known: Plain, others: int = OTHERS) -> list[str]:
    """The op types under which a call is to be run: those in it, and some others."""
    found = sorted(known.types | inside(case))
    rest = sorted(families().keys() - {*found})
    return found + random.Random(case.name).sample(rest, others)


# -- in other ways --------------------------------------------------------------------------------
#
# Each makes of a function of tensors, outside of the scope, what is to be run inside: a function
# that gives the results, and a function from the gradients of those to the gradients of the inputs.

Function = Callable[..., Any]


def by_autograd(wrap: Callable[[Function, Sequence[Any]], Function]) -> Function:
    """A way in which autograd differentiates what is returned."""

    def made(f: Function, xs: Sequence[Any]) -> Function:
        run = wrap(f, xs)

        def pulled(*xs: Any) -> tuple[Any, Function]:
            ys = run(*xs)
            return ys, lambda: differentiated(ys, xs)

        return pulled

    return made


def transformed(f: Function, xs: Sequence[Any]) -> Function:
    """`torch.func.vjp`."""

    def pulled(*xs: Any) -> tuple[Any, Function]:
        ys, pull = torch.func.vjp(f, *[x.detach() for x in xs])
        return ys, lambda: list(pull(tuple(map(weights, ys))))

    return pulled


def in_thread(f: Function, xs: Sequence[Any]) -> Function:
    """A thread that is started when it is called."""

    def run(*xs: Any) -> Any:
        results: list[Any] = []

        def work() -> None:
            try:
                results.append(f(*xs))
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    return run


def batched(f: Function, xs: Sequence[Any]) -> Function:
    """`torch.func.vmap` over a batch of one."""
    run = torch.func.vmap(f)
    return lambda *xs: tuple([y[0] for y in run(*[x[None] for x in xs])])


def compiled(backend: str) -> Callable[[Function, Sequence[Any]], Function]:
    torch._dynamo.config.recompile_limit = 64  # for each op type, one program
    return lambda f, xs: torch.compile(f, backend=backend, dynamic=False)


def traced(f: Function, xs: Sequence[Any]) -> Function:
    return torch.jit.trace(f, tuple(xs), check_trace=False)


WAYS: dict[str, Function] = {
    "thread": by_autograd(in_thread),
    "checkpoint": by_autograd(lambda f, xs: partial(checkpoint, f, use_reentrant=False)),
    "checkpoint, reentrant": by_autograd(lambda f, xs: partial(checkpoint, f, use_reentrant=True)),
    "func.vjp": transformed, "vmap": by_autograd(batched), "jit.trace": by_autograd(traced),
    "aot_eager": by_autograd(compiled("aot_eager")), "inductor": by_autograd(compiled("inductor")),
}  # fmt: skip
EAGER = by_autograd(lambda f, xs: f)


class Result(NamedTuple):
    """Results and gradients of a call in some way; or the error."""

    ys: Any
    dxs: list[Any]
    error: Exception | None = None
    fired: bool = False


def result(
    run: Function, xs: Sequence[Any], op_type: str | None = None, writes: bool = False
) -> Result:
    """What a call gives in a scope; it is differentiated outside."""
    torch.manual_seed(0)
    try:
        with scope(op_type, writes) as used:
            ys, pull = run(*xs)
        return Result(ys, pull(), fired=used is not None and bool(used.hits))
    except Exception as error:  # (its frames would hold what torch has open in them)
        return Result((), [], error.with_traceback(None))


def in_ways(case: Case, known: Plain, ways: Sequence[str]) -> Iterator[Verdict]:
    """The verdicts on a call in each of these ways, under each op type."""
    call = Call(case)
    if not call.xs:
        return
    eager = EAGER(call.pure, call.xs)
    types = [t for t in op_types(case, known) if not (call.in_place and t == "Identity")]
    expected = {t: result(eager, call.xs, t) for t in (None, *types)}
    for way in ways:
        torch._dynamo.reset()
        try:
            run = WAYS[way](call.pure, call.xs)
        except Exception:
            continue
        own, rounding = result(run, call.xs), ROUNDING.get(way)
        if means_the_same(own, expected[None]):
            for t in types:
                got = result(run, call.xs, t)
                outcome = judged(got, own, expected[t], expected[None], rounding)
                yield Verdict(f"{way}, {t}: {case.name}", *outcome)
            for t in types[:1]:
                got = result(run, call.xs, t, writes=True)
                outcome = judged(got, own, expected[t], expected[None], rounding)
                yield Verdict(f"{way}, writing, {t}: {case.name}", *outcome)


def means_the_same(own: Result, expected: Result) -> bool:
    """Whether torch takes the call in some way, and for what it is eagerly."""
    if own.error is not None or len(own.ys) != len(expected.ys):
        return False
    return close(own.ys, expected.ys, 1e-4) and close(own.dxs, expected.dxs, 1e-4)


def judged(
    got: Result, own: Result, due: Result, plain: Result, rounding: float | None
) -> tuple[str, str]:
    """`own` is torch's, in the same way; `due` is what comes of the eager call in the scope."""
    if isinstance(got.error, PassedOverError):
        return (REFUSED if due.fired or due.error else BROKEN), shown(got.error)
    if got.error is not None:
        return BROKEN, shown(got.error)
    if not any(same(got.ys, each.ys, rounding) for each in (own, plain)):
        return SILENT, "the value is another"
    if due.error is not None:
        kept = close(got.dxs, own.dxs)
        return (SILENT, "torch's own") if kept else (DELIVERED, "refused in an eager call")
    if close(got.dxs, due.dxs, rounding or 1e-6):
        return DELIVERED, FIRED if due.fired else UNTOUCHED
    return SILENT, "torch's own" if close(got.dxs, own.dxs) else "another gradient"


ROUNDING = {"inductor": 1e-5}


def same(ys: Sequence[Any], own: Sequence[Any], rounding: float | None) -> bool:
    """Whether values are torch's own, to the bit if they are not to be rounded."""
    return close(ys, own, rounding) if rounding else compare(ys, own) == "same"


# -- special values -------------------------------------------------------------------------------

FILLS: dict[str, tuple[float | None, ...]] = {
    "inf": (float("inf"), None, float("-inf"), None), "nan": (float("nan"), None, None),
    "far": (1e4, -1e4, 1e4), "zeros": (0.0, -0.0), "as it is": (None,),
}  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def special(case: Case, values: Sequence[float | None], dtype: torch.dtype) -> Case:
    """The call with these values in turn (None: as it was), in another dtype."""

    def change(x: Any) -> Any:
        if not is_tensor(x) or not x.is_floating_point() or x.layout is not torch.strided:
            return x
        x, wanted = x.detach().to(dtype), x.requires_grad
        if wanted:
            given = torch.tensor([0.0 if v is None else v for v in values]).to(x)
            stays = torch.tensor([v is None for v in values], device=x.device)
            turn = torch.arange(x.numel(), device=x.device).reshape(x.shape) % len(values)
            x = torch.where(stays[turn], x, given[turn])
        return x.requires_grad_(wanted)

    return case._replace(given=tree_map(change, case.given))


# Kernels that end the process over values outside of what they are for, or do not end.
ONLY_USUAL = ("bernoulli", "nn_functional_binary_cross_entropy", "matrix_exp")


def with_special_values(case: Case, types: Sequence[str]) -> Iterator[Verdict]:
    if CUDA and case.name.partition(":")[0] in ONLY_USUAL:
        return
    for fill, values in FILLS.items():
        for dtype in DTYPES:
            each = special(case, values, dtype)
            if known := plain(each):
                kind = f"{fill} {str(dtype).removeprefix('torch.')}"
                for t in types:
                    yield Verdict(f"special, {t}: {case.name}, {kind}", *eager(each, known, t))


# -- jobs -----------------------------------------------------------------------------------------

CHEAP = [way for way in WAYS if way not in ("aot_eager", "inductor")]
QUICK = ["add", "cumsum", "kron", "linalg_vecdot", "matmul", "nn_functional_silu", "softmax"]


def jobs(quick: bool = False) -> list[str]:
    """One for each op."""
    return QUICK if quick else sorted(load())


def run(job: str, quick: bool = False) -> list[Verdict]:
    """All verdicts on an op."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if CUDA:
            torch.cuda.synchronize()  # fails if a kernel has failed before: nothing runs any more
        try:
            every = list(cases(load()[job], 1 if quick else SAMPLES))
        except Exception:  # torch's own: no sample can be made on this machine
            return []
        return [v for case in every for v in examined(case, quick)]


def examined(case: Case, quick: bool) -> Iterator[Verdict]:
    """A call eagerly, and the first of its kind in all other ways."""
    known = plain(case)
    if known is None:
        return
    for t in op_types(case, known):
        yield Verdict(f"eager, {t}: {case.name}", *eager(case, known, t))
        if t in known.types:
            yield Verdict(f"eager, writing, {t}: {case.name}", *eager(case, known, t, writes=True))
    _, _, kind = case.name.partition(":")
    if kind in ("op 0", "inplace_variant 0"):
        yield from in_ways(case, known, ways(case.name, quick))
    if kind == "op 0" and not quick:
        yield from with_special_values(case, op_types(case, known, others=0))


def ways(name: str, quick: bool) -> list[str]:
    """The ways for a call: some are compiled as well, and for a few of them kernels are written."""
    draw = zlib.crc32(name.encode()) % 20
    compiled = ["aot_eager"] * (draw % 2 == 0) + ["inductor"] * (draw == 0)
    return CHEAP if quick else [*CHEAP, *compiled]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    kind, _, name = case.partition(": ")
    if outcome in WRONG:
        return f"{kind}: {detail[:80]}", name
    if outcome == REFUSED:
        return kind, name
    way, _, op_type = kind.rpartition(", ")
    return f"{way}: {detail}", f"{op_type} in {name}"
