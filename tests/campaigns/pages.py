"""The pages of `Drawing.html` in a browser: searched, zoomed, opened, closed and clicked.

    python -m tests.campaigns.pages [--browser chromium] [--keep FOLDER]

Three models are drawn: a ResNet-18 in PyTorch, a transformer in Flax and a TensorFlow 1 graph with
Adam. Each page is opened in a headless browser; a script at its end does what a reader does, and
writes down what it saw. A browser is needed (Chromium or Chrome); the test suite does without.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import regrad as rg
from regrad.inspection.drawings import Drawing

SCRIPT = """
<script>
"use strict";
const report = {};
const shown = () => world.querySelectorAll(".box").length;
const transform = () => world.getAttribute("transform");
const click = e => e.dispatchEvent(new MouseEvent("click", {bubbles: true}));
const press = id => click(document.getElementById(id));
const overlaps = () => {
  const all = [...world.querySelectorAll(".box rect")].map(r => r.getBBox());
  let n = 0;
  const before = (a, b) => a.x + a.width <= b.x || a.y + a.height <= b.y;
  all.forEach((a, i) => all.slice(i + 1).forEach(b => {
    if (!before(a, b) && !before(b, a)) n += 1;
  }));
  return n;
};
report.first = shown();
report.firstOverlaps = overlaps();
press("close");
report.closed = shown();
const scope = world.querySelector(".box.scope");
click(scope);
report.opened = shown();
click(world.querySelector(".title"));
report.closedAgain = shown();
press("open");
report.all = shown();
report.allOverlaps = overlaps();
const before = transform();
const box = svg.getBoundingClientRect();
const at = {clientX: box.left + 50, clientY: box.top + 50};
svg.dispatchEvent(new WheelEvent("wheel", {deltaY: -400, ...at}));
report.zoomed = view.k;
report.moved = transform() !== before;
press("close");
const field = document.getElementById("search");
field.value = "WORD";
field.dispatchEvent(new Event("input"));
report.found = found.size;
report.marked = world.querySelectorAll(".box.found").length;
const hit = world.querySelector(".box.found:not(.scope)");
moved = false;
click(hit);
report.details = document.getElementById("details").textContent;
const out = document.createElement("pre");
out.id = "report";
out.textContent = JSON.stringify(report);
document.body.appendChild(out);
</script>
"""


def resnet() -> Drawing:
    """A ResNet-18 in PyTorch under guided backprop."""
    import torch

    from bench.foreign_torch import resnet18

    with rg.torch.gradient_override_map({"Relu": rg.rules.guided_relu}):
        return rg.torch.draw(resnet18(torch.nn.ReLU()), torch.randn(1, 3, 64, 64))


def transformer() -> Drawing:
    """A small transformer in Flax."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
            return x + nn.Dense(32)(nn.relu(nn.Dense(64)(nn.LayerNorm()(x))))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(4):
                x = Layer()(x)
            return nn.Dense(10)(x)

    net, x = Transformer(), jnp.ones((2, 8, 32))
    params = net.init(jax.random.key(0), x)
    return rg.jax.draw(rg.jax.override(net.apply, {"Relu": rg.rules.guided_relu}), params, x)


def adam() -> Drawing:
    """A TensorFlow 1 graph of three layers with an override, trained by Adam."""
    import regrad.v1 as tf

    graph = tf.Graph()
    with graph.as_default():
        h = x = tf.placeholder(tf.float32, [None, 64], name="x")
        labels = tf.placeholder(tf.int32, [None], name="labels")
        for i in range(3):
            h = tf.nn.relu(tf.layers.dense(h, 32, name=f"dense{i}"))
        with graph.gradient_override_map({"Sign": "Identity"}):
            h = tf.sign(h)
        logits = tf.layers.dense(h, 10, name="logits")
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        tf.train.AdamOptimizer(1e-3).minimize(tf.reduce_mean(loss))
        assert x is not None
    return graph.draw()


MODELS = {
    "resnet18": (resnet, "relu"),
    "transformer": (transformer, "Relu"),
    "adam": (adam, "Sign"),
}


def looked_at(drawing: Drawing, word: str, browser: str, path: Path) -> dict[str, Any]:
    """What the script in a page saw."""
    page = drawing.html().replace("</body>", SCRIPT.replace("WORD", word) + "</body>")
    path.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
         "--dump-dom", path.resolve().as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.S)
    if found is None:
        sys.exit(f"{path.name}: the script did not run to its end")
    return json.loads(unescape(found[1]))


def faults(drawing: Drawing, saw: dict[str, Any]) -> Iterator[str]:
    """What is not as it should be."""
    wanted = {
        "the first view is legible": 3 <= saw["first"] <= 60,
        "no boxes overlap at first": saw["firstOverlaps"] == 0,
        "closing all leaves fewer": saw["closed"] <= saw["first"],
        "a click opens a scope": saw["opened"] > saw["closed"],
        "a click on its title closes it": saw["closedAgain"] == saw["closed"],
        "opening all shows every op": saw["all"] == len(drawing.boxes),
        "no boxes overlap when all are open": saw["allOverlaps"] == 0,
        "the wheel zooms": saw["moved"],
        "the search finds and marks": saw["found"] > 0 and saw["marked"] > 0,
        "a click shows the details": "rule" in saw["details"] and "takes from" in saw["details"],
    }
    return (text for text, holds in wanted.items() if not holds)


def main() -> None:
    """Draw the models, look at their pages, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--browser", default="chromium", help="Chromium, or Chrome")
    parser.add_argument("--keep", type=Path, help="a folder for the pages")
    options = parser.parse_args()
    broken = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (draw, word) in MODELS.items():
            drawing = draw()
            saw = looked_at(drawing, word, options.browser, folder / f"{name}.html")
            found = list(faults(drawing, saw))
            broken += len(found)
            print(f"{name}: {len(drawing.boxes)} ops, {saw['first']} boxes at first;",
                  "; ".join(found) or "all is well")  # fmt: skip
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
