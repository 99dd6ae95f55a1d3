"""`python -m regrad`: what it prints, what it writes, and its exit status."""

import json
import re
import sys

import pytest

import regrad as rg
from regrad import __main__ as regrad_main
from regrad.__main__ import main

MODULE = """
import regrad as rg

def fine(x):
    return rg.sin(x).sum()

def masked(x):
    return rg.where(x > 0, rg.sqrt(rg.abs(x)), 0.0).sum()

@rg.custom_grad
def doubled(x):
    return rg.sin(x), lambda dy: 2 * dy * rg.cos(x)

class Nets:
    doubled = staticmethod(lambda x: doubled(x).sum())
"""
JAX = """import jax.numpy as jnp
def loss(x):
    return jnp.sum(jnp.sin(x))
"""
ARGS = ["--args", "[[1.0, 0.0]]"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    path = tmp_path / f"model_{tmp_path.name}.py"
    path.write_text(MODULE)
    return path.name


def run(capsys, *arguments):
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_info_names_versions(capsys):
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert f"regrad {rg.__version__}" in out and "numpy " in out


def test_check(capsys, file):
    assert run(capsys, "check", f"{file}:fine", *ARGS, "--order", "2")[0] == 0
    status, out, _ = run(capsys, "check", f"{file}:Nets.doubled", *ARGS)
    assert status == 1
    assert "scaled by 2" in out and "'doubled'" in out


@pytest.mark.slow
def test_trace_and_its_picture(capsys, file, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    status, out, _ = run(capsys, "trace", f"{file}:fine", *ARGS, "--plot", "trace.png")
    assert status == 0
    assert "Sin" in out and f"{file}:5" in out
    assert (tmp_path / "trace.png").stat().st_size > 1000


def test_nan(capsys, file):
    assert run(capsys, "nan", f"{file}:fine", *ARGS)[:2] == (
        0, "all is finite, forward and backward\n",
    )  # fmt: skip
    status, out, _ = run(capsys, "nan", f"{file}:masked", *ARGS)
    assert status == 1
    assert "the gradient of Sqrt" in out and "at index (1,)" in out


def test_compare(capsys, file):
    status, out, _ = run(capsys, "compare", f"{file}:Nets.doubled", *ARGS)
    assert status == 1
    assert "doubled" in out and "2 undeclared" in out
    assert run(capsys, "compare", f"{file}:fine", *ARGS, "--other", f"{file}:fine")[0] == 0


@pytest.mark.slow
def test_the_library_is_that_of_the_module(capsys, file, tmp_path):
    pytest.importorskip("jax")
    path = tmp_path / f"in_jax_{tmp_path.name}.py"
    path.write_text(JAX)
    status, out, _ = run(capsys, "trace", f"{path.name}:loss", *ARGS)
    assert status == 0
    assert "reduce_sum" in out and f"{path.name}:3" in out


def test_draw(capsys, file, tmp_path):
    assert run(capsys, "draw", f"{file}:fine", *ARGS, "--out", "net.html")[0] == 0
    assert "<svg" in (tmp_path / "net.html").read_text()


def test_a_module_by_name(capsys, file):
    assert run(capsys, "nan", f"{file.removesuffix('.py')}:fine", *ARGS)[0] == 0


def test_bad_input_is_an_error_in_one_line(capsys, file):
    for arguments, message in [
        (["nan", "no_such_module:f"], "No module named 'no_such_module'"),
        (["nan", "no_such_file.py:f"], "there is no file no_such_file.py"),
        (["nan", f"{file}:nothing"], "has no 'nothing'"),
        (["nan", "fine"], "expected module:function or file.py:function, got 'fine'"),
        (["nan", f"{file}:fine", "--args", "{"], "--args is a JSON list, got '{'"),
        (["nan", f"{file}:fine", "--args", "{}"], "with an entry for each argument"),
        (["draw", f"{file}:fine", *ARGS, "--out", "net.png"], "--out is a file .html or .svg"),
    ]:
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert err.startswith(f"regrad {arguments[0]}: ") and message in err
        assert err.count("\n") == 1


TORCH = """import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x).sum()
net = Net()
"""
RELU = """import regrad as rg
def net(x):
    return rg.sum(rg.nn.relu(x))
def double(dy, y):
    return 2 * dy * (y > 0)
"""
IN_JAX = """import jax
def net(x):
    return jax.nn.relu(x).sum()
"""


@pytest.fixture(params=["regrad", "torch", "jax"])
def net(request, file, tmp_path):
    if request.param != "regrad":
        pytest.importorskip(request.param)
    path = tmp_path / f"{request.param}_{tmp_path.name}.py"
    path.write_text({"regrad": RELU, "torch": TORCH, "jax": IN_JAX}[request.param])
    (tmp_path / "rules_here.py").write_text(RELU)
    sys.modules.pop("rules_here", None)
    return f"{path.name}:net"


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("command", ["trace", "compare", "check", "nan", "draw"])
def test_a_rule_is_tried(capsys, net, command):
    """guided_relu keeps what is positive, on the way here as ReLU does; its double does not."""
    options = [net, "--args", "[[1.0, -2.0]]", "--override", "Relu=guided_relu"]
    status, out, _ = run(capsys, command, *options)
    assert status == 0 and re.search(r"^Relu +guided_relu +\d", out, re.M), out
    options[-1] = "Relu=rules_here:double"
    status, out, _ = run(capsys, command, *options)
    assert status == (1 if command in ("compare", "check") else 0), out
    assert re.search(r"^Relu +double +\d", out, re.M)


def test_several_rules_are_tried_and_factories_are_called(capsys, file):
    options = [
        f"{file}:masked", *ARGS, "--override", "Sqrt=superspike", "--override", "Abs=Identity",
    ]  # fmt: skip
    status, out, _ = run(capsys, "nan", *options)
    assert status == 0
    assert re.search(r"^Sqrt +superspike", out, re.M) and re.search(r"^Abs +Identity", out, re.M)


def test_a_rule_that_never_runs_is_reported(capsys, net):
    options = [net, "--args", "[[1.0, -2.0]]", "--override", "Tanh=Identity"]
    status, out, _ = run(capsys, "trace", *options)
    assert status == 1 and "the rule 'Identity' for the op type 'Tanh' never ran" in out


def test_a_target_that_does_not_fit_is_an_error_in_one_line(capsys, net):
    for arguments, message in [
        ([], "takes (x); pass --args, a JSON list with an entry for each argument, got []"),
        (["--args", "[[1.0], [1.0]]"], "takes (x); pass --args"),
        (["--args", "[[1.0, [2.0]]]"], "--args: " if "regrad" not in net else "unequal rows"),
        (["--args", "[[1.0]]", "--override", "Relu"], "--override is OPTYPE=RULE"),
        (["--args", "[[1.0]]", "--override", "Relo=Identity"], "Did you mean 'Relu'"),
        (["--args", "[[1.0]]", "--override", "Relu=none"], "no rule is registered as 'none'"),
        (["--args", "[[1.0]]", "--override", "Relu=rules_here:nothing"], "has no 'nothing'"),
    ]:
        status, _, err = run(capsys, "check", net, *arguments)
        assert status == 2 and err.startswith("regrad check: ") and message in err, err
        assert err.count("\n") == 1


def test_a_class_is_no_target(capsys, file):
    status, out, err = run(capsys, "trace", f"{file}:Nets", *ARGS)
    assert (status, out) == (2, "") and "Nets is a class; name a function or an instance" in err


def test_notebooks_show_tensors_tables_and_hits():
    html = rg.tensor([[1.0, 2.5], [3.0, 4.0]])._repr_html_()
    assert html.startswith("<p>Tensor: float32, shape (2, 2)</p><table>")
    assert "<td>2.5</td>" in html
    assert "<pre>" in rg.scalar(1.0)._repr_html_()
    long = rg.arange(100)._repr_html_()
    assert long.count("<td>") == 7 and "<td>…</td>" in long
    with rg.gradient_override_map({"Sin": lambda dy: dy}) as used:
        rg.grad(lambda x: rg.sin(x))(1.0)
    assert "<td>Sin</td>" in used._repr_html_()
    assert "&lt;lambda&gt;" in used._repr_html_()
    assert json.dumps(html)


@pytest.mark.slow
def test_hosts_lists_what_holds_on_this_machine(capsys, monkeypatch):
    from regrad.jax.host import HOST, SIGHT

    monkeypatch.setattr(regrad_main, "LIBRARIES", ("regrad", "jax"))
    status, out, err = run(capsys, "hosts")
    lines = out.splitlines()
    assert status == 0 and "some seconds" in err
    assert lines[0] == f"JAX {HOST.version} (0.10 to 0.12 are tested)"
    assert all(line.endswith("  holds") for line in lines[1:])
    monkeypatch.setattr(SIGHT, "losses", ["jax.core is gone"])
    status, out, _ = run(capsys, "hosts")
    assert status == 1
    assert re.search(r"^  traces, comparisons and drawings +refused: jax\.core is gone$", out, re.M)


def test_hosts_says_what_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(regrad_main, "LIBRARIES", ("regrad", "torch"))
    for name in [name for name in sys.modules if name.startswith(("regrad.torch", "torch."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    status, out, _ = run(capsys, "hosts")
    assert status == 0 and "pip install '.[torch]'" in out
