"""Plans: the selection of the layers of an unedited model to quantize, and their quantizers.

A plan runs a model once on a sample, with rules that record the calls of its layers, and selects
some of these layers. Each selected layer is a key of a map of rules, whose value replaces the layer
by one with quantized operands. The arrays of the quantizers are the `steps`. A host (PyTorch, JAX,
regrad's own functions) defines the layers, runs models, and creates the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrad.core.backends import backend_of
from regrad.core.containers import flatten
from regrad.core.dispatch import lift
from regrad.core.extras import needed
from regrad.core.places import ChainStep, at, entries, matches, near_paths, paths_around
from regrad.core.reports import Table
from regrad.core.scopes import optional
from regrad.core.surrogates import replace
from regrad.core.tensor import Readable, Tensor
from regrad.errors import ArgumentError, kind
from regrad.rules.quantize.layers_of_hosts import Call, Host, Layer, LayerForward
from regrad.rules.quantize.ours import OurHost
from regrad.rules.quantize.quantizers import Quantizer

ROLES = ("weights", "inputs", "activations", "products")


@dataclass(frozen=True, repr=False)
class Selection:
    """Quantizers for the layers that some paths select."""

    quantizers: tuple[tuple[str, Quantizer], ...]
    where: Any = None
    but: Any = ()

    def selects(self, call: Call) -> bool:
        """Return whether the selection contains a layer, or a module around the layer."""
        if self.where is not None and not any(_names(e, call) for e in entries(self.where)):
            return False
        return not any(_names(e, call) for e in entries(self.but))

    def check(self, calls: Sequence[Call]) -> None:
        """Raise if an entry names no layer."""
        where = () if self.where is None else entries(self.where)
        for entry in (*where, *entries(self.but)):
            if not any(_names(entry, call) for call in calls):
                shown = repr(entry) if isinstance(entry, str) else entry.__name__
                paths = [*dict.fromkeys(call.path for call in calls)]
                hint = near_paths(entry, paths) if isinstance(entry, str) else ""
                raise ArgumentError(
                    f"quantize: {shown} names no layer that ran with the sample.{hint}"
                )


def _names(entry: Any, call: Call) -> bool:
    if isinstance(entry, type):
        return call.module_class is not None and issubclass(call.module_class, entry)
    around = [call.path, *paths_around(call.path)]
    return any(path == entry or matches(entry, ChainStep((path,))) for path in around)


def layers(
    weights: Quantizer | None = None, inputs: Quantizer | None = None, *,
    activations: Quantizer | None = None, products: Quantizer | None = None, where: Any = None,
    but: Any = (),
) -> Plan:  # fmt: skip
    """Return a plan that quantizes the layers of an unedited model.

    Args:
        weights: The quantizer for weights of dense layers, convolutions and embeddings.
        inputs: The quantizer for inputs of dense layers and convolutions.
        activations: The quantizer for results of ReLUs, hard tanhs and clamps, in place or not.
        products: The quantizer for both operands of products without weights, as in attention.
        where: The layers to quantize: a path, a pattern (`"layers.*"`), a PyTorch module class, or
            a tuple of these. Selecting a module selects all layers inside it. None selects all
            layers.
        but: The layers to leave unchanged, in the same form. A list is accepted as well as a tuple.

    Layers are calls of `F.linear`, `F.conv1d` to `F.conv_transpose3d` and `F.embedding` in PyTorch
    modules, and products and convolutions in named scopes of JAX programs and of regrad's
    functions. In the latter, the operand that does not depend on the data is the weights.

    Returns:
        A `Plan`; `plan | other` quantizes the layers of both.

    Raises:
        ArgumentError: No quantizer is passed, or an argument is not a quantizer.

    >>> import torch
    >>> import regrad as rg
    >>> import regrad.torch
    >>> from regrad.rules import quantize as Q
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.ones(1, 4)
    >>> plan = Q.layers(weights=Q.lsq(4, per="channel"), inputs=Q.affine(8), but="2")
    >>> steps = plan.steps(net, x)
    >>> [(name, tuple(p.shape)) for name, p in steps.named_parameters()]
    [('0.weights_step', (8, 1))]
    >>> with rg.torch.gradient_override_map(plan.rules(steps), values=True, model=net) as used:
    ...     net(x).sum().backward()
    >>> used.assert_fired()
    """
    given = dict(zip(ROLES, (weights, inputs, activations, products), strict=True))
    for role, quantizer in given.items():
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            raise ArgumentError(f"layers: expected {role} to be a quantizer, got {kind(quantizer)}")
        if quantizer is not None and "noise" in quantizer.states:
            raise ArgumentError(
                f"layers: {quantizer!r} takes new noise at each call, and a plan draws no noise. "
                "Call the quantizer in your own function: rg.replace(forward)."
            )
    chosen = tuple((role, q) for role, q in given.items() if q is not None)
    if not chosen:
        raise ArgumentError(
            "layers: no quantizer was passed. Pass one for weights, inputs, activations or "
            "products: Q.layers(weights=Q.affine(8))"
        )
    where = tuple(where) if isinstance(where, list) else where
    return Plan((Selection(chosen, where, tuple(but) if isinstance(but, list) else but),))


@dataclass(frozen=True, repr=False)
class Plan:
    """Quantizers for the layers of a model, by place; see `layers`.

    >>> from regrad.rules import quantize as Q
    >>> plan = Q.layers(weights=Q.affine(8)) | Q.layers(inputs=Q.affine(8))
    >>> len(plan.selections)
    2
    """

    selections: tuple[Selection, ...]

    def __or__(self, other: Plan) -> Plan:
        return Plan(self.selections + other.selections)

    def steps(self, model: Any, *sample: Any, **named: Any) -> Any:
        """Return the arrays of the quantizers, initialized from a sample.

        Args:
            model: A `torch.nn.Module`, or a function of JAX or regrad, whose first argument
                contains its parameters.
            sample: The arguments of a call; for a function, with the parameters first.
            named: Keyword arguments of the call.

        Returns:
            In PyTorch a `torch.nn.Module` of parameters and buffers by path, with a `state_dict`,
            for optimizers; in JAX a pytree of arrays; in regrad Variables, as `steps.variables`.
            `steps[path]` is a dict of the arrays of a layer. The model is left unchanged.

        Raises:
            ArgumentError: An entry of the plan names no layer, two entries name the same layer, or
                shared weights are quantized in two ways.
        """
        host = _host_of(model, (sample, named))
        calls = host.calls(model, sample, named)
        if not calls:
            raise ArgumentError("quantize: no layer ran with the sample")
        for selection in self.selections:
            selection.check(calls)
        found, others = self._selected(calls)
        self._share(host, model, calls, found)
        arrays: dict[str, dict[str, Any]] = {layer.name: {} for layer in found}
        for layer in found:
            for call in _calls_of(layer, calls):
                _observe(layer, call, arrays[layer.name], first=True)
        return host.steps(found, others, arrays)

    def observe(self, steps: Any, model: Any, *sample: Any, **named: Any) -> Any:
        """Update the steps with further samples: observed ranges change, trained arrays do not.

        Args:
            steps: The steps of this plan; PyTorch and regrad steps are changed in place.
            model: The model, as for `steps`.
            sample: The arguments of a call.
            named: Keyword arguments of the call.

        Raises:
            ArgumentError: The steps do not belong to this model.
        """
        _check_steps(steps, "observe(steps, model, x)")
        calls = _host_of(model, (sample, named)).calls(model, sample, named)
        arrays = _arrays(steps)
        for layer in steps.layers:
            for call in _calls_of(layer, calls):
                _observe(layer, call, arrays[layer.name], first=False)
        return steps.with_arrays(arrays)

    def rules(self, steps: Any) -> dict[Any, Any]:
        """Return the map of rules, for a scope with `values=True` (and `model=model`).

        Args:
            steps: The steps of this plan.
        """
        _check_steps(steps, "rules(steps)")
        arrays = {layer.name: steps[layer.name] for layer in steps.layers}
        made = {f.layers[0].key: f.rule(arrays) for f in steps.forwards}
        inside = {f.layers[0].path for f in steps.forwards}
        for call in steps.others:  # (a key also matches inside of a layer)
            if call.path and not inside.isdisjoint(["", *paths_around(call.path)]):
                own = type(steps.forwards[0])([Layer(call.path, call.kind, {})])
                made.setdefault(at(call.path, call.kind.what), optional(replace(own)))
        return made

    def report(self, used: Any) -> Table:
        """Return a report of a scope with the rules of this plan, layer by layer.

        Args:
            used: The scope, or the JAX override.

        Returns:
            A table of layers with: bits, the range of the codes, the share of clipped values and
            the error (signal to noise, in dB) on the last sample, and the number of calls. Products
            and convolutions that were not quantized are listed as "float".
        """
        found = _forwards(used)
        rows: list[tuple[str, ...]] = []
        hits = [*used.hits]
        for forward in found:
            for layer in forward.layers:
                mine = [h for h in hits if h.path == layer.path and forward.__name__ in h.rule]
                for role, quantizer in layer.quantizers.items():
                    low, high, clipped, noise = layer.stats[role]
                    rows.append((
                        layer.name, layer.kind.name, role, repr(quantizer), f"{quantizer.bits}",
                        f"{low:.4g} to {high:.4g}", f"{100 * clipped:.1f} %", f"{noise:.1f}",
                        f"{sum(h.count for h in mine)}",
                    ))  # fmt: skip
        floats = [c for c in found[0].others if "activations" not in c.kind.roles]
        rows += [(c.path, c.kind.name, "float", *[""] * 6) for c in floats]
        headings = ("layer", "op", "what", "by", "bits", "range", "clipped", "SNR (dB)", "calls")
        return Table(headings, rows)

    def export(
        self, model: Any, steps: Any, *sample: Any, file: Any = None, **named: Any
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Return the codes of the weights, with scales and zero points, and the inputs' arrays.

        Args:
            model: The model.
            steps: The steps of this plan.
            sample: The arguments of a call, needed to find the weights of a function.
            file: A file to write the result to, with safetensors, or None.
            named: Keyword arguments of the call.

        Returns:
            NumPy arrays by name: `"0.weights"` (integers, or floats of a format),
            `"0.weights.scale"`, and, where they exist, `"0.weights.zero_point"` and
            `"0.weights.offset"`; these have the axes of the weights and one entry per block. Arrays
            of other quantizers are named like `"0.inputs.step"`. `dequantize` restores the weights.
            A layer in a loop has several weights: `"0[0].weights"`, `"0[1].weights"`.

        Raises:
            ArgumentError: The weights are not a parameter of the model, and no sample is passed.
        """
        _check_steps(steps, "export(model, steps)")
        host = _host_of(model, (sample, named) if sample or named else steps)
        calls = host.calls(model, sample, named) if sample or named else []
        arrays = _arrays(steps)
        found: dict[str, np.ndarray] = {}
        for layer in steps.layers:
            for role, quantizer in layer.quantizers.items():
                state = layer.given(arrays, role)
                if role != "weights":
                    prefix = f"{layer.name}.{role}".lstrip(".")
                    found |= {f"{prefix}.{n}": _numpy(x) for n, x in state.items()}
                    continue
                every = _weights(host, model, layer, calls)
                # (each iteration of a loop has its own weights)
                for i, weights in enumerate(every):
                    parts = quantizer.exported(weights, state)
                    prefix = f"{layer.name}{f'[{i}]' * (len(every) > 1)}.weights".lstrip(".")
                    found[prefix] = _integers(_numpy(parts.pop("")))
                    found |= {f"{prefix}.{n}": _numpy(x) for n, x in parts.items()}
        if file is not None:
            needed("safetensors.numpy", "train", "export").save_file(found, file)
        return found

    def _selected(self, calls: Sequence[Call]) -> tuple[list[Layer], list[Call]]:
        """Return the layers to quantize, and one call of each other layer."""
        found: dict[Any, list[Layer]] = {}
        own: dict[tuple[str, str], Call] = {}
        for call in calls:
            quantizers = self._quantizers(call)
            if not quantizers:
                own.setdefault(call.place, call)
                continue
            known = found.setdefault(call.place, [])
            if not any(layer.has(call) for layer in known):
                made = Layer(call.path, call.kind, quantizers, len(known), call.shape)
                known.append(made)
        for place, known in found.items():
            _tell_apart(known, [call for call in calls if call.place == place])
        made = [layer for known in found.values() for layer in known]
        return made, [call._replace(operands={}) for call in own.values()]

    def _quantizers(self, call: Call) -> dict[str, Quantizer]:
        found: dict[str, Quantizer] = {}
        for selection in self.selections:
            if not selection.selects(call):
                continue
            for role, quantizer in selection.quantizers:
                if role == "products" and "products" in call.kind.roles:
                    mine = {f"products_{operand}": quantizer for operand in call.kind.operands}
                elif role in call.kind.roles:
                    axes = (call.kind.channel, call.kind.inputs)
                    mine = {role: quantizer.along(*axes) if role == "weights" else quantizer}
                else:
                    continue
                if both := [name for name in mine if name in found]:
                    raise ArgumentError(
                        f"quantize: two entries of the plan quantize the {both[0]} of "
                        f"{call.path!r}. Exclude this layer from one of them with "
                        f"but={call.path!r}."
                    )
                found |= mine
        return found

    def _share(self, host: Host, model: Any, calls: Sequence[Call], made: Sequence[Layer]) -> None:
        """Let layers with the same weights share the arrays for them, or raise if they cannot."""
        owners: dict[Any, tuple[str, Layer | None]] = {}
        by_call = {id(call): layer for layer in made for call in _calls_of(layer, calls)}
        for call in calls:
            operand = call.kind.roles.get("weights")
            owner = host.owner(model, call.operands[operand]) if operand else None
            if owner is None:
                continue
            layer = by_call.get(id(call))
            if layer is not None:
                layer.owner = owner
            path, known = owners.setdefault(owner, (call.path, layer))
            if known is layer:
                continue
            a, b = (x and x.quantizers.get("weights") for x in (known, layer))
            if a != b:
                raise ArgumentError(
                    f"quantize: {path!r} and {call.path!r} share weights, which would be "
                    f"quantized in two ways, {a or 'float'} and {b or 'float'}. Quantize both in "
                    "the same way, or neither (but=)."
                )
            if layer is not None and known is not None:
                layer.shares = known


def _tell_apart(known: list[Layer], calls: Sequence[Call]) -> None:
    """Check that the weights distinguish the layers with one path and function."""
    known.sort(key=lambda layer: layer.shape is None)
    if len(known) == 1 and all(known[0].has(call) for call in calls):
        known[0].shape = None
        return
    for call in calls:
        fits = [layer for layer in known if layer.fits(call.operands)]
        if not fits or not fits[0].has(call):
            raise ArgumentError(
                f"quantize: {call.path!r} calls {call.kind.name} several times, and the shapes of "
                "its operands do not distinguish the calls. Name the parts (a module or a named "
                f"scope for each), or exclude the layer with but={call.path!r}."
            )


def _calls_of(layer: Layer, calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if layer.has(call)]


def _weights(host: Host, model: Any, layer: Layer, calls: Sequence[Call]) -> list[Any]:
    """Return the weights of a layer: one array, or one for each iteration of a loop."""
    found: list[Any] = []
    for call in _calls_of(layer, calls):
        w = call.operands[layer.operand("weights")]
        if not any(np.array_equal(_numpy(w), _numpy(x)) for x in found):
            found.append(w)
    known = host.parameter(model, layer.owner)
    if not found and known is None:
        raise ArgumentError(
            f"export: the weights of {layer.name!r} are not a parameter of the model. Pass a "
            "sample to export: plan.export(model, steps, x)"
        )
    return found or [known]


def _integers(codes: np.ndarray) -> np.ndarray:
    """Return codes as integers of 8 or 16 bits, if they are integers."""
    if (codes != np.round(codes)).any():
        return codes
    kinds = (np.int8, np.uint8, np.int16)
    fits = [t for t in kinds if np.iinfo(t).min <= codes.min() and codes.max() <= np.iinfo(t).max]
    return codes.astype(fits[0]) if fits else codes


def _observe(layer: Layer, call: Call, arrays: dict[str, Any], first: bool) -> None:
    """Initialize, or update, the arrays of a layer from one of its calls."""
    for role, quantizer in layer.quantizers.items():
        v = call.operands["y" if role == "activations" else layer.operand(role)]
        names = {state: f"{role}_{state}" for state in quantizer.states}
        known = {s: arrays[n] for s, n in names.items() if n in arrays}
        try:
            state = quantizer.first(v) if first and not known else quantizer.observed(v, known)
            layer.stats[role] = _stats(quantizer, v, state)
        except ArgumentError as error:
            raise ArgumentError(f"quantize: the {role} of {layer.name!r}: {error}") from None
        arrays |= {names[s]: x for s, x in state.items()}


def _stats(quantizer: Quantizer, v: Any, state: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the range of the quantized sample, the clipped share, and the error in dB."""
    x, y = _numpy(v).astype(float), _numpy(quantizer(v, **state)).astype(float)
    beyond = ((x > y.max()) | (x < y.min())).mean()
    noise = ((x - y) ** 2).mean()
    ratio = 10 * np.log10((x**2).mean() / noise) if noise and (x**2).mean() else np.inf
    return float(y.min()), float(y.max()), float(beyond), float(ratio)


def _arrays(steps: Any) -> dict[str, dict[str, Any]]:
    """Return the arrays of layers, as values."""
    return {
        layer.name: {
            name: lift(x) if isinstance(x, Readable) else x for name, x in steps[layer.name].items()
        }
        for layer in steps.layers
    }


def _numpy(x: Any) -> np.ndarray:
    if isinstance(x, Tensor):
        return x.numpy()
    x = x.detach().float() if backend_of(x).name == "torch" and x.dtype.itemsize < 4 else x
    return np.asarray(backend_of(x).to_numpy(x))


def _check_steps(steps: Any, call: str) -> None:
    """Raise if the argument is not the steps of a plan (but, for example, the model)."""
    if not hasattr(steps, "forwards"):
        raise ArgumentError(
            f"{call} expected the steps of the plan, as plan.steps(model, x) returns them, got "
            f"{kind(steps)}"
        )


def _forwards(used: Any) -> list[LayerForward]:
    rules = getattr(used, "_rules", {})
    found = [getattr(rule, "forward", None) for rule in rules.values()]
    made = [f for f in found if isinstance(f, LayerForward) and f.layers[0].quantizers]
    if not made:
        raise ArgumentError("report: the scope has no rules of a plan")
    return made


def dequantize(exported: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the weights for exported codes, by the names of the layers.

    Args:
        exported: The result of `Plan.export`, or a file of it that was read with safetensors.

    Returns:
        NumPy arrays of floats, `{"0": weights}`.

    Raises:
        ArgumentError: An entry has codes without a scale.
    """
    found: dict[str, np.ndarray] = {}
    for name, codes in exported.items():
        path, _, last = name.rpartition(".")
        if last != "weights":
            continue
        scale = exported.get(f"{name}.scale")
        if scale is None:
            raise ArgumentError(f"dequantize: {name!r} has no scale")
        value = np.asarray(codes).astype(scale.dtype)
        zero, offset = (exported.get(f"{name}.{part}") for part in ("zero_point", "offset"))
        value = value if zero is None else value - _blocks(zero, codes.shape)
        value = value * _blocks(scale, codes.shape)
        found[path] = value if offset is None else value + _blocks(offset, codes.shape)
    return found


def _blocks(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return an array with one entry per block, repeated for each element."""
    x = np.asarray(x)
    for axis in range(x.ndim):
        x = np.repeat(x, shape[axis] // x.shape[axis], axis=axis)
    return x


def _host_of(model: Any, sample: Any) -> Host:
    """Return the host of a model."""
    if any(c.__module__.startswith("torch.nn.") for c in type(model).__mro__):
        return needed("regrad.torch.quantizing", "torch", "quantize").TorchHost()
    if not callable(model):
        raise ArgumentError(
            "quantize: expected the model to be a torch.nn.Module, or a function of JAX or "
            f"regrad, got {kind(model)}"
        )
    leaves = flatten(sample)[0]
    if any(type(x).__module__.partition(".")[0] in ("jax", "jaxlib") for x in leaves):
        return needed("regrad.jax.quantizing", "jax", "quantize").JaxHost()
    return OurHost()
