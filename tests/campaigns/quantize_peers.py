"""Quantizers next to those of PyTorch, torchao, brevitas and transformers.

    python -m tests.campaigns.quantize_peers                 all of it (a minute)
    python -m tests.campaigns.quantize_peers --only brevitas  packages whose name begins like this
    python -m tests.campaigns.quantize_peers page            docs/quantize_peers.md anew

For each case of `quantize_cases` the peer's quantizer is in a copy of a float model, in layers of
the peer's or in layers that call it; ours is put in force on the model as it is, by the key of the
layers' op. Compared are the value, and the gradients by the inputs, by all parameters, and by the
steps that learn, of one weighted sum of the outputs. The models have random weights of three
seeds; they are in float64 where the peer computes in it, else in float32, as ours then is.

None of the packages is a dependency of this project. Beside `pip install -e '.[torch]'`:

    pip install torchao==0.18.0 brevitas==0.13.4 transformers==5.24.0

A whole run writes `tests/campaigns/results/quantize_peers.json`, of which docs/quantize_peers.md is
made.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch import nn

import regrad.torch
from bench import report
from regrad.rules import quantize as Q
from tests.campaigns import records
from tests.campaigns.proof_page import table
from tests.campaigns.quantize_cases import Case, Way, cases, edited, layers, rules
from tests.campaigns.quantize_models import built
from tests.helpers.paths import ROOT

PATH = records.RESULTS / "quantize_peers.json"
PROSE, PAGE = Path(__file__).with_name("quantize_page.md"), ROOT / "docs" / "quantize_peers.md"
PACKAGES = ("torch", "torchao", "brevitas", "transformers")
PARTS = ("value", "inputs", "weights", "learned")
SEEDS = 3
BOUNDS = {"float64": 1e-6, "float32": 1e-5}

Found = dict[str, dict[str, torch.Tensor]]


# -- one case --------------------------------------------------------------------------------------


def judged(case: Case) -> dict[str, Any]:
    """The largest relative differences over models and seeds, as they are recorded."""
    found: dict[str, Any] = {
        "package": case.package, "name": case.name, "convention": case.convention,
        "ours": {k: shown(w) for k in ("weights", "inputs") if (w := getattr(case, k))},
        "models": list(case.models), "dtype": str(case.dtype).removeprefix("torch."),
        "off": list(case.off),
    }  # fmt: skip
    each = [compared(case, name, seed) for name in case.models for seed in range(SEEDS)]
    kept = [e for e in each if not is_moved(found, e[0])]
    found |= {"runs": len(each), "moved": len(each) - len(kept)}
    found["apart"] = worst([e[0] for e in kept or each])
    if usual := [e[1] for e in each if e[1]]:
        found["usual"] = {
            k: repr(q) for k, q in zip(("weights", "inputs"), case.usual, strict=True) if q
        }
        found["usual apart"] = worst(usual)
    return found


def is_moved(entry: Mapping[str, Any], apart: Mapping[str, float]) -> bool:
    """Whether rounding in float32 has moved a code, by which all that follows differs."""
    is_off = entry["dtype"] == "float64" or "value" in entry["off"]
    return not is_off and apart["value"] > BOUNDS["float32"]


def shown(way: Way) -> str:
    return way.shown or repr(way.q)


def worst(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: max(e[part] for e in found) for part in PARTS if part in found[0]}


def compared(case: Case, name: str, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """How far ours and ours with the usual options are from the peer, on one model."""
    model, x = built(name, case.dtype, case.even, seed)
    twin = edited(case, model)
    steps = {}
    if case.learned:
        with torch.no_grad():
            twin(x)  # (brevitas sets its scale by the first call)
        steps = {p: case.learned(twin.get_submodule(p)) for p, _ in layers(model, case.kinds)}
    theirs = answer(twin, x, steps)
    mine = answer(model, x, *put_in_force(case, model, steps))
    if not any(case.usual):
        return apart(mine, theirs), {}
    ways = [q and Way(q, usual_state(q)) for q in case.usual]
    other = case._replace(weights=ways[0], inputs=ways[1] or case.inputs)
    if case.learned and case.weights:
        other = case._replace(weights=case.weights._replace(q=ways[0].q))
    usual = answer(model, x, *put_in_force(other, model, steps))
    return apart(mine, theirs), apart(usual, theirs)


def usual_state(q: Q.Quantizer) -> Any:
    return (lambda v, _: q.first(v)) if q.states else None


def put_in_force(
    case: Case, model: nn.Module, steps: Mapping[str, nn.Parameter]
) -> tuple[dict[str, nn.Parameter], Callable[[], Any]]:  # fmt: skip
    """Return parameters of ours that begin as those of the peer, and a function of the scope."""
    own = {path: nn.Parameter(p.detach().clone()) for path, p in steps.items()}
    override = regrad.torch.gradient_override_map
    return own, lambda: override(rules(case, model, own), values=True, model=model)


def answer(
    model: nn.Module, x: torch.Tensor, steps: Mapping[str, nn.Parameter], scope: Any = None
) -> Found:  # fmt: skip
    """The value, and the gradients of a weighted sum of it."""
    x = x.clone().requires_grad_()
    if scope is None:
        y = model(x)
    else:
        with scope() as used:
            y = model(x)
        used.assert_fired()
    weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    known = dict(model.named_parameters())
    inner = {id(p) for p in steps.values()}
    params = {n: p for n, p in known.items() if id(p) not in inner and "scaling_impl" not in n}
    wanted = [x, *params.values(), *steps.values()]
    grads = torch.autograd.grad(
        (y * weights).sum(), wanted, allow_unused=True, materialize_grads=True
    )
    dx, *rest = grads
    return {"value": {"": y.detach()}, "inputs": {"": dx},
            "weights": dict(zip(params, rest, strict=False)),
            "learned": dict(zip(steps, rest[len(params):], strict=True))}  # fmt: skip


def apart(mine: Found, due: Found) -> dict[str, float]:
    """The largest difference of each part, in proportion to the largest number of an array.

    The gradients by steps are one array.
    """
    found = {}
    for part in PARTS:
        assert mine[part].keys() == due[part].keys(), (part, mine[part].keys(), due[part].keys())
        pairs = [(mine[part][k], due[part][k]) for k in due[part]]
        if part == "learned" and pairs:  # sums of many, of which one may be near 0
            pairs = [tuple(torch.cat([x.flatten() for x in xs]) for xs in zip(*pairs, strict=True))]
        if pairs:
            found[part] = float(f"{max(relative(*pair) for pair in pairs):.1e}")
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    most = max(float(a.abs().max()), float(b.abs().max()))
    return float((a - b).abs().max()) / most if most else 0.0


def agrees(entry: Mapping[str, Any]) -> bool:
    """Whether all parts are within the bounds, but those in which the peer is elsewhere.

    A step's gradient is a sum that cancels, so that float32 has fewer digits of it.
    """
    bound = BOUNDS[entry["dtype"]]
    bounds = dict.fromkeys(PARTS, bound) | {"learned": 3 * bound}
    is_near = all(v <= bounds[k] for k, v in entry["apart"].items() if k not in entry["off"])
    return is_near and 8 * entry["moved"] <= entry["runs"]


# -- the page --------------------------------------------------------------------------------------


def page(content: Mapping[str, Any]) -> str:
    """Return the text of docs/quantize_peers.md: the prose, with tables at the marks."""
    found = content["cases"]
    blocks = {
        "facts": f"{records.line(content)}.",
        "agreement": agreement([e for e in found if not e["off"]]),
        "conventions": conventions([e for e in found if not e["off"]]),
        "elsewhere": elsewhere([e for e in found if e["off"]]),
    }
    return report.filled(PROSE.read_text(encoding="utf-8"), blocks)


def number(value: float | None) -> str:
    return (
        "–"
        if value is None
        else "0"
        if value == 0
        else f"{value:{'.2g' if value > 1e-3 else '.0e'}}"
    )


def called(ours: Mapping[str, str]) -> str:
    """Our quantizers, of weights and inputs."""
    return ", ".join(f"{part}: `{call}`" for part, call in ours.items())


def agreement(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [e["package"], f"`{e['name']}`", called(e["ours"]), ", ".join(e["models"]), e["dtype"],
         *(number(e["apart"].get(part)) for part in PARTS), f"{e['moved']} of {e['runs']}"]
        for e in found
    ]  # fmt: skip
    header = ["package", "peer", "regrad", "models", "dtype", "value", "d inputs", "d weights",
              "d steps", "moved"]  # fmt: skip
    return table(header, rows, numbers=5)


def conventions(found: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for e in found:
        usual = e.get("usual apart")
        grads = max(v for k, v in usual.items() if k != "value") if usual else None
        cells = (
            (called(e["usual"]), number(usual["value"]), number(grads))
            if usual
            else ("same", "–", "–")
        )
        rows.append([f"{e['package']} `{e['name']}`", e["convention"], called(e["ours"]), *cells])
    header = ["peer", "its conventions", "equal options of regrad", "regrad's defaults",
              "difference of values", "of gradients"]  # fmt: skip
    return table(header, rows, numbers=2)


def elsewhere(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [f"{e['package']} `{e['name']}`", e["convention"], called(e["ours"]),
         *(number(e["apart"].get(part)) for part in PARTS[:3])]
        for e in found
    ]  # fmt: skip
    header = ["peer", "difference", "closest quantizer of regrad", "value", "d inputs",
              "d weights"]  # fmt: skip
    return table(header, rows, numbers=3)


# -- the command -----------------------------------------------------------------------------------


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.quantize_peers")
    parser.add_argument("page", nargs="?", choices=["page"], help="write the page only")
    parser.add_argument("--only", default="", help="packages whose name begins like this")
    options = parser.parse_args(given)
    if options.page:
        PAGE.write_text(page(records.read(PATH)), encoding="utf-8")
        return 0
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    entries = []
    for case in tqdm.tqdm([c for c in cases() if c.package.startswith(options.only)], unit="case"):
        entries.append(judged(case))
        if options.only or not agrees(entries[-1]):
            print(entries[-1])
    if not options.only:
        known = records.facts("tests.campaigns.quantize_peers", PACKAGES)
        seconds = round(time.perf_counter() - start)
        records.write(PATH, {**known, "cases": entries, "seconds": seconds})
    return 0 if all(map(agrees, entries)) else 1


if __name__ == "__main__":
    sys.exit(main())
