"""Calls that are understood once: what the short road gives, the general one gives, too."""

import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch as rt
from regrad.core.tensor import wrap
from regrad.errors import RuleError
from regrad.torch import call_cache, recorded

CALLS = {
    "relu": (F.relu, "Relu", {"inplace": False}),
    "tanh": (torch.tanh, "Tanh", {}),
    "method": (torch.Tensor.sigmoid, "Sigmoid", {}),
    "slope": (F.leaky_relu, "LeakyRelu", {"negative_slope": 0.2}),
    "softmax": (torch.softmax, "Softmax", {"dim": -1}),
    "product": (torch.mul, "Mul", {}),
}


def of_torch(dy, x):
    return dy * torch.cos(x)


def of_regrad(dy, x):
    return rg.where(x > 0, dy * rg.cos(x), 0)


def of_y(dy, y):
    return dy * rg.exp(y)


def of_two(dy, a, b):
    return [dy * rg.sin(b), dy * a]


@pytest.fixture
def used(monkeypatch):
    """Return the calls that took the short road, forward and backward."""
    found = []
    for module, name in ((call_cache, "_pull"), (recorded.Recordings, "replay")):
        old = getattr(module, name)

        def run(*args, old=old, name=name):
            result = old(*args)
            if result is not None:
                found.append(name)
            return result

        monkeypatch.setattr(module, name, run)
    return found


def gradients(f, rules, steps=4, dtype=torch.float64, shape=(3, 4), count=12):
    """Return the gradients of a few steps, each on inputs of its own, and the hits."""
    found = []
    with rt.gradient_override_map(rules) as scope:
        for step in range(steps):
            x = torch.linspace(-1, 1 + step, count, dtype=dtype).reshape(shape).requires_grad_()
            (f(x) * torch.arange(float(count)).reshape(shape)).sum().backward()
            found.append(x.grad)
    return found, [(h.op_type, h.where, h.count, h.ran, h.shapes) for h in scope.hits]


@pytest.fixture
def general(monkeypatch):
    def run(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(call_cache, "is_grad_enabled", lambda: False)
            return gradients(*args, **options)

    return run


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rule", [of_torch, of_regrad, of_y, "with y in torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_roads_agree(name, rule, dtype, used, general):
    function, op_type, options = CALLS[name]
    if rule == "with y in torch":
        rule = lambda dy, y: dy * y.exp()  # noqa: E731
    if name == "product":
        f, rule = (lambda x: torch.mul(x, x.detach() + 1)), of_two
    else:
        f = lambda x: function(x, **options)  # noqa: E731
    short, hits = gradients(f, {op_type: rule}, dtype=dtype)
    assert len(used) >= 2
    other, expected = general(f, {op_type: rule}, dtype=dtype)
    assert hits == expected
    for a, b in zip(short, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_against_a_function_written_by_hand(used):
    class Hand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return torch.where(x > 0, dy * x.cos(), 0)

    ours, _ = gradients(torch.tanh, {"Tanh": of_regrad})
    theirs, _ = gradients(Hand.apply, {})
    assert len(used) >= 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-15, atol=0)


# -- rules that do not do the same each time -------------------------------------------------------

SCALE = 1.0
ARRAY = np.ones(())
LOG: list[float] = []


class Settings:
    scale = 1.0


def by_global(dy, x):
    return dy * SCALE


def by_array(dy, x):
    return dy * rg.asarray(ARRAY)


def by_attribute(dy, x):
    return rg.abs(dy) * Settings.scale


def by_values(dy, x):
    return dy * (2.0 if float(rg.sum(x)) > 3 else 1.0)


def by_default(dy, x, scale=[1.0]):  # noqa: B006
    return rg.positive(dy) * scale[0]


def step_with(rule, x=1.0):
    x = torch.full((2,), x, dtype=torch.float64, requires_grad=True)
    with rt.gradient_override_map({"Tanh": rule}):
        (torch.tanh(x) * 1).sum().backward()
    return x.grad.tolist()


def set_global(value):
    globals()["SCALE"] = value


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (by_global, set_global),
        (by_array, lambda value: ARRAY.fill(value)),
        (by_attribute, lambda value: setattr(Settings, "scale", value)),
        (by_default, lambda value: by_default.__defaults__[0].__setitem__(0, value)),
    ],
    ids=["global", "array in place", "attribute", "default"],
)
def test_what_a_rule_reads_may_change(rule, change):
    change(1.0)
    for _ in range(5):
        assert step_with(rule) == [1.0, 1.0]
    change(3.0)
    assert step_with(rule) == [3.0, 3.0]
    change(1.0)
    assert step_with(rule) == [1.0, 1.0]


def test_a_cell_may_change():
    scale = 1.0

    def rule(dy, x):
        return rg.abs(dy) * scale

    for _ in range(5):
        assert step_with(rule) == [1.0, 1.0]
    scale = 2.0
    assert step_with(rule) == [2.0, 2.0]


def test_a_rule_that_reads_values_reads_them_each_time():
    for _ in range(4):
        assert step_with(by_values) == [1.0, 1.0]
    assert step_with(by_values, 2.0) == [2.0, 2.0]


def test_a_parameter_may_change():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    rule = lambda dy, x: dy * weight.detach()  # noqa: E731
    for _ in range(4):
        assert step_with(rule) == [1.0, 1.0]
    with torch.no_grad():
        weight.fill_(4.0)
    assert step_with(rule) == [4.0, 4.0]


def test_what_a_rule_notes_it_notes_each_time():
    LOG.clear()

    def rule(dy, x):
        LOG.append(1.0)
        return rg.abs(dy)

    for _ in range(6):
        step_with(rule)
    assert len(LOG) == 6
    count = 0

    def counted(dy, x):
        nonlocal count
        count += 1
        return rg.abs(dy)

    for _ in range(6):
        step_with(counted)
    assert count == 6


@pytest.mark.parametrize("names", ["print", "time", "random"])
def test_rules_with_effects_are_not_recorded(names):
    space = {"rg": rg, "random": __import__("random"), "time": __import__("time")}
    bodies = {"print": "print(1)", "time": "time.time()", "random": "random.random()"}
    exec(f"def rule(dy, x):\n    {bodies[names]}\n    return rg.abs(dy)", space)
    assert recorded.pure_closure([space["rule"]]) is None


def test_pure_rules_are_known():
    for rule in (of_regrad, of_y, rg.rules.guided_relu, rg.rules.superspike(10.0)):
        assert recorded.pure_closure([rule]) is not None


def test_the_default_dtype_is_part_of_it():
    def rule(dy, x):
        return rg.astype(dy * rg.sum(rg.ones(())), x.dtype)

    x32 = torch.ones(2, requires_grad=True)
    for dtype in ("float32", "float64", "float32"):
        with rg.default_dtype(dtype), rt.gradient_override_map({"Tanh": rule}):
            for _ in range(4):
                x32.grad = None
                torch.tanh(x32).sum().backward()
                assert x32.grad.dtype == torch.float32


# -- recorded rules: the functions of torch that they called ---------------------------------------

RECORDED = {
    "one tensor of several": lambda dy, x: dy * rg.split(x, 2, axis=0)[1],
    "a list of tensors": lambda dy, x: rg.concat([dy[:1], x[1:2]], axis=0),
    "a view": lambda dy, x: rg.matrix_transpose(rg.flip(dy, axis=0)),
    "an input twice": lambda dy, x: rg.multiply(dy, dy) + rg.exp(x),
    "a reduction": lambda dy, x: dy / (rg.sqrt(rg.sum(x * x, axis=-1, keepdims=True)) + 1),
    "the gradient itself": lambda dy, x: rg.positive(rg.astype(dy, dy.dtype)),
}


@pytest.fixture
def written(monkeypatch):
    """Return the recordings that were made, None for each run that could not be recorded."""
    found, old = [], recorded._record

    def record(*args):
        ys, program = old(*args)
        found.append(program)
        return ys, program

    monkeypatch.setattr(recorded, "_record", record)
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_rule_runs_what_its_python_runs(name, written, monkeypatch):
    short, _ = gradients(torch.tanh, {"Tanh": RECORDED[name]}, shape=(2, 2), count=4)
    assert len(written) == 1
    assert written[0] is not None
    monkeypatch.setattr(recorded.Recordings, "are_possible", lambda self: False)
    python, _ = gradients(torch.tanh, {"Tanh": RECORDED[name]}, shape=(2, 2), count=4)
    for a, b in zip(short, python, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("rule", [rg.rules.guided_relu, rg.rules.arctan_surrogate()])
def test_rules_are_recorded_at_the_size_of_networks(rule, written, monkeypatch):
    def run():
        return gradients(torch.relu, {"Relu": rule}, shape=(4, 64, 8, 8), count=4 * 64 * 64)[0]

    short = run()  # (`where` of so many writes into arrays that it has made)
    assert len(written) == 1
    assert written[0] is not None
    monkeypatch.setattr(recorded.Recordings, "are_possible", lambda self: False)
    for a, b in zip(short, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_gradient_whose_sign_is_a_flag_is_told_apart(written):
    x = torch.ones(2, 8192, dtype=torch.float64, requires_grad=True)
    dy = torch.complex(x.detach(), -2 * x.detach()).conj().imag  # 2, by a flag on -2
    assert dy.is_neg()
    with rt.gradient_override_map({"Relu": rg.rules.guided_relu}):
        for arrived in (dy.resolve_neg(), dy.resolve_neg(), dy, -dy):
            (found,) = torch.autograd.grad(torch.relu(x), x, arrived)
            assert found.unique().tolist() == [2.0 if arrived[0, 0] > 0 else 0.0]
    assert written[0] is not None


def test_a_recording_writes_into_nothing_that_it_was_given():
    x = torch.ones(3)
    with recorded._Writer([x]) as writer:
        y = x * 2
        y.view(3).add_(1)
        assert writer.complete
        x.view(3).add_(1)
    assert not writer.complete


def test_inputs_that_were_one_tensor_when_recorded_are_told_apart(written):
    def rule(dy, a, b):
        return rg.multiply(dy, b), rg.multiply(dy, a)

    a = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([5.0, 7.0], dtype=torch.float64, requires_grad=True)
    with rt.gradient_override_map({"Mul": rule}):
        for _ in range(4):
            torch.mul(a, a).sum().backward()
        a.grad = None
        torch.mul(a, b).sum().backward()
    assert len(written) == 1
    assert written[0] is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([5.0, 7.0], [2.0, 3.0])


def test_a_gradient_that_is_laid_out_differently(written):
    rule = lambda dy, x: rg.reshape(rg.reshape(dy, (-1,)) * 2, x.shape)  # noqa: E731
    with rt.gradient_override_map({"Tanh": rule}):
        for layout in ("rows", "rows", "rows", "columns"):
            x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
            dy = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
            torch.tanh(x).backward(dy if layout == "rows" else dy.T.contiguous().T)
            assert x.grad.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert written[0] is not None


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * x.item(),
        lambda x: x * x.numpy().item(),
        lambda x: x * (2 if x > 0 else 3),
        lambda x: torch.add(x, 1, out=torch.empty_like(x)),
        lambda x: x.clone().mul_(2),
        lambda x: x.contiguous() if x.is_contiguous() else x,
        lambda x: torch.ones(()),
    ],
    ids=["item", "numpy", "bool", "out", "in place", "layout", "constant"],
)
def test_what_depends_on_more_than_the_kinds_is_not_written_down(run):
    x = torch.tensor(2.0)
    with recorded._Writer([x]) as writer:
        y = run(x)
    program = writer.program([wrap(y)])
    assert (
        program is None or program(torch.tensor(3.0))[0].tolist() == run(torch.tensor(3.0)).tolist()
    )


def test_a_copy_that_only_some_layouts_need_is_written_down():
    x = torch.arange(6.0).reshape(2, 3)
    with recorded._Writer([x]) as writer:
        y = x.contiguous().view(-1)
    program = writer.program([wrap(y)])
    assert program(x.T.contiguous().T)[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_second_derivative_of_a_recorded_rule_is_that_of_regrad(written):
    rule = lambda dy, x: rg.multiply(dy, x * rg.stop_gradient(x))  # noqa: E731
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    with warmed({"Tanh": rule}):
        (g,) = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
    assert written[0] is not None
    assert h.tolist() == [0.5, 2.0]


# -- what is unusual -------------------------------------------------------------------------------


def warmed(rules, function=torch.tanh):
    """Return a scope in which calls of this kind are known."""
    scope = rt.gradient_override_map(rules)
    with rt.gradient_override_map(rules):
        for _ in range(4):
            function(torch.ones(2, dtype=torch.float64, requires_grad=True)).sum().backward()
    return scope


@pytest.mark.parametrize("rule", [lambda dy, x: dy * x**3, lambda dy, x: rg.multiply(dy, x**3)])
def test_third_order(rule):
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    with warmed({"Tanh": rule}):
        (g,) = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        (k,) = torch.autograd.grad(h.sum(), x)
    torch.testing.assert_close(g, x**3)
    torch.testing.assert_close(h, 3 * x**2)
    torch.testing.assert_close(k, 6 * x)


def test_torch_func_checkpoint_autocast_and_threads():
    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    rules = {"Tanh": of_torch}
    expected = x.cos()
    with warmed(rules) as used:
        assert torch.equal(torch.func.grad(lambda x: torch.tanh(x).sum())(x), expected)
        each = torch.func.vmap(torch.func.grad(torch.tanh))(x)
        assert torch.equal(each, expected)
        y = x.clone().requires_grad_()
        for reentrant in (False, True):
            checkpoint(torch.tanh, y, use_reentrant=reentrant).sum().backward()
            assert torch.equal(y.grad, expected)
            y.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            torch.tanh(y).sum().backward()
        assert torch.equal(y.grad, expected)
        y.grad = None
        runs = [threading.Thread(target=lambda: torch.tanh(y).sum().backward()) for _ in range(3)]
        for run in runs:
            run.start()
            run.join()
        torch.testing.assert_close(y.grad, 3 * expected)
        (g,) = torch.autograd.grad(torch.tanh(y), y, torch.eye(2).double(), is_grads_batched=True)
        assert torch.equal(g, torch.diag(expected))
    used.assert_fired()


def test_in_place_and_subclasses():
    class Named(torch.Tensor):
        pass

    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    with warmed({"Tanh": of_torch}):
        (2 * x).tanh_().sum().backward()
        torch.testing.assert_close(x.grad, 2 * (2 * x).cos())
        y = x.detach().as_subclass(Named).requires_grad_()
        z = torch.tanh(y)
        z.sum().backward()
    assert type(z) is Named
    torch.testing.assert_close(y.grad.as_subclass(torch.Tensor), y.as_subclass(torch.Tensor).cos())


@pytest.mark.parametrize("answer", ["none", "shape", "dtype", "kind"])
def test_wrong_answers_are_told_alike(answer):
    wrong = {
        "none": lambda dy: None,
        "shape": lambda dy: torch.cat([dy, dy]),
        "dtype": lambda dy: dy.float(),
        "kind": lambda dy: 3.0,
    }[answer]
    told = []
    for warm in (0, 4):
        count = 0

        def rule(dy, x):
            nonlocal count
            count += 1
            return wrong(dy) if count > warm else dy * 1  # noqa: B023

        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        with (
            pytest.raises(RuleError) as error,
            warnings.catch_warnings(),
            rt.gradient_override_map({"Tanh": rule}),
        ):
            warnings.simplefilter("ignore")
            for _ in range(warm + 1):
                y = torch.tanh(x)
                y.sum().backward()
        told.append(str(error.value))
    assert told[0] == told[1]


def test_errors_in_a_rule_name_it():
    fails = False

    def rule(dy, x):
        if fails:
            raise ValueError("no")
        return dy * 2

    for _ in range(4):
        step_with(rule)
    fails = True
    with pytest.raises(ValueError, match="no") as error:
        step_with(rule)
    assert any("rule" in note and "Tanh" in note for note in error.value.__notes__)


def test_a_rule_that_begins_to_write_is_refused():
    writes = False

    def rule(dy, x):
        return dy.mul_(2) if writes else dy * 2

    for _ in range(4):
        step_with(rule)
    writes = True
    with pytest.raises(RuleError, match="wrote into a tensor"):
        step_with(rule)


def test_many_shapes_leave_a_bounded_cache():
    x = [torch.ones(n, dtype=torch.float64, requires_grad=True) for n in range(1, 200)]
    with rt.gradient_override_map({"Tanh": of_regrad}) as used:
        for each in x * 2:
            torch.tanh(each).sum().backward()
    (hit,) = used.hits
    assert hit.count == hit.ran == 398
    ways = used._ruleset.mode.ways[torch.tanh]
    for known in ways.known.values():
        assert known is None or len(known.rule.recordings.known) <= recorded.KEPT


def test_parts_of_layers_are_understood_once_too(used):
    layer = torch.nn.LSTM(3, 4)
    x = torch.randn(6, 2, 3)

    def run(rules, **options):
        found = []
        with rt.gradient_override_map(rules, **options) as scope:
            for _ in range(2):
                y = layer(x)[0]
                found += torch.autograd.grad(y.sum(), list(layer.parameters()))
        return found, [(h.op_type, h.count, h.ran) for h in scope.hits]

    short, hits = run({"Tanh": lambda dy, y: 3 * dy * (1 - y * y)})
    assert (
        len(used) == 12 - 1
    )  # in the second step: what a rule writes into is known after the first
    assert hits == [("Tanh", 24, 24)]
    used.clear()
    general, _ = run({"Tanh": lambda dy, y, site: 3 * dy * (1 - y * y)})  # is asked at each call
    assert not used
    for a, b in zip(short, general, strict=True):
        torch.testing.assert_close(a, b)
