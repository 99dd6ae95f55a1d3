"""Overrides in public models, against an independent answer.

    python -m tests.campaigns.public_models                       all of it
    python -m tests.campaigns.public_models --only timm/resnet    rows whose name begins like this
    python -m tests.campaigns.public_models --types Relu,Softmax  these op types only
    python -m tests.campaigns.public_models --fresh               from the beginning
    python -m tests.campaigns.public_models --compiled aot_eager  some, by torch.compile
    python -m tests.campaigns.public_models --keys path           rules in one place (class, nth)
    python -m tests.campaigns.public_models --builtin             rules by `builtin`

The models are in `public_table` (PyTorch) and `public_jax`, with random weights and tiny sizes. A
case is a model and an op type of which it runs at least one; its rule multiplies the native
gradient by a factor, another one for each operand. The answer that is due comes from
`public_oracle`: hooks on the autograd record of the plain model. Outputs in the scope must be those
of the plain model, to the bit where the op is called by its name. One of these comes of a case:

* delivered: every gradient is the one that is due (relative error up to 1e-6);
* refused: an error of regrad's, with its message;
* explained: torch's own error about a tensor that was changed in place after a rule had named it;
* silent: another gradient or another value. There must be none;
* broken: any other error. There must be none.

With `--compiled` a model is compiled anew in each scope. It has to have as many graphs as without a
scope; gradients are due from the same oracle, and values up to rounding.

With `--keys` the rule is for one place: `rg.at(path, op_type)` with the module of the op in the
middle, `rg.at(its class, op_type)`, or the first op in that module. Which ops of the record are
there is told by hooks on the modules (`public_places`). With `--builtin` the rules multiply what
`builtin(dy)` gives, and no formula is written.

None of the packages is a dependency of this project. Beside `pip install -e '.[test]'`:

    pip install transformers diffusers torch_geometric diffrax
    pip install --no-deps torchvision==0.28.0 timm captum zennit

(`--no-deps`, or another torch may come along.) What is done is noted under `out/`, and a second run
of the same sources goes on from there. A whole run writes `tests/campaigns/results/public.json`.
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

import regrad.torch
from regrad.errors import RegradError
from tests.campaigns import driver, public_jax, public_oracle, public_places, public_table, records
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT
from tests.campaigns.public_oracle import BY_NAME, Op
from tests.campaigns.verdicts import Verdict, shown
from tests.helpers.paths import ROOT

RESULT = records.RESULTS / "public.json"
OUT = ROOT / "out"
COMPILED = (  # what `--compiled` runs
    "torchvision/resnet18", "timm/vit_tiny_patch16_224",
    "transformers/BertForSequenceClassification/sdpa", "transformers/GPT2LMHeadModel/sdpa",
    "transformers/GPT2LMHeadModel/eager", "transformers/LlamaForCausalLM/sdpa",
    "transformers/LlamaForCausalLM/eager",
)  # fmt: skip
TWO = ("MatMul", "AddV2", "Mul")  # op types of two operands, which torch may exchange inside


class Ways(NamedTuple):
    """How the rules are put in force: by torch.compile, in one place, by `builtin`."""

    backend: str = ""
    keys: str = ""
    builtin: bool = False

    @property
    def part(self) -> str:
        """The part of the campaign; "" for all models as they are."""
        return self.backend or self.keys or "builtin" * self.builtin


class Job(NamedTuple):
    key: str  # the name of a row
    types: tuple[str, ...]
    ways: Ways


# -- a model ---------------------------------------------------------------------------------------


class Subject:
    """A model with what the plain run of it gave."""

    def __init__(self, row: public_table.Row, ways: Ways = Ways()) -> None:  # noqa: B008
        self.ways = ways
        torch.manual_seed(0)
        built = row.build()
        self.dtype = built.dtype
        self.module = built.module.to(self.dtype)
        self.args = [self._input(x) for x in built.args]
        self.options = {k: self._input(x) for k, x in built.options.items()}
        given = [*self.args, *self.options.values(), *self.module.parameters()]
        self.xs = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        (self.ys, self.record), self.calls = self.recorded()
        self.key: Any = None  # of the place that the case is about; None: everywhere
        self.dys = [torch.randn_like(y) for y in self.ys]
        is_single = self.record.is_single or self.dtype != torch.float64
        self.tolerance = 2e-4 if is_single else max(1e-6, 30 * self._unrest())
        self.counter = CompileCounterWithBackend(self.ways.backend)
        self.compiled_ys = self.call(self.compiled())
        self.graphs = self.counter.frame_count

    def compiled(self) -> Any:
        """The model as it runs in a case: compiled anew, if it is to be compiled."""
        if not self.ways.backend:
            return self.module
        torch._dynamo.reset()
        self.counter = CompileCounterWithBackend(self.ways.backend)
        return torch.compile(self.module, backend=self.counter)  # pyright: ignore

    def _unrest(self) -> float:
        """How much the plain gradients change if weights and inputs change by a rounding."""
        rest = self.due([], 1.0, 1.0)
        before = [x.detach().clone() for x in self.xs]
        with torch.no_grad():
            for x in self.xs:
                x.mul_(1 + torch.finfo(self.dtype).eps * torch.randn_like(x).sign())
        moved = public_oracle.gradients(self.call(), self.dys, self.xs)
        for x, old in zip(self.xs, before, strict=True):
            x.data = old
        (self.ys, self.record), self.calls = self.recorded()
        return public_oracle.error(moved, rest)

    def recorded(self) -> tuple[Any, list[public_places.Call]]:
        run = partial(public_oracle.recorded, self.call)
        return public_places.calls_of(self.module, run) if self.ways.keys else (run(), [])

    def _input(self, x: Any) -> Any:
        is_real = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().to(self.dtype, copy=True).requires_grad_() if is_real else x

    def call(self, model: Any = None) -> list[torch.Tensor]:
        """The outputs that have a gradient; with the same random numbers at each call."""
        torch.manual_seed(1)
        found = leaves((self.module if model is None else model)(*self.args, **self.options))
        return [y for y in found if y.requires_grad]

    def due(self, ops: Sequence[Op], k: float, l: float) -> list[torch.Tensor]:  # noqa: E741
        return public_oracle.answers(self.ys, self.dys, self.xs, ops, k, l)

    def overridden(
        self,
        op_type: str,
        k: float,
        l: float,  # noqa: E741
        model: Any = None,
    ) -> tuple[Any, Any, int]:
        """The outputs in a scope, the gradients, and how many calls were bound."""
        make = public_oracle.builtin_rule if self.ways.builtin else public_oracle.rule
        rules = {self.key or op_type: make(op_type, k, l)}
        model = self.compiled() if model is None else model
        whole = self.module if self.key is not None else None
        with regrad.torch.gradient_override_map(rules, model=whole) as used:
            ys = self.call(model)
        found = public_oracle.gradients(ys, self.dys, self.xs)
        return ys, found, sum(hit.count for hit in used.hits)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output, also in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)


def verdict_of(subject: Subject, case: str, op_type: str, ops: Sequence[Op]) -> Verdict:
    """Run one case."""
    try:
        outcome, detail = compared(subject, op_type, ops)
    except RegradError as error:
        outcome, detail = REFUSED, shown(error)
    except Exception as error:
        in_place = "modified by an inplace operation" in str(error)
        outcome, detail = (EXPLAINED if in_place else BROKEN), shown(error)
    return Verdict(case, outcome, detail)


def compared(subject: Subject, op_type: str, ops: Sequence[Op]) -> tuple[str, str]:
    """Outcome and detail of a case that raises nothing."""
    counted = [op for op in ops if public_oracle.is_called(op_type, op)]
    first = wrong = None
    for k, l in factors(op_type):  # noqa: E741
        ys, found, hits = subject.overridden(op_type, k, l)
        if wrong := values_differ(subject, ys, op_type, ops, counted):
            return SILENT, wrong
        if (graphs := subject.counter.frame_count) != subject.graphs:
            return BROKEN, f"{graphs} graphs, without a scope {subject.graphs}"
        every = counted if op_type in BY_NAME else ops
        far = public_oracle.error(found, subject.due(every, k, l))
        if far <= subject.tolerance:
            return DELIVERED, ("" if first is None else "operands exchanged by torch")
        if (
            subject.ways.keys == "nth"
            and public_oracle.error(found, subject.due([], k, l)) <= subject.tolerance
        ):
            return EXPLAINED, f"{hits} call was counted that needs no gradient"
        first = first or explained(subject, found, far, ops, counted, hits, k, l)
        if op_type in BY_NAME and hits != subject.overridden(op_type, k, l, subject.module)[2]:
            return EXPLAINED, f"it calls {hits} when it is compiled, and {len(counted)} otherwise"
    return SILENT, str(first)


def factors(op_type: str) -> list[tuple[float, float]]:
    """One factor for each operand; the same for both if torch may have exchanged them."""
    k, l = public_oracle.K, public_oracle.L  # noqa: E741
    return [(k, l), (k, k)] if op_type in TWO else [(k, l)]


def explained(
    subject: Subject, found: Any, far: float, ops: Any, counted: Any, hits: int, k: float, l: float  # noqa: E741
) -> str:  # fmt: skip
    """What a wrong gradient looks like: whether the plain one, and whether some ops lack."""
    plain = public_oracle.error(found, subject.due([], k, l))
    by_name = public_oracle.error(found, subject.due(counted, k, l))
    like = "as in the plain model" if plain <= subject.tolerance else f"relative error {far:.1e}"
    like = "only the ops called by name" if by_name <= subject.tolerance < plain else like
    hidden = Counter(f"{op.name} in {op.creator}" for op in ops if op not in counted)
    unseen = "; a view changed in place hides nodes" if subject.record.hides else ""
    return (
        f"gradient {like}: {hits} bound, {len(ops)} in the record, "
        f"of them {dict(hidden)} not by name{unseen}"
    )


def values_differ(subject: Subject, ys: Any, op_type: str, ops: Any, counted: Any) -> str:
    """Whether outputs differ from the plain ones: at all, or by more than rounding."""
    if len(ys) != len(subject.ys):
        return f"{len(ys)} outputs have a gradient instead of {len(subject.ys)}"
    if all(torch.equal(y, plain) for y, plain in zip(ys, subject.ys, strict=True)):
        return ""
    far = max(
        float((y - plain).detach().abs().max() / (plain.detach().abs().max() + 1e-300))
        for y, plain in zip(ys, subject.ys, strict=True)
    )
    is_apart = len(counted) < len(ops) or op_type == "Conv2D" or subject.ways.backend
    bound = subject.tolerance if is_apart else 0.0
    return "" if far <= bound else f"values differ by {far:.1e} of the largest"


# -- the jobs --------------------------------------------------------------------------------------


def done(job: Job) -> driver.Entry:
    torch.set_num_threads(1)
    return driver.entry(job.key, lambda: attempted(*job), limit=3600, every=True)


def attempted(name: str, types: Sequence[str], ways: Ways) -> Iterator[Verdict]:
    if name.startswith("jax/"):
        yield from public_jax.verdicts(name, types)
        return
    row = next(r for r in public_table.rows() if r.name == name)
    public_table.prepared(row.package)
    subject = Subject(row, ways)
    if wrong := values_differ(subject, subject.compiled_ys, "", (), ()):
        yield Verdict(name, EXPLAINED, f"compiled without a scope, {wrong}")
        return
    for op_type in types or public_table.OP_TYPES:
        ops = subject.record.ops(op_type)
        if ways.keys and op_type in BY_NAME:
            ops = [op for op in ops if public_oracle.is_called(op_type, op)]
        if ways.keys and ops:
            found = public_places.places(subject.module, subject.calls, op_type, ops, ways.keys)
            subject.key, is_there = found or (None, lambda op: False)
            ops = [op for op in ops if is_there(op)]
        if ops:
            yield verdict_of(subject, f"{name}/{op_type}", op_type, ops)


# -- the report ------------------------------------------------------------------------------------


def package_of(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "jax" else parts[0]


def class_of(package: str, verdict: Verdict) -> tuple[str, str]:
    """A message without what is of one case only, and the case."""
    case, _, detail = verdict
    if found := re.match(r"\w+: (\S+)(?: \S+){0,4}? computes '(\w+)' inside", detail):
        return f"{found[2]} in {found[1]}", case
    text = re.sub(r"\d[\d.e+-]*", "#", detail)
    text = re.sub(r"`.*?`|\(\S+:#\)", "…", text, flags=re.DOTALL)
    return f"{case.rpartition('/')[2]}: {text[:160]}", case


def needed() -> list[str]:
    return [*public_table.SOURCES, *public_jax.PACKAGES]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = driver.arguments("tests.campaigns.public_models", 2, "rows that begin like this")
    parser.add_argument("--types", default="", metavar="Relu,Mul", help="these op types only")
    parser.add_argument("--compiled", default="", metavar="BACKEND", help="by torch.compile")
    parser.add_argument("--keys", default="", choices=public_places.KINDS, help="in one place")
    parser.add_argument("--builtin", action="store_true", help="rules by builtin")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    start = time.perf_counter()
    ways = Ways(options.compiled, options.keys, options.builtin)
    types = tuple(filter(None, options.types.split(",")))
    rows = [*public_table.rows(), *([] if ways.part else public_jax.rows())]
    wanted = [row.name for row in rows if row.name.startswith(options.only)]
    if options.compiled and not options.only:
        wanted = [name for name in wanted if name in COMPILED]
    if not wanted:
        sys.exit(f"no row begins with {options.only!r}; see public_table.rows()")
    is_all = not (options.only or ways.part)
    packages = needed() if is_all else sorted({n.partition("/")[0] for n in wanted} - {"jax"})
    if lacking := records.missing(packages):
        sys.exit(f"not installed: {', '.join(lacking)}; the head of public_models.py says how")
    jobs = [Job(name, types, ways) for name in wanted]
    digest = driver.sources(str((types, ways)))
    entries = driver.carried_out(jobs, options, done, OUT / "public.jsonl", digest)
    found = driver.classes(entries, package_of, class_of)
    counts = driver.totals(entries, package_of)
    is_whole = not options.only and not options.types
    path = RESULT.with_stem(f"public-{ways.part}") if ways.part else RESULT
    path = path if is_whole else OUT / "public-part.json"
    content = {
        **records.facts("tests.campaigns.public_models", ["torch", *["jax"] * is_all, *packages]),
        "seconds": round(sum(entry["seconds"] for entry in entries)), "models": len(entries),
        "counts": counts, "classes": found,
        "cases": {case: outcome for e in entries for case, outcome, _ in e["others"]},
    }  # fmt: skip
    records.write(path, content)
    every = {"all": sum(counts.values(), Counter[str]())}
    return driver.told(found, counts | every, [path.relative_to(ROOT)], start)


if __name__ == "__main__":
    sys.exit(main())
