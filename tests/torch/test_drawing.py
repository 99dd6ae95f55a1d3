"""`regrad.torch.draw`: the functions of a model in its modules, and whose rules they have."""

import pytest
import torch
from torch import nn

import regrad as rg
from regrad.errors import ArgumentError
from regrad.torch import custom_grad, draw
from tests.torch.common import bare_function, leaf, override

Clip = bare_function("Clip", lambda ctx, x: x * 1, lambda ctx, dy: dy.clamp(-1, 1))
Both = bare_function("Both", lambda ctx, x: (x * 2, x + 2), lambda ctx, a, b: a + b)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return Clip.apply(self.relu(self.conv(x))) + x


@pytest.fixture
def drawing():
    net = nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(8, 3))
    with override({"Relu": rg.rules.guided_relu}):
        return draw(net, torch.ones(1, 2, 2, 2))


def ends(drawing):
    return {(a.source, a.target) for a in drawing.arrows}


def test_functions_in_the_modules_that_ran_them(drawing):
    found = [(b.lines[0], b.scope) for b in drawing.boxes if b.kind in ("op", "override")]
    assert found == [
        ("conv2d", ("0 Block", "conv")), ("relu", ("0 Block", "relu")), ("add", ("0 Block",)),
        ("conv2d", ("1 Block", "conv")), ("relu", ("1 Block", "relu")), ("add", ("1 Block",)),
        ("flatten", ("2 Flatten",)), ("linear", ("3 Linear",)),
    ]  # fmt: skip


def test_parameters_lie_where_they_are_used(drawing):
    variables = {b.name: b.scope for b in drawing.boxes if b.kind == "variable"}
    assert variables["0.conv.weight"] == ("0 Block", "conv")
    assert variables["3.bias"] == ("3 Linear",)
    assert ("0.conv.weight", "conv2d") in ends(drawing)


def test_rules_stand_out(drawing):
    relu = next(b for b in drawing.boxes if b.name == "relu")
    assert relu.kind == "override" and relu.details["rule"].startswith("override: guided_relu, ")
    clip = next(b for b in drawing.boxes if b.name == "Clip")
    assert clip.kind == "custom" and "Clip.backward" in clip.details["rule"]
    assert {("relu", "Clip"), ("Clip", "add"), ("args[0]", "add")} <= ends(drawing)
    assert "mul" not in {b.name for b in drawing.boxes}  # which the Function's forward ran


def test_functions_in_place_and_containers():
    def f(pair):
        x = pair["a"] * 2
        x += pair["b"]
        return {"y": x.relu_()}

    found = draw(f, {"a": torch.ones(2), "b": torch.ones(2)})
    assert [b.name for b in found.boxes if b.kind == "op"] == ["mul", "add", "relu"]
    assert {("args[0]['a']", "mul"), ("mul", "add"), ("args[0]['b']", "add")} <= ends(found)


def test_custom_gradients_of_regrad():
    scaled = custom_grad(lambda x: (x * 2, lambda dy: dy * 3))
    found = draw(lambda x: scaled(x).sum(), leaf(1, 1))
    assert [b.kind for b in found.boxes].count("custom") == 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_all_outputs_of_a_function_come_from_its_box(requires_grad):
    x = torch.ones(2, requires_grad=requires_grad)
    found = draw(lambda x: torch.sub(*Both.apply(x)).sin(), x)
    boxes = {b.name: b.kind for b in found.boxes if b.kind != "input"}
    assert boxes == {"Both": "custom", "sub": "op", "sin": "op"}
    assert ends(found) == {("args[0]", "Both"), ("Both", "sub"), ("sub", "sin")}


def test_what_a_view_wrote_is_on_the_way():
    def f(x):
        y = x * 1
        y[0].exp_()
        return y.sum()

    found = draw(f, leaf(1, 1))
    assert {("mul", "getitem"), ("getitem", "exp"), ("exp", "sum")} <= ends(found)


def test_a_gradient_of_torch_func_is_drawn_with_the_ops_of_its_derivative():
    f = torch.func.grad(lambda x: x.sin().sum())
    found = draw(lambda x: f(x).sum(), leaf(1, 1))
    assert {("args[0]", "cos"), ("cos", "mul")} <= ends(found)


def test_nothing_is_left_behind():
    before = len(torch.nn.modules.module._global_forward_hooks)

    def fails(x):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        draw(fails, torch.ones(1))
    assert len(torch.nn.modules.module._global_forward_hooks) == before
    with pytest.raises(ArgumentError, match="must be a function"):
        draw(3)
