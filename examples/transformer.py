"""A small transformer is trained to write like Python's manual, letter by letter.

The text is the output of `help`. It comes with Python, so there is nothing to download. Queries and
keys are rotated by their position (rotary embedding), AdamW comes from optax, and the training step
is compiled.

Before each block a `custom_grad` in the middle of the model clips the gradient. The value passes
unchanged, and the gradient of each example gets a norm of at most CLIP. An optimizer that clips
only has access to the sum over all examples. Here a single odd example cannot dominate.

Halfway, weights and optimizer are saved to a file. Another model, drawn from another seed, reads
the file and continues. Its final state is bit-identical to the state of the uninterrupted run.

Run:     python examples/transformer.py [--quick]      (about two minutes)
Prints:  the loss per letter, in training and on other text; how many of the gradients that reached
         a clip were too long; whether the resumed run is the same; and a text that the model
         writes.
Needs:   jax, optax, safetensors.
Source:  Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762. Su et al.,
         "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv 2104.09864.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import optax

import regrad as rg

WIDTH, HEADS, BLOCKS, CONTEXT, BATCH, CLIP = 64, 4, 2, 64, 16, 0.08


def text() -> str:
    """Return the output of `help("if")` and similar calls: most of the language reference."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise SystemExit(
            f"The text to learn from is Python's own manual, and this Python lacks it ({error}). "
            "It is part of the standard library: install that in full."
        ) from error
    return "".join(topics.values())


# -- the model -------------------------------------------------------------------------------------


def turned(x):
    """Rotate pairs of features, (…, position, features), by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * 100.0 ** -(np.arange(half) / half)
    cos, sin = (
        rg.tensor(np.cos(angles), dtype="float32"),
        rg.tensor(np.sin(angles), dtype="float32"),
    )
    a, b = rg.split(x, 2, axis=-1)
    return rg.concat([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Transformer:
    """Maps letters (batch, place) to logits (batch, place, letters) of the next letters."""

    def __init__(self, letters: int, seed: int):
        rng = np.random.default_rng(seed)
        sizes = {"embedding": (letters, WIDTH), "logits": (WIDTH, letters)}
        for i in range(BLOCKS):
            sizes |= {f"qkv{i}": (WIDTH, 3 * WIDTH), f"out{i}": (WIDTH, WIDTH)}
            sizes |= {f"up{i}": (WIDTH, 4 * WIDTH), f"down{i}": (4 * WIDTH, WIDTH)}
        self.weights = {
            name: rg.Variable(rng.normal(0, m**-0.5, (m, n)), dtype="float32", name=name)
            for name, (m, n) in sizes.items()
        }
        self.clips = rg.Variable(0.0, trainable=False, name="clips")

    def __call__(self, ids):
        w = self.weights
        x = rg.nn.embedding(w["embedding"], ids)
        for i in range(BLOCKS):
            x = self.clipped(x)
            x = x + self.attention(rg.nn.layer_norm(x) @ w[f"qkv{i}"]) @ w[f"out{i}"]
            x = x + rg.nn.gelu(rg.nn.layer_norm(x) @ w[f"up{i}"]) @ w[f"down{i}"]
        return rg.nn.layer_norm(x) @ w["logits"]

    def clipped(self, x):
        """Return x. Clip each example's gradient to the norm CLIP, and count the clipped ones."""

        def grad_func(dy):
            norm = rg.sqrt(rg.sum(rg.square(dy), axis=(1, 2), keepdims=True))
            self.clips.assign_add(rg.sum(rg.astype(norm > CLIP, "float32")))
            return dy * (CLIP / rg.maximum(norm, CLIP))

        return rg.custom_grad(lambda x: (x, grad_func))(x)

    def attention(self, qkv):
        batch, places, _ = qkv.shape
        heads = qkv.reshape((batch, places, 3, HEADS, WIDTH // HEADS))
        q, k, v = rg.unstack(rg.permute_dims(heads, (2, 0, 3, 1, 4)))
        y = rg.nn.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return rg.permute_dims(y, (0, 2, 1, 3)).reshape((batch, places, WIDTH))

    def loss(self, ids):
        return rg.losses.sparse_softmax_cross_entropy(ids[:, 1:], self(ids[:, :-1]))


# -- training --------------------------------------------------------------------------------------


class Run:
    """A model, its optimizer and the compiled step. All of their state is in Variables."""

    def __init__(self, letters: int, steps: int, seed: int):
        self.model = Transformer(letters, seed)
        weights = list(self.model.weights.values())
        self.adamw = rg.train.Optimizer(
            optax.adamw(optax.warmup_cosine_decay_schedule(0, 4e-3, steps // 10, steps)), "adamw"
        )
        self.adamw.init(weights)
        self.state = [*weights, self.model.clips, *self.adamw.variables]
        self.loss = rg.jit(self.model.loss)
        self.step = rg.jit(lambda ids: self.adamw.minimize(lambda: self.model.loss(ids)))

    def train(self, batches) -> float:
        """Return the mean loss of these batches."""
        return rg.train.fit(self.step, batches, epochs=1)["loss"][0]

    def bits(self) -> list[bytes]:
        return [v.numpy().tobytes() for v in self.state]


def random_batches(ids, steps: int):
    """Yield random batches of pieces of the text. Step n always has the same batch."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(ids) - CONTEXT, (steps, BATCH, 1))
    return [ids[s + np.arange(CONTEXT + 1)] for s in starts]


def resumed(run: Run, half: list, letters: int, steps: int) -> Run:
    """Return a new run that starts from the file of another run and is trained to the end."""
    new = Run(letters, steps, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.safetensors"
        rg.train.save(file, run.state)
        rg.train.restore(file, new.state)
    new.train(half)
    return new


def write(run: Run, alphabet: str, start: str, letters: int, seed: int = 0) -> str:
    """Draw letters one by one. The program is compiled once, for a window of fixed size."""
    rng, logits = np.random.default_rng(seed), rg.jit(run.model)
    ids = [alphabet.index(c) for c in start]
    for _ in range(letters):
        window = np.zeros((1, CONTEXT), np.int64)
        recent = ids[-CONTEXT:]
        window[0, : len(recent)] = recent  # attention is causal, so later letters have no effect
        scores = logits(window).numpy()[0, len(recent) - 1] / 0.8  # the temperature
        ids.append(int(np.argmax(scores + rng.gumbel(size=len(scores)))))
    return "".join(alphabet[i] for i in ids)


def main(quick: bool = False) -> dict[str, object]:
    source, steps = text(), 32 if quick else 1200
    alphabet = "".join(sorted(set(source)))
    ids = np.array([alphabet.index(c) for c in source])
    train, test = np.split(ids, [len(ids) * 9 // 10])
    run = Run(len(alphabet), steps, seed=0)
    weights = sum(v.size for v in run.model.weights.values())
    print(f"{len(train):,} letters to learn from, {len(alphabet)} different; {weights:,} weights")

    batches = random_batches(train, steps)
    pieces = 32 if quick else 200
    held_out = test[: pieces * (CONTEXT + 1)].reshape(pieces, CONTEXT + 1)
    start, losses = time.perf_counter(), []
    parts = np.array_split(batches, 8)
    for i, part in enumerate(parts, 1):
        losses.append((run.train(list(part)), run.loss(held_out).item()))
        print("step {}: loss {:.3f}, on other text {:.3f}".format(i * steps // 8, *losses[-1]))
        if i == 4:
            new = resumed(run, [b for part in parts[4:] for b in part], len(alphabet), steps)
    seconds, same = time.perf_counter() - start, run.bits() == new.bits()
    clips = run.model.clips.item() / (steps * BATCH * BLOCKS)
    print(
        f"{clips:.0%} of the gradients that met a clip were too long; {seconds:.0f} s for both runs"
    )
    print(
        f"the resumed run has {'the same' if same else 'OTHER'} bits, in {len(run.state)} variables"
    )
    written = write(run, alphabet, "The ", 20 if quick else 400)
    print(f"\n{written}")
    return {
        "losses": losses,
        "same": same,
        "clips": clips,
        "written": written,
        "letters": len(alphabet),
    }


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
