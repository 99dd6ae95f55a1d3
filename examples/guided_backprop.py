"""Guided backprop, deconvnet and the plain gradient of one unedited ReLU network.

The three saliency methods differ only in how a gradient passes a ReLU. So each method is a rule for
the op type "Relu", active around the call. Then follows the sanity check of Adebayo et al.: the
last layer is replaced by random numbers (ten times). A saliency that explains the prediction must
change.

                 dx, for y = relu(x)
    gradient     dy where x > 0
    deconvnet    dy where dy > 0
    guided       dy where x > 0 and dy > 0

Run:     python examples/guided_backprop.py [--quick]
Prints:  test accuracy of a network 64-128-128-128-128-128-128-10 on handwritten digits, and for
         each method the median cosine between the saliencies before and after (1 means no
         change). Draws out/guided_backprop.png.
Source:  Zeiler and Fergus, 2013, arXiv 1311.2901. Springenberg et al., 2014, arXiv 1412.6806.
         Adebayo et al., "Sanity Checks for Saliency Maps", 2018, arXiv 1810.03292.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import regrad as rg

METHODS = {
    "gradient": {},
    "deconvnet": {"Relu": rg.rules.deconvnet_relu},
    "guided": {"Relu": rg.rules.guided_relu},
}


def model(layers, x):
    *hidden, (w, b) = layers
    for v, c in hidden:
        x = rg.nn.relu(x @ v + c)
    return x @ w + b


def saliency(layers, x, classes, rules):
    """Return the gradient of each image's logit of the given class, under the rules."""
    with rg.gradient_override_map(rules) as used:
        dx = rg.grad(lambda x: rg.sum(model(layers, x) * classes))(x)
    used.assert_fired()
    return dx.numpy()


# -- training --------------------------------------------------------------------------------------


def layer(rng, m: int, n: int):
    w = rng.normal(size=(m, n)) * np.sqrt(2 / m)
    return [rg.tensor(w, dtype="float32"), rg.zeros(n)]


def adam(layers, gradients, state, rate=1e-3):
    """Run one step. `state` holds the running means of gradients and squares, updated in place."""
    state["steps"] = t = state.get("steps", 0) + 1
    new = []
    for i, (pair, dpair) in enumerate(zip(layers, gradients, strict=True)):
        new.append([])
        for j, (x, dx) in enumerate(zip(pair, dpair, strict=True)):
            m, v = state.get((i, j), (0.0, 0.0))
            state[i, j] = m, v = 0.9 * m + 0.1 * dx, 0.999 * v + 0.001 * rg.square(dx)
            new[i].append(x - rate * (m / (1 - 0.9**t)) / (rg.sqrt(v / (1 - 0.999**t)) + 1e-8))
    return new


def loss(x, labels, layers):
    return rg.losses.sparse_softmax_cross_entropy(labels, model(layers, x))


def train(layers, x, labels, epochs: int, rng, batch: int = 64):
    state = {}
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(len(x)), len(x) // batch):
            gradient = rg.grad(partial(loss, rg.tensor(x[rows]), rg.tensor(labels[rows])))
            layers = adam(layers, gradient(layers), state)
    return layers


# -- the experiment --------------------------------------------------------------------------------


def cosines(a, b):
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.sum(a * b, axis=1) / np.maximum(norms, 1e-30)


def draw(images, before, after, medians, path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    columns = [("image", images)]
    for name, median in medians.items():
        columns += [(name, before[name]), (f"last layer random\ncosine {median:.2f}", after[name])]
    figure, panels = plt.subplots(
        len(images), len(columns), figsize=(11, 1.6 * len(images) + 0.9), layout="constrained"
    )
    for column, (title, values) in zip(panels.T, columns, strict=True):
        column[0].set_title(title, fontsize=10)
        for axes, pixels in zip(column, values, strict=False):
            limit = abs(pixels).max()
            style = ("gray", 0) if title == "image" else ("RdBu_r", -limit)
            axes.imshow(pixels.reshape(8, 8), cmap=style[0], vmin=style[1], vmax=limit)
            axes.set(xticks=[], yticks=[])
    figure.supxlabel(
        "red: more ink here raises the predicted class; blue: lowers it · the cosine with the "
        "saliency to its left is the median over test images and ten draws",
        fontsize=9,
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)


def main(quick: bool = False) -> dict[str, float]:
    """Train, compare the methods, draw; return the median cosines."""
    digits = load_digits()
    x = (digits.data / 16).astype(np.float32)
    split = train_test_split(x, digits.target, random_state=0, stratify=digits.target)
    x_train, x_test, labels_train, labels_test = split
    rng = np.random.default_rng(0)
    sizes = [64] + [128] * 6 + [10]
    layers = [layer(rng, m, n) for m, n in pairwise(sizes)]
    layers = train(layers, x_train, labels_train, 5 if quick else 20, rng)

    images = rg.tensor(x_test)
    predicted = model(layers, images).numpy().argmax(1)
    print(f"test accuracy {np.mean(predicted == labels_test):.1%}")
    classes = rg.tensor(np.eye(10, dtype=np.float32)[predicted])
    randomised = [[*layers[:-1], layer(rng, 128, 10)] for _ in range(10)]
    before, after, medians = {}, {}, {}
    for name, rules in METHODS.items():
        before[name] = saliency(layers, images, classes, rules)
        redone = [saliency(other, images, classes, rules) for other in randomised]
        after[name] = redone[0]
        medians[name] = float(np.median([cosines(before[name], other) for other in redone]))
    for name, median in medians.items():
        print(f"{name:>10}: median cosine with a random last layer {median:.3f}")
    draw(x_test[:3], before, after, medians, Path("out/guided_backprop.png"))
    return medians


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
