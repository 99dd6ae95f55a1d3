"""Every op of torch's own sample database under every override that concerns it.

    python -m tests.campaigns.torch_ops                 all ops, a few samples of each
    python -m tests.campaigns.torch_ops --samples 0     all ops, all samples
    python -m tests.campaigns.torch_ops --only softmax  ops whose name contains this

A plain call runs first, under a `TorchDispatchMode` that sees which ATen ops autograd records. For
each op type among them (and some that are not) the call runs again in a scope with a rule for that
type. One of these must come of it:

* delivered: rules were bound, and no op of the type kept autograd's own gradient;
* refused: PassedOverError;
* SILENT: autograd recorded an op of the type all the same. There must be none;
* broken: an error that the plain call does not raise. There must be none;
* untouched: the type is not concerned, and the call ran as ever.

What counts as an op of a type is said here (`ATEN`) by ATen's names, and not taken from the tables
of the library, which are under test.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import regrad.torch
from regrad.errors import PassedOverError
from regrad.torch.optypes import BINARY, families

# op type: ATen's names, where they are more or others than the names in torch.
ATEN = {
    "Softmax": "_softmax _safe_softmax", "LogSoftmax": "_log_softmax", "Relu6": "hardtanh",
    "Selu": "elu", "Square": "square", "Conv2D": "convolution", "Conv3D": "convolution",
    "LogSigmoid": "log_sigmoid_forward", "MaxPool": "max_pool2d_with_indices max_pool2d",
    "MaxPool3D": "max_pool3d_with_indices", "ClipByValue": "clamp clamp_min clamp_max",
    "MatMul": "mm bmm mv dot vdot addmm baddbmm addbmm addmv linear", "Prelu": "_prelu_kernel",
    "MatrixInverse": "linalg_inv_ex", "Cholesky": "cholesky linalg_cholesky_ex",
    "Maximum": "maximum fmax", "Minimum": "minimum fmin", "Sub": "sub rsub",
    "Max": "amax max", "Min": "amin min", "Reshape": "view _unsafe_view _reshape_alias",
    "Conj": "_conj _conj_physical conj_physical",
}  # fmt: skip

# Which calls of an ATen op are an op of the type, where its name alone does not tell.
WHEN: dict[str, Callable[..., bool]] = {
    "Elu": lambda x, alpha=1, scale=1, input_scale=1: scale == 1,
    "Relu6": lambda x, low=-1, high=1: (low, high) == (0, 6),
    "Selu": lambda x, alpha=1, scale=1, input_scale=1: scale != 1,
    "Conv2D": lambda x, w, bias, stride, padding, dilation, transposed, *rest: (
        w.dim() == 4 and not transposed
    ),
    "Conv3D": lambda x, w, bias, stride, padding, dilation, transposed, *rest: (
        w.dim() == 5 and not transposed
    ),
    "RealDiv": lambda *args, rounding_mode=None: rounding_mode is None,
}
# Callables of which the docs say which op types count inside; all else there is torch's own.
LISTED = {
    "column_stack": "ConcatV2", "einsum": "MatMul Mul", "inner": "MatMul Mul",
    "tensordot": "MatMul", "outer": "Mul", "linalg_multi_dot": "MatMul",
    "nn_functional_bilinear": "MatMul", "nn_functional_cross_entropy": "LogSoftmax",
    "nn_functional_linear": "MatMul", "hstack": "ConcatV2", "vstack": "ConcatV2",
    "dstack": "ConcatV2", "nn_functional_scaled_dot_product_attention": "MatMul Softmax",
    "nn_functional_multi_head_attention_forward": "MatMul Softmax Mean",
    "flatten": "Reshape", "ravel": "Reshape", "unflatten": "Reshape", "view_as": "Reshape",
    "float_power": "Pow", "square": "Pow", "aminmax": "Max Min",
}  # fmt: skip
# Ops that other calls run for torch's own ends, and that nobody wrote: the layout of an operand,
# the factor of a dropout mask, the mean in a pool. They count only in calls of these names, or (the
# second table) in all but these.
ONLY_IN = {"Identity": "clone alias", "Reshape": "reshape view reshape_as"}
NOT_IN = {
    "Mul": "nn_functional_rrelu",
    "Mean": "nn_functional_adaptive_avg_pool1d nn_functional_adaptive_avg_pool2d "
            "nn_functional_adaptive_avg_pool3d",
}  # fmt: skip
OUTCOMES = ("delivered", "refused", "SILENT", "broken", "untouched", "refused, not concerned")


def aten_types() -> dict[str, list[str]]:
    """The op types that an ATen op may be of, by its name without overload."""
    found: dict[str, list[str]] = {}
    for family in families().values():
        names = ATEN.get(family.type) or " ".join(family.names)
        for name in names.split():
            for each in (name, f"{name}_"):
                found.setdefault(each, []).append(family.type)
    return found


TYPES = aten_types()


def types_of(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Iterator[str]:
    """The op types that a call of an ATen op is of."""
    for op_type in TYPES.get(func.overloadpacket.__name__, ()):
        if op_type not in WHEN or WHEN[op_type](*args, **options):
            yield op_type


def written(types: set[str], name: str) -> set[str]:
    """The op types that a call of this name has for its caller."""
    name = name.partition(":")[0]
    if name in LISTED:
        return types & {*LISTED[name].split()}
    plumbing = {t for t, names in NOT_IN.items() if name in names.split()}
    plumbing |= {t for t, names in ONLY_IN.items() if name not in names.split()}
    if "dropout" in name:
        plumbing |= {"Mul", "RealDiv"}
    return types - plumbing


class Recorded(TorchDispatchMode):
    """The ATen ops that autograd records, below which this mode stands, with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and any(map(is_wanted, tree_leaves((args, kwargs)))):
            every = types_of(func, args, kwargs or {}) if is_float(y) else ()
            self.found += [(op_type, y) for op_type in every]
        return y

    def types(self, result: Any) -> set[str]:
        """The op types among them that gradients of the result pass."""
        nodes = behind(result)
        return {op_type for op_type, ys in self.found if reached(ys, nodes)}


def behind(result: Any) -> set[Any]:
    """All backward nodes behind a result."""
    stack = [y.grad_fn for y in flat(result) if y.grad_fn is not None]
    found = set(stack)
    while stack:
        new = {node for node, _ in stack.pop().next_functions if node is not None} - found
        found |= new
        stack += new
    return found


def reached(ys: Any, nodes: set[Any]) -> bool:
    """Whether a result has one of the nodes."""
    return any(y.grad_fn in nodes for y in flat(ys))


def is_wanted(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def is_float(ys: Any) -> bool:
    """Whether a result has a gradient at all."""
    tensors = [y for y in tree_leaves(ys) if isinstance(y, torch.Tensor)]
    return any(y.is_floating_point() or y.is_complex() for y in tensors)


# -- the calls ------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One call of a sample, and whether it changes its first argument."""

    name: str
    function: Callable[..., Any]
    sample: Any
    in_place: bool


def load() -> list[Any]:
    """torch's sample database. Its test code imports expecttest, of which nothing is needed."""
    if "expecttest" not in sys.modules and not importlib.util.find_spec("expecttest"):
        sys.modules["expecttest"] = mock.Mock(TestCase=unittest.TestCase, __spec__=None)
    from torch.testing._internal import common_methods_invocations as samples

    return [
        op
        for op in samples.op_db
        if {torch.float32, torch.float64} & op.dtypes and not op.name.startswith(NO_VALUES)
    ]


def cases(op: Any, count: int, dtype: torch.dtype) -> Iterator[Case]:
    """Calls of an op in all its variants, with a few of its samples (0: all of them)."""
    every = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd))
    few = every if not count else every[:: max(1, len(every) // count)][:count]
    for sample in few:
        for kind, function in variants(op):
            if "operator" not in kind or (len(sample.args) == 1 and not sample.kwargs):
                name = f"{op.formatted_name}:{kind}"
                yield Case(name, function, sample, "inplace" in kind)


def variants(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions, methods and operators of an op, under all its names."""
    for alias in (op, *op.aliases):
        prefix = "" if alias is op else f"{alias.name}."
        for kind in ("op", "method_variant", "inplace_variant"):
            if function := getattr(alias, kind, None):
                yield prefix + kind, function
    for kind in ("operator_variant", "inplace_operator_variant"):
        if function := getattr(op, kind, None):
            yield kind, function


def ready(case: Case) -> Callable[[], Any]:
    """The call, ready to run, with tensors of its own, no leaves where it changes them."""
    leaves = tree_map(fresh, (case.sample.input, case.sample.args, case.sample.kwargs))
    input, args, options = leaves
    if case.in_place:
        input = tree_map(lambda x: x.clone() if is_wanted(x) else x, input)
    torch.manual_seed(0)
    return lambda: case.function(input, *args, **options)


def fresh(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if is_tensor(x) else x


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def pair(dy: Any, a: Any, b: Any) -> Any:
    return [torch.ones_like(x) if is_tensor(x) else None for x in (a, b)]


# Results that torch's functions change in place: a rule had better not ask for them.
RULES: dict[str, Callable[..., Any]] = {
    "Identity": lambda dy: torch.ones_like(dy), **dict.fromkeys(BINARY, pair),
}  # fmt: skip

# What has no values before they are written.
NO_VALUES = ("empty", "new_empty")


def ones(op: Any, grad: Any) -> Any:
    """A rule that fits every op type: one for each element of each input."""
    found = [torch.full_like(x, 1.0) if is_tensor(x) else None for x in op.inputs]
    return found[0] if len(found) == 1 else found


# -- what comes of them ---------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What came of a call under a rule for one op type."""

    what: str
    case: str
    op_type: str
    value: str = "same"  # or "rounded", "DIFFERENT"
    detail: str = ""


def plain(case: Case) -> tuple[Any, set[str]] | None:
    """The result of a call, and the op types in it. None if it fails without any override."""
    try:
        call, repeat = ready(case), ready(case)
        again = repeat()
        torch.manual_seed(0)
        with Recorded() as seen:
            y = call()
    except Exception:
        return None
    if compare(y, again) != "same" or backward(again):  # it cannot be repeated, or differentiated
        return None
    return y, written(seen.types(y), case.name)


def compare(ys: Any, expected: Any) -> str:
    """Whether two results are the same to the bit, or up to rounding."""
    pairs = list(zip(tree_leaves(ys), tree_leaves(expected), strict=True))
    pairs = [(y.detach(), e.detach()) for y, e in pairs if is_tensor(e) and not e.is_sparse]
    if all(y.dtype == e.dtype and y.shape == e.shape for y, e in pairs):
        if all(bitwise(y, e) for y, e in pairs):
            return "same"
        if all(torch.allclose(y, e, rtol=1e-4, atol=1e-5, equal_nan=True) for y, e in pairs):
            return "rounded"
    return "DIFFERENT"


def bitwise(y: torch.Tensor, expected: torch.Tensor) -> bool:
    if y.is_quantized or y.layout is not torch.strided or y.is_nested:
        return True
    return torch.equal(as_bytes(y), as_bytes(expected))


def as_bytes(y: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(y.numel(), dtype=y.dtype)
    return flat.copy_(y.reshape(-1)).view(torch.uint8)


def outcome(case: Case, op_type: str, expected: Any, concerned: bool) -> Outcome:
    """Run a call in a scope with a rule for one op type, forward and backward."""
    call, rule = ready(case), RULES.get(op_type, ones)
    try:
        with regrad.torch.gradient_override_map({op_type: rule}) as used, Recorded() as seen:
            y = call()
    except PassedOverError as error:
        what = "refused" if concerned else "refused, not concerned"
        return Outcome(what, case.name, op_type, detail=str(error)[:160])
    except Exception as error:
        return Outcome("broken", case.name, op_type, detail=repr(error)[:300])
    value = compare(y, expected)
    if concerned and op_type in written(seen.types(y), case.name):
        return Outcome("SILENT", case.name, op_type, value)
    if detail := backward(y):
        return Outcome("broken", case.name, op_type, value, detail)
    missed = concerned and not any(hit.ran for hit in used.hits) and any(map(is_wanted, flat(y)))
    return Outcome("delivered" if used.hits else "untouched", case.name, op_type, value,
                   "the rule did not run" if missed else "")  # fmt: skip


def flat(ys: Any) -> list[torch.Tensor]:
    return [y for y in tree_leaves(ys) if is_tensor(y)]


def backward(ys: Any) -> str:
    """Differentiate everything that can be; what went wrong, if anything."""
    try:
        wanted = [y for y in flat(ys) if is_wanted(y)]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(y) for y in wanted])
    except Exception as error:
        return repr(error)[:300]
    return ""


def examine(case: Case, others: int, rng: random.Random) -> Iterator[Outcome]:
    """A call under each op type that concerns it, and some that do not."""
    found = plain(case)
    if found is None:
        return
    expected, types = found
    for op_type in sorted(types):
        yield outcome(case, op_type, expected, True)
    for op_type in rng.sample(sorted(families().keys() - types), others):
        yield outcome(case, op_type, expected, False)


def campaign(
    ops: Sequence[Any], samples: int, others: int, tell: Callable[[str], None] = lambda line: None
) -> list[Outcome]:
    """All outcomes of these ops."""
    rng, found = random.Random(0), []
    warnings.simplefilter("ignore")
    for n, op in enumerate(ops):
        dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32
        try:
            some = list(cases(op, samples, dtype))
        except Exception as error:
            tell(f"no samples of {op.formatted_name}: {error!r:.100}")
            continue
        for case in some:
            found += examine(case, others, rng)
        if n % 50 == 0:
            tell(f"{n} of {len(ops)} ops, {len(found)} calls")
    return found


def report(found: Sequence[Outcome]) -> Iterator[str]:
    """The counts as a table, and what is wrong."""
    counts = Counter(o.what for o in found)
    values = Counter((o.what, o.value) for o in found)
    yield "| outcome | calls | value to the bit | rounded | different |"
    yield "| --- | --: | --: | --: | --: |"
    for what in OUTCOMES:
        row = [values[what, v] for v in ("same", "rounded", "DIFFERENT")]
        yield f"| {what} | {counts[what]} | " + " | ".join(map(str, row)) + " |"
    yield ""
    concerned = {o.op_type for o in found if o.what in ("delivered", "refused", "SILENT")}
    yield f"Never concerned: {', '.join(sorted(families().keys() - concerned)) or 'none'}.\n"
    for title, wrong in WRONG.items():
        these = Counter((o.case, o.op_type, o.detail) for o in found if wrong(o))
        for (case, op_type, detail), n in sorted(these.items()):
            yield f"{title}: {op_type} in {case} ({n} times) {detail}"


WRONG: dict[str, Callable[[Outcome], bool]] = {
    "SILENT": lambda o: o.what == "SILENT",
    "broken": lambda o: o.what == "broken",
    "value": lambda o: o.value == "DIFFERENT",
    "rounded, untouched": lambda o: o.value == "rounded" and o.what == "untouched",
    "rule did not run": lambda o: bool(o.detail) and o.what == "delivered",
    "refused, not concerned": lambda o: o.what == "refused, not concerned",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4, help="of each op; 0: all")
    parser.add_argument("--others", type=int, default=2, help="op types that are not concerned")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    options = parser.parse_args()
    start = time.perf_counter()
    ops = [op for op in load() if options.only in op.formatted_name]
    found = campaign(
        ops, options.samples, options.others, lambda line: print(line, file=sys.stderr)
    )
    print(f"{len(ops)} ops, {len(found)} calls, {time.perf_counter() - start:.0f} s\n")
    print("\n".join(report(found)))


if __name__ == "__main__":
    main()
