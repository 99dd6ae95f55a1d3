"""The tools that see gradients, on PyTorch models as they stand; drawings of such models."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch as rt
from regrad.errors import ArgumentError, GradientError
from regrad.testing import GradientCheckError
from regrad.torch import custom_grad, draw
from tests.torch.common import bare_function, function, leaf, override
from tests.torch.placed import Made


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


Sign = function(lambda x: x.sign(), lambda dy, x: torch.zeros_like(dy), "Sign")
Identity = function(lambda x: x.clone(), lambda dy, x: dy, "Identity", newer=True)
Rounded = function(lambda x: x.round(), lambda dy, x: dy, "Rounded")


def block():
    def forward(m, x):
        return m.relu(m.norm(m.conv(x)) + x)

    conv, norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
    return Made(forward, conv=conv, norm=norm, relu=nn.ReLU(inplace=True))


def net():
    def forward(m, x):
        return m.last(m.layer1(x).mean((2, 3)))

    torch.manual_seed(0)
    return Made(forward, layer1=nn.Sequential(block(), block()), last=nn.Linear(2, 3))


def image():
    return torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))


def kinds_of(trace):
    """The op types and paths of the steps, without those that are part of another."""
    return [(step.op_type, step.path) for step in trace.steps if "(" not in step.op_type]


def hooks():
    return [
        len(torch_modules._global_forward_hooks),
        len(torch_modules._global_forward_pre_hooks),
        len(torch.overrides._get_current_function_mode_stack()),
    ]


# -- trace_gradients -----------------------------------------------------------------------------


def test_a_trace_has_the_ops_in_order_with_their_modules():
    model = net()
    trace = rt.trace_gradients(lambda x: F.cross_entropy(model(x), torch.tensor([0, 1])))(image())
    assert kinds_of(trace)[:7] == [
        ("linear", "last"), ("mean", ""), ("relu", "layer1.1.relu"), ("add", "layer1.1"),
        ("batch_norm", "layer1.1.norm"), ("conv2d", "layer1.1.conv"), ("relu", "layer1.0.relu"),
    ]  # fmt: skip
    parts = [f"cross_entropy ({name})" for name in ("nll_loss", "log_softmax")]
    assert [s.op_type for s in trace.steps[:2]] == parts
    assert all(__file__ in step.line for step in trace.steps)


def test_figures_are_those_of_the_gradients():
    model = net()
    x = image().requires_grad_()
    trace = rt.trace_gradients(lambda x: model(x).square().sum())(x)
    figures = dict(trace.inputs)
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    model(x).square().sum().backward()
    assert figures.keys() == {"args[0]", *dict(model.named_parameters())}
    for name, p in [("args[0]", x), *model.named_parameters()]:
        torch.testing.assert_close(figures[name].norm, p.grad.norm().item(), rtol=1e-3, atol=1e-5)
        assert figures[name].shape == tuple(p.shape)
        assert figures[name].zeros == int((p.grad == 0).sum())


def test_each_input_of_an_op_has_its_name():
    w, b = ones(3, 2), torch.zeros(3, requires_grad=True)
    trace = rt.trace_gradients(lambda x: F.linear(x, w, b).sum())(torch.ones(1, 2))
    (step,) = [step for step in trace.steps if step.op_type == "linear"]
    assert {name for name, numbers in step.left if numbers} == {"bias", "weight"}
    assert {name for name, _ in trace.inputs} == {"w", "b"}


def test_rules_are_told_with_their_places():
    @rt.custom_grad
    def reverse(x):
        return x * 1, lambda dy: -dy

    def f(x):
        with rt.gradient_override_map({"Relu": rg.rules.guided_relu, Sign: lambda dy: dy}):
            return reverse(Sign.apply(F.relu(x)) + Identity.apply(x)).sum()

    trace = rt.trace_gradients(f)(ones(2))
    kinds = {step.op_type: (step.kind, step.rule.partition(",")[0]) for step in trace.steps}
    expected = {
        "relu": ("override", "guided_relu"), "Sign": ("override", "<lambda>"),
        "Identity": ("custom", "Identity.backward"), "reverse": ("custom", "reverse"),
        "sum": ("built-in", ""),
    }  # fmt: skip
    assert kinds | expected == kinds
    assert {step.line.rpartition(":")[0] for step in trace.steps} == {__file__}


@pytest.mark.parametrize("wrap", [lambda y: {"loss": y, "y": y * 2}, lambda y: (y, [3])])
def test_a_container_with_one_loss(wrap):
    trace = rt.trace_gradients(lambda x: wrap(x.square().sum()))(ones(2))
    assert trace.inputs[0][1].largest == 2.0


@pytest.mark.parametrize(("f", "error", "words"), [
    (lambda x: (x.sum(), x.mean()), GradientError, "2 losses"),
    (lambda x: x.detach().sum(), GradientError, "does not require grad"),
    (3, ArgumentError, "function or a module"),
], ids=["two", "none", "a number"])  # fmt: skip
def test_losses_that_are_refused(f, error, words):
    with pytest.raises(error, match=words):
        rt.trace_gradients(f)(ones(2))


def test_a_step_that_calls_backward_itself():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    trace = rt.trace_gradients(step)(image())
    assert isinstance(trace.value, float) and len(kinds_of(trace)) > 8
    assert dict(trace.inputs)["last.weight"].norm == pytest.approx(
        model.last.weight.grad.norm().item(), rel=1e-5
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    layer = nn.Linear(2, 2)

    def f(x):
        checkpoint(lambda x: torch.tanh(layer(x)), x, use_reentrant=reentrant).sum().backward()

    trace = rt.trace_gradients(f)(ones(1, 2))
    assert {"tanh", "linear"} <= {step.op_type for step in trace.steps}
    assert dict(trace.inputs)["weight"] is not None


def test_nothing_is_left_behind():
    before = hooks()
    forward = Sign.__dict__["forward"]
    y = Sign.apply(ones(1))
    with pytest.raises(ZeroDivisionError):
        rt.trace_gradients(lambda x: Sign.apply(x) / 0 + 1 // 0)(ones(1))
    rt.find_nan(lambda x: x.log().sum())(torch.zeros(2, requires_grad=True))
    rt.compare_gradients(lambda x: Sign.apply(x).sum())(ones(1))
    assert hooks() == before and Sign.__dict__["forward"] is forward
    assert y.grad_fn.metadata == {}


def test_no_activation_is_kept_alive():
    alive = []

    def f(x):
        thrown_away = x.exp()
        alive.append(weakref.ref(thrown_away))
        del thrown_away
        gc.collect()
        assert alive[0]() is None
        return (x * 2).sum()

    trace = rt.trace_gradients(f)(ones(3))
    assert not trace.value.requires_grad


def test_a_shape_changes_nothing():
    model = net()
    x = image().requires_grad_()
    want = torch.autograd.grad(model(x).sum(), x)[0]
    seen = []
    x.register_hook(seen.append)
    rt.trace_gradients(lambda x: model(x).sum())(x)
    torch.testing.assert_close(seen[0], want)


# -- find_nan ------------------------------------------------------------------------------------


def test_the_operands_and_the_index():
    x = torch.ones(4, 8)
    x[3, 7] = 0
    found = rt.find_nan(lambda x: x.log().sum())(x.requires_grad_())
    assert (found.op_type, found.index, found.what) == ("log", (3, 7), "inf")
    assert found.operands[0].value == 0 and "log(maximum(x, eps))" in found.cure
    assert "input = 0 at index (3, 7)" in str(found)


def test_masks_of_infinity_are_no_fault():
    mask = torch.tensor([False, True, True])

    def attention(x):
        bias = torch.zeros(3).masked_fill(mask, -torch.inf)
        return F.softmax(x + bias, -1)[0]

    assert rt.find_nan(attention)(ones(3)) is None


def test_what_was_there_before():
    layer = nn.Linear(2, 1)
    layer.weight.data[0, 1] = torch.nan
    found = rt.find_nan(layer)(torch.ones(1, 2))
    assert (found.phase, found.output, found.index) == ("argument", "weight", (0, 1))


def test_a_function_of_ones_own_that_makes_a_nan():
    root = function(lambda x: x.sqrt(), lambda dy, x: dy / (2 * x.sqrt()), "Root")
    found = rt.find_nan(lambda x: root.apply(x).sum())(torch.zeros(2, requires_grad=True))
    assert (found.phase, found.op_type, found.what) == ("backward", "Root", "inf")
    assert found.rule.startswith("Root.backward, ") and found.operands[0].value == 1


# -- saved_bytes ---------------------------------------------------------------------------------


def test_bytes_by_line_and_module():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    saved = rt.saved_bytes(lambda x: model(x).exp().sum())(torch.ones(16, 4))
    assert {row.op_type: row.size for row in saved.rows} == {"sigmoid": 16 * 8 * 4, "exp": 128}
    assert {row.op_type: row.path for row in saved.rows}["sigmoid"] == "1"


def test_what_is_thrown_away_is_not_kept():
    def f(x):
        x.exp().sum()
        return x.sin().sum(), x * 2

    saved = rt.saved_bytes(f)(ones(4))
    assert saved.total == 0


# -- check_gradients -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.versions
def test_modules_are_checked_by_all_parameters_and_left_alone():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 1))
    before = [p.clone() for p in model.parameters()]
    report = rt.gradient_report(model, [torch.ones(1, 2)], order=2)
    assert report.ok and report.comparisons > 5
    assert all(map(torch.equal, before, model.parameters()))
    rt.check_gradients(lambda x: x.sin() * x.exp(), [torch.tensor([0.3, 1.0])], order=3)


Stale = function(lambda x: x.sin(), lambda dy, x: dy.detach() * x.cos(), "Stale")


@rt.custom_grad
def rt_stale(x, save):
    save(x=x)
    return x.sin(), lambda dy, saved: dy.detach() * saved.x.cos()


@rt.gradient_override_map({"Sin": lambda dy, x: dy.detach() * x.cos()})
def overridden(x):
    return x.sin()


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize(
    ("f", "name"), [(Stale.apply, "Stale"), (overridden, "sin"), (rt_stale, "rt_stale")]
)
def test_a_rule_that_cuts_the_history_of_dy(f, name):
    x = torch.tensor([0.3, 0.7])
    rt.check_gradients(f, [x])
    with pytest.raises(GradientCheckError, match=rf"order 2 by dy\(.*{name}.*input 'dy'"):
        rt.check_gradients(f, [x], order=2)


@pytest.mark.slow
@pytest.mark.versions
def test_rules_and_numbers_that_do_not_matter_to_a_check():
    rule = rg.rules.optional(lambda dy, a, b: (dy * b * 7, dy * a * 7))
    with rt.gradient_override_map({"Mul": rule}):
        rt.check_gradients(torch.sin, [torch.tensor([0.3, 0.7])], order=3)
    z = torch.tensor([0.3 + 1j, -0.2 + 0.5j])
    rt.check_gradients(lambda z: z.exp() * z.conj(), [z], order=3)


def test_nothing_to_check_is_said():
    with pytest.raises(ArgumentError, match="nothing was checked: there are no elements"):
        rt.check_gradients(torch.sin, [torch.zeros(0, 2)])


@pytest.mark.versions
def test_forward_mode_is_checked_where_there_is_one():
    half = bare_function(
        "Half", lambda x: 2 * x, lambda ctx, dy: 2 * dy, setup_context=lambda ctx, xs, y: None,
        jvp=lambda ctx, dx: dx,
    )  # fmt: skip
    report = rt.gradient_report(half.apply, [torch.tensor([1.0])])
    assert [finding.mode for finding in report.findings] == ["forward"]


@pytest.mark.slow
@pytest.mark.versions
def test_the_message_names_the_rule_and_its_line():
    with (
        rt.gradient_override_map({"Sin": lambda dy, x: dy * x}),
        pytest.raises(GradientCheckError, match=r"\(override\) for sin at .*test_seeing.py:\d+"),
    ):
        rt.check_gradients(lambda x: torch.sin(x) * x, [torch.tensor([0.5, 0.7])])


def test_writes_to_parts_are_steps_whose_gradients_add_up():
    def f(x):
        y = x.clone()
        y[1:] = x[:2].tanh()
        y[0] *= 3
        return (y**2).sum()

    steps = {step.op_type: step for step in rt.trace_gradients(f)(leaf(0.3, 0.7, 0.2)).steps}
    assert {"setitem", "mul_", "getitem", "tanh"} <= set(steps)
    h = np.tanh([0.3, 0.7])  # y is (3 x0, h0, h1)
    np.testing.assert_allclose(steps["tanh"].arrived.norm, np.linalg.norm(2 * h))
    np.testing.assert_allclose(steps["tanh"].sent.norm, np.linalg.norm(2 * h * (1 - h * h)))


# -- compare_gradients ---------------------------------------------------------------------------


def guided(model):
    def f(x):
        with rt.gradient_override_map({"Relu": rg.rules.guided_relu}):
            return model(x).square().sum()

    return f


def test_rules_against_the_true_gradient():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = rt.compare_gradients(guided(model))(x)
    rows = {row.name: row for row in found.rows}
    assert rows["2.weight"].gap == 0 and rows["args[0]"].cosine < 1
    assert (rows["x"].op_type, rows["x"].path, rows["x"].kind) == ("relu", "1", "op")
    with pytest.raises(GradientError, match="guided_relu"):
        found.assert_same()
    for declared in ("Relu", "relu", "guided_relu"):
        rt.compare_gradients(guided(model), surrogates=[declared])(x).assert_same()
    assert all(p.grad is None for p in model.parameters())


def test_the_same_rules_on_both_sides_do_not_differ():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    found = rt.compare_gradients(guided(model), guided(model))(torch.ones(1, 3))
    assert found.ok and not found.differences


def test_a_function_of_regrad_on_the_other_side():
    found = rt.compare_gradients(lambda x: x.sin().sum(), lambda x: rg.sin(x).sum())
    assert found(ones(2)).ok
    found = rt.compare_gradients(lambda x: 10 * x.sin().sum(), lambda x: x.sin().sum())
    assert found(ones(2)).rows[0].ratio == pytest.approx(10)


def test_differences_need_no_rule():
    layer = nn.Linear(2, 3)
    found = rt.compare_gradients(lambda x: layer(x).tanh(), "differences")(torch.ones(1, 2))
    assert [row.name for row in found.rows] == ["weight", "bias"] and found.ok
    with rt.gradient_override_map({"Tanh": lambda dy: 3 * dy}):
        found = rt.compare_gradients(torch.tanh, "differences")(torch.zeros(2, requires_grad=True))
    assert found.rows[0].ratio == pytest.approx(3, rel=1e-5)
    with pytest.raises(ArgumentError, match="without keywords"):
        rt.compare_gradients(torch.sum, "differences")(ones(2), dim=0)


def test_a_straight_through_estimator_has_no_true_gradient():
    def f(x):
        return (Identity.apply(x) + Rounded.apply(x)).sum()

    found = rt.compare_gradients(f)(ones(2))
    assert [row.op_type for row in found.worst() if row.kind == "op"] == ["Rounded"]
    assert found.worst()[0].other_zeros == 1
    assert rt.compare_gradients(f, surrogates=["Rounded"])(ones(2)).ok


def test_a_custom_gradient_is_compared_in_place():
    @rt.custom_grad
    def half(x):
        return x.tanh(), lambda dy: 0.5 * dy

    found = rt.compare_gradients(lambda x: (half(x) * x.sin()).sum())(leaf(0.3, 0.7))
    (row,) = [row for row in found.rows if row.kind == "op"]
    given, true = np.sin([0.3, 0.7]) * 0.5, np.sin([0.3, 0.7]) * (1 - np.tanh([0.3, 0.7]) ** 2)
    assert (row.op_type, row.name) == ("half", "x")
    np.testing.assert_allclose(row.ratio, np.linalg.norm(given) / np.linalg.norm(true))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def vjp(ctx, dy):
        return 1.5 * dy


def test_a_gradient_by_the_name_vjp():
    def f(x):
        return Halved.apply(x).sum()

    step = rt.trace_gradients(f)(ones(2)).steps[1]
    assert step.kind == "custom" and step.rule.startswith(f"Halved.vjp, {__file__}:")
    rows = rt.compare_gradients(f)(ones(2)).rows
    assert [(row.op_type, row.ratio) for row in rows] == [("", 0.5), ("Halved", 0.5)]
    assert Halved.vjp(None, 2.0) == 3


def test_what_is_compiled_runs_op_by_op():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(1, 3)
    compiled(x)
    trace = rt.trace_gradients(lambda x: compiled(x).sum())(x)
    assert kinds_of(trace)[1:] == [("relu", "1"), ("linear", "0")]


def test_other_threads_are_left_alone():
    def elsewhere():
        x = ones(2)
        Rounded.apply(x).sum().backward()
        grads.append(x.grad.tolist())

    def f(x):
        y = Rounded.apply(x)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return y.sum()

    grads = []
    found = rt.compare_gradients(f)(ones(2))
    assert grads == [[1.0, 1.0], [1.0, 1.0]] and found.rows[0].other_zeros == 1
    trace = rt.trace_gradients(f)(ones(2))
    assert [step.op_type for step in trace.steps] == ["sum", "Rounded"]


# -- drawings --------------------------------------------------------------------------------------

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


def test_nothing_is_left_of_a_drawing():
    before = len(torch.nn.modules.module._global_forward_hooks)

    def fails(x):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        draw(fails, torch.ones(1))
    assert len(torch.nn.modules.module._global_forward_hooks) == before
    with pytest.raises(ArgumentError, match="must be a function"):
        draw(3)
