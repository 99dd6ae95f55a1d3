"""Faults that the source once had, and that its tests did not find then: changes of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from tests.helpers.paths import ROOT


@dataclass(frozen=True)
class Past:
    """A fault as a change of text, which must be in the file exactly once."""

    title: str
    file: str  # under src/regrad
    text: str
    fault: str

    @property
    def name(self) -> str:
        return f"{self.file}:past:{self.title}"

    @property
    def path(self) -> Path:
        return ROOT / "src" / "regrad" / self.file

    @property
    def line(self) -> int:
        """The line in which the change begins."""
        before, found, after = self.path.read_text(encoding="utf-8").partition(self.text)
        if not found or self.text in after:
            raise LookupError(f"{self.name}: expected the text once in the file: {self.text!r}")
        first = self.text.splitlines()[0]
        return before.count("\n") + 1 + (0 if first.strip() else 1)

    def code(self) -> CodeType:
        """The code of the file with the fault."""
        assert self.line
        source = self.path.read_text(encoding="utf-8").replace(self.text, self.fault)
        return compile(source, self.path, "exec", dont_inherit=True)


TORCH = [
    Past("hooks of a backward pass run without scopes", "torch/intercepts.py",
         "held = _hold_scopes()\n    if not held:\n        return old(*args, **options)\n    with",
         "held = _hold_scopes()\n    if held:\n        return old(*args, **options)\n    with"),
    Past("keywords of a whole call are sorted", "core/signatures.py",
         "key=lambda item: order.index(item[0])", "key=lambda item: item[0]"),
    Past("an input that is given twice becomes two", "torch/whole_calls.py",
         "[*map(ids.index, ids)]", "[*range(len(ids))]"),
    Past("hooks run within the whole call", "torch/host/bodies.py",
         'names["torch"] = PatchedModule(torch, _C=PatchedModule(torch._C, **yes))', "pass"),
    Past("unused outputs are filled with zeros", "torch/whole_calls.py",
         "made.materializes = scope._materialize", "made.materializes = True"),
    Past("a module may change its class", "torch/places.py",
         "if type(module) is not known.kind:", "if False:"),
    Past("a module may be put into another place", "torch/places.py",
         "if (now := held.get(key)) is not inner and id(now) in self.known:", "if False:"),
    Past("torch.autograd.backward is an op of the program", "torch/nodes.py",
         "passes = torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward",
         "passes = torch.autograd.grad, torch.Tensor.backward"),
    Past("a replaced value forgets what it closes over", "torch/calls.py",
         "if of_function and torch.is_grad_enabled() and (found := self._link(xs)) is not None:",
         "if False and (found := self._link(xs)) is not None:"),
    Past("a replaced value may write into its input", "torch/calls.py",
         "if replaces and [version_of(x) for x in xs] != versions:", "if False:"),
    Past("custom_grad may change its input in place", "torch/custom.py",
         "if x.grad_fn is not node:", "if False:"),
    Past("the fast path of transformers skips rules", "torch/intercepts.py",
         "return old() and all(CALLED.isdisjoint(s._ruleset.plan.replaced) for s in open_here())",
         "return old()"),
    Past("a recomputation forgets its scopes", "torch/intercepts.py",
         "old(self, bind_scopes(recompute_fn), *args, **opts)",
         "old(self, recompute_fn, *args, **opts)"),
    Past("a Function of others keeps its gradient silently", "torch/intercepts.py",
         "for scope, name in listing(function, open_here()).items():", "for scope, name in ():"),
]  # fmt: skip

OTHERS = [
    Past("the order of dicts is not part of a key", "core/containers.py",
         "return leaves, rebuild, (structure, *order)", "return leaves, rebuild, structure"),
    Past("static values differ by more than their order", "core/pytrees.py",
         "return type(value), value, tuple([(exactly(k), exactly(v)) for k, v in value.items()])",
         "return type(value), value"),
    Past("True is 1 in a key", "core/pytrees.py",
         "        return type(value), repr(value)\n    return type(value), value",
         "        return type(value), repr(value)\n    return value"),
    Past("jobs forget their scopes", "core/jobs.py",
         "return old(self, carry(func), *args, **options)",
         "return old(self, func, *args, **options)"),
    Past("items of queues forget their scopes", "core/jobs.py",
         "if type(item) is tuple and any(isinstance(part, Context) for part in item):",
         "if False:"),
    Past("a trace ignores the rules in force", "transforms/jit.py",
         "return given.key, closure.key, rules, registry.version, get_default_dtype()",
         "return given.key, closure.key, registry.version, get_default_dtype()"),
    Past("a trace ignores what f closes over", "transforms/jit.py",
         "return given.key, closure.key, rules, registry.version, get_default_dtype()",
         "return given.key, rules, registry.version, get_default_dtype()"),
    Past("a trace ignores the default dtype", "transforms/jit.py",
         "return given.key, closure.key, rules, registry.version, get_default_dtype()",
         "return given.key, closure.key, rules, registry.version"),
    Past("attributes of a thread are those of another", "transforms/closures.py",
         "if isinstance(value, threading.local):", "if False:"),
    Past("a result that nothing uses takes part", "core/walk.py",
         "    if all(dy is UNUSED for dy in dys):\n        return UNUSED\n", ""),
    Past("keywords of a whole call of ours are sorted", "core/signatures.py",
         "key=lambda item: order.index(item[0])", "key=lambda item: item[0]"),
    Past("a second derivative of a once_differentiable rule", "autodiff/once.py",
         "        if not places:\n            return close(ys)\n", "        return close(ys)\n"),
]  # fmt: skip

PAST = [*TORCH, *OTHERS]
