"""Random ops and dropout: seeds, distributions, gradients, shapes of the run."""

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_rows import ROWS
from tests.helpers.v1_session import any_session, run

pytestmark = pytest.mark.usefixtures("graph")
session, I64 = any_session, tf.int64


def near(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


# -- dropout -------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_is_drawn_anew(session):
    x = tf.ones([1000, 10])
    y = tf.nn.dropout(x, 0.8)
    (dx,) = tf.gradients(y, x)
    (a, gradient), b = session.run([y, dx]), session.run(y)
    assert set(np.unique(a).tolist()) == {0.0, 1.25}
    assert abs(a.mean() - 1) < 0.02
    assert (a != b).any()
    np.testing.assert_array_equal(a, gradient)


@pytest.mark.parametrize("shape", [[None, 10], [1000, 10], None])
def test_keep_prob_may_be_fed(shape):
    x, keep = tf.placeholder(tf.float32, shape), tf.placeholder(tf.float32)
    y = tf.nn.dropout(x, keep)
    assert y.shape == tf.TensorShape(shape)
    ones = np.ones([1000, 10], np.float32)
    assert (run(y, {x: ones, keep: 1.0}) == 1).all()
    got = run(y, {x: ones, keep: 0.5})
    assert abs(got.mean() - 1) < 0.05
    assert set(np.unique(got).tolist()) == {0.0, 2.0}


def test_dropout_of_whole_channels():
    x = tf.placeholder(tf.float32, [None, 4, 4, 3])
    y = run(tf.nn.dropout(x, 0.5, [None, 1, 1, 3]), {x: np.ones([50, 4, 4, 3])})
    assert (y == y[:, :1, :1]).all()
    assert {0.0, 2.0} == set(np.unique(y).tolist())
    size = tf.shape(x)
    assert run(tf.nn.dropout(x, 0.5, [size[0], 1, 1, 1]), {x: np.ones([5, 4, 4, 3])}).shape[0] == 5


def test_rate_is_one_minus_keep_prob_and_infinities_are_hidden():
    assert run(tf.nn.dropout(tf.ones([1000]), rate=0.2)).max() == np.float32(1.25)
    assert not np.isnan(run(tf.nn.dropout(tf.fill([100], np.float32(np.inf)), 0.5))).any()


# -- random ops ----------------------------------------------------------------------------------

DRAWS = {
    "random_normal": lambda seed: tf.random_normal([6], seed=seed),
    "truncated_normal": lambda seed: tf.truncated_normal([6], seed=seed),
    "random_uniform": lambda seed: tf.random_uniform([6], seed=seed),
    "integers": lambda seed: tf.random_uniform([6], 0, 1000, tf.int32, seed=seed),
    "random_shuffle": lambda seed: tf.random_shuffle(np.arange(50), seed=seed),
    "multinomial": lambda seed: tf.multinomial(np.zeros([2, 50], np.float32), 6, seed=seed),
    "dropout": lambda seed: tf.nn.dropout(np.ones(50, np.float32), 0.5, seed=seed),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("draw", "jit"), [*[(d, False) for d in DRAWS], ("random_normal", True)])
def test_seeds(draw, jit):
    def twice(graph_seed, op_seed):
        with tf.Graph().as_default():
            tf.set_random_seed(graph_seed)
            y = DRAWS[draw](op_seed)
            sessions = []
            for _ in range(2):
                with tf.Session(jit=jit) as session:
                    sessions.append([session.run(y).tolist() for _ in range(2)])
            return sessions

    for seeds in [(1, None), (None, 2), (1, 2), (0, 0), (-1, 2**40)]:
        (a, b), again = twice(*seeds)
        assert a != b
        assert [a, b] == again == twice(*seeds)[0]
    fresh, other = twice(None, None)
    assert fresh != other
    assert twice(1, None) != twice(2, None)


def test_ops_of_one_seeded_graph_differ():
    tf.set_random_seed(1)
    a, b = tf.random_normal([6]), tf.random_normal([6])
    a, b, c = run([a, b, a])
    assert a.tolist() == c.tolist() != b.tolist()


@pytest.mark.parametrize(("draw", "low", "high", "mean", "deviation"), [
    (tf.random_normal, -6, 6, 0, 1), (lambda n: tf.random_normal(n, 3.0, 0.5), 0, 6, 3, 0.5),
    (tf.truncated_normal, -2, 2, 0, 0.8796), (tf.random_uniform, 0, 1, 0.5, 12**-0.5),
    (lambda n: tf.truncated_normal(n, 1.0, 2.0, tf.float64), -3, 5, 1, 1.7593),
    (lambda n: tf.random_uniform(n, -1, 3), -1, 3, 1, 4 * 12**-0.5),
    (lambda n: tf.random_uniform(n, tf.constant(2, I64), 5, I64), 2, 4, 3, (2 / 3) ** 0.5),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["known", "fed", "compiled"])
def test_distributions(draw, low, high, mean, deviation, kind):
    fed = kind == "fed"
    shape = tf.placeholder(tf.int32, [2]) if fed else [100, 200]
    y = draw(shape)
    assert y.shape.as_list() == ([None, None] if fed else [100, 200])
    with tf.Session(jit=kind == "compiled") as session:
        got = session.run(y, {shape: [100, 200]} if fed else None)
    assert (got.dtype, got.shape) == (y.dtype.as_numpy_dtype, (100, 200))
    assert low <= got.min() < got.max() <= high
    assert abs(got.mean() - mean) < 0.03 * max(deviation, 1)
    assert abs(got.std() - deviation) < 0.03 * deviation


def test_the_parameters_of_a_distribution_have_gradients():
    mean, stddev = tf.constant([1.0, 5.0]), tf.constant(2.0)
    y = tf.random_normal([3, 2], mean, stddev)
    value, by_mean, by_stddev = run([y, *tf.gradients(y, [mean, stddev])])
    assert by_mean.tolist() == [3.0, 3.0]
    near(by_stddev, ((value - [1.0, 5.0]) / 2).sum())


def test_shapes_that_are_known_in_the_run():
    x = tf.placeholder(tf.float32)
    y = x + tf.random_normal(tf.shape(x), stddev=0.01)
    near(run(y, {x: ROWS}) * 0, ROWS * 0)
    assert run(tf.random_normal(tf.shape(x)), {x: ROWS}).shape == ROWS.shape


def test_random_shuffle_permutes_rows_and_has_no_gradient(session):
    x = tf.constant(ROWS)
    y = tf.random_shuffle(x)
    assert sorted(session.run(y).tolist()) == sorted(ROWS.tolist())
    with pytest.raises(LookupError):
        tf.gradients(y, x)
    rows = tf.gather(x, tf.random_shuffle(tf.range(4)))
    assert (session.run(tf.gradients(rows, x)[0]) == 1).all()


@pytest.mark.parametrize("draw", [tf.multinomial, tf.random.categorical])
def test_categorical(session, draw):
    logits = tf.placeholder(tf.float32, [None, 3])
    got = session.run(draw(logits, 3000), {logits: np.log([[0.2, 0.3, 0.5], [1.0, 1e-30, 1e-30]])})
    assert (got.dtype, got.shape) == (np.int64, (2, 3000))
    assert np.abs(np.bincount(got[0]) / 3000 - [0.2, 0.3, 0.5]).max() < 0.05
    assert not got[1].any()


def test_random_crop():
    x = np.arange(60).reshape(5, 4, 3)
    blocks = [run(tf.random_crop(x, [2, 4, 3])) for _ in range(20)]
    starts = {int(b.flat[0]) for b in blocks}
    assert all(b.shape == (2, 4, 3) and (np.diff(b.ravel()) == 1).all() for b in blocks)
    assert starts <= {0, 12, 24, 36}
    assert len(starts) > 1


# -- in branches and loops -------------------------------------------------------------------------


def test_the_gradient_of_a_branch_sees_the_same_draw(session):
    x, p = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.bool, [])
    y = tf.cond(p, lambda: tf.nn.dropout(x, 0.5), lambda: x)
    (dx,) = tf.gradients(y, x)
    got = [session.run([y, dx], {x: np.ones([2, 6]), p: True}) for _ in range(10)]
    assert all((value == gradient).all() for value, gradient in got)
    assert len({value.tobytes() for value, _ in got}) > 5


def test_the_gradient_of_a_loop_sees_the_same_draws(session):
    x = tf.ones([6])

    def turn(i, y, draws):
        z = tf.random_uniform([6])
        return i + 1, y * z, tf.concat([draws, z], 0)

    shapes = [tf.TensorShape([]), tf.TensorShape([6]), tf.TensorShape([None])]
    start = [0, x * 1.0, tf.zeros([0])]
    _, y, draws = tf.while_loop(lambda i, y, draws: i < 4, turn, start, shapes)
    (dx,) = tf.gradients(y, x)
    got = [session.run([y, dx, draws]) for _ in range(5)]
    for value, gradient, _ in got:
        near(value, gradient)
    assert len(set(np.concatenate([draws for *_, draws in got]).tolist())) == 5 * 4 * 6
