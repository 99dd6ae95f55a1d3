"""The inspection tools for unmodified PyTorch models."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from regrad.checking import differences
from regrad.core.replacements import Entrance
from regrad.core.signatures import helpful
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, GradientError, kind
from regrad.inspection import comparisons, nonfinite, paths, saved, traces
from regrad.inspection.checks import of_arrays
from regrad.inspection.comparisons import RTOL, GradientComparison, InPlace
from regrad.inspection.nonfinite import CURES, NonFinite
from regrad.inspection.paths import GradientPath
from regrad.inspection.recorder import Bad, Kept, Leaf, Recording, RunRecorder, Tool, first_bad
from regrad.inspection.saved import SavedBytes
from regrad.inspection.traces import GradientTrace
from regrad.torch.bridge import from_regrad
from regrad.torch.host import DisableTorchFunction, number_of
from regrad.torch.nodes import tensors
from regrad.torch.open_scopes import inside
from regrad.torch.seeing.arrays import Measures, as_array, at_rest, is_float, without_history
from regrad.torch.seeing.checks import Floats, TorchArrays, check_callable
from regrad.torch.seeing.modules import argument_paths, found_in
from regrad.torch.seeing.names import key_of, op_type_of
from regrad.torch.seeing.notes import OpNote, name_of_rule
from regrad.torch.seeing.watching import Found, Looker, functions_of_python

# The names of ops in regrad's list of cures, where they differ from the op type of the function.
_CURE_OF = {
    "div": "RealDiv", "where": "SelectV2", "norm": "Norm", "linalg.vector_norm": "Norm",
    "linalg.norm": "Norm", "rpow": "Pow",
}  # fmt: skip


@helpful("trace_gradients")
def trace_gradients(f: Callable[..., Any]) -> Callable[..., GradientTrace]:
    """Return a function that runs `f` and its backward pass, and reports what ran.

    Args:
        f: A function of tensors and other arguments, or a module. It returns a tensor, or a
            container with one loss (a scalar, or an entry named `loss`). Or it calls `backward()`
            itself, and may return anything. For a result that is not a scalar, the incoming
            gradient is 1 for each element.

    Returns:
        A function of f's arguments that returns a `GradientTrace`. The trace has a step for each
        node of autograd's graph, in the order in which they ran: torch's function, its rule
        (built-in, an override of a `regrad.torch` scope, or custom: an `autograd.Function`), the
        line of the innermost code outside of torch that ran it, the path of the module, and
        figures of the incoming and outgoing gradients. The tool computes gradients of all
        parameters and arguments that require grad, and leaves `.grad` unchanged, unless f changes
        it. Compiled code runs op by op. `trace.worst()` reports the most likely problem, and
        `trace.cuts` has the ops that passed no gradient on (`detach`, ops under `no_grad`).

    Raises:
        ArgumentError: f is not callable.
        GradientError: The result of f has no gradient, or contains several losses.

    >>> import torch
    >>> import regrad.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> trace = regrad.torch.trace_gradients(lambda x: model(x).sum())(torch.ones(1, 2))
    >>> [(step.op_type, step.path) for step in trace.steps if step.op_type != "linear (t)"]
    [('sum', ''), ('relu', '1'), ('linear', '0')]
    """
    return traces.traced(TorchRecorder(f, "trace_gradients"))


@helpful("find_nan")
def find_nan(f: Callable[..., Any]) -> Callable[..., NonFinite | None]:
    """Return a function that runs `f` forward and backward, and finds the first NaN or infinity.

    Args:
        f: A function or module, as for `trace_gradients`.

    Returns:
        A function of f's arguments that returns a `NonFinite`, or None if all values are finite.
        The `NonFinite` has the torch function, the line of your code that ran it, the module, the
        element, the arguments of the function there, and the usual cure. It also reports an
        argument or parameter that is not finite at the start.

        The tool reports a NaN where it first appears. It does not report an infinity that the
        program writes on purpose (`masked_fill(mask, -inf)`), or an infinity that leads to no NaN
        and to no infinite result or gradient.

        Use the tool for debugging: it keeps the arguments of every function, and waits for each.

    Raises:
        ArgumentError, GradientError: As for `trace_gradients`.

    >>> import torch
    >>> import regrad.torch
    >>> x = torch.tensor([1.0, 0.0], requires_grad=True)
    >>> found = regrad.torch.find_nan(lambda x: torch.log(x).sum())(x)
    >>> found.op_type, found.phase, found.what, found.index
    ('log', 'forward', 'inf', (1,))
    """
    return nonfinite.searched(TorchRecorder(f, "find_nan"))


def gradient_path(f: Callable[..., Any], name: str) -> Callable[..., GradientPath]:
    """Return a function that runs `f` and reports how the gradient reaches one of its inputs.

    Args:
        f: A function, as for `trace_gradients`.
        name: The input to follow: the name of an argument or a parameter, `"args[0]"`,
            `"layer1.weight"`, as in the inputs of a trace.

    Returns:
        A function of f's arguments that returns a `GradientPath`. The path has the ops between the
        result and the parameter, each with its rule and line, and the norms of the incoming
        gradients and of the gradients that leave towards the parameter. It also shows where the
        gradient dies: where only zeros or non-finite values leave, or where an op cuts it off.
        Print it for a table.

    Raises:
        ArgumentError: f has no differentiated input of that name.
        GradientError: As for `trace_gradients`.

    >>> import torch
    >>> import regrad.torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> path = regrad.torch.gradient_path(net, "0.bias")(torch.ones(1, 2))
    >>> [step.op_type for step in path.steps]
    ['linear', 'relu', 'linear']
    """
    return paths.followed(TorchRecorder(f, "gradient_path"), name)


def compare_gradients(
    f: Callable[..., Any],
    other: Any = "true",
    *,
    surrogates: Iterable[str] = (),
    rtol: float = RTOL,
    seed: int = 0,
) -> Callable[..., GradientComparison]:
    """Return a function that compares the gradient of `f` with another gradient of the function.

    Args:
        f: A function or module, as for `trace_gradients`.
        other: `"true"`: f itself with torch's own gradients, without the rules of scopes; autograd
            differentiates the forward passes of Functions and custom gradients.
            `"differences"`: central differences, in float64, for a call without keywords. Or
            another function of the same arguments, of torch's tensors or of regrad's Tensors.
        surrogates: Op types (`"relu"` as in the rows, or `"Relu"`) or names of rules whose
            gradients differ on purpose.
        rtol: The difference from which two gradients count as different, relative to the larger
            norm.
        seed: The seed of torch's generator in both runs.

    Returns:
        A function of the arguments that returns a `GradientComparison`: cosine, ratio of norms,
        agreement of signs, and zeros of both gradients. It has a row for each argument and
        parameter, and for each input of each op that has a custom rule. For an op, both rules
        receive the gradient that arrived there. The ops are the ops of f whose rule is not also a
        rule of the other run. If f calls `backward()` itself, the comparison uses the gradients
        that it accumulates, and `.grad` changes as f changes it.

    Raises:
        ArgumentError: `other` is none of these.
        GradientError: As for `trace_gradients`; `surrogates` is not a list of strings.

    >>> import torch
    >>> import regrad as rg
    >>> import regrad.torch
    >>> x = torch.tensor([-0.5, 2.0], requires_grad=True)
    >>> with regrad.torch.gradient_override_map({"Relu": rg.rules.straight_through}):
    ...     found = regrad.torch.compare_gradients(lambda x: torch.relu(x).sum())(x)
    >>> [(row.name, row.op_type, row.signs) for row in found.rows], found.ok
    ([('args[0]', '', 0.5), ('x', 'relu', 0.5)], False)
    """
    recorder = partial(TorchRecorder, api="compare_gradients", seed=seed)
    of_other = partial(recorder, other=True)
    return comparisons.compared(recorder(f), other, surrogates, rtol, of_other)


def saved_bytes(f: Callable[..., Any]) -> Callable[..., SavedBytes]:
    """Return a function that runs `f` and reports the memory that its backward pass keeps.

    Args:
        f: A function of tensors and other arguments, or a module; it may return anything. If it
            calls `backward()` itself, the report covers all memory kept until then.

    Returns:
        A function of f's arguments that returns `SavedBytes`: bytes by torch function, line of
        your code, and module. The report counts each storage once, in full, for the function that
        kept it first. It does not count parameters, buffers, arguments, and tensors that f reads
        from outside, since these stay alive in any case.

    Raises:
        ArgumentError: f is not callable.

    >>> import torch
    >>> import regrad.torch
    >>> x = torch.zeros(256, requires_grad=True)
    >>> saved = regrad.torch.saved_bytes(lambda x: torch.sin(x + 1.0).sum())(x)
    >>> saved.total, saved.rows[0].op_type
    (1024, 'sin')
    """
    return saved.measured(TorchRecorder(f, "saved_bytes"))


# -- the recorder --------------------------------------------------------------------------------


class TorchRecorder(RunRecorder):
    """The recorder of PyTorch functions: a `Looker`, and one run that it observes.

    Args:
        f: The function.
        api: The name of the tool in messages.
        seed: The seed of torch's generator for each run; None to leave the generator unchanged.
        other: Whether f may be a function of regrad's Tensors.
    """

    by_op = True

    def __init__(
        self, f: Callable[..., Any], api: str, seed: int | None = None, other: bool = False
    ) -> None:
        check_callable(f, api)
        super().__init__(f, api)
        self.seed = seed
        self.other = other
        self.measures: Measures = Measures()

    def run(self, args: Sequence[Any], options: dict[str, Any], tool: Tool) -> Recording:
        f = _of_torch(self.f, args, options) if self.other else self.f
        return self._run(f, args, options, Looker(found_in(f, args, options), tool))

    def _run(
        self, f: Callable[..., Any], args: Sequence[Any], options: Any, looker: Looker
    ) -> Recording:
        given = [x for x in tensors((args, options)) if x.requires_grad]
        value, made, found = None, [], {}
        rest = nullcontext() if self.seed is None else at_rest(self.seed)
        with rest, suppress(Found), looker.looking():
            value = f(*args, **options)
            if not looker.ran_backward:
                loss = find_loss(value, self.api)
                made = [key_of(loss.grad_fn)]
                found = looker.back(loss, given)
        leaves = []
        for name, x in sources(looker, args, given):
            key = id(x)
            kind = "argument" if name.startswith("args") and args else "parameter"
            g = found.get(key) if found.get(key) is not None else looker.taken.get(key)
            leaves.append(Leaf(name, kind, x, g, key, name))
        ys = [*tensors((value,)), *looker.losses]
        cuts = [(OpNote(*cut), name) for cut, name in looker.cuts.items()]
        return Recording(without_history(value), ys, leaves, cuts, looker.ops(), made)

    def array(self, x: Any) -> Any:
        if x is None or x.is_meta or (x.layout is not torch.strided and not x.is_sparse):
            return None
        return as_array(x if x.layout is torch.strided else x.to_dense())

    def held(self, x: Any) -> Any:
        return None if x is None else x.detach().clone()

    def figures(self, x: Any) -> Any:
        return self.measures.of(x)

    def bad(self, x: Any) -> Bad | None:
        if not is_float(x) or x.layout is not torch.strided or x.is_meta or x.is_nested:
            return None
        with torch.no_grad(), DisableTorchFunction():
            finite = not x.numel() or torch.isfinite(x).all()
        return None if finite else first_bad(as_array(x))

    def type_of(self, op: Any) -> str:
        name = op.op_type.partition(" (")[2].rstrip(")") or op.op_type.rstrip("_")
        known = _CURE_OF.get(name) or (op_type_of(op.func) if callable(op.func) else "")
        return known if known in CURES else name.title().replace("_", "")

    def kept(self, args: Sequence[Any], options: dict[str, Any]) -> Iterable[Kept]:
        return kept(self.f, args, options)

    def true(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        looker = _OwnGradients(found_in(self.f, args, options), InPlace(self))
        return self._run(self.f, args, options, looker).leaves

    def differences(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        if options:
            raise ArgumentError(f"{self.api}: differences need a call without keywords")
        floats = Floats(self.f, args, self.api)
        f = of_arrays(TorchArrays(self.seed or 0), floats, floats.xs, forward=False).f
        found = differences.gradients(f, [as_array(x) for x in floats.xs])
        every = zip(floats.names, floats.xs, found, strict=True)
        return [Leaf(name, "argument", x, torch.tensor(g), None, name) for name, x, g in every]

    def names(self, other: Any) -> tuple[str, str]:
        if not callable(other):
            return ("given", other) if other == "differences" else ("rules", "true")
        return getattr(self.f, "__name__", "f"), getattr(other, "__name__", "other")

    def meant(self, surrogates: Iterable[str], ops: Iterable[Any]) -> list[str]:
        given = list(surrogates)
        overrides = [(op, op.override) for op in ops if op.override is not None]
        return given + [op.op_type for op, call in overrides if call.rule.op.type in given]


def _of_torch(other: Any, args: Sequence[Any], options: Any) -> Callable[..., Any]:
    """Return the other function as a function of torch tensors."""
    if isinstance(other, torch.nn.Module):
        return other
    with torch.no_grad(), at_rest(0):
        y = other(*args, **options)
    return from_regrad(other) if isinstance(y, Tensor) else other


# -- the ends of a run ----------------------------------------------------------------------------


def sources(
    looker: Looker, args: Sequence[Any], given: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Return everything that a gradient may reach: arguments, parameters, and other leaves."""
    named = [*argument_paths(args), *looker.held.items()]
    names = looker.paths.parameters() | {id(x): name for name, x in reversed(named)}
    outside = [x for x in looker.held.values() if isinstance(x, torch.Tensor)]
    parameters = [p for module in looker.paths.seen for p in module.parameters()]
    every = {id(x): x for x in (*given, *outside, *parameters, *looker.leaves.values())}
    wanted = [x for x in every.values() if x.requires_grad]
    return [(names.get(id(x), f"a tensor of shape {tuple(x.shape)}"), x) for x in wanted]


def find_loss(value: Any, api: str) -> torch.Tensor:
    """Return the tensor to differentiate in the result of f."""
    if isinstance(value, torch.Tensor):
        return _differentiable(value, api)
    named = value.get("loss") if isinstance(value, dict) else getattr(value, "loss", None)
    if isinstance(named, torch.Tensor):
        return _differentiable(named, api)
    found = [y for y in tensors((value,)) if y.requires_grad and y.grad_fn is not None]
    scalars = [y for y in found if y.numel() == 1]
    if len(scalars) == 1 or len(found) == 1:
        return (scalars if len(scalars) == 1 else found)[0]
    raise GradientError(
        f"{api}: f returned {kind(value)} with {len(scalars)} losses (tensors of one number that "
        "require grad). Return the loss, name it 'loss', or call backward() in f."
    )


def _differentiable(y: torch.Tensor, api: str) -> torch.Tensor:
    if not y.requires_grad:
        raise GradientError(
            f"{api}: the result of f does not require grad, because no tensor that it depends on "
            "does. Is the result computed under no_grad, or detached?"
        )
    return y


# -- a run with torch's own gradients ------------------------------------------------------------


class _OwnGradients(Looker):
    """Observes a run in which all gradients are torch's own, without scopes and custom gradients.

    In third-party Functions, autograd's gradient of `forward` replaces `backward`.
    """

    def entrances(self) -> Iterator[Entrance]:
        yield from super().entrances()
        for function in functions_of_python():
            if not function.__module__.startswith("regrad."):
                name = name_of_rule(function)
                yield function, name, partial(self._own_backward, getattr(function, name))

    def _own_backward(self, old: Callable[..., Any], _: Any) -> Any:
        """Return a `backward` that differentiates a Function's forward pass by autograd."""

        def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
            note = self.functions.get(number_of(ctx)) if get_ident() == self.paths.thread else None
            if note is None or not note.is_held:  # the Function ran elsewhere, or before
                return old(ctx, *dys)
            found = iter(note.own_gradients(dys))
            return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)

        return staticmethod(backward)

    @contextmanager
    def looking(self) -> Generator[None]:
        with inside(own=True), super().looking():
            yield


# -- saved memory ----------------------------------------------------------------------------------


def kept(f: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> list[Kept]:
    """Run a function; return each storage that its backward pass keeps, and its first keeper."""
    held = found_in(f, args, options)
    keeper = _Keeper(held)
    with keeper.looking(), torch.autograd.graph.saved_tensors_hooks(keeper.pack, _as_it_is):
        value = f(*args, **options)
    alive = set(_storages((args, options, held, keeper.leaves)))
    for module in keeper.paths.seen:
        alive |= set(_storages(([*module.parameters(), *module.buffers()],)))
    rows = list(keeper.rows(alive))
    del value  # the result must stay alive until here
    return rows


class _Keeper(Looker):
    """Records the tensors that each function saves."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.saved: dict[int, tuple[StorageWeakRef, OpNote, int]] = {}

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Record a saved tensor for the call that began last."""
        with DisableTorchFunction():
            if self.closed or x.layout is not torch.strided:
                return x
            storage = x.untyped_storage()
            weak = StorageWeakRef(storage)
            known = self.saved.get(weak.cdata)
            if known is None or (not self.ran_backward and known[0].expired()):
                self.saved[weak.cdata] = weak, self.last or OpNote(""), storage.nbytes()
            return x.detach()  # (avoids a cycle between an op and its own output)

    def rows(self, alive: set[int]) -> Iterator[Kept]:
        """Yield the rows of the storages still kept; after a backward pass, of all storages."""
        for key, (storage, note, size) in self.saved.items():
            if key not in alive and (self.ran_backward or not storage.expired()):
                yield note.op_type, note.line, note.path, size


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _storages(values: Any) -> Iterable[int]:
    """Yield the storages of tensors."""
    for x in tensors((values,)):
        if x.layout is torch.strided:
            yield StorageWeakRef(x.untyped_storage()).cdata
