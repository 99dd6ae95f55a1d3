"""The GradBench tool gives the right numbers: differences, closed forms and NumPy say so."""

import io
import json
import math
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.spatial.transform import Rotation

from bench.gradbench import __main__ as tool
from bench.gradbench import ba, det, protocol, session, table

RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def same_numbers():
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(7).bit_generator.state


def call(module: str, function: str, given):
    return getattr(import_module(f"bench.gradbench.{module}"), function)(given)


def differences(f, x):
    """The derivatives of f(x), a number or an array, by all of x, along new last axes."""
    x, rows = np.asarray(x, dtype=float), []
    for i in range(x.size):
        step = np.zeros(x.size)
        step[i] = 1e-5
        step = step.reshape(x.shape)
        rows.append((np.asarray(f(x + step)) - np.asarray(f(x - step))) / 2e-5)
    return np.moveaxis(np.array(rows), 0, -1).reshape(*np.shape(rows[0]), *x.shape)


@pytest.mark.slow
def test_hello():
    assert call("hello", "square", 3.0) == 9
    assert call("hello", "double", 3.0) == 6


def test_lse():
    x = RNG.normal(size=7)
    assert_allclose(call("lse", "primal", {"x": x}), np.log(np.exp(x).sum()))
    assert_allclose(call("lse", "gradient", {"x": x}), np.exp(x) / np.exp(x).sum())
    assert_allclose(call("lse", "primal", {"x": x + 1e4}), 1e4 + np.log(np.exp(x).sum()))


@pytest.mark.parametrize("m", [1, 4, 7])
def test_llsq(m):
    x, n = RNG.normal(size=m), 6
    t = np.linspace(-1, 1, n)
    powers = np.vander(t, m, increasing=True)
    rest = powers @ x - np.sign(t)
    assert_allclose(call("llsq", "primal", {"x": x, "n": n}), rest @ rest / 2)
    assert_allclose(call("llsq", "gradient", {"x": x, "n": n}), powers.T @ rest)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_det(size, monkeypatch):
    monkeypatch.setattr(det, "LARGEST", 4)  # 5 goes one minor after another
    a = RNG.normal(size=(size, size))
    given = {"A": a.ravel(), "ell": size}
    assert_allclose(det.expansion(det.read(given)[0]).item(), np.linalg.det(a))
    cofactors = np.linalg.det(a) * np.linalg.inv(a).T
    assert_allclose(call("det", "gradient", given), cofactors.ravel())


def test_kmeans():
    points = RNG.normal(size=(9, 2))
    centroids = points[-3:]
    squares = np.square(points[:, None] - centroids).sum(axis=2)
    given = {"points": points, "centroids": centroids}
    assert_allclose(call("kmeans", "cost", given), squares.min(axis=1).sum())
    members = squares.argmin(axis=1)
    means = [points[members == j].mean(axis=0) for j in range(3)]
    assert_allclose(call("kmeans", "dir", given), centroids - means, atol=1e-12)


def gmm_input(d: int = 3, k: int = 2, n: int = 5):
    free = {"alpha": (k,), "mu": (k, d), "q": (k, d), "l": (k, d * (d - 1) // 2)}
    given = {name: RNG.normal(size=shape) for name, shape in free.items()}
    return given | {"d": d, "k": k, "n": n, "m": 1, "gamma": 1.3, "x": RNG.normal(size=(n, d))}


def gmm_naive(given) -> float:
    """The definition itself, by SciPy's distributions."""
    d, k, gamma = given["d"], given["k"], given["gamma"]
    shares = np.exp(given["alpha"]) / np.exp(given["alpha"]).sum()
    density, prior = 0.0, 0.0
    for i in range(k):
        factor = np.diag(np.exp(given["q"][i]))
        columns, rows = np.triu_indices(d, 1)
        factor[rows, columns] = given["l"][i]
        precision = factor.T @ factor
        normal = stats.multivariate_normal(given["mu"][i], np.linalg.inv(precision))
        density = density + shares[i] * normal.pdf(given["x"])
        scale = np.eye(d) / gamma**2
        prior += stats.wishart(d + given["m"] + 1, scale).logpdf(precision)
    return np.log(density).sum() + prior


@pytest.mark.slow
def test_gmm():
    given = gmm_input()
    assert_allclose(call("gmm", "objective", given), gmm_naive(given))
    gradient = call("gmm", "jacobian", given)
    for name in ("alpha", "mu", "q", "l"):
        expected = differences(lambda x, name=name: gmm_naive(given | {name: x}), given[name])
        assert_allclose(gradient[name], expected, rtol=1e-6, atol=1e-7)


def test_ode():
    # Of degree 4 in time at most, the solution is exact: y_i = 2^(i+1) x_0 … x_i / (i+1)!
    x = RNG.uniform(0.5, 1.5, size=4)
    exact = np.cumprod(2 * x / np.arange(1, 5))
    assert_allclose(call("ode", "primal", {"x": x, "s": 3}), exact)
    assert_allclose(call("ode", "gradient", {"x": x, "s": 3}), exact[-1] / x)


def lstm_naive(main, extra, state, text) -> float:
    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    bits, state, total = text.shape[1], state.copy(), 0.0
    for here, following in pairwise(text):
        x = here * extra[0]
        for layer in range(len(main) // 2):
            (wf, wi, wo, wc), (bf, bi, bo, bc) = main[2 * layer : 2 * layer + 2].reshape(2, 4, bits)
            hidden, cell = state[2 * layer], state[2 * layer + 1]
            change = sigmoid(hidden * wi + bi) * np.tanh(hidden * wc + bc)
            cell = cell * sigmoid(x * wf + bf) + change
            x = sigmoid(x * wo + bo) * np.tanh(cell)
            state[2 * layer], state[2 * layer + 1] = x, cell
        y = x * extra[1] + extra[2]
        total += following @ (y - np.log(2 + np.exp(y).sum()))
    return -total / (bits * (len(text) - 1))


@pytest.mark.slow
def test_lstm():
    bits, layers = 3, 2
    main, extra = RNG.normal(size=(2 * layers, 4 * bits)), RNG.normal(size=(3, bits))
    state, text = RNG.normal(size=(2 * layers, bits)), RNG.integers(0, 2, size=(4, bits)) * 1.0
    given = {"main_params": main, "extra_params": extra, "state": state, "sequence": text}
    assert_allclose(call("lstm", "objective", given), lstm_naive(main, extra, state, text))
    by_main = differences(lambda x: lstm_naive(x, extra, state, text), main)
    by_extra = differences(lambda x: lstm_naive(main, x, state, text), extra)
    expected = np.concatenate([by_main.ravel(), by_extra.ravel()])
    assert_allclose(call("lstm", "jacobian", given), expected, rtol=1e-6, atol=1e-9)


def ba_naive(variables, feature):
    """The errors of one observation, by SciPy's rotation."""
    camera, point, weight = variables[:11], variables[11:14], variables[14]
    seen = Rotation.from_rotvec(camera[:3]).apply(point - camera[3:6])
    flat = seen[:2] / seen[2]
    r2 = flat @ flat
    flat = flat * (1 + camera[9] * r2 + camera[10] * r2**2)
    return weight * (flat * camera[6] + camera[7:9] - feature)


@pytest.mark.parametrize("turn", [1.0, 0.0])
def test_ba(turn):
    """Cameras, points, weights and features of their own, which the eval does not have."""
    n, m, p = 2, 3, 4
    cameras, points = RNG.normal(size=(n, 11)), RNG.normal(size=(m, 3)) + np.array([0, 0, 9])
    cameras[:, :3] *= turn
    weights, features = RNG.normal(size=p), RNG.normal(size=(p, 2))
    camera, point = np.arange(p) % n, np.arange(p) % m
    arrays = (cameras, points, weights, features)
    indices = (ba.indices(camera), ba.indices(point))
    observations = ba.Observations(*map(protocol.tensor, arrays), *indices)
    variables = np.hstack([cameras[camera], points[point], weights[:, None]])

    errors, weight_errors = ba.objective.call(observations)
    assert_allclose(errors.numpy(), [ba_naive(*v) for v in zip(variables, features, strict=True)])
    assert_allclose(weight_errors.numpy(), 1 - weights**2)

    starts, columns, values = (part.numpy() for part in ba.jacobian.call(observations))
    matrix = np.zeros((3 * p, 11 * n + 3 * m + p))
    for i, (start, end) in enumerate(pairwise(starts)):
        matrix[i, columns[start:end]] = values[start:end]

    def all_errors(x):
        c, q = x[: 11 * n].reshape(n, 11), x[11 * n : -p].reshape(m, 3)
        rows = np.hstack([c[camera], q[point], x[-p:, None]])
        errors = [ba_naive(*v) for v in zip(rows, features, strict=True)]
        return np.concatenate([np.ravel(errors), 1 - x[-p:] ** 2])

    x = np.concatenate([cameras.ravel(), points.ravel(), weights])
    assert_allclose(matrix, differences(all_errors, x), rtol=1e-6, atol=1e-6 * abs(matrix).max())


@pytest.mark.slow
def test_ba_messages():
    given = {"n": 2, "m": 2, "p": 20, "w": 0.5, "feat": [0.1, 0.2]}
    given |= {"cam": [0.1] * 11, "x": [1.0, 2.0, 9.0]}
    answer = call("ba", "objective", given)
    assert answer["reproj_error"]["repeated"] == answer["w_err"]["repeated"] == 20
    assert answer["w_err"]["element"] == 0.75
    answer = call("ba", "jacobian", given)
    assert answer["rows"] == [15 * i for i in range(30)] + [20 * 31]
    assert answer["cols"][:15] == [*range(11), *range(22, 25), 28]
    assert answer["cols"][-1] == 47
    assert answer["vals"][-1] == -1.0


def hand(triangles: bool):
    """A model of 22 bones and a few vertices, as the eval sends it."""
    bones, vertices, n = 22, 6, 4
    parents = [-1] + [0 if i % 4 == 1 else i - 1 for i in range(1, 21)] + [0]
    model = {
        "parents": parents,
        "base_relatives": np.eye(4) + 0.1 * RNG.normal(size=(bones, 4, 4)) * ROWS,
        "inverse_base_absolutes": np.eye(4) + 0.1 * RNG.normal(size=(bones, 4, 4)) * ROWS,
        "base_positions": np.hstack([RNG.normal(size=(vertices, 3)), np.ones((vertices, 1))]),
        "weights": RNG.uniform(size=(vertices, bones)),
        "triangles": RNG.integers(0, vertices, size=(5, 3)),
        "is_mirrored": triangles,
    }
    data = {"model": model, "correspondences": RNG.integers(0, 5, size=n)}
    data["points"] = RNG.normal(size=(n, 3))
    us = RNG.uniform(size=(n, 2)) if triangles else []
    return {"theta": 0.3 * RNG.normal(size=26), "us": us, "data": data}


ROWS = np.array([1, 1, 1, 0])[:, None]  # the last row of a homogeneous matrix stays as it is


def hand_naive(theta, us, given):
    data, model = given["data"], given["data"]["model"]
    turns = np.zeros((22, 2))
    for finger in range(5):
        bend, spread, middle, tip = theta[6 + 4 * finger : 10 + 4 * finger]
        turns[4 * finger + 2 : 4 * finger + 5] = [[bend, spread], [middle, 0], [tip, 0]]
    absolutes, places = [], 0
    for i, parent in enumerate(model["parents"]):
        turn = np.eye(4)
        turn[:3, :3] = Rotation.from_euler("xz", turns[i]).as_matrix()
        own = model["base_relatives"][i] @ turn
        absolutes.append(own if parent < 0 else absolutes[parent] @ own)
        bone = absolutes[-1] @ model["inverse_base_absolutes"][i]
        places = places + model["weights"][:, i, None] * (model["base_positions"] @ bone.T)
    places = places[:, :3] * [-1 if model["is_mirrored"] else 1, 1, 1]
    places = Rotation.from_rotvec(theta[:3]).apply(places) + theta[3:6]
    if not len(us):
        return data["points"] - places[data["correspondences"]]
    corners = places[model["triangles"][data["correspondences"]]]
    shares = np.column_stack([us, 1 - us.sum(axis=1)])
    return data["points"] - (shares[..., None] * corners).sum(axis=1)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("triangles", [False, True])
def test_ht(triangles):
    given = hand(triangles)
    theta, us = given["theta"], given["us"]
    assert_allclose(call("ht", "objective", given), hand_naive(theta, us, given).ravel())
    expected = differences(lambda theta: hand_naive(theta, us, given).ravel(), theta)
    if triangles:
        both = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
        by_us = [
            (hand_naive(theta, us + 1e-5 * d, given) - hand_naive(theta, us - 1e-5 * d, given))
            for d in both
        ]
        expected = np.column_stack([*(d.ravel() / 2e-5 for d in by_us), expected])
    assert_allclose(call("ht", "jacobian", given), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("variant", ["ff", "fr", "rf", "rr"])
def test_particle(variant):
    """The particle hits the origin: the flight, computed here, ends there."""
    w = call("particle", variant, {"w": 0.0})
    charges = np.array([[10, 10 - w], [10, 0]])
    x, velocity = np.array([0.0, 8.0]), np.array([0.75, 0.0])
    while True:
        away = x - charges
        force = (away / np.linalg.norm(away, axis=1)[:, None] ** 3).sum(axis=0)
        if (x + 0.1 * velocity)[1] <= 0:
            break
        x, velocity = x + 0.1 * velocity, velocity + 0.1 * force
    assert abs(x[0] - x[1] / velocity[1] * velocity[0]) < 1e-4
    assert_allclose(w, 0.20719187, atol=1e-5)


@pytest.mark.parametrize("variant", ["ff", "fr", "rf", "rr"])
def test_saddle(variant):
    assert_allclose(call("saddle", variant, {"start": [1.0, 1.0]}), np.zeros(4), atol=1e-4)


# -- the protocol and the report --------------------------------------------------------------


def test_the_tool_answers_every_message(monkeypatch, capsys):
    messages = [
        {"kind": "start", "eval": "lse"}, {"kind": "define", "module": "lse"},
        {"kind": "define", "module": "nothing"},
        {"kind": "evaluate", "module": "lse", "function": "primal",
            "input": {"x": [0.0, 0.0], "min_runs": 3, "min_seconds": 0}},
        {"kind": "analysis", "of": 3, "valid": True},
        {"kind": "evaluate", "module": "lse", "function": "primal", "input": {}},
    ]  # fmt: skip
    lines = "".join(json.dumps({"id": i} | message) + "\n" for i, message in enumerate(messages))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    tool.main()
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["id"] for answer in answers] == list(range(6))
    assert answers[0]["tool"] == "regrad"
    assert [answer.get("success") for answer in answers[1:]] == [True, False, True, None, False]
    assert_allclose(answers[3]["output"], math.log(2))
    assert [t["name"] for t in answers[3]["timings"]] == ["evaluate"] * 3
    assert "nothing" in answers[2]["error"] and "KeyError" in answers[5]["error"]


def test_the_report_compares_round_by_round():
    def one(seconds: float, valid: bool = True) -> session.Session:
        return session.Session([session.Evaluation("gradient", "n=1", seconds, valid, "")], "")

    rounds = {
        ("lse", "regrad"): [one(1e-3), one(2e-3), one(3e-3)],
        ("lse", "jax"): [one(2e-3), one(2e-3), one(2e-3)],
        ("lse", "manual"): [one(1e-3), one(1e-3), session.Session([], "the tool ended")],
    }
    text = table.markdown([], {}, rounds, ["regrad", "jax", "manual"])
    assert "| lse | 1 of 1 valid | 1 of 1 valid | the tool ended |" in text
    assert "jax 1.00 × (0.50 to 1.50) | ≤ 1.00 × | yes |" in text
    assert "over all gradients: 1.50" in text
