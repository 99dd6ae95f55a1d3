"""Optimizers and the loop of `regrad.train`."""

import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import regrad as rg
from regrad import train
from regrad.core.tensor import wrap
from regrad.errors import ArgumentError, DTypeError, GradientError, StateError
from tests.helpers import fitted_line as line
from tests.helpers.fitted_line import WAYS, as_jax, loss_of, model, same_bits, values
from tests.helpers.rows import refused

# -- the numbers -----------------------------------------------------------------------------------


def plain(transformation, steps):
    """The loop that optax's own documentation has, over JAX's gradients."""
    tx = optax.with_extra_args_support(transformation)
    params = {"w": jnp.full(3, 0.5, jnp.float32), "b": jnp.asarray(0, jnp.float32)}

    loss = lambda p: jnp.mean((line.X @ p["w"] + p["b"] - line.Y) ** 2)  # noqa: E731

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return params, losses


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("make", [line.as_numpy, as_jax, line.as_torch])
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_plain_optax(way, make):
    due, due_losses = plain(WAYS[way](), 12)
    w, b = model(make)
    library = type(w.value.data)
    optimizer = train.Optimizer(WAYS[way]())
    losses = [optimizer.minimize(loss_of(w, b, make)).item() for _ in range(12)]
    np.testing.assert_allclose(losses, due_losses, rtol=2e-5)
    for v in (w, b):
        np.testing.assert_allclose(v.numpy(), due[v.name], rtol=2e-5)
    assert type(w.value.data) is library


def test_sgd_in_closed_form():
    w = rg.Variable(np.float64([3.0, -1.0]), name="w")
    optimizer = train.Optimizer(optax.sgd(0.25))
    for n in range(1, 6):
        optimizer.minimize(lambda: rg.square(w).sum())  # w ← w - 0.25 · 2w
        np.testing.assert_array_equal(w.numpy(), np.array([3.0, -1.0]) / 2**n)
    assert w.dtype == np.float64


def test_overrides_and_custom_gradients_count():
    @rg.custom_grad
    def tripled(x, save):
        return x, lambda dy: 3 * dy

    w = rg.Variable([2.0], name="w")
    optimizer = train.Optimizer(optax.sgd(1.0))
    with rg.gradient_override_map({"Sign": lambda dy, x: 10 * dy}) as used:
        optimizer.minimize(lambda: tripled(rg.sign(w)).sum())
    used.assert_fired()
    assert w.tolist() == [2.0 - 30.0]


def test_what_has_no_gradient_stays_and_keeps_its_state():
    (w, b), optimizer = model(), train.Optimizer(optax.adam(0.1), name="adam")
    optimizer.init([w, b])
    optimizer.minimize(loss_of(w, b))
    before = values([w, b, *optimizer.variables])
    optimizer.minimize(lambda: w.sum())
    optimizer.apply_gradients([(rg.ones(3), w), (None, b)])
    after = values([w, b, *optimizer.variables])
    changed = {n for n in before if before[n].tobytes() != after[n].tobytes()}
    assert changed == {"w", "adam/count", "adam/mu/w", "adam/nu/w"}


def test_a_variable_that_is_read_first_and_trained_later_has_its_state():
    (w, b), optimizer = model(), train.Optimizer(optax.adam(0.1))
    optimizer.minimize(lambda: w.sum() + rg.stop_gradient(b))
    optimizer.minimize(lambda: w.sum() + b)
    assert b.item() != 0


def test_gradients_by_name_by_pairs_and_as_arrays():
    def applied(form):
        w, b = model()
        adam = train.Optimizer(optax.adam(0.1))
        loss, pairs = adam.compute_gradients(loss_of(w, b), [b, w])
        assert loss.item() == loss_of(w, b)().item()
        assert [v.name for _, v in pairs] == ["b", "w"]
        adam.apply_gradients(*form(pairs, [b, w]))
        return values([w, b])

    due = applied(lambda pairs, variables: [pairs])
    same_bits(applied(lambda pairs, vs: [{v.name: dx for dx, v in pairs}, vs]), due)
    same_bits(applied(lambda pairs, vs: [{v.name: dx.numpy() for dx, v in pairs}, vs]), due)


def test_names_are_known_after_init():
    w, b = model()
    sgd = train.Optimizer(optax.sgd(0.5))
    sgd.init([w, b])
    sgd.apply_gradients({"b": 1.0, "w": None})
    assert (w.tolist(), b.item()) == ([0.5, 0.5, 0.5], -0.5)


def test_var_list_limits_what_is_trained():
    w, b = model()
    frozen = rg.Variable(0, trainable=False, dtype="int32", name="steps")
    train.Optimizer(optax.sgd(0.1)).minimize(loss_of(w, b), [b, frozen])
    assert w.tolist() == [0.5, 0.5, 0.5]
    assert b.item() != 0


def test_parts_of_optax_that_go_by_names():
    w, b = model()
    parts = {"moved": optax.sgd(1.0), "kept": optax.set_to_zero()}
    labels = {"w": "moved", "b": "kept"}
    train.Optimizer(optax.multi_transform(parts, labels)).minimize(lambda: w.sum() + b)
    assert (w.tolist(), b.item()) == ([-0.5, -0.5, -0.5], 0)


def test_complex_variables_go_downhill():
    z = rg.Variable(np.complex64([1 + 2j]), name="z")
    optimizer = train.Optimizer(optax.sgd(0.25))
    losses = [optimizer.minimize(lambda: rg.square(rg.abs(z)).sum()).item() for _ in range(3)]
    np.testing.assert_allclose(losses, [5.0, 1.25, 0.3125], rtol=1e-6)


def test_a_rate_is_changed_by_hand():
    w = rg.Variable([1.0], name="w")
    optimizer = train.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    optimizer.init([w])
    (rate,) = [v for v in optimizer.variables if v.name.endswith("hyperparams/learning_rate")]
    rate.assign(0.5)
    optimizer.minimize(lambda: w.sum())
    assert w.tolist() == [0.5]


# -- the state -------------------------------------------------------------------------------------


def test_names_of_the_state():
    w = rg.Variable([1.0], name="layer/w")
    optimizer = train.Optimizer(WAYS["adamw"](), name="adamw")
    optimizer.init([w])
    assert [v.name for v in optimizer.variables] == [
        "adamw/0/count", "adamw/mu/layer/w", "adamw/nu/layer/w", "adamw/2/count",
    ]  # fmt: skip
    assert not any(v.trainable for v in optimizer.variables)


def test_init_is_idempotent():
    (w, b), optimizer = model(), train.Optimizer(optax.adam(0.1))
    optimizer.init([w, b])
    first = optimizer.variables
    optimizer.init([b])
    optimizer.minimize(loss_of(w, b))
    assert all(a is b for a, b in zip(optimizer.variables, first, strict=True))


@pytest.mark.parametrize("way", ["adam", "injected", "noisy"])
def test_state_threads_through_a_compiled_function(way):
    """What a compiled step does: put tracers into all variables, run, take the results out."""
    (w, b), optimizer = model(as_jax), train.Optimizer(WAYS[way]())
    for _ in range(4):
        optimizer.minimize(loss_of(w, b))
    expected = w.numpy(), b.numpy()

    (w, b), optimizer = model(as_jax), train.Optimizer(WAYS[way]())
    optimizer.init([w, b])
    variables = [w, b, *optimizer.variables]

    @jax.jit
    def step(held):
        for v, data in zip(variables, held, strict=True):
            v.assign(wrap(data))
        loss = optimizer.minimize(loss_of(w, b, as_jax))
        return [v.value.data for v in variables], loss.data

    held = [v.value.data for v in variables]
    for _ in range(4):
        held, _ = step(held)
    np.testing.assert_allclose(held[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(held[1], expected[1], rtol=1e-5)


def test_inside_a_compiled_function_the_state_must_be_there():
    w, b = model(as_jax)
    optimizer = train.Optimizer(optax.adam(0.1))

    def step(held):
        w.assign(wrap(held))
        optimizer.minimize(loss_of(w, b, as_jax))

    with pytest.raises(StateError, match=r"Call \.init\(var_list\) first, outside of it"):
        jax.jit(step)(w.value.data)
    with pytest.raises(StateError, match="no state yet"):
        _ = optimizer.variables
    w, b = model(as_jax)
    optimizer.minimize(loss_of(w, b))  # the failed attempt left nothing behind


# -- errors of the optimizer -----------------------------------------------------------------------


@pytest.fixture
def sgd():
    return train.Optimizer(optax.sgd(0.1))


def variable(name, value=1.0, **options):
    return rg.Variable(value, name=name, **options)


def known(sgd, w, b):
    sgd.init([w, b])
    return sgd


ONES, C = rg.ones(3), variable("c")
MISTAKES = [  # of an optimizer and of the variables w and b
    (lambda sgd, w, b: train.Optimizer(optax.adam), ArgumentError,
     r"got function\. Call it: Optimizer\(optax\.adam"),
    (lambda sgd, w, b: train.Optimizer(0.1), ArgumentError,
     r"such as optax\.adam\(1e-3\).*got float\."),
    (lambda sgd, w, b: sgd.init([]), ArgumentError, "var_list is empty"),
    (lambda sgd, w, b: sgd.minimize(loss_of(w, b), []), ArgumentError, "var_list is empty"),
    (lambda sgd, w, b: sgd.init([ONES]), ArgumentError, "list of Variables, got Tensor"),
    (lambda sgd, w, b: sgd.init([w, variable("w")]), ArgumentError,
     "two different variables are called 'w'"),
    (lambda sgd, w, b: sgd.init([variable("n", 1, dtype="int32")]), DTypeError,
     "'n' is of int32; only floats"),
    (lambda sgd, w, b: sgd.apply_gradients({"w": ONES}), ArgumentError,
     r"goes by names\. Pass the variables"),
    (lambda sgd, w, b: sgd.apply_gradients({"c": ONES}, [w]), ArgumentError,
     r"unknown variables \['c'\]; known are \['w'\]"),
    (lambda sgd, w, b: known(sgd, w, b).apply_gradients({"c": ONES}), ArgumentError,
     r"unknown variables \['c'\]; known are \['w', 'b'\]"),
    (lambda sgd, w, b: known(sgd, w, b).minimize(lambda: C * C), StateError,
     r"has state for .* got the variable 'c'"),
    (lambda sgd, w, b: known(sgd, w, b).init([variable("w", [1.0, 2.0, 3.0])]), StateError,
     "another variable of the name 'w'"),
    (lambda sgd, w, b: sgd.apply_gradients([(rg.ones(2), w)]), rg.errors.ShapeError,
     r"of 'w' must have its shape, \(3,\), got \(2,\)"),
    (lambda sgd, w, b: sgd.apply_gradients([(np.ones(3), w)]), DTypeError,
     "of 'w' must have its dtype, float32, got float64"),
    (lambda sgd, w, b: sgd.apply_gradients([(None, w), (None, b)]), GradientError,
     r"no gradient for any variable: \['w', 'b'\]"),
    (lambda sgd, w, b: sgd.apply_gradients([(ONES, w), (ONES, w)]), ArgumentError,
     "two gradients for one variable"),
    (lambda sgd, w, b: sgd.apply_gradients([(w, ONES)]), ArgumentError,
     r"got \(variable, gradient\): swap them"),
    (lambda sgd, w, b: sgd.apply_gradients([ONES]), ArgumentError, "an entry that is Tensor"),
    (lambda sgd, w, b: sgd.apply_gradients([(ONES, w)], [w]), ArgumentError,
     "var_list goes with a dict"),
    (lambda sgd, w, b: rg.variable_grads(lambda: [sgd.minimize(loss_of(w, b)), w.sum()][1]),
     GradientError, "being differentiated"),
    (lambda sgd, w, b: rg.grad(lambda x: sgd.apply_gradients([(x, w)]))([1.0, 1.0, 1.0]),
     GradientError, "being differentiated"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_refused_and_change_nothing(sgd, call, error, words):
    w, b = model()
    refused(lambda: call(sgd, w, b), error, words)
    assert w.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("package", "extra", "use"), [
    ("optax", "jax", lambda: train.Optimizer(None)),
    ("safetensors", "train", lambda: train.restore("x", model())),
])  # fmt: skip
def test_missing_packages(monkeypatch, package, extra, use):
    monkeypatch.setitem(sys.modules, package, None)
    refused(lambda: use(), rg.errors.MissingPackageError, rf"pip install '\.\[{extra}\]'")


def test_float64_is_never_truncated():
    w = rg.Variable(np.ones(2), name="w")
    optimizer = train.Optimizer(optax.adam(0.1))
    with jax.enable_x64(False), pytest.raises(DTypeError, match="JAX cannot hold float64"):
        optimizer.minimize(lambda: w.sum())
    assert w.tolist() == [1.0, 1.0]


def test_float64_data_need_no_x64_mode():
    w = rg.Variable([1.0, 1.0], name="w")
    optimizer = train.Optimizer(optax.adam(0.1))
    with jax.enable_x64(False):
        loss = optimizer.minimize(lambda: (w * np.float64([1.0, 2.0])).sum())
    assert loss.dtype == np.float64
    np.testing.assert_allclose(w.numpy(), [0.9, 0.9], rtol=1e-6)


# -- the loop --------------------------------------------------------------------------------------


def test_fit():
    w, b = model()
    adam = train.Optimizer(optax.adam(0.1))
    batches = list(zip(np.split(line.X, 4), np.split(line.Y, 4), strict=True))

    def step(batch):
        x, y = batch
        return adam.minimize(lambda: rg.mean(rg.square(x @ w + b - y)))

    history = train.fit(step, batches, epochs=30, evaluate=lambda: rg.abs(b - 0.3))
    assert len(history.epochs) == 30
    assert history["loss"][-1] < 0.1 * history["loss"][0]
    assert history["evaluation"][-1] < 0.1
    assert not history.stopped_early
    assert json.loads(json.dumps(history.epochs)) == history.epochs


def test_fit_stops_early():
    evaluations = iter([3.0, 2.0, 2.0, float("nan"), 1.0])
    history = train.fit(
        lambda x: x, [1.0, 2.0], 10, evaluate=lambda: next(evaluations), patience=2, progress=False
    )
    assert history["loss"] == [1.5] * 4
    assert history.stopped_early
    losses = iter([2.0, 1.0, 1.0])
    assert train.fit(lambda x: next(losses), [0], 10, patience=1)["loss"] == [2, 1, 1]


def test_fit_reads_losses_once_an_epoch():
    log = []

    class Loss:
        def __float__(self):
            log.append("read")
            return 1.0

    def step(batch):
        log.append("step")
        return Loss()

    train.fit(step, lambda: iter(range(3)), epochs=2)
    assert log == (["step"] * 3 + ["read"] * 3) * 2


def test_callbacks_see_each_epoch(tmp_path):
    seen, w = [], rg.Variable(4.0, name="w")
    sgd = train.Optimizer(optax.sgd(0.25))

    def note(epoch, figures):
        seen.append((epoch, figures))
        train.save(tmp_path / f"{epoch}", [w])

    step = lambda x: sgd.minimize(lambda: rg.square(w - x))  # noqa: E731

    history = train.fit(step, [0.0], 2, evaluate=lambda: w, callbacks=[note, lambda *_: None])
    assert seen == [(1, {"loss": 16.0, "evaluation": 2.0}), (2, {"loss": 4.0, "evaluation": 1.0})]
    train.restore(tmp_path / "1", [w])
    assert w.item() == 2.0
    train.fit(step, [0.0], 1, callbacks=lambda epoch, figures: figures.clear())
    assert history["loss"] == [16.0, 4.0]
    with pytest.raises(ArgumentError, match=r"expected functions for callbacks, got int"):
        train.fit(step, [0.0], 1, callbacks=[3])  # pyright: ignore[reportArgumentType]


def test_the_bar_shows_the_loss(monkeypatch):
    text = io.StringIO()
    text.isatty = lambda: True  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(sys, "stderr", text)
    train.fit(lambda x: x, [1.0, 2.0], 1)
    assert "epoch 1/1: 100%" in text.getvalue() and "loss=1.5" in text.getvalue()
    train.fit(lambda x: x, iter([1.0, 4.0]), 1)
    assert "loss=2.5" in text.getvalue()


def test_fit_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert train.fit(lambda x: x, [1.0], 1)["loss"] == [1.0]


def test_what_fit_refuses():
    with pytest.raises(ArgumentError, match="no batches in epoch 2"):
        train.fit(lambda x: 1.0, iter([1, 2]), 2)
    with pytest.raises(ArgumentError, match="must return its loss, got None"):
        train.fit(lambda x: None, [1], 1)
    with pytest.raises(ArgumentError, match="expected a list or the like for batches, got int"):
        train.fit(lambda x: 1.0, 3, 1)
