"""Surrogates of spikes next to the surrogates of snntorch, spikingjelly, norse, sinabs and spyx.

    python -m tests.campaigns.spike_peers                 all of it (two minutes)
    python -m tests.campaigns.spike_peers --only norse    packages whose name begins like this
    python -m tests.campaigns.spike_peers page            only docs/spike_peers.md

For each case of `spike_cases`, the peer's spike runs at points that include the threshold, the
bounds of the bump and far points, in float32 and in float64. Ours runs in two ways: as a rule for
"Step" on `torch.heaviside`, and as a rule for the Function of the peer itself. Compared are the
spikes, the gradient, and the gradient of the gradient.

For each of the peer's surrogates with its default parameters, a network of `spike_nets` is built
with it. The same network, built with the peer's default surrogate and not edited, runs under our
rule. Compared are the spikes, the gradients, and the weights after five steps of training.

None of the packages is a dependency of this project. Next to `pip install -e '.[torch,jax]'`:

    pip install snntorch==1.0.0 spikingjelly==2.0.0 norse==1.1.0 sinabs==3.1.3
    pip install --no-deps spyx==1.0.0

Of spyx, only the file of its activations is imported. For Lava and Rockpool, the formulas of their
public sources are written out. A whole run writes `tests/campaigns/results/spike_peers.json`, from
which docs/spike_peers.md is made.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tqdm

import regrad as rg
import regrad.torch
from bench import report
from tests.campaigns import records
from tests.campaigns.proof_page import table
from tests.campaigns.spike_cases import PACKAGES, Case, cases, peer
from tests.campaigns.spike_nets import NETS, Net, built, inputs
from tests.helpers.paths import ROOT

PATH = records.RESULTS / "spike_peers.json"
PROSE, PAGE = Path(__file__).with_name("spike_page.md"), ROOT / "docs" / "spike_peers.md"
PARTS = ("value", "first", "second")
LEARNED = ("value", "inputs", "weights", "trained")
BOUNDS = {"float64": 1e-12, "float32": 2e-6}
SEEDS, TRAINED, RATE = 3, 5, 0.01
# Multiples of 1/64, which are exact in float32: the threshold, the bounds of all bumps, far points.
FAR = [-1024.0, -64.0, -10.0, 10.0, 64.0, 1024.0]
POINTS = np.concatenate([np.arange(-256, 257) / 64, FAR])
WEIGHTS = 1 + np.arange(len(POINTS)) / 512

Answer = dict[str, np.ndarray | None]


# -- one case --------------------------------------------------------------------------------------


def judged(case: Case) -> dict[str, Any]:
    """The differences from the peer in both dtypes and ways, as they are recorded."""
    found: dict[str, Any] = {
        "package": case.package, "name": case.name, "ours": case.ours, "factor": case.factor,
        "default": case.default, "note": case.note, "off": case.off, "second": case.second,
        "single": case.is_single, "apart": {}, "not finite": 0,
    }  # fmt: skip
    for dtype in BOUNDS:
        try:
            theirs = (in_jax if case.package == "spyx" else in_torch)(case, dtype)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            return {**found, "raises": text[:160]}
        due, *mine = theirs
        pairs = [{p: apart(each[p], due[p]) for p in PARTS} for each in mine]
        found["apart"][dtype] = {p: worst([pair[p] for pair in pairs]) for p in PARTS}
        bad = sum(int((~np.isfinite(x)).sum()) for x in due.values() if x is not None)
        found["not finite"] = max(found["not finite"], bad)
        assert all(np.isfinite(x).all() for each in mine for x in each.values() if x is not None)
    return found


def in_torch(case: Case, dtype: str) -> list[Answer]:
    """The answers of the peer, of our rule for "Step", and of our rule for the peer's Function."""
    known, rule = peer(case.package), case.rule()
    spikes = known.spikes(case.name)
    due, key = answer(spikes, dtype, known.functions)
    zero = torch.tensor(known.at_zero, dtype=getattr(torch, dtype))
    moved = (lambda dy, x: rule(dy, x - known.moved)) if known.moved else rule
    step, options = rule, {}
    if "graded" in case.ours:
        value = lambda x: rg.where(x >= 0, x + 1.0, 0.0)  # noqa: E731
        step, options = rg.replace(value, rule), {"values": True}
    mine = answer(lambda x: torch.heaviside(x, zero), dtype, None, {"Step": step}, **options)[0]
    if "a count" in case.note:
        mine["value"] = due["value"]  # (a count is no step)
    return [due, mine, answer(spikes, dtype, None, {key: moved})[0]]


def answer(
    f: Callable[..., Any], dtype: str, functions: Any, rules: Any = None, **options: Any
) -> tuple[Answer, Any]:
    """The value and both derivatives, and the Function of autograd that spikes."""
    x = torch.tensor(POINTS, dtype=getattr(torch, dtype), requires_grad=True)
    scope = rg.torch.gradient_override_map(rules, **options) if rules else nullcontext()
    used: Any
    with scope as used:
        y = f(x)
    key = getattr(functions, type(y.grad_fn).__name__.removesuffix("Backward"), None)
    weights = torch.tensor(WEIGHTS, dtype=x.dtype)
    (first,) = torch.autograd.grad(y, x, weights.to(y.dtype), create_graph=True)
    second = None
    if first.requires_grad:
        (second,) = torch.autograd.grad((first * weights).sum(), x, allow_unused=True)
    if rules:
        used.assert_fired()
    values = {"value": y, "first": first, "second": second}
    return {k: None if v is None else v.detach().double().numpy() for k, v in values.items()}, key


def in_jax(case: Case, dtype: str) -> list[Answer]:
    """The answers of spyx, and of our rule for its activation."""
    import jax
    import jax.numpy as jnp

    from regrad.jax import override

    spikes = peer(case.package).spikes(case.name)

    def derived(f: Any) -> Answer:
        x, weights = jnp.asarray(POINTS, dtype), jnp.asarray(WEIGHTS, dtype)
        first = jax.grad(lambda x: (weights * f(x)).sum())
        found = f(x), first(x), jax.grad(lambda x: (weights * first(x)).sum())(x)
        return dict(zip(PARTS, [np.asarray(v, "float64") for v in found], strict=True))

    with jax.enable_x64(True):
        key = override(lambda x: spikes(x), {spikes: case.rule()})
        step = override(lambda x: jnp.sign(x), {"Sign": case.rule()})
        mine, signs = derived(key), derived(step)
        return [derived(spikes), mine, {**signs, "value": mine["value"]}]


def apart(mine: np.ndarray | None, due: np.ndarray | None) -> float | None:
    """The largest difference, in proportion to the largest number; None without an answer."""
    if due is None:
        return 0.0 if mine is None or not mine.any() else None
    mine, good = np.zeros_like(due) if mine is None else mine, np.isfinite(due)
    most = max(abs(mine[good]).max(), abs(due[good]).max())
    return float(f"{abs(mine - due)[good].max() / most:.1e}") if most else 0.0


def worst(found: Sequence[float | None]) -> float | None:
    return None if None in found else max(x for x in found if x is not None)


def agrees(entry: Mapping[str, Any]) -> bool:
    """Whether values, and the derivatives that the peer has, are within the bounds."""
    if entry["off"]:
        return True
    return "raises" not in entry and all(
        x is None or x <= BOUNDS["float32" if entry["single"] else dtype]
        for dtype, found in entry["apart"].items()
        for part, x in found.items() if part != "second" or not entry["second"]
    )  # fmt: skip


# -- networks --------------------------------------------------------------------------------------


def in_network(case: Case) -> dict[str, Any]:
    """The differences of a network under our rule from one with the peer's surrogate."""
    each = [compared(case, seed) for seed in range(SEEDS)]
    good = {part: [e[part] for e in each if np.isfinite(e[part])] for part in LEARNED}
    return {
        "package": case.package, "name": case.name, "ours": case.ours, "factor": case.factor,
        "dtype": str(built(case.package, None, "", 0).dtype).removeprefix("torch."),
        "apart": {part: max(good[part], default=None) for part in LEARNED},
        "runs": SEEDS, "not finite": SEEDS - min(map(len, good.values())),
        "spikes": [round(f([e["spikes"] for e in each]), 2) for f in (min, max)],
    }  # fmt: skip


def compared(case: Case, seed: int) -> dict[str, float]:
    known, rule = peer(case.package), case.rule()
    due = trained(built(case.package, known.spikes, case.name, seed), seed, None)
    net = built(case.package, known.spikes, "", seed)
    moved = (lambda dy, x: rule(dy, x - net.moved)) if net.moved else rule
    mine = trained(net, seed, {net.key: moved})
    assert all(bool(x.isfinite().all()) for xs in mine.values() for x in xs)
    found = {part: relative(mine[part], due[part]) for part in LEARNED}
    return found | {"spikes": float((due["value"][0] != 0).double().mean())}


def trained(net: Net, seed: int, rules: Any) -> dict[str, list[torch.Tensor]]:
    """The spikes and gradients of a network, and its weights after five steps of training."""
    xs, model = inputs(net.dtype, seed).requires_grad_(), net.model
    params = [p for p in model.parameters() if p.requires_grad]
    found: dict[str, list[torch.Tensor]] = {}
    used: Any
    scope = lambda: rg.torch.gradient_override_map(rules) if rules else nullcontext()  # noqa: E731
    for step in range(TRAINED):
        with scope() as used:
            spikes = model(xs)
        loss = ((spikes.mean(0) - 0.3) ** 2 * torch.arange(1, spikes.shape[-1] + 1)).sum()
        dxs, *grads = torch.autograd.grad(loss, [xs, *params])
        if rules:
            used.assert_fired()
        if not step:
            found = {"value": [spikes.detach()], "inputs": [dxs], "weights": grads}
        with torch.no_grad():
            for p, dp in zip(params, grads, strict=True):
                p -= RATE * dp
    return found | {"trained": [p.detach().clone() for p in params]}


def relative(mine: Sequence[torch.Tensor], due: Sequence[torch.Tensor]) -> float:
    a, b = (torch.cat([x.flatten() for x in xs]) for xs in (mine, due))
    gap, most = float((a - b).abs().max()), float(b.abs().max())
    return float(f"{gap / most if most else gap:.1e}")


def is_near(entry: Mapping[str, Any]) -> bool:
    """Whether a network agrees where the peer is finite; sums over steps lose some digits."""
    return all(
        x is None or x <= 10 * BOUNDS[entry["dtype"]] for x in entry["apart"].values()
    )  # fmt: skip


# -- the page --------------------------------------------------------------------------------------


def page(content: Mapping[str, Any]) -> str:
    """Return the text of docs/spike_peers.md: the prose, with tables at the marks."""
    found = content["cases"]
    blocks = {
        "facts": f"{records.line(content)}.",
        "agreement": agreement([e for e in found if not e["off"]]),
        "networks": networks(content["networks"]),
        "elsewhere": elsewhere(found),
    }
    return report.filled(PROSE.read_text(encoding="utf-8"), blocks)


def number(value: float | None, absent: str = "none") -> str:
    return absent if value is None else f"{value:.0e}" if value else "0"


def factor(value: float) -> str:
    return f"{value:.4g} · " if value != 1 else ""


def agreement(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [e["package"], f"`{e['name']}`" + (", its default" if e["default"] else ""),
         f"{factor(e['factor'])}`{e['ours']}`", e["note"] or "–",
         number(e["apart"]["float32"]["value"]),
         *(number(e["apart"][dtype]["first"]) for dtype in BOUNDS),
         *("differs" if e["second"] else number(e["apart"][dtype]["second"]) for dtype in BOUNDS)]
        for e in found
    ]  # fmt: skip
    header = ["package", "peer", "regrad", "convention of the peer", "spikes", "gradient, float64",
              "float32", "second order, float64", "float32"]  # fmt: skip
    return table(header, rows, numbers=5)


def networks(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [e["package"], f"`{e['name']}`", f"{factor(e['factor'])}`{e['ours']}`", e["dtype"],
         *(number(e["apart"][part], "NaN") for part in LEARNED), f"{e['spikes'][0]:.0%}"]
        for e in found
    ]  # fmt: skip
    header = ["package", "built with", "our rule", "dtype", "spikes", "d inputs", "d weights",
              "weights after training", "outputs that spike"]  # fmt: skip
    return table(header, rows, numbers=5)


def elsewhere(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [f"{e['package']} `{e['name']}`", e["off"], f"`{e['ours']}`",
         "raises" if "raises" in e else number(e["apart"]["float64"]["first"])]
        for e in found if e["off"]
    ]  # fmt: skip
    rows += [
        [f"{e['package']} `{e['name']}`", f"at second order, {e['second']}", f"`{e['ours']}`",
         number(e["apart"]["float64"]["second"])]
        for e in found if e["second"]
    ]  # fmt: skip
    rows += [
        [f"{e['package']} `{e['name']}`", f"{e['not finite']} of {2 * len(POINTS)} derivatives "
         "are NaN or inf; ours are finite", f"`{e['ours']}`", "NaN"]
        for e in found if e["not finite"]
    ]  # fmt: skip
    header = ["peer", "its gradient", "ours", "apart by"]
    return table(header, rows, numbers=1)


# -- the command -----------------------------------------------------------------------------------


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.spike_peers")
    parser.add_argument("page", nargs="?", choices=["page"], help="write the page only")
    parser.add_argument("--only", default="", help="packages whose name begins like this")
    options = parser.parse_args(given)
    if options.page:
        PAGE.write_text(page(records.read(PATH)), encoding="utf-8")
        return 0
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    entries, nets = [], []
    for case in tqdm.tqdm([*cases(options.only)], unit="case"):
        entries.append(judged(case))
        if options.only or not agrees(entries[-1]):
            print(entries[-1])
        if case.default and not case.off and case.package in NETS:
            nets.append(in_network(case))
            if options.only or not is_near(nets[-1]):
                print(nets[-1])
    if not options.only:
        known = records.facts("tests.campaigns.spike_peers", PACKAGES)
        seconds = round(time.perf_counter() - start)
        records.write(PATH, {**known, "cases": entries, "networks": nets, "seconds": seconds})
    return 0 if all(map(agrees, entries)) and all(map(is_near, nets)) else 1


if __name__ == "__main__":
    sys.exit(main())
