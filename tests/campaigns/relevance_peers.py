"""Rules of relevance next to zennit's, Captum's and lxt's.

    python -m tests.campaigns.relevance_peers                 all of it (some minutes)
    python -m tests.campaigns.relevance_peers --only ViT      models whose name begins like this
    python -m tests.campaigns.relevance_peers --show          the programs
    python -m tests.campaigns.relevance_peers --layers        layers, paths and maps
    python -m tests.campaigns.relevance_peers --more          norms, shap and inseq
    python -m tests.campaigns.relevance_peers --lost          what public models lose
    python -m tests.campaigns.relevance_peers page            docs/peers.md anew, from the record

For each case of `relevance_cases` the program of regrad's and that of the peer's run on one model
with random weights of a fixed seed, in float64. The expected answer is the peer's, or, where the
peer does not see a part of the model, its answer for the same model rewritten for it. Times are
processor times of one thread in float32, in turn, and their medians.

With `--lost`, `lrp.relevance` runs on the models of `public_table`, and what is lost of the
relevance is written down, with the ops that lose most, in `results/relevance_lost.json`.

With `--layers`, the cases of `layer_cases` run in the same way, also against the package grad-cam,
and are recorded in `results/layer_peers.json`. grad-cam resizes maps in float32, so its bound is
wider.

With `--more`, the cases of `more_cases` run in the same way, also against shap and inseq, and are
recorded in `results/more_peers.json`. Both return float32.

None of the packages is a dependency of this project; tests/campaigns/public_models.py says how to
install them, then `pip install --no-deps lxt` and `pip install grad-cam shap inseq`. A whole run
writes `tests/campaigns/results/relevance_peers.json`, of which docs/peers.md is made.
"""

import argparse
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch import nn

from bench import report
from regrad.rules import lrp
from tests.campaigns import layer_cases, more_cases, public_table, records
from tests.campaigns.proof_page import table
from tests.campaigns.relevance_cases import (
    STUBS,
    Case,
    cases,
    function,
    lines,
    lxt_names,
    names,
    unpatched,
)
from tests.campaigns.relevance_models import built, inputs
from tests.helpers.paths import ROOT

PATH = records.RESULTS / "relevance_peers.json"
LOST = records.RESULTS / "relevance_lost.json"
OF_LAYERS = records.RESULTS / "layer_peers.json"
MORE = records.RESULTS / "more_peers.json"
PROSE, PAGE = Path(__file__).with_name("relevance_page.md"), ROOT / "docs" / "peers.md"
PACKAGES = ("torch", "torchvision", "timm", "transformers", "zennit", "captum", "lxt")
AGREES, SILENT, RAISES = "agrees", "silently wrong", "raises"
BOUND = 1e-6
BOUNDS = {"grad-cam": 1e-5}
ROUNDS = 15


# -- one case --------------------------------------------------------------------------------------


def judged(case: Case, scope: Mapping[str, Any], rounds: int = ROUNDS) -> dict[str, Any]:
    """The outcome of a case, as it is recorded."""
    ours, theirs = (function(text, dict(scope)) for text in (case.ours, case.theirs))
    model = built(case.model)
    twin = built(case.model, twin=True) if "twin" in case.due else None
    x = inputs(case.model)

    def answer(run: Callable[..., torch.Tensor], net: nn.Module = model) -> torch.Tensor:
        with unpatched(dict(scope)):
            return run(net, x.clone(), twin).detach()

    found: dict[str, Any] = {"model": case.model, "rule": case.name, "peer": case.peer}
    mine = answer(ours)
    total = shared(case, model, x)
    try:
        other = answer(theirs, built(case.model))
    except Exception as error:
        other, text = None, f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
        found |= {"outcome": RAISES, "detail": text}
    due = answer(function(case.due, dict(scope))) if case.due not in ("", "sum") else other
    found["ours"] = apart(mine, due) if due is not None else None
    found["share"] = per_cent(mine, total)
    if other is not None and due is not None:
        found["theirs"] = apart(other, due) if case.due else 0.0
        found["their share"] = per_cent(other, total)
        if case.due == "sum":
            found["ours"], found["theirs"] = (abs(1 - found[k]) for k in ("share", "their share"))
        bound = BOUNDS.get(case.peer, BOUND)
        is_right = found["theirs"] <= bound and (case.due or found["ours"] <= bound)
        found["outcome"] = AGREES if is_right else SILENT
    found |= {"lines": lines(case.ours), "their lines": lines(case.theirs), "note": case.note}
    if other is not None and not case.due:
        found["ratio"] = timed(case, ours, theirs, scope, rounds)
    return found


def shared(case: Case, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of each example, which its inputs share."""
    y = model(x)[:, 3].detach()
    return y - model(x.flip(0))[:, 3].detach() if case.name == "deep_lift" else y


def per_cent(relevance: torch.Tensor, total: torch.Tensor) -> float:
    """The relevance of the inputs, in proportion to what there was: the example farthest from 1."""
    shares = relevance.flatten(1).sum(1) / total
    return float(f"{shares[(shares - 1).abs().argmax()]:.3g}")


def apart(found: torch.Tensor, due: torch.Tensor) -> float:
    return float(f"{float((found - due).abs().max() / due.abs().max()):.1e}")


def timed(
    case: Case, ours: Any, theirs: Any, scope: Mapping[str, Any], rounds: int
) -> float:  # fmt: skip
    """The time of our program in that of the peer's."""
    model, x = built(case.model).float(), inputs(case.model).float()
    found: dict[Any, list[float]] = {ours: [], theirs: []}
    for _ in range(rounds):
        for run, times in found.items():
            given = x.clone()
            with unpatched(dict(scope)):
                start = time.process_time()
                run(model, given)
                times.append(time.process_time() - start)
    mine, other = (statistics.median(times[1:]) for times in found.values())
    return round(mine / other, 2)


# -- where relevance is lost in public models ------------------------------------------------------


KEPT = ("VGG", "ResNet-18", "DenseNet-121", "ViT", "GPT-2", "Llama")
ADDED = r"bias$|pos(?!_conv)|wpe|class_token|cls_token|token_type"  # parameters that are added


def without_biases(model: nn.Module) -> nn.Module:
    """A model in which what is added, as biases and positions, is 0: it keeps relevance."""
    for name, p in model.named_parameters():
        if re.search(ADDED, name):
            p.data.zero_()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.zero_()
    return model


def kept(name: str) -> dict[str, Any]:
    """How much relevance is missing in a model of the table above."""
    model, x = without_biases(built(name)), inputs(name)
    rules = "cp_lrp" if name in ("ViT", "GPT-2", "Llama") else "epsilon_plus"
    found = lrp.relevance(model, x, 3, getattr(lrp, rules)())
    return {"model": name, "rules": rules, "missing": worst(found)}


def worst(found: Any) -> float:
    total = found.total.abs().max()
    return float(f"{float((found.missing.abs().max()) / total):.1e}")


def lost(row: public_table.Row) -> dict[str, Any]:
    """The relevance that a public model loses, and where most of it is lost."""
    torch.manual_seed(0)
    public_table.prepared(row.package)
    given = row.build()
    model = without_biases(given.module.to(given.dtype))
    options = {k: v for k, v in given.options.items() if k != "labels"}
    if "decoder" in dict(model.named_modules()) or "model.decoder" in dict(model.named_modules()):
        options["decoder_input_ids"] = public_table.tokens(5)
    options = {k: v.to(given.dtype) if v.is_floating_point() else v for k, v in options.items()}
    args = tuple(x.to(given.dtype) if x.is_floating_point() else x for x in given.args)
    rules = "cp_lrp" if uses_attention(model) else "epsilon_plus"
    entry: dict[str, Any] = {"model": row.name, "rules": rules}
    try:
        found = lrp.relevance(
            model, options or args, first_output, getattr(lrp, rules)(), check="ops"
        )
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return {**entry, "outcome": RAISES, "detail": text[:200]}
    total = float(found.total.sum())
    if not total:
        return {**entry, "outcome": RAISES, "detail": "the output is 0 (its last weights are)"}
    losses = [
        {"op": loss.op, "module": loss.path, "share": float(f"{loss.lost / total:.1e}")}
        for loss in found.losses[:3]
        if abs(loss.lost / total) > 1e-5
    ]
    share = float(f"{float(found.missing.sum()) / total:.1e}")
    return {**entry, "missing": share, "losses": losses}


def uses_attention(model: nn.Module) -> bool:
    """Whether it has layer or RMS norms: a transformer, or what is built like one."""
    kinds = {type(m).__name__ for m in model.modules()}
    return any("LayerNorm" in kind or "RMSNorm" in kind for kind in kinds)


def first_output(y: Any) -> torch.Tensor:
    """One number of the first output of floats: of its last position, the third channel."""
    from tests.campaigns.public_models import leaves

    value = next(v for v in leaves(y) if v.is_floating_point() and v.dim())
    return value[:1].reshape(1, -1)[:, value[0].numel() // 2]


# -- the page --------------------------------------------------------------------------------------


def page(content: Mapping[str, Any]) -> str:
    """Return the text of docs/peers.md: the prose, with tables at the marks."""
    found = content["cases"]
    same = [e for e in found if "ratio" in e]
    other = [e for e in found if "ratio" not in e]
    blocks = {
        "facts": f"{records.line(content)}.", "agreement": agreement(same),
        "differences": differences(other), "kept": kept_table(content["kept"]),
        "lost": losses(records.read(LOST)["lost"]),
        **layer_blocks("layer", records.read(OF_LAYERS)),
        **layer_blocks("more", records.read(MORE)),
    }  # fmt: skip
    return report.filled(PROSE.read_text(encoding="utf-8"), blocks)


def layer_blocks(name: str, content: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of layers, paths and maps, or of more cases."""
    rows, wrong = [], []
    for e in content["cases"]:
        start = [e["model"], e["rule"], e["peer"]]
        if "ratio" in e:
            counts = [str(e["lines"]), str(e["their lines"])]
            rows.append([*start, number(e["ours"]), f"{e['ratio']:.2f}", *counts])
        else:
            says = f"raises: `{e['detail']}`" if e["outcome"] == RAISES else e["outcome"]
            off = number(e["ours"]), number(e.get("theirs"))
            wrong.append([*start, says, *off, "" if e["outcome"] == AGREES else e["note"]])
    header = ["model", "method", "peer", "apart by", "time, of the peer's", "lines", "peer's lines"]
    other = ["model", "method", "peer", "the peer", "regrad is off by", "the peer by",
             "not seen by it"]  # fmt: skip
    return {
        f"{name}_facts": f"{records.line(content)}.", f"{name}s": table(header, rows, numbers=4),
        f"{name}_differences": table(other, wrong),
    }  # fmt: skip


def number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.0e}"


def agreement(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [e["model"], f"`{e['rule']}`", e["peer"], number(e["ours"]), f"{e['ratio']:.2f}",
         str(e["lines"]), str(e["their lines"])]
        for e in found
    ]  # fmt: skip
    header = ["model", "rules", "peer", "difference", "time / peer's time", "lines", "peer's lines"]
    return table(header, rows, numbers=4)


def differences(found: Sequence[Mapping[str, Any]]) -> str:
    """The cases in which a peer needs another model, or fails."""
    rows = []
    for e in found:
        says = f"{e['outcome']}: `{e['detail']}`" if e["outcome"] == RAISES else e["outcome"]
        off = number(e["ours"]), number(e.get("theirs"))
        shares = [f"{e['share']:.2f}", f"{e['their share']:.3g}" if "their share" in e else "–"]
        rows.append([e["model"], f"`{e['rule']}`", e["peer"], says, *off, *shares, e["note"]])
    header = ["model", "rules", "peer", "result of the peer", "error of regrad", "of the peer",
              "share in the inputs: regrad", "peer", "ops that the peer ignores"]  # fmt: skip
    return table(header, rows)


def kept_table(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [[e["model"], f"`{e['rules']}`", number(e["missing"])] for e in found]
    return table(["", "composite", "missing / output"], rows, numbers=1)


def losses(found: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for e in sorted(found, key=lambda e: abs(e.get("missing") or 0)):
        if e.get("outcome") == RAISES:
            rows.append([e["model"], f"`{e['rules']}`", "–", f"raises: `{e['detail']}`"])
            continue
        at = [f"{l['op']} {l['share']:+.2g}" for l in e["losses"]]  # noqa: E741
        rows.append([e["model"], f"`{e['rules']}`", number(e["missing"]), ", ".join(at) or "–"])
    return table(["model", "composite", "missing", "largest losses (gains are negative)"], rows)


# -- the command -----------------------------------------------------------------------------------


def public_rows() -> list[public_table.Row]:
    kinds = ("/train", "/eager", "/padded")
    return [row for row in public_table.rows() if not row.name.endswith(kinds)]


def write_lost() -> None:
    """Run the public models, and write down what each loses as it comes."""
    found: list[Any] = []
    for row in tqdm.tqdm(public_rows(), unit="model"):
        found.append(lost(row))
        known = records.facts("tests.campaigns.relevance_peers", PACKAGES)
        records.write(LOST, {**known, "lost": found})


def write_cases(of: Any, path: Path, rounds: int) -> None:
    """Run the cases of a module, and write down their outcomes."""
    public_table.prepared("torchvision")
    wanted, scope = of.cases(), of.names()
    found = [judged(case, scope, rounds) for case in tqdm.tqdm(wanted, unit="case")]
    facts = records.facts("tests.campaigns.relevance_peers", of.PACKAGES)
    records.write(path, {**facts, "cases": found})


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.relevance_peers")
    parser.add_argument("page", nargs="?", choices=["page"], help="write docs/peers.md only")
    parser.add_argument("--only", default="", help="models whose name begins like this")
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--lost", action="store_true", help="what public models lose")
    parser.add_argument("--layers", action="store_true", help="layers, paths and maps")
    parser.add_argument("--more", action="store_true", help="norms, shap and inseq")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each is timed")
    options = parser.parse_args(given)
    wanted = [case for case in cases() if case.model.startswith(options.only)]
    if options.show:
        print(
            "\n\n".join(f"# {c.model}, {c.name}\n{c.ours}\n# {c.peer}\n{c.theirs}" for c in wanted)
        )
        return 0
    if options.page:
        PAGE.write_text(page(records.read(PATH)), encoding="utf-8")
        return 0
    start = time.perf_counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.lost:
        write_lost()
        return 0
    if options.layers or options.more:
        of, path = (more_cases, MORE) if options.more else (layer_cases, OF_LAYERS)
        write_cases(of, path, options.rounds)
        return 0
    public_table.prepared("torchvision")
    scope = {**names(), **lxt_names()}
    entries = []
    for case in tqdm.tqdm(wanted, unit="case"):
        entries.append(judged(case, scope, options.rounds))
        if options.only:
            print(entries[-1])
    if options.only:
        return 0
    content = {
        **records.facts("tests.campaigns.relevance_peers", PACKAGES), "stubs for lxt": STUBS,
        "cases": entries, "kept": [kept(name) for name in KEPT],
        "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    records.write(PATH, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
