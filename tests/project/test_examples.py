"""Each example runs in its quick form, in a temporary directory, and does what it says."""

import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from regrad.core.registry import RULES
from tests.helpers.children import free_port
from tests.helpers.optional import ABSENT
from tests.helpers.paths import DOCS, EXAMPLES, GOLDEN, ROOT

pytestmark = pytest.mark.slow


def main_of(path, name):
    """The main function of a program."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the main function of an example where it may write; it must leave its picture."""

    def run_example(name: str, picture: bool = True, **options):
        monkeypatch.chdir(tmp_path)
        main = main_of(EXAMPLES / f"{name}.py", f"example_{name}")
        quick = {"quick": True} if "quick" in inspect.signature(main).parameters else {}
        answer = main(**quick, **options)
        if picture:
            png = tmp_path / "out" / f"{name}.png"
            assert png.read_bytes().startswith(b"\x89PNG")
        return answer

    return run_example


def test_every_example_has_a_test_and_says_how_to_run_it():
    tested = {n.removeprefix("test_") for n in globals() if n.startswith("test_")}
    for path in EXAMPLES.glob("*.py"):
        assert path.stem in tested
        command = rf"(python|torchrun .*) examples/{path.name}"
        assert re.search(command, path.read_text(encoding="utf-8"))


def test_binarized_digits(run):
    accuracies = run("binarized_digits")
    signs = [accuracies[way] for way in ("straight-through", "clipped", "approx_sign")]
    assert accuracies["float"] >= max(signs)
    assert min(signs) > accuracies["true gradient"] + 0.02
    assert accuracies["clipped"] > 0.93


def test_binarized_digits_compiled(run, capsys):
    accuracies = run("binarized_digits", jit=True, ways=["true gradient", "clipped"])
    assert accuracies["clipped"] > max(0.93, accuracies["true gradient"] + 0.02)
    assert "ms compiled" in capsys.readouterr().out


def test_binarized_cnn(run):
    rows = run("binarized_cnn", picture=False)
    fixed, learning = rows["true gradient"], rows["clipped"]
    assert fixed["changed"] == 0
    assert learning["changed"] > 0.05
    assert learning["accuracy"] > max(0.8, fixed["accuracy"] + 0.4)
    assert fixed["ran"] == learning["ran"] == 2 * 21 * 5  # epochs, steps, signs


def test_spiking(run):
    rows = run("spiking")
    for row in rows["memory"]:
        assert row["difference"] == 0
        assert row["checkpoint"] < row["kept"] / 2
    plain, again = rows["training"]
    assert plain["accuracy"] > 0.8
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-3)
    assert again["accuracy"] == pytest.approx(plain["accuracy"], abs=0.01)


def test_neural_ode(run):
    answer = run("neural_ode")
    assert answer["losses"][-1] < answer["losses"][0] / 5
    differences = [row["difference"] for row in answer["gradients"]]
    assert differences[-1] < 1e-5
    for coarse, fine in itertools.pairwise(differences):
        assert 10 < coarse / fine < 40


def test_transformer(run):
    answer = run("transformer", picture=False)
    training, held_out = answer["losses"][-1]
    assert max(training, held_out) < 0.8 * np.log(answer["letters"])
    assert answer["same"]
    assert 0 < answer["clips"] < 1


def test_gradient_reversal(run):
    rows = run("gradient_reversal")
    assert set(rows) == {0.0, 6.0}
    assert max(row["difference"] for row in rows.values()) < 1e-10


def test_guided_backprop(run):
    cosines = run("guided_backprop")
    assert cosines["guided"] >= 0.95
    assert abs(cosines["gradient"]) <= 0.4
    assert abs(cosines["gradient"]) < cosines["deconvnet"] < cosines["guided"]


def test_foreign_resnet(run, capsys):
    cosines = run("foreign_resnet")
    assert cosines["guided"] >= 0.95
    assert abs(cosines["gradient"]) <= 0.4
    assert abs(cosines["gradient"]) < cosines["deconvnet"] < cosines["guided"]
    printed = capsys.readouterr().out
    assert printed.count("Relu     guided_relu") == 4  # lines: three of modules, one of F.relu


def test_foreign_quantized(run):
    rows = run("foreign_quantized", picture=False)
    fixed, learning = (rows[f"fine-tuned, {g}"] for g in ("torch's gradient", "straight-through"))
    assert fixed["moved"] == 0
    assert learning["moved"] > 0.5
    assert learning["accuracy"] > fixed["accuracy"] + 0.03
    assert rows["float32"]["accuracy"] > rows["rounded"]["accuracy"]


def test_foreign_reversal(run):
    rows = run("foreign_reversal")
    assert rows["difference"] < 1e-15
    assert min(source for strength in (0.0, 1.0) for source, _ in rows[strength]) > 0.85


def test_implicit_layer(run):
    rows = run("implicit_layer")
    assert len({row["implicit_bytes"] for row in rows}) == 1
    assert rows[-1]["unrolled_bytes"] == 20 * rows[0]["unrolled_bytes"]
    for row in rows:
        if row["iterations"] >= 50:
            assert row["first"] <= 1e-12
            assert row["second"] <= 1e-12


def test_log1pexp(run):
    table = run("log1pexp", picture=False)
    for row in table.values():
        assert row["log1pexp"] == pytest.approx(row["true"], rel=1e-6, abs=1e-7)
    naive, documented = table[100.0]["naive"], table[100.0]["documented"]
    assert naive[1] != naive[1]  # NaN
    assert documented[1] == 1.0
    assert documented[2] != documented[2]


def test_reversible_network(run):
    rows = run("reversible_network")
    assert {row["reversible_bytes"] for row in rows} == {2 * 64 * 16 * 8}
    assert rows[-1]["ordinary_bytes"] == 64 * rows[0]["ordinary_bytes"]
    assert rows[-1]["blocks"] == 256
    assert max(row["error"] for row in rows) <= 1e-12


def test_sharded_training(run):
    losses = run("sharded_training", picture=False)
    alone = losses.pop("one device")
    assert alone[-1] < 0.9 * alone[0]
    assert len(losses) == 3
    for others in losses.values():
        assert others == pytest.approx(alone, abs=1e-5)


# -- overrides at scale, by the commands of their page ---------------------------------------------


def prints_what_the_page_says(package: str, page: str = "torch/at_scale.md") -> None:
    """Run at_scale_{package}.py in processes of its own."""
    if package in ABSENT:
        pytest.skip(f"needs {package}")
    shown = rf"```sh\n(.* examples/at_scale_{package}\.py)\n```\n\n```text\n([^`]*)```"
    ((command, printed),) = re.findall(shown, (DOCS / page).read_text(encoding="utf-8"))
    launcher, *rest = command.split()
    module = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[launcher]
    paths = {"PYTHONPATH": str(ROOT / "src"), "PET_MASTER_PORT": free_port()}  # (torchrun reads it)
    done = subprocess.run(
        [sys.executable, *module, *rest], cwd=ROOT, env={**os.environ, **paths},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.sub(r"^\[Gloo\].*\n", "", done.stdout, flags=re.M) == printed  # (says torch 2.10)


def test_at_scale_torch():
    prints_what_the_page_says("torch")


def test_at_scale_jax():
    prints_what_the_page_says("jax", "jax/compiled.md")


def test_at_scale_accelerate():
    prints_what_the_page_says("accelerate")


def test_at_scale_lightning():
    prints_what_the_page_says("lightning")


# -- TensorFlow 1 programs ---------------------------------------------------------------------


@pytest.fixture
def registry():
    """Programs register rules for the whole process; put back what was there."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def test_every_tensorflow_program_has_a_test():
    tested = {
        "guided_backprop", "dorefa_digits", "gradient_reversal", "deep_digits", "carried_over",
    }  # fmt: skip
    assert {path.stem for path in (EXAMPLES / "tf1").glob("*.py")} == tested


@pytest.fixture
def run_tf1(tmp_path, monkeypatch, registry):
    """Run the main function of a TensorFlow 1 program where it may write."""

    def run_program(name: str):
        monkeypatch.chdir(tmp_path)
        path = EXAMPLES / "tf1" / f"{name}.py"
        assert f"python examples/tf1/{name}.py" in path.read_text(encoding="utf-8")
        return main_of(path, f"tf1_{name}")(quick=True)

    return run_program


def test_tf1_guided_backprop(run_tf1, tmp_path):
    answer = run_tf1("guided_backprop")
    picture = tmp_path / "out" / "guided_backprop_tf1.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert answer


def test_tf1_carried_over_prints_what_tensorflow_printed(run_tf1, capsys):
    run_tf1("carried_over")
    recorded = GOLDEN / "tf1_carried_over.txt"
    assert capsys.readouterr().out == recorded.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["dorefa_digits", "gradient_reversal", "deep_digits"])
def test_tf1_programs_learn(run_tf1, name):
    assert run_tf1(name)


def test_foreign_jax(run):
    for cosine, plain, ours in run("foreign_jax", picture=False).values():
        assert -0.9 < cosine < 0.99
        assert ours < 0.9 * plain
