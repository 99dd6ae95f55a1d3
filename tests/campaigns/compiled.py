"""F14: every module of torch.nn and every function of torch.nn.functional, compiled under a rule.

Each runs plain, under the oracle of `torch_samples`, and then in a network: the module, and a `sin`
of all that it returns. The network is compiled (Dynamo, AOTAutograd) without regrad; in a scope
with a rule for Sin, which hits another layer; and in one for each op type that the module runs, so
that the rule hits it. One of these must come of it:

* delivered: as many graphs as without regrad, values that are those of the plain compiled network,
  and gradients by all inputs and parameters that are, for the rule of Sin, those of the module
  alone (computed without regrad), and otherwise those of the eager network in the same scope;
* refused: PassedOverError, where the eager network is refused as well;
* explained: torch does not compile the network without regrad, or not to the eager values; or it
  breaks the graph in other places, where it breaks it without regrad as well;
* silent: another gradient or value;
* broken: any other error, or another number of graphs.
"""

import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from regrad.errors import PassedOverError
from tests.campaigns import torch_samples
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT, WRONG
from tests.campaigns.proof_page import table as markdown
from tests.campaigns.torch_ops import EAGER, Result, inside, means_the_same, plain, result, same
from tests.campaigns.torch_samples import Call, Case, cases, close, is_float
from tests.campaigns.verdicts import Verdict, shown
from tests.helpers import by_backward

TITLE = "modules of torch.nn, compiled"
SAMPLES = 2  # of each module and function
OTHER = "Sin"

# -- modules --------------------------------------------------------------------------------------

X, IMAGE, ROWS = (4, 6), (2, 4, 6, 6), (2, 5, 4)
# Those of torch.nn that torch's own table of modules lacks: how they are made, and their inputs.
MORE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "AdaptiveLogSoftmaxWithLoss": (lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 8, [3, 5]),
        (X, torch.tensor([0, 2, 4, 7]))),
    "AlphaDropout": (nn.AlphaDropout, (X,)),
    "ChannelShuffle": (partial(nn.ChannelShuffle, 2), (IMAGE,)),
    "CosineSimilarity": (nn.CosineSimilarity, (X, X)),
    "CrossMapLRN2d": (partial(nn.CrossMapLRN2d, 2), (IMAGE,)), "Dropout": (nn.Dropout, (X,)),
    "Dropout1d": (nn.Dropout1d, (ROWS,)), "Dropout2d": (nn.Dropout2d, (IMAGE,)),
    "Dropout3d": (nn.Dropout3d, ((2, 3, 2, 4, 4),)),
    "EmbeddingBag": (partial(nn.EmbeddingBag, 5, 3), (torch.tensor([[0, 1], [4, 2]]),)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (IMAGE,)), "Flatten": (nn.Flatten, (IMAGE,)),
    "Fold": (partial(nn.Fold, (4, 4), 2), ((1, 8, 9),)), "Hardsigmoid": (nn.Hardsigmoid, (X,)),
    "Identity": (nn.Identity, (X,)), "LazyBatchNorm2d": (nn.LazyBatchNorm2d, (IMAGE,)),
    "LazyInstanceNorm2d": (partial(nn.LazyInstanceNorm2d, affine=True), (IMAGE,)),
    "LazyLinear": (partial(nn.LazyLinear, 3), (X,)),
    "MaxUnpool2d": (partial(nn.MaxUnpool2d, 2), ((1, 1, 2, 2),
        torch.tensor([[[[0, 3], [8, 10]]]]))),
    "PairwiseDistance": (nn.PairwiseDistance, (X, X)),
    "PixelShuffle": (partial(nn.PixelShuffle, 2), (IMAGE,)),
    "PixelUnshuffle": (partial(nn.PixelUnshuffle, 2), (IMAGE,)), "RReLU": (nn.RReLU, (X,)),
    "Sequential": (lambda: nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.LayerNorm(3)), (X,)),
    "TransformerDecoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2),
        (ROWS, ROWS)),
    "TripletMarginLoss": (nn.TripletMarginLoss, (X, X, X)),
    "TripletMarginWithDistanceLoss": (nn.TripletMarginWithDistanceLoss, (X, X, X)),
    "Unflatten": (partial(nn.Unflatten, 1, (2, 3)), (X,)),
    "Unfold": (partial(nn.Unfold, 2), (IMAGE,)),
    "Upsample": (partial(nn.Upsample, scale_factor=2), (IMAGE,)),
    "UpsamplingBilinear2d": (partial(nn.UpsamplingBilinear2d, scale_factor=2), (IMAGE,)),
    "UpsamplingNearest2d": (partial(nn.UpsamplingNearest2d, scale_factor=2), (IMAGE,)),
}  # fmt: skip


@cache
def table() -> dict[str, Any]:
    """torch's own table of modules, by name."""
    torch_samples.op_db()  # which sees to what both need
    from torch.testing._internal import common_modules

    return {info.name: info for info in common_modules.module_db}


def subjects(name: str) -> Iterator[Case]:
    """The cases of a module or a function: a few of torch's own samples, or the one above."""
    torch.manual_seed(zlib.crc32(name.encode()))
    if name in table():
        info = table()[name]
        every = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=True
        )
        for n, sample in enumerate(every[:: max(1, len(every) // SAMPLES)][:SAMPLES]):
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).double()
            yield of_module(f"{name} {n}", module, sample.forward_input)
    elif (made := MORE.get(name.removeprefix("nn."))) is not None:
        args = [torch.randn(a, dtype=torch.float64, requires_grad=True) if type(a) is tuple else a
                for a in made[1]]  # fmt: skip
        yield of_module(f"{name} 0", made[0]().double(), (args, {}))
    else:
        every = cases(torch_samples.load()[name.replace(".", "_")], SAMPLES)
        yield from (case for case in every if ":op " in case.name)


def of_module(name: str, module: nn.Module, given: Any) -> Case:
    args, options = given if isinstance(given, tuple) else (given.args, given.kwargs)
    input, *rest = args or [options.pop("input")]
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        module(*args, **options)
    return Case(name, module, (input, rest, options))


# -- networks -------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module, or a function, and a layer behind it."""

    def __init__(self, call: Call, inner: Any) -> None:
        super().__init__()
        self.call = call
        self.inner = inner if isinstance(inner, nn.Module) else None

    def forward(self, *xs: Any) -> Any:
        return tuple([torch.sin(y) for y in self.call.pure(*xs)])


def judged(case: Case) -> Iterator[Verdict]:
    """The verdicts on a case: under a rule for another layer, and under those that hit it."""
    known = plain(case)
    if known is None:
        yield Verdict(case.name, EXPLAINED, "it cannot be repeated without regrad")
        return
    call = Call(case)
    net = Net(call, case.function)
    xs = [*call.xs, *filter(is_float, net.parameters())]
    if not xs:
        return
    taken = len(call.xs)
    run = EAGER(lambda *xs: net(*xs[:taken]), xs)
    eager = result(run, xs)
    alone, graphs = compiled(net, taken, xs, None)
    if not means_the_same(alone, eager):
        why = shown(alone.error) if alone.error else "to other values"
        yield Verdict(case.name, EXPLAINED, f"torch does not compile it: {why}")
        return
    for op_type in (OTHER, *sorted(known.types | inside(case))):
        if op_type == OTHER:
            due = Result(eager.ys, by_ones(call.ready()(), xs), fired=True)
        else:
            due = result(run, xs, op_type)
        got, found = compiled(net, taken, xs, op_type)
        where = "another layer" if op_type == OTHER else "it"
        kind = f"a rule that hits {where}, {op_type}: {case.name}"
        whole = partial(is_whole, net, call.xs)
        yield Verdict(kind, *verdict(got, found, due, alone, graphs, whole))


def by_ones(ys: Any, xs: Sequence[Any]) -> list[Any]:
    """The gradients of a module's results for ones that arrive."""
    wanted = [y for y in torch_samples.flat(ys) if y.requires_grad]
    found = by_backward.rotating(wanted, xs, [torch.ones_like(y) for y in wanted])
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(xs, found, strict=True)]


def compiled(net: nn.Module, taken: int, xs: Sequence[Any], op_type: str | None) -> tuple[Any, int]:
    """Return the compiled network's result under a rule, and its number of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(net, backend=counter)
    return result(EAGER(lambda *xs: run(*xs[:taken]), xs), xs, op_type), counter.frame_count


def is_whole(net: nn.Module, xs: Sequence[Any]) -> bool:
    """Return whether torch compiles a network to one graph without regrad."""
    torch._dynamo.reset()
    try:
        torch.compile(net, backend="aot_eager", fullgraph=True)(*xs)
    except Exception:
        return False
    return True


def verdict(
    got: Result,
    graphs: int,
    due: Result,
    alone: Result,
    graphs_alone: int,
    is_whole: Callable[[], bool],
) -> tuple[str, str]:
    if isinstance(got.error, PassedOverError) and isinstance(due.error, PassedOverError):
        return REFUSED, shown(got.error)
    if got.error is not None:
        return BROKEN, shown(got.error)
    if due.error is not None:
        return BROKEN, f"an eager call has {shown(due.error)}"
    if not same(got.ys, alone.ys, 1e-9):
        return SILENT, "the value is another"
    if not close(got.dxs, due.dxs):
        return SILENT, "torch's own" if close(got.dxs, alone.dxs) else "another gradient"
    if graphs != graphs_alone:
        why = f"{graphs} graphs, without regrad {graphs_alone}"
        return (BROKEN, why) if is_whole() else (EXPLAINED, f"torch breaks the graph: {why}")
    return DELIVERED, f"{graphs} graph{'s' if graphs != 1 else ''}"


# -- jobs -----------------------------------------------------------------------------------------

QUICK = ["nn.BatchNorm2d", "nn.MultiheadAttention", "nn.ReLU", "nn.functional.cross_entropy"]


def jobs(quick: bool = False) -> list[str]:
    """One for each module and function."""
    functions = [name for name in torch_samples.load() if name.startswith("nn_functional_")]
    named = [name.replace("nn_functional_", "nn.functional.") for name in functions]
    return QUICK if quick else sorted([*table(), *(f"nn.{name}" for name in MORE), *named])


def run(job: str, quick: bool = False) -> list[Verdict]:
    """All verdicts on a module or function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            every = list(subjects(job))
        except Exception as error:
            return [Verdict(job, EXPLAINED, f"torch's own sample fails: {shown(error)}")]
        return [v for case in every[: 1 if quick else None] for v in judged(case)]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """Return the class of a case, and its name in it."""
    kind, _, name = case.partition(": ")
    if outcome in WRONG:
        return f"{kind}: {detail[:80]}", name
    if outcome == EXPLAINED:
        return detail.partition(":")[0], case
    where, _, op_type = kind.rpartition(", ")
    return (kind if outcome == REFUSED else f"{where}: {detail}"), f"{op_type} in {name}"


def tables(classes: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts: as many graphs as without regrad, or what else came, by kind of rule."""
    every: dict[str, Counter[str]] = defaultdict(Counter)
    for each in classes:
        kind, _, detail = each["class"].partition(": ")
        if kind.startswith("a rule"):
            found = detail if each["outcome"] == DELIVERED else each["outcome"]
            every[kind.partition(",")[0]][found] += each["count"]
    columns = sorted({found for counts in every.values() for found in counts})
    rows = [[kind, *[f"{counts[c]:,}" for c in columns]] for kind, counts in every.items()]
    text = markdown(["", *columns], rows, numbers=len(columns))
    return f"Cases, by the number of graphs, which is that without regrad:\n\n{text}"
