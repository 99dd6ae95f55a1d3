"""The proof can fail: faults that are put in are found. And a slice of each of its campaigns."""

import dataclasses
import json
import os
import re
import subprocess
import tempfile

import numpy as np
import pytest

import regrad as rg
from regrad.checking.findings import GradientReport
from regrad.core import bindings, overrides, walk
from regrad.errors import RuleError
from tests.campaigns import (
    answers,
    concurrency,
    driver,
    edges,
    fires,
    memory,
    mutations,
    numerics,
    op_calls,
    proof,
    records,
    regions,
    ulps,
)
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT, UNNAMED
from tests.campaigns.verdicts import Verdict, judged

pytestmark = pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")


def outcomes(verdicts):
    return {v.outcome for v in verdicts}


# -- F1 --------------------------------------------------------------------------------------------


def derivatives(op_type, library, names):
    """Every derivative of one op in some regions."""
    call = op_calls.call_of(op_type)
    xs = fires.data(call, library)
    found = []
    for region in names:
        for name, take, due in fires.derivatives(call):
            with op_calls.in_force(op_type):
                got = fires.attempt(take(regions.REGIONS[region](call.f)), *xs)
            found.append(judged(f"{op_type} {name}: {region}", got, due))
    return found


@pytest.mark.parametrize("op_type", ["Sign", "Pack", "Unpack", "Cast", "MatMul", "Conj", "Conv2D"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rules_fire(op_type, library):
    assert outcomes(derivatives(op_type, library, regions.SHORT)) == {DELIVERED}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("op_type", ["Sign", "MatMul"])
def test_rules_fire_in_graphs_and_compiled(op_type):
    found = [*fires.run(f"{op_type}/graph", quick=True), *fires.run(f"{op_type}/jit", quick=True)]
    assert len(found) > 20
    assert outcomes(found) == {DELIVERED}


def test_what_is_due_is_known_without_the_library():
    call = op_calls.Call("Mul", [np.array([1.0, 2.0]), np.array([3.0])], {}, [np.zeros(2)])
    total = 2 + 1 + 2 + np.cos(1.0)  # the weights of two elements
    np.testing.assert_allclose(call.slopes(call.xs)[0], np.array([10.0, 13.0]) * total)
    np.testing.assert_allclose(call.second()[0], np.array([3.0, 2 + np.cos(1.0)]) * 3 * total)


def test_an_override_that_is_dropped_is_found(monkeypatch):
    assert op_calls.call_of("Tanh")  # (found by an override, too)
    monkeypatch.setattr(overrides.OpBinding, "bind", lambda self, op, xs: op.rule)
    found = derivatives("Tanh", "numpy", ("alone", "scan", "cond"))
    assert SILENT in outcomes(found)
    assert DELIVERED not in outcomes(found)


def test_a_rule_that_runs_wrongly_is_found(monkeypatch):
    pull = bindings.CountedRule.pull
    doubled = lambda self, *args: [(i, dx * 2.0) for i, dx in pull(self, *args)]  # noqa: E731
    monkeypatch.setattr(bindings.CountedRule, "pull", doubled)
    assert outcomes(derivatives("Tanh", "numpy", ("alone",))) == {SILENT}


@pytest.mark.slow
def test_a_region_that_loses_rules_is_found(monkeypatch):
    monkeypatch.setitem(regions.REGIONS, "checkpoint", regions.masking)
    found = fires.run("Tanh/jit", quick=True)
    assert {v.case for v in found if v.outcome == SILENT} == {
        "Tanh/jit in jit, first: checkpoint",
        "Tanh/jit around jit, checkpoint",
    }


def test_a_scope_that_leaks_is_found(monkeypatch):
    call = op_calls.call_of("Tanh")
    xs, slopes = fires.data(call, "numpy"), call.slopes(call.xs)
    assert outcomes(judged(*case) for case in fires.cached_cases(call, xs, slopes)) == {DELIVERED}
    monkeypatch.setattr(rg, "jit", kept)
    assert SILENT in outcomes(judged(*case) for case in fires.cached_cases(call, xs, slopes))


def kept(f):
    """A compiled function that never looks again."""
    results = []

    def run(*xs):
        if not results:
            results.append(f(*xs))
        return results[0]

    return run


def test_errors_of_the_library_and_others():
    due = [np.ones(2)]
    assert judged("", RuleError("no"), due).outcome == REFUSED
    assert judged("", KeyError("no"), due).outcome == BROKEN
    assert judged("", [np.ones(2)], due).outcome == DELIVERED
    assert judged("", [np.ones(3)], due).outcome == SILENT
    assert judged("", [np.full(2, np.nan)], due).outcome == SILENT


# -- F2 --------------------------------------------------------------------------------------------


def row_of(name):
    return next(row for row in numerics.ROWS if str(row) == name)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "name", ["elementwise: Tanh", "elementwise: a real tensor times a complex one"]
)
def test_a_slice_of_the_gradients(name):
    found = [*numerics.verdicts(row_of(name))]
    assert len(found) > 10
    assert outcomes(found) == {DELIVERED}


@pytest.mark.slow
def test_a_wrong_gradient_is_found_in_each_mode(monkeypatch):
    row = row_of("elementwise: Tanh")
    right = numerics.nth
    monkeypatch.setattr(numerics, "nth", lambda *args: [1.5 * dx for dx in right(*args)])
    for mode in numerics.MODES:
        for forward in (False, True):
            found = numerics.compared(row, "float32", mode, forward)
            assert outcomes(found) == {SILENT}, mode


def test_a_rule_that_differences_contradict_is_found():
    row = row_of("elementwise: Tanh")
    wrong = dataclasses.replace(row, f=lambda x: rg.tanh(rg.rules.reverse_gradient(x)))
    assert outcomes(numerics.differences(wrong)) == {SILENT}


# -- F3 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["native", "native, one input", "TensorFlow's", "a sequence"])
def test_wrong_answers_are_refused_by_name(form):
    found = [answers.verdict(form, "eager NumPy", fault) for fault in answers.FAULTS]
    assert outcomes(found) <= {REFUSED, DELIVERED}
    assert sum(v.outcome == REFUSED for v in found) > 0.9 * len(found)


@pytest.mark.parametrize("form", answers.FORMS)
def test_right_answers_pass(form):
    for fault, due in answers.rights(form):
        if form == "per input" or "one input" in form:
            fault = fault._replace(answer=lambda gs, f=fault: answers.alone(f.answer, gs))
        got = answers.MODES["eager NumPy"](answers.FORMS[form](fault.answer))
        assert judged(fault.name, got, due).outcome == DELIVERED


def wrong_shape(form="native"):
    fault = next(f for f in answers.FAULTS if f.name == "the shape (2, 3)")
    return answers.verdict(form, "eager NumPy", fault).outcome


def test_an_answer_that_is_not_checked_is_found(monkeypatch):
    assert wrong_shape() == REFUSED
    long = lambda record, leaf, dx, dy: rg.zeros(3, dtype=dx.dtype)  # noqa: E731
    monkeypatch.setattr(walk, "check_gradient", long)
    assert wrong_shape() == SILENT
    monkeypatch.setattr(walk, "check_gradient", lambda record, leaf, dx, dy: {}[leaf])
    assert wrong_shape() == BROKEN


def test_an_error_without_names_is_found(monkeypatch):
    monkeypatch.setattr(walk, "describe_pull", lambda record, name="": "something")
    assert wrong_shape() == UNNAMED


def mortal(job):
    if job.name.endswith("dies"):
        os._exit(1)
    return {"job": job.key, "counts": {}, "others": [], "seconds": 0}


@pytest.mark.slow
def test_a_job_that_ends_its_process_is_broken_and_the_others_are_done():
    jobs = [proof.Job("F5", f"{i}{'dies' * (i == 1)}") for i in range(4)]
    found = {result["job"]: result for result in driver.results(jobs, 2, mortal)}
    assert sorted(found) == sorted(job.key for job in jobs)
    broken = {key for key, result in found.items() if result["counts"].get(BROKEN)}
    assert broken == {jobs[1].key}


# -- F6, F7 ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_the_special_points_on_numpy(first):
    for op_type in edges.op_types()[first::4]:
        found = edges.run(f"points/numpy/{op_type}")
        assert not [v for v in found if v.outcome not in (DELIVERED, EXPLAINED)]


@pytest.mark.parametrize("job", ["points/torch/Atan2", "points/jax/Hypot"])
def test_a_slice_of_the_special_points(job):
    found = edges.run(job)
    assert len(found) > 600
    assert outcomes(found) == {DELIVERED, EXPLAINED}


def test_wrong_numbers_at_special_points_are_found(monkeypatch):
    right = edges.by_regrad
    monkeypatch.setattr(edges, "by_regrad", lambda *args: [1 - x for x in right(*args)])
    assert SILENT in outcomes(edges.run("points/numpy/Tanh"))


def test_a_slice_of_the_fills():
    assert outcomes(edges.run("fills/torch/0", quick=True)) == {DELIVERED}
    row = next(row for row in edges.ROWS if str(row) == "linalg: MatrixSolve: columns")
    assert edges.filled(row, "0", "torch").outcome == REFUSED
    broken = dataclasses.replace(row, f=lambda a, b: {}[a])
    assert edges.filled(broken, "0", "torch").outcome == BROKEN


def test_distances_in_ulps():
    one = np.array([1.0, 1e-9])
    assert ulps.distance(one, one) == 0
    assert ulps.distance(one, one + np.array([3 * np.spacing(1.0), 0])) == 3
    small = np.array([0, np.spacing(1e-3)])  # what counts is a thousandth of the largest
    assert ulps.distance(one, one + small) == pytest.approx(1)
    assert ulps.distance(np.array([np.nan]), np.array([1.0])) == np.inf
    assert ulps.distance(np.array([np.inf]), np.array([-np.inf])) == np.inf
    assert ulps.distance(np.array([np.nan]), np.array([np.nan])) == 0


def test_a_slice_of_the_ulps(monkeypatch):
    row = next(row for row in ulps.ROWS if str(row) == "elementwise: Tanh")
    assert ulps.judged(row, "float32", "graph").case == "float32/graph/0 elementwise: Tanh"
    assert ulps.judged(row, "float64", "jit").outcome == DELIVERED
    ran = ulps.ran
    wrong = lambda *case: [y * (1 + 1e-9 * (case[-1] == "graph")) for y in ran(*case)]  # noqa: E731
    monkeypatch.setattr(ulps, "ran", wrong)
    assert ulps.judged(row, "float64", "graph").outcome == SILENT


# -- F8 --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
@pytest.mark.parametrize("way", concurrency.WAYS)
def test_a_slice_of_threads_and_tasks(way):
    assert outcomes(concurrency.run(f"{way}/0", quick=True)) == {DELIVERED}


def test_rules_that_all_threads_share_are_found(monkeypatch):
    def leaking(rng):
        bound.append(k := rng.uniform(-2, 2))
        yield
        yield np.float32(bound[-1] - k)

    bound = []
    monkeypatch.setattr(concurrency, "PARTS", [leaking])
    found = concurrency.run("tasks/0", quick=True)
    assert SILENT in outcomes(found)


def test_an_update_that_is_lost_is_found(monkeypatch):
    monkeypatch.setattr(concurrency, "UPDATES", [*concurrency.UPDATES, None])
    assert outcomes(concurrency.counted("threads")) == {SILENT}


# -- F9 --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient", "override", "new graph", "thread"])
def test_a_slice_of_memory(name):
    assert memory.examined(name, 100).outcome == DELIVERED


@pytest.mark.slow
def test_a_leak_is_found(monkeypatch):
    kept = []
    leak = memory.Kind(lambda stack: lambda i: kept.append(np.ones(100_000)), 1000)
    monkeypatch.setitem(memory.KINDS, "leak", leak)
    assert memory.examined("leak", 200).outcome == BROKEN


# -- the whole -------------------------------------------------------------------------------------


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """The command with a campaign of its own, that counts its runs."""
    calls = []

    def run(name, quick):
        calls.append(name)
        outcome = SILENT if name.startswith("Tanh") else DELIVERED
        detail = "[1] instead of [2]" if outcome == SILENT else ""
        return [Verdict(f"{name} first: alone", outcome, detail)]

    monkeypatch.setattr(fires, "run", run)
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    monkeypatch.setattr(proof, "OUT", tmp_path / "out")
    monkeypatch.setattr(proof, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(fires, "op_types", lambda: ["Sign", "Tanh"])
    monkeypatch.setattr(proof.sys, "argv", ["proof"])
    return calls


@pytest.mark.slow
def test_a_second_run_goes_on(runner, capsys, tmp_path):
    assert proof.main(["--only", "F1/Sign"]) == 0
    assert runner == [f"Sign/{mode}" for mode in fires.MODES]
    assert proof.main(["--only", "F1/"]) == 1
    assert len(runner) == 2 * len(fires.MODES)
    with (tmp_path / "out" / "proof.jsonl").open("a") as file:
        file.write('{"job": "cut off')
    proof.main(["--only", "F1/"])
    assert len(runner) == 2 * len(fires.MODES)
    proof.main(["--only", "F1/Sign", "--fresh"])
    assert len(runner) == 3 * len(fires.MODES)
    assert "SILENT F1: numpy first: alone" in capsys.readouterr().out


@pytest.mark.slow
def test_results_are_written(runner, tmp_path):
    proof.main(["--only", "F1"])
    proof.main(["--only", "F1/Sign"])
    part = json.loads((tmp_path / "out" / "proof-part.json").read_text())
    assert part["jobs"] == len(fires.MODES)
    result = json.loads((tmp_path / "results" / "F1.json").read_text())
    modes = len(fires.MODES)
    assert result["counts"] == {"F1": {DELIVERED: modes, SILENT: modes}}
    assert result["classes"][0]["cases"] == ["Tanh"]
    assert {"date", "machine", "versions", "command", "commit", "files"} <= result.keys()


def test_each_record_has_its_commit_and_its_files():
    for path in records.RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", content["commit"]), path.name
        assert content["files"] == records.files_of(path)
        assert all((proof.ROOT / file).exists() for file in content["files"])


def test_records_older_than_their_files_are_listed(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]

    def commit(text):
        (tmp_path / "rule.py").write_text(text)
        subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
        subprocess.run([*git, "commit", "-qm", text], cwd=tmp_path, check=True)
        show = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True)
        return show.stdout.decode().strip()

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    paths = []
    for i, text in enumerate(["one", "two", "three"]):
        content = {"commit": commit(text)[:10], "files": ["rule.py"]}
        paths.append(records.write(tmp_path / f"R{i}.json", content))
    lines = records.stale(paths)
    assert [line.partition(":")[0] for line in lines] == ["R0.json", "R1.json"]
    assert "2 commits since" in lines[0] and "have changed rule.py" in lines[0]
    paths[0].write_text(json.dumps({"commit": "0" * 10, "files": ["rule.py"]}))
    with pytest.raises(RuntimeError, match="git has no history of 0000000000"):
        records.stale(paths)


def test_results_name_no_folder_of_the_machine():
    with tempfile.TemporaryDirectory() as folder:
        text = f"{folder}/model.npz is damaged ({proof.ROOT}/tests/x.py:3)"
    assert records.without_folders(text) == "model.npz is damaged (tests/x.py:3)"


@pytest.mark.slow
def test_a_campaign_that_fails_is_broken(monkeypatch, runner):
    def fails(name, quick):
        raise KeyError(name)

    monkeypatch.setattr(fires, "run", fails)
    assert proof.main(["--only", "F1/Sign/numpy"]) == 1


# -- broken rules ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_broken_rules_are_caught():
    verdicts = [*mutations.run("Sin"), *mutations.run("MatMul")]
    assert len(verdicts) > 25 and outcomes(verdicts) <= {REFUSED, EXPLAINED}


@pytest.mark.slow
def test_broken_rules_survive_a_check_that_never_fails(monkeypatch):
    right = GradientReport(1, 1, (), ())
    monkeypatch.setattr(mutations, "gradient_report", lambda *args, **options: right)
    monkeypatch.setattr(mutations, "conventions_fail", lambda case: False)
    verdicts = [*mutations.run("Sin")]
    assert len(verdicts) > 8 and outcomes(verdicts) <= {SILENT, EXPLAINED}


def test_a_mutant_is_one_and_the_rule_comes_back():
    (site,) = mutations.sites("Sin")
    doubled = dict(mutations.mutants(site))["factor of 2"]
    with mutations.broken(site, doubled):
        assert rg.grad(rg.sin)(0.0).item() == 2.0
    assert rg.grad(rg.sin)(0.0).item() == 1.0
    named = dict(mutations.mutants(site))
    with mutations.broken(site, named["cos to sin"]):
        assert rg.grad(rg.sin)(0.0).item() == 0.0
    (site,) = [site for site in mutations.sites("Maximum") if site.wrt == "a"]
    (bound,) = [f for what, f in mutations.mutants(site) if what.startswith(">= to >,")]
    with mutations.broken(site, bound):
        assert rg.grad(lambda a: rg.maximum(a, 1.0))(1.0).item() == 0.0
    assert rg.grad(lambda a: rg.maximum(a, 1.0))(1.0).item() == 1.0


def test_mutants_that_change_nothing_are_told_from_survivors():
    (site,) = mutations.sites("Sin")
    assert mutations.is_same(site, site.function)
    assert not mutations.is_same(site, dict(mutations.mutants(site))["factor of 1.001"])
    unreached = next(site for site in mutations.sites("Sqrt"))
    assert not mutations.is_same(unreached._replace(op_type="Sin"), unreached.function)
