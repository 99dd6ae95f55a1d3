"""Pictures by matplotlib: what is drawn, and with which numbers."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, UnknownOpError
from tests.helpers.rows import refused

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def closed():
    yield
    matplotlib.pyplot.close("all")


def lines(ax):
    return {line.get_label(): line.get_xydata() for line in ax.get_lines()}


def test_a_rule_over_a_range():
    options = {"low": -2, "high": 2, "points": 401}
    found = lines(rg.plot.rule("Sign", rg.rules.clipped_straight_through, **options))
    x, rule = found["rule: clipped_straight_through"].T
    np.testing.assert_array_equal(rule, (np.abs(x) <= 1).astype(float))
    true = found["true derivative"][:, 1]
    assert np.isnan(true[200]) and np.nanmax(np.abs(true)) == 0
    np.testing.assert_array_equal(found["Sign"][:, 1], np.sign(x))


def test_a_function_with_its_own_gradient():
    @rg.custom_grad
    def doubled(x):
        return rg.sin(x), lambda dy: 2 * dy * rg.cos(x)

    found = lines(rg.plot.rule(doubled))
    x, rule = found["its own rule"].T
    np.testing.assert_allclose(rule, 2 * np.cos(x))
    np.testing.assert_allclose(found["true derivative"][:, 1], np.cos(x), atol=1e-6)


def test_kinks_are_no_jumps():
    true = lines(rg.plot.rule("Relu", points=11))["true derivative"][:, 1]
    np.testing.assert_allclose(true, [0] * 5 + [0.5] + [1] * 5)


def test_bad_input_of_rule():
    refused(lambda: rg.plot.rule(rg.sign, lambda dy: dy), ArgumentError, "for an op type")
    refused(lambda: rg.plot.rule("Sign", low=1, high=1), ArgumentError, "expected low < high")
    refused(lambda: rg.plot.rule("Sgin"), UnknownOpError)


def test_histograms_layer_by_layer():
    plain = {"a": np.array([0.0, 1.0, 10.0]), "b": rg.tensor([1e-3, 1.0])}
    axes = rg.plot.histograms(
        plain, {"a": np.zeros(3), "b": np.ones(2)}, labels=("with", "without")
    )
    assert len(axes) == 2
    assert axes[0].get_title("right").endswith("with: 33% zeros   without: 100% zeros")
    assert sum(patch.get_height() for patch in axes[1].containers[0]) == 2
    refused(lambda: rg.plot.histograms({}), ArgumentError, "no gradients")
    refused(lambda: rg.plot.histograms(plain, {"a": np.zeros(3)}), ArgumentError, "the same names")


def test_saliency():
    image = np.linspace(0, 1, 48).reshape(4, 4, 3)
    axes = rg.plot.saliency(image, {"plain": image, "guided": np.zeros_like(image)})
    assert [ax.get_title() for ax in axes] == ["image", "plain", "guided"]
    np.testing.assert_allclose(axes[1].get_images()[0].get_array(), image.max(-1))
    with pytest.raises(ArgumentError, match="expected the gradient 'plain' in the image's shape"):
        rg.plot.saliency(image, {"plain": image[0]})
    refused(lambda: rg.plot.saliency(image[0, 0], {}), ArgumentError, "an image of rank 2 or 3")


def test_a_trace():

    ax = rg.plot.trace(rg.trace_gradients(lambda x: (rg.nn.relu(x - 9.0) * x).sum())(np.ones(3)))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["Sum", "Mul", "Relu", "Sub"]
    assert ax.get_yscale() == "log"
    assert "died" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_comparison():
    f = lambda p: (rg.sign(p["a"]) * p["b"]).sum() + (p["a"] * p["c"]).sum()  # noqa: E731

    args = {"a": np.array([0.5, -2.0]), "b": np.ones(2), "c": np.array([2.0, 1.0])}
    with rg.gradient_override_map({"Sign": "Identity"}):
        found = rg.compare_gradients(f, surrogates=["Sign"])(args)
    ax = rg.plot.comparison(found)
    strips = ax.images[0].get_array()
    assert strips.shape == (3, len(found.rows))
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == ["args[0]['a']", "args[0]['b']", "args[0]['c']", "Sign by x"]
    for i, row in enumerate(found.rows):
        if np.isfinite(row.cosine):
            assert strips[0, i] == pytest.approx(row.cosine)
        colour = ax.get_xticklabels()[i].get_color()
        assert (colour == "black") == (not row.differs())
    same = rg.compare_gradients(f)(args).plot()
    assert all(label.get_color() == "black" for label in same.get_xticklabels())


def test_relevance_of_images():
    relevance = np.zeros((2, 5, 6))
    relevance[:, 0, 0], relevance[0, 4, 5] = 1.0, -2.0
    for given in (relevance, relevance[None], relevance.transpose(1, 2, 0), relevance.sum(0)):
        (drawn,) = rg.plot.relevance(given).get_images()
        red, _, blue, _ = np.moveaxis(drawn.get_array(), -1, 0)
        assert red.shape == (5, 6) and np.isclose(red[1, 1], blue[1, 1], atol=0.01)
        assert red[0, 0] > 2 * blue[0, 0] and red[4, 5] < blue[4, 5] / 2
    below, above = rg.plot.relevance(relevance, image=np.ones((3, 5, 6))).get_images()
    assert below.get_array().shape == (5, 6)
    assert np.allclose(above.get_array()[..., 3], np.sqrt(np.abs(relevance.sum(0)) / 2))
    with pytest.raises(ArgumentError, match=r"image of the size of the relevance, \(5, 6\), got"):
        rg.plot.relevance(relevance, image=np.ones((3, 3)))
    refused(lambda: rg.plot.relevance(np.ones(3)), ArgumentError, "a text needs tokens=")
    with pytest.raises(ArgumentError, match="is one of up to four channels"):
        rg.plot.relevance(np.ones((5, 6, 7)))
    with pytest.raises(ArgumentError, match="expected finite relevance"):
        rg.plot.relevance(np.full((2, 2), np.nan))


def test_relevance_of_tokens():
    tokens = ["not", "$a$", "\n"] * 9
    ax = rg.plot.relevance(np.linspace(-1, 1, 27)[None], tokens=tokens)
    assert [text.get_text() for text in ax.texts] == ["not", "$a$", "\\n"] * 9
    first, *_, last = ax.patches
    assert first.get_facecolor()[2] > first.get_facecolor()[0]
    assert last.get_facecolor()[0] > last.get_facecolor()[2]
    assert len({text.get_position()[1] for text in ax.texts}) == 2  # lines
    assert rg.plot.relevance(np.zeros(2), tokens=["a", "b"]).texts[0].get_color() == "black"
    with pytest.raises(ArgumentError, match="expected 2 tokens, one for each value, got 1"):
        rg.plot.relevance(np.zeros(2), tokens=["a"])
    with pytest.raises(ArgumentError, match=r"relevance of one text.*got shape \(2, 2\)"):
        rg.plot.relevance(np.zeros((2, 2)), tokens=["a", "b"])


def test_relevance_of_layers():
    layers = {"a": np.array([[1.0, -3.0]]), "b": rg.tensor([2.0])}
    ax = rg.plot.relevance(layers)
    assert [bar.get_width() for bar in ax.patches] == [1.0, 2.0, -3.0, 0.0]
    assert list(ax.get_lines()[0].get_xdata()) == [-2.0, 2.0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    refused(lambda: rg.plot.relevance({}), ArgumentError, "there are no layers")
