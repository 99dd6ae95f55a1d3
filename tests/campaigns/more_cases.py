"""Programs for what zennit and Captum leave out, and for shap and inseq.

The programs are as in `relevance_cases`. They leave their answer in `R`.
"""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.campaigns import layer_cases, public_table
from tests.campaigns.relevance_cases import DEEP_LIFT, Case, deep_lift, of_zennit, relevance
from tests.campaigns.relevance_cases import names as relevance_names
from tests.campaigns.relevance_models import TEXT, tokens

PACKAGES = ("torch", "torchvision", "transformers", "zennit", "captum", "shap", "inseq")
DEEP = "deep = shap.DeepExplainer(model, x[:3])\nR = torch.tensor(deep.shap_values(x)[..., 3])"
OURS = "R = lrp.relevance(model, x, 3, lrp.deep_lift(), reference=[*x[:3, None]]).inputs"
PLAIN, BLOCK = "a convolutional network", "transformer.h.1.mlp"


def names() -> dict[str, Any]:
    """The names that programs use."""
    public_table.prepared("transformers")
    import inseq
    import shap

    known = {**relevance_names(), **layer_cases.names()}
    return {**known, "shap": shap, "same_numbers": same_numbers, "inseq": inseq,
            "tokenizer": tokenizer(), "text": TEXT, "tokens": tokens,
            "quiet": {"show_progress": False, "pretty_progress": False}}  # fmt: skip


def tokenizer() -> Any:
    """A tokenizer of one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unknown>", "<pad>", "<end>", "<begin>"]
    words = {word: i for i, word in enumerate([*special, *[f"w{i}" for i in range(4, 64)]])}
    made = Tokenizer(models.WordLevel(words, unk_token=special[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    keys = ("unk_token", "pad_token", "eos_token", "bos_token")
    return PreTrainedTokenizerFast(tokenizer_object=made, **dict(zip(keys, special, strict=True)))


@contextlib.contextmanager
def same_numbers(x: torch.Tensor) -> Generator[None]:
    """A block in which shap draws what regrad draws with the seed 0, in the dtype of x."""
    random, drawn, before = np.random.default_rng(0), [0.0], torch.get_default_dtype()

    def seed(n: int) -> None:
        nonlocal random
        random = np.random.default_rng(0)

    def choice(count: int) -> Any:
        drawn[0] = random.uniform(size=1)[0]
        return random.integers(count, size=1)[0]

    torch.set_default_dtype(x.dtype)
    try:
        with patch.multiple(np.random, seed=seed, choice=choice, uniform=lambda: drawn[0]):
            yield
    finally:
        torch.set_default_dtype(before)


# -- norms, and two activations in a row -----------------------------------------------------------


def wrong_cases() -> Iterator[Case]:
    note = "the merged norm keeps its `eps`, and scales by 1 / √(1 + `eps`)"
    for eps, name, theirs in (
        ("1e-5", "excitation", "ExcitationBackprop"), ("1e-5", "epsilon_plus", "EpsilonPlus"),
        ("1e-5", "epsilon_alpha2_beta1", "EpsilonAlpha2Beta1"),
        ("1e-3", "excitation", "ExcitationBackprop"), ("1e-3", "epsilon_plus", "EpsilonPlus"),
        ("1e-3", "epsilon_alpha2_beta1", "EpsilonAlpha2Beta1"),
    ):  # fmt: skip
        model = f"ResNet-18, norms of `eps={eps}`"
        small = "stabilizer=1e-12" + (", epsilon=1e-12" if "epsilon" in name else "")
        with_norms = f"{theirs}({small}, canonizers=[ResNetCanonizer()])"
        yield Case(model, name, "zennit", relevance(f"lrp.merge_norms(model, lrp.{name}({small}))"),
                   of_zennit(with_norms), of_zennit(with_norms, "twin"), note)  # fmt: skip
    note = "the second activation: the sum is not the difference of the outputs"
    for kind in ("ReLU", "Tanh"):
        model = f"two activations in a row, ReLU and {kind}"
        yield Case(model, "deep_lift", "captum", DEEP_LIFT, deep_lift("model"), "sum", note)
    due = "R = captum.DeepLiftShap(twin).attribute(x, x[:3], target=3)"
    yield Case("a residual network of functions", "DeepExplainer", "shap", OURS, DEEP, due,
               "`F.relu`")  # fmt: skip


# -- shap and inseq --------------------------------------------------------------------------------


def of_inseq(method: str, options: str = "", layer: str = "", to: str = "model") -> str:
    inner = f"{to}.inner"
    at = f", target_layer={inner}.get_submodule({layer!r})" if layer else ""
    return (
        f"of = inseq.load_model({inner}, {method!r}, tokenizer=tokenizer{at})\n"
        f"found = of.attribute(text, text + ' w21', attributed_fn='logit'{options}, **quiet)\n"
        "R = found.sequence_attributions[0].target_attributions[:-1, 0][None].to(x)\n"
        "of.attribution_method.unhook()"
    )


def right_cases() -> Iterator[Case]:
    yield Case(PLAIN, "GradientExplainer", "shap",
               "x = x[:1]\nR = A.attribute(model, x, 3, {}, along=A.expected(-x, 5)).inputs",
               "x = x[:1]\nwith same_numbers(x):\n"
               "    of = shap.GradientExplainer(model, -x)\n"
               "    R = torch.tensor(of.shap_values(x, nsamples=5)[..., 3])")  # fmt: skip
    for model in (PLAIN, "two activations in a row, ReLU and ReLU"):
        yield Case(model, "DeepExplainer", "shap", OURS, DEEP)
    model, found = "GPT-2 of tokens", "A.attribute(model, x, 21, {}"
    unknown = "model.inner.transformer.wte.weight[:1].expand_as(x).detach()"
    for name, mine, theirs in (
        ("saliency", f"{found}).gradients.abs()", of_inseq("saliency")),
        ("input × gradient", f"{found}).inputs", of_inseq("input_x_gradient")),
        ("integrated gradients",
         f"{found}, reference={unknown}, along=A.integrated(8)).inputs",
         of_inseq("integrated_gradients", ", n_steps=8")),
        ("layer gradient × activation",
         f"{found}, ['inner.{BLOCK}']).layers['inner.{BLOCK}']",
         of_inseq("layer_gradient_x_activation", layer=BLOCK)),
    ):  # fmt: skip
        yield Case(model, name, "inseq", f"R = {mine}", theirs)
    ours = (
        "ids, target = tokens(), lambda y: y.logits[:, -1, 21]\n"
        f"R = A.attribute(model.inner, ids, target, {{}}, at={BLOCK!r}, reference=ids * 0, "
        f"along=A.integrated(8)).layers[{BLOCK!r}]"
    )
    due = (
        "def logit(ids):\n    return model.inner(ids).logits[:, -1, 21]\n"
        f"of = captum.LayerIntegratedGradients(logit, model.inner.get_submodule({BLOCK!r}))\n"
        "R = of.attribute(tokens(), tokens() * 0, n_steps=8)"
    )
    theirs = of_inseq("layer_integrated_gradients", ", n_steps=8", BLOCK)
    yield Case(model, "layer integrated gradients", "inseq", ours, theirs, due,
               "the difference from the baseline: all shares are 0")  # fmt: skip


def cases() -> list[Case]:
    return [*right_cases(), *wrong_cases()]
