"""Relevance of a PyTorch model: a run under rules that turn gradients into relevance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.overrides
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from regrad.core.callers import find_caller
from regrad.core.containers import tree_map
from regrad.core.places import near_paths
from regrad.errors import ArgumentError, GradientError, kind
from regrad.inspection.relevances import Loss, Relevance
from regrad.rules import runs
from regrad.rules.lrp_maps import LINEAR
from regrad.rules.runs import loss_of, relevance_of
from regrad.torch.bridge import alias, is_differentiable
from regrad.torch.host import DisableTorchFunction, settings_unlocked
from regrad.torch.nodes import LIBRARIES, tensors
from regrad.torch.overriding import gradient_override_map
from regrad.torch.seeing.modules import ModulePaths
from regrad.torch.seeing.names import function_name, op_type_of
from regrad.torch.seeing.watching import GETTER, writes


def explain(
    model: Any, inputs: Any, rules: Any, layers: Any, check: Any, batch_axis: int,
    create_graph: bool, target: Any, reference: Any,
) -> Relevance:  # fmt: skip
    """Return the relevance of a model's inputs; see `regrad.rules.lrp.relevance`."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"relevance expected a torch.nn.Module, got {kind(model)}")
    ops = Ops(model, check is not None, create_graph)
    with as_found(model, create_graph):
        run = TorchRun(model, inputs, target, reference, batch_axis, create_graph)
        alone = Ops(model, False, False)
        handles = [
            model.register_forward_pre_hook(lambda *_: alone.shapes.clear()),
            model.register_forward_hook(lambda *_: setattr(ops, "alone", [*alone.shapes])),
        ]
        with hooks(handles), alone:
            run.alone = run.apart()
        # (a loss has the true derivative of the relevance, by `order=1`)
        order = 1 if create_graph else None
        with gradient_override_map(rules, model=model, order=order) as used:
            total, found = run.differentiated(ops, layers)
    pairs = zip(run.points, found, strict=False)
    known = [p.relevance(dx, run.half, batch_axis) for p, dx in pairs]
    count = len(run.leaves)
    by_layer = dict(zip(run.layers, known[count:], strict=True))
    rows = ops.losses(found[len(run.points) :]) if check else None
    return run.answer(total, run.by_name(known[:count]), by_layer, rows, used)


class Point(NamedTuple):
    """A value whose relevance the caller wants, and the graph edge that receives its gradient."""

    edge: Any
    value: torch.Tensor
    name: Any = None
    is_embedded: bool = False

    def relevance(self, dx: torch.Tensor | None, half: int | None, axis: int) -> torch.Tensor:
        """Return the relevance; with `half`, the relevance of differences to the second half."""
        return self.summed(relevance_of(self.value, dx, half, axis))

    def pair(self, dx: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the value and a gradient; of sparse ones, the products and their factor of 1."""
        if dx is None or not is_sparse(self.value):
            return self.value, dx
        products = (self.value.to_sparse() * dx.to_sparse()).coalesce().values()
        return products, torch.ones_like(products)

    def summed(self, found: torch.Tensor) -> torch.Tensor:
        """Return shares; for a token, the sum over its embedding."""
        return found.sum(-1) if self.is_embedded else found


def point_of(
    x: torch.Tensor, name: Any = None, is_embedded: bool = False, keeps: bool = False
) -> Point:
    """Return the point of a value in the graph of autograd.

    Args:
        x: The value.
        name: The name of the input.
        is_embedded: Whether the value is an embedding of tokens.
        keeps: Whether the value keeps its history.
    """
    with DisableTorchFunction():  # (no mode may receive these calls)
        value = x.clone() if keeps else x.detach().clone()
        return Point(get_gradient_edge(x), value, name, is_embedded)


class TorchRun(runs.RelevanceRun):
    """A run of a model that differentiates with respect to the inputs.

    Args:
        keeps: Whether the results keep their history.
        move: Returns the tensor that replaces the n-th input, embedding or output of `at`.
        at: Paths of modules whose outputs are differentiated in place of the inputs.
        through: The path of a module and an index into its output. Gradients pass there only.
    """

    array = "a tensor"

    def __init__(
        self, model: nn.Module, inputs: Any, target: Any, reference: Any = None,
        batch_axis: int = 0, keeps: bool = False,
        move: Callable[[int, torch.Tensor], torch.Tensor] = lambda n, x: x,
        at: Any = (), through: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(model, inputs, target, reference, batch_axis)
        self.move = move
        self.keeps = keeps
        modules = dict(model.named_modules())
        self.at: list[str] = named(at, modules)
        self.through: Any = None if through is None else _unit(through, modules, batch_axis)
        self.is_running: bool = False
        self.alone: list[torch.Tensor] = []  # the targets of inputs and references, run separately
        self.leaves: list[Point] = []
        self.embedded: dict[Any, torch.Tensor] = {}  # by embedding module and input
        self.layers: dict[str, Point] = {}
        self.heads: dict[str, Point] = {}
        self.units: dict[str, Point] = {}
        self.placed: dict[str, torch.Tensor] = {}
        self.rebuilt: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {}
        for name, x in self.floats.items():
            if x.dtype == torch.float16:
                raise ArgumentError("relevance: float16 is too coarse; use bfloat16 or float32")
            if not self.at:
                values, self.rebuilt[name] = _apart(x if keeps else x.detach())
                self.values[name] = self.rebuilt[name](self._leaf(name, values.clone()))

    def _refer(self, others: dict[Any, Any]) -> None:
        check_dense(self.floats.values())
        super()._refer(others)

    def is_float(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and is_differentiable(x)

    def _leaf(self, name: Any, x: torch.Tensor, is_embedded: bool = False) -> torch.Tensor:
        leaf = self.move(len(self.leaves), x).requires_grad_()
        self.leaves.append(point_of(leaf, name, is_embedded, self.keeps))
        return leaf

    def by_name(self, found: Sequence[torch.Tensor]) -> list[tuple[Any, torch.Tensor]]:
        """Return the results for the leaves, each with the name of its input."""
        return [(p.name, share) for p, share in zip(self.leaves, found, strict=True)]

    def as_given(self, found: Iterable[tuple[Any, Any]]) -> Any:
        same = self.rebuilt.get
        return super().as_given([(name, same(name, _whole)(share)) for name, share in found])

    def chosen(self, y: Any) -> torch.Tensor:
        if not self.leaves and not self.placed:
            raise ArgumentError(
                "relevance: no input is a tensor of floats, or is read by an nn.Embedding of the "
                f"model; got {[kind(x) for x in self.values.values()]}. Pass the embedded input, "
                'or explain the output of the module that reads it: attribute(…, at="its path")'
            )
        value = super().chosen(y)
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            raise ArgumentError(
                f"relevance: the target is {kind(value)}, expected a tensor that depends on the "
                "inputs"
            )
        return value

    @property
    def points(self) -> list[Point]:
        """The points whose gradients the run computes."""
        return [*self.leaves, *self.layers.values(), *self.heads.values()]

    def differentiated(
        self, ops: Ops, layers: Any = (), heads: Any = ()
    ) -> tuple[torch.Tensor, Any]:
        """Run the model; return the total to share, and the gradients at points and ops."""
        modules = dict(self.model.named_modules())
        layers, heads = named(layers, modules), named(heads, modules)
        layers = [n for n in layers if n not in self.at]
        embeddings = [m for m in modules.values() if isinstance(m, nn.Embedding) and not self.at]
        placing = [modules[n].register_forward_hook(partial(self._placed, n)) for n in self.at]
        # (in the backward pass a checkpoint runs modules again, which does not count as a call)
        with hooks([*[m.register_forward_hook(self._embedded) for m in embeddings], *placing]):
            marked, given = partial(self._mark, self.layers), partial(self._mark, self.heads)
            handles = [modules[n].register_forward_hook(partial(marked, n)) for n in layers]
            handles += [modules[n].register_forward_pre_hook(partial(given, n)) for n in heads]
            if self.through:
                unit = partial(self._mark, self.units, self.through[0])
                handles.append(modules[self.through[0]].register_forward_hook(unit))
            state = random_states(self.model)
            with hooks([*handles, *ops.paths.install()]), ops:
                self.is_running = True
                value, total = self.explained(self.values)
                self.is_running = False
            if not all(map(torch.equal, state, random_states(self.model))):
                self._check_random(value)
            due = {*self.at, *layers} - {*self.layers} | ({*heads} - {*self.heads})
            if due := [*due, *({*(self.through or ())[:1]} - {*self.units})]:
                raise ArgumentError(f"relevance: the module {due[0]!r} did not run")
            if self.alone:
                runs.check_halves(total.detach(), self.alone)
            edges = [*[point.edge for point in self.points], *ops.edges]
            found = self._gradients(value.sum(), edges)
        return total if self.keeps else total.detach(), found

    def _gradients(self, y: torch.Tensor, edges: list[Any]) -> Any:
        """Return the gradients at the edges; with `through`, the gradients that pass one unit."""
        options: dict[str, Any] = {"allow_unused": True, "create_graph": self.keeps}
        if self.through is None:
            return torch.autograd.grad(y, edges, **options)
        edge = self.units[self.through[0]].edge
        (dy,) = torch.autograd.grad(y, [edge], retain_graph=True, create_graph=self.keeps)
        mask = dy.new_tensor(runs.mask_of(self.through, dy.shape))
        return torch.autograd.grad([edge], edges, [dy * mask], **options)

    def _check_random(self, value: torch.Tensor) -> None:
        """Raise ArgumentError if a second run has another result."""
        again, _ = self.explained(self.values)
        if not torch.allclose(again, value, 1e-5, 1e-8, equal_nan=True):
            raise ArgumentError(
                "relevance: the model draws random numbers, and its output differs from run to "
                f"run: {value.detach().sum():.4g} and {again.detach().sum():.4g}. Call "
                "model.eval(), or pass the random numbers as an input"
            )

    def _mark(self, where: dict[str, Point], name: str, module: Any, args: Any, *ys: Any) -> None:
        """Record the point of a module's output or input; the first one of several."""
        (x,) = ys or (args,)
        x = x[0] if isinstance(x, tuple | list) and x else x
        if name in where:
            raise ArgumentError(f"relevance: the module {name!r} ran more than once")
        if not isinstance(x, torch.Tensor) or is_sparse(x) or not x.requires_grad:
            raise ArgumentError(
                f"relevance: the module {name!r} {'returned' if ys else 'was called with'} "
                f"{kind(x)}, expected a dense tensor that depends on the inputs"
            )
        where[name] = point_of(x, keeps=self.keeps)

    def _placed(self, name: str, module: Any, args: Any, y: Any) -> Any:
        """Return the output of a module of `at`, moved: the first of several."""
        many = isinstance(y, tuple | list) and y
        x = y[0] if many else y
        if not isinstance(x, torch.Tensor) or not is_differentiable(x):
            raise ArgumentError(
                f"attribute: the module {name!r} returned {kind(y)}, expected a tensor of floats"
            )
        if name in self.placed and self.is_running:
            raise ArgumentError(f"attribute: the module {name!r} ran more than once")
        with DisableTorchFunction():
            if name not in self.placed:
                # (a copy, because the model may change the output in place)
                copy = x.clone() if self.keeps else x.detach().clone()
                leaf = self.move(len(self.layers), copy).requires_grad_()
                self.placed[name] = leaf
                self.layers[name] = point_of(leaf, keeps=self.keeps)
            moved = self.placed[name].clone()
        return type(y)([moved, *y[1:]]) if many else moved

    def _embedded(self, module: Any, args: Any, y: torch.Tensor) -> torch.Tensor | None:
        given = args[0].data_ptr(), args[0].numel()
        for name, ids in self.values.items():
            # (the same tokens, in any shape; with a reference, the tokens of both runs)
            dense = isinstance(ids, torch.Tensor) and not is_sparse(ids) and self.half is None
            if dense and (ids.data_ptr(), ids.numel()) == given:
                with DisableTorchFunction():
                    leaf = self.embedded.get((module, name, y.shape))
                    if leaf is None:
                        leaf = self._leaf(name, y if self.keeps else y.detach(), True)
                    self.embedded[module, name, y.shape] = leaf
                    return leaf
        return None


def is_sparse(x: torch.Tensor) -> bool:
    """Return whether a tensor has a layout without strides."""
    return x.layout is not torch.strided


def check_dense(inputs: Iterable[Any]) -> None:
    """Raise if an input is sparse, because a reference may have entries in other places."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and is_sparse(x):
            raise ArgumentError(
                f"relevance: a reference is for dense inputs, got a sparse matrix ({x.layout}). "
                "Pass its values as the input, and make the matrix in the model"
            )


def random_states(model: nn.Module) -> list[torch.Tensor]:
    """Return the states of the random generators that a model may read."""
    on_cuda = any(p.device.type == "cuda" for p in model.parameters())
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_cuda else [])]


def _unit(through: Any, modules: Mapping[str, Any], batch_axis: int) -> tuple[str, Any]:
    """Return the path of a module, and the index of a unit of its output, with the batch."""
    path, index = runs.unit_of(through, batch_axis)
    names = named(path, modules)
    if len(names) != 1:
        raise ArgumentError(f"attribute: through expected one module, got {names}")
    return names[0], index


@contextmanager
def hooks(handles: Sequence[Any]) -> Generator[None]:
    """Keep hooks active during a block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def named(paths: Any, modules: Mapping[str, Any]) -> list[str]:
    """Return the paths of the modules that paths or patterns match."""
    found: dict[str, None] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        fits = [n for n in modules if runs.names(path, n)]
        if not fits:
            raise ArgumentError(
                f"relevance: no module of the model is {path!r}.{near_paths(path, modules)}"
            )
        found |= dict.fromkeys(fits)
    return list(found)


@contextmanager
def as_found(model: nn.Module, learns: bool = False) -> Generator[None]:
    """A block which leaves a model as it was.

    Args:
        model: The model.
        learns: Whether parameters are differentiated, too, and not inputs alone.
    """
    free = [p for p in model.parameters() if p.requires_grad and not learns]
    held = [
        (module, name, x, x.clone())
        for module in model.modules()
        for name, x in module.named_buffers(recurse=False)
    ]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    # (fused attention has no second derivative)
    math = sdpa_kernel(SDPBackend.MATH) if learns else nullcontext()
    with torch.random.fork_rng(sorted(devices)), full_precision(), math:
        try:
            for p in free:
                p.requires_grad_(False)
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            for p in free:
                p.requires_grad_()
            for module, name, x, before in held:
                if getattr(module, name) is not x:
                    setattr(module, name, x)
                if not all(map(torch.equal, _dense_parts(x), _dense_parts(before))):
                    with torch.no_grad():
                        x.copy_(before)


def _dense_parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of which a sparse tensor consists, or the tensor itself."""
    if not is_sparse(x):
        return [x]
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        return [x.indices(), x.values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    return [x.ccol_indices(), x.row_indices(), x.values()]


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x


def _apart(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the values of a tensor, and a function that returns a tensor with other values.

    A sparse tensor keeps its pattern: entries outside the pattern stay 0.
    """
    *places, values = _dense_parts(x)
    if not is_sparse(x):
        return values, _whole
    if x.layout is torch.sparse_coo:
        made, options = torch.sparse_coo_tensor, {"is_coalesced": True}
    else:
        made, options = torch.sparse_compressed_tensor, {"layout": x.layout}
    make: Callable[..., torch.Tensor] = partial(made, *places, size=x.shape, **options)
    return values, lambda v: make(v, check_invariants=False)


@contextmanager
def full_precision() -> Generator[None]:
    """Compute float32 products in float32 during a block, and not in TF32 or bfloat16."""
    backends: Any = torch.backends
    cuda, cudnn, cpu = backends.cuda, backends.cudnn, backends.mkldnn
    pairs = [(part, cudnn) for part in (cuda.matmul, cudnn.conv, cudnn.rnn)]
    pairs += [(part, cpu) for part in (cpu.matmul, cpu.conv, cpu.rnn)]
    # (a part with the same precision as the whole backend follows the backend)
    before = [(p, p.fp32_precision.replace(whole.fp32_precision, "none")) for p, whole in pairs]
    allowed = False
    with suppress(RuntimeError):  # (raised if a user has set the precision of parts)
        allowed = cudnn.allow_tf32
    try:
        with settings_unlocked():
            if allowed:
                cudnn.allow_tf32 = False
            for part, _ in before:
                part.fp32_precision = "ieee"
        yield
    finally:
        with settings_unlocked():
            if allowed:
                cudnn.allow_tf32 = True
            for part, precision in before:
                part.fp32_precision = precision


# -- relevance losses ------------------------------------------------------------------------------


class Ops(torch.overrides.TorchFunctionMode):
    """Copies outputs of ops under rules, and records the relevance that each torch function passes.

    A rule saves its output, and the model may change that output in place. So the model receives a
    copy.
    """

    def __init__(self, model: nn.Module, checks: bool, keeps: bool) -> None:
        super().__init__()
        self.checks: bool = checks
        self.keeps: bool = keeps
        self.paths: ModulePaths = ModulePaths({"": model})
        self.seen: list[tuple[tuple[str, str, str], list[Point], list[Point]]] = []
        self.shapes: list[tuple[Any, tuple[int, ...]]] = []  # of each call
        self.alone: list[tuple[Any, tuple[int, ...]]] = []  # of the calls for half of the batch

    @property
    def edges(self) -> list[Any]:
        """The edges for which to compute gradients: all outputs and inputs, in order."""
        return [point.edge for _, ys, xs in self.seen for point in (*ys, *xs)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if type(func) is GETTER or writes(func, args, options):
            return func(*args, **options)
        if options.get("training") and _depends(func, args, options):
            raise ArgumentError(
                f"relevance: {function_name(func)} runs in training mode ({find_caller(LIBRARIES)})"
                ", so a result depends on the other examples or on random numbers. Call "
                "model.eval()"
            )
        if self.keeps and any(x.requires_grad for x in tensors((args, options)) if is_sparse(x)):
            raise GradientError(  # (a TypeError would vanish in an operator)
                f"relevance: {function_name(func)} takes a sparse matrix that depends on the "
                f"inputs ({find_caller(LIBRARIES)}), and PyTorch has no second derivative of it. "
                "With create_graph=True, use a dense matrix, or index_add of the products of edges"
            )
        if not self.checks:
            return self._followed(func, func(*args, **options), args)
        xs: list[Point] = []
        args, options = tree_map(partial(self._alias, xs), (args, options))
        y = self._followed(func, func(*args, **options), args)
        ys = [point_of(each) for each in tensors((y,)) if each.requires_grad]
        if ys and xs:
            name = op_type_of(func) or function_name(func)
            self.seen.append(((self.paths.path, name, find_caller(LIBRARIES)), ys, xs))
        return y

    def _followed(self, func: Callable[..., Any], y: Any, args: Any) -> Any:
        """Return a result, copied if needed, whose batch is where a rule of pairs expects it."""
        for x in islice(tensors((y,)), 1):
            n, known = len(self.shapes), getattr(x.grad_fn, "known", None)
            rule = known[0].rule.name if isinstance(known, tuple) else ""
            self.shapes.append((func, tuple(x.shape)))
            if not self.alone or rule not in runs.PAIRED or _is_linear(rule, func, x):
                continue
            what = f"relevance: {function_name(func)} ({find_caller(LIBRARIES)})"
            if n >= len(self.alone):
                raise ArgumentError(
                    f"{what} runs after the model, in the target, where {rule} cannot compare "
                    "inputs with references. Make it a part of the model, or omit its rule"
                )
            before, shape = self.alone[n]
            if before == func and len(x) != 2 * shape[0]:
                raise ArgumentError(
                    f"{what} returned the shape {shape} for the inputs, and {tuple(x.shape)} for "
                    f"inputs and references, so the batch is not its first axis, where {rule} "
                    "reads it. Move the batch there, as batch_first=True does"
                )
        return _copied(y, args)

    def _alias(self, xs: list[Point], x: Any) -> Any:
        """Return an alias of a tensor for this call, whose gradient covers only this use."""
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return x
        with DisableTorchFunction():
            mine = alias(x)
        xs.append(point_of(mine))
        return mine

    def losses(self, found: Sequence[Any]) -> list[Loss]:
        """Return the loss of each op."""
        gradients = iter(found)
        return [
            loss_of(*where, *[[p.pair(next(gradients)) for p in points] for points in ends])
            for where, *ends in self.seen
        ]


def _depends(func: Callable[..., Any], args: Any, options: Any) -> bool:
    """Return whether a function in training reads its whole batch or a random number."""
    given = inspect.signature(func).bind(*args, **options).arguments
    return bool(given.get("p", given.get("dropout_p", 1)))


def _is_linear(rule: str, func: Callable[..., Any], y: Any) -> bool:
    """Return whether the mean gradient of a call is its own, for any pairs: it moves one factor."""
    moving = [f for f, _ in y.grad_fn.next_functions if f is not None]
    return rule == "mean_gradient" and op_type_of(func) in LINEAR and len(moving) == 1


def _copied(y: Any, args: Any) -> Any:
    """Return a copy of the output of an op under a rule, unless it shares memory with an input."""
    if not isinstance(y, torch.Tensor) or not isinstance(y.grad_fn, BackwardCFunction):
        return y
    with DisableTorchFunction():
        if is_sparse(y):  # (it has no storage)
            return y.clone()
        place = y.untyped_storage().data_ptr()
        dense = [x for x in tensors(args) if not is_sparse(x)]
        shares = any(x.untyped_storage().data_ptr() == place for x in dense)
        return y if shares else y.clone()
