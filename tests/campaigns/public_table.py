"""The frozen table of public torch models: which, how small, and with what inputs.

Written down before any result was seen. A row is never taken out because of its result; the cases
of a row are the op types (`OP_TYPES`) that autograd's record of the plain model holds.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

OP_TYPES = (
    "Relu", "Gelu", "Silu", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "MatMul", "AddV2", "Mul",
    "Mean", "Identity", "Reshape", "Conv2D", "MaxPool",
)  # fmt: skip


class Built(NamedTuple):
    """A model and one call of it."""

    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float64


class Row(NamedTuple):
    """A model of a package: `torchvision/resnet18/train`."""

    name: str
    build: Callable[[], Built]

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]


def images(size: int, batch: int = 2) -> torch.Tensor:
    return torch.rand(batch, 3, size, size)


def tokens(length: int = 7, batch: int = 2, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


# -- torchvision -----------------------------------------------------------------------------------

# constructor in torchvision.models: image size
CLASSIFIERS = {
    "alexnet": 64, "squeezenet1_1": 48, "resnet18": 32, "resnext50_32x4d": 32, "densenet121": 32,
    "googlenet": 48, "inception_v3": 80, "mobilenet_v2": 32, "mobilenet_v3_small": 32,
    "shufflenet_v2_x0_5": 32, "mnasnet0_5": 32, "efficientnet_b0": 32, "regnet_y_400mf": 32,
    "convnext_tiny": 32,
}  # fmt: skip
EXTRA = {"googlenet": {"aux_logits": False, "init_weights": False},
         "inception_v3": {"aux_logits": False, "init_weights": False}}  # fmt: skip
TRAINED = ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "alexnet")
SEGMENTERS = ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")


def classifier(name: str, train: bool) -> Built:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None, num_classes=10, **EXTRA.get(name, {}))
    return Built(model.train(train), (images(CLASSIFIERS[name]),))


def segmenter(name: str) -> Built:
    from torchvision.models import segmentation

    model = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=4)
    return Built(model.eval(), (images(48),))


def detector(name: str) -> Built:
    """The losses of a detector, as in training."""
    from torchvision.models import detection

    sizes = {"num_classes": 3, "min_size": 64, "max_size": 64}
    model = getattr(detection, name)(weights=None, weights_backbone=None, **sizes)
    boxes = torch.tensor([[4.0, 6.0, 40.0, 50.0]], dtype=torch.float64)
    target = {"boxes": boxes, "labels": torch.tensor([1])}
    losses = Wrapped(model.train(), lambda inner, image: inner([image], [target]))
    return Built(losses, (images(64)[0],))


class Wrapped(torch.nn.Module):
    """A model that is called in another way than by its inputs alone."""

    def __init__(self, inner: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.call(self.inner, *args, **options)


TRANSFORMERS: dict[str, tuple[str, tuple[Any, ...], int]] = {  # class, sizes, image
    "vit": ("VisionTransformer", (32, 16, 2, 4, 32, 64), 32),
    "swin": ("SwinTransformer", ([4, 4], 16, [2, 2], [2, 4], [4, 4]), 32),
    "maxvit": ("MaxVit", ((64, 64), 8, 2, [8, 16], [1, 1], 8, 0.0), 64),
}


def transformer_of_torchvision(name: str) -> Built:
    from torchvision import models

    kind, sizes, image = TRANSFORMERS[name]
    return Built(getattr(models, kind)(*sizes, num_classes=10).eval(), (images(image),))


def video(name: str) -> Built:
    from torchvision.models import video as videos

    model = getattr(videos, name)(weights=None, num_classes=4)
    return Built(model.eval(), (torch.rand(1, 3, 4, 32, 32),))


def of_torchvision() -> Iterator[Row]:
    for names, kind, build in (
        (CLASSIFIERS, "", partial(classifier, train=False)),
        (TRAINED, "/train", partial(classifier, train=True)),
        (SEGMENTERS, "", segmenter),
        (("retinanet_resnet50_fpn", "fcos_resnet50_fpn"), "/train", detector),
        (TRANSFORMERS, "", transformer_of_torchvision),
        (("r3d_18",), "", video),
    ):
        yield from (Row(f"torchvision/{name}{kind}", partial(build, name)) for name in names)


# -- timm ------------------------------------------------------------------------------------------

# name in timm: image size, and what else makes it small. One or two of a family.
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    **dict.fromkeys(["resnet10t", "resnetv2_18", "nf_resnet26", "skresnet18", "efficientnet_lite0",
        "mobilenetv4_conv_small_035", "ghostnet_050", "repvgg_a0", "convnextv2_atto",
        "inception_next_atto", "poolformer_s12", "mambaout_femto", "starnet_s1"], (32, {})),
    **dict.fromkeys(["efficientvit_b0", "fastvit_t8"], (64, {})),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2}),
    "beit_base_patch16_224": (32, {"img_size": 32, "depth": 1}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (1, 1), "num_heads": (3, 6)}),
    "mixer_s32_224": (64, {"img_size": 64}), "gmlp_ti16_224": (32, {"img_size": 32}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "depth": 2}),
    "cait_xxs24_224": (32, {"img_size": 32, "depth": 2}), "levit_128s": (64, {"img_size": 64}),
    **dict.fromkeys(["mobilevit_xxs", "edgenext_xx_small"], (64, {})),
    "coat_lite_tiny": (32, {"img_size": 32}), "pvt_v2_b0": (32, {}),
    "davit_tiny": (56, {"depths": (1, 1, 1, 1)}), "sequencer2d_s": (64, {"layers": (1, 1, 1, 1)}),
}  # fmt: skip
TRAINED_IN_TIMM = ("vit_tiny_patch16_224", "convnextv2_atto", "mobilenetv4_conv_small_035")


def of_timm() -> Iterator[Row]:
    for name in FAMILIES:
        yield Row(f"timm/{name}", partial(family, name, False))
    for name in TRAINED_IN_TIMM:
        yield Row(f"timm/{name}/train", partial(family, name, True))


def family(name: str, train: bool) -> Built:
    import timm

    size, options = FAMILIES[name]
    more = {"drop_rate": 0.1, "drop_path_rate": 0.1} if train else {}
    model = timm.create_model(name, pretrained=False, num_classes=10, **options, **more)
    return Built(model.train(train), (images(size),))


# -- transformers ----------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
         "intermediate_size": 48, "max_position_embeddings": 32, "pad_token_id": 0}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# model class: (config class, its sizes, which inputs)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BertForSequenceClassification": ("BertConfig", SMALL, "classes"),
    "RobertaForMaskedLM": ("RobertaConfig", SMALL, "words"),
    "DistilBertForMaskedLM": ("DistilBertConfig", {"dim": 32, "n_layers": 2, "n_heads": 4,
        "hidden_dim": 48, "vocab_size": 64}, "words"),
    "AlbertForMaskedLM": ("AlbertConfig", {**SMALL, "embedding_size": 16}, "words"),
    "ElectraForMaskedLM": ("ElectraConfig", {**SMALL, "embedding_size": 16}, "words"),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", {**SMALL, "relative_attention": True}, "words"),
    "GPT2LMHeadModel": ("GPT2Config", GPT, "words"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL, "words"),
    "OPTForCausalLM": ("OPTConfig", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}, "words"),
    "BloomForCausalLM": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4,
        "vocab_size": 64}, "words"),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED, "words"),
    "MistralForCausalLM": ("MistralConfig", GROUPED, "words"),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED, "words"),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 8}, "words"),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 8}, "words"),
    "PhiForCausalLM": ("PhiConfig", SMALL, "words"),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, **EXPERTS}, "words"),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2,
        "vocab_size": 64}, "words"),
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48,
        "num_layers": 2, "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0}, "words"),
    "BartForConditionalGeneration": ("BartConfig", {"d_model": 32, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64,
        "max_position_embeddings": 32}, "words"),
    "WhisperForConditionalGeneration": ("WhisperConfig",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        "sound"),
    "ViTForImageClassification": ("ViTConfig", {**SMALL, "image_size": 32}, "pictures"),
    "SwinForImageClassification": ("SwinConfig", {"image_size": 32, "embed_dim": 16,
        "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}, "pictures"),
    "SegformerForImageClassification": ("SegformerConfig",
        {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2],
        "mlp_ratios": [2, 2], "decoder_hidden_size": 16}, "pictures"),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", {**SMALL, "conv_dim": (16, 16), "conv_kernel": (10, 3),
        "conv_stride": (5, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}, "waves"),
}  # fmt: skip
NOT_SDPA = ("DebertaV2ForMaskedLM", "MambaForCausalLM", "BloomForCausalLM", "Gemma2ForCausalLM",
            "SegformerForImageClassification", "SwinForImageClassification")  # fmt: skip
SINGLE = ("MixtralForCausalLM",)  # the grouped product of its experts knows no float64
PADDED = ("GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM")
TRAINED_OF_HF = ("BertForSequenceClassification", "GPT2LMHeadModel", "BartForConditionalGeneration")


def of_transformers() -> Iterator[Row]:
    for name in MODELS:
        for way in ("eager", "sdpa")[: 1 if name in NOT_SDPA else 2]:
            yield Row(f"transformers/{name}/{way}", partial(pretrained, name, way))
    for kind, names in {"padded": PADDED, "train": TRAINED_OF_HF}.items():
        for name in names:
            build = partial(pretrained, name, "sdpa", **{kind: True})
            yield Row(f"transformers/{name}/sdpa/{kind}", build)


def pretrained(name: str, way: str, padded: bool = False, train: bool = False) -> Built:
    import transformers

    config, sizes, inputs = MODELS[name]
    made = getattr(transformers, config)(**sizes)
    made._attn_implementation = way
    made.use_cache = False
    model = getattr(transformers, name)(made).train(train)
    options = INPUTS[inputs]()
    if padded:
        options["attention_mask"] = torch.tensor([[0] * 3 + [1] * 4, [1] * 7])
    return Built(model, (), options, torch.float32 if name in SINGLE else torch.float64)


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "words": lambda: {"input_ids": (words := tokens()), "labels": words},
    "classes": lambda: {"input_ids": tokens(), "labels": torch.tensor([0, 1])},
    "pictures": lambda: {"pixel_values": images(32), "labels": torch.tensor([0, 1])},
    "sound": lambda: {"input_features": torch.rand(2, 8, 20), "labels": tokens(5)},
    "waves": lambda: {"input_values": torch.rand(2, 400)},
}  # fmt: skip

# -- diffusers -------------------------------------------------------------------------------------

TIME = torch.tensor([3])
BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
UNET = {"sample_size": 8, "in_channels": 3, "out_channels": 3, **BLOCKS}
CROSS = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
         "cross_attention_dim": 16, "attention_head_dim": 4}  # fmt: skip
ATTENTIVE = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
             "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}  # fmt: skip
CODER = {"in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, **BLOCKS}  # fmt: skip
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2,
       "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 8,
       "norm_num_groups": 4}  # fmt: skip


# class in diffusers: its sizes, and what it is called with
DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], tuple[Any, ...]]]] = {
    "UNet2DModel": ({**UNET, **ATTENTIVE}, lambda: (images(8), TIME)),
    "UNet2DConditionModel": ({**UNET, **CROSS}, lambda: (images(8), TIME, torch.rand(2, 5, 16))),
    "AutoencoderKL": (CODER, lambda: (images(16),)),
    "VQModel": ({**CODER, "num_vq_embeddings": 16}, lambda: (images(16),)),
    "DiTTransformer2DModel": (DIT, lambda: (torch.rand(2, 4, 8, 8), torch.tensor([3, 4]),
        torch.tensor([0, 1]))),
}  # fmt: skip


def of_diffusers() -> Iterator[Row]:
    for name in DIFFUSERS:
        yield Row(f"diffusers/{name}", partial(diffuser, name))
    yield Row("diffusers/UNet2DConditionModel/AttnProcessor", partial(diffuser, ATTENTION, True))


ATTENTION = "UNet2DConditionModel"


def diffuser(name: str, explicit: bool = False) -> Built:
    import diffusers

    sizes, inputs = DIFFUSERS[name]
    model = getattr(diffusers, name)(**sizes).eval()
    if explicit:
        from diffusers.models.attention_processor import AttnProcessor

        model.set_attn_processor(AttnProcessor())
    return Built(model, inputs())


# -- PyTorch Geometric -----------------------------------------------------------------------------

CONVS: dict[str, dict[str, Any]] = {
    "GCNConv": {}, "GATv2Conv": {"heads": 2}, "SAGEConv": {}, "TransformerConv": {"heads": 2},
}  # fmt: skip


def of_geometric() -> Iterator[Row]:
    for name in CONVS:
        yield Row(f"torch_geometric/{name}", partial(graph, name))


def graph(name: str) -> Built:
    """Two layers with a ReLU between, over a ring of six nodes."""
    from torch_geometric import nn

    layer = partial(getattr(nn, name), **CONVS[name])
    width = 5 * CONVS[name].get("heads", 1)
    layers = torch.nn.ModuleList([layer(4, 5), layer(width, 3)])
    ring = torch.arange(6)
    edges = torch.stack([ring, (ring + 1) % 6])

    def call(modules: Any, x: torch.Tensor) -> Any:
        first, second = modules
        return second(first(x, edges).relu(), edges)

    return Built(Wrapped(layers, call).eval(), (torch.rand(6, 4),))


SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "torchvision": of_torchvision, "timm": of_timm, "transformers": of_transformers,
    "diffusers": of_diffusers, "torch_geometric": of_geometric,
}  # fmt: skip


def rows() -> list[Row]:
    return [row for source in SOURCES.values() for row in source()]


def prepared(package: str) -> None:
    """Import a package. torchvision's own ops need a build for the torch at hand; none is used."""
    _declare_ops_of_torchvision()  # (most of the others import it)
    importlib.import_module(package)


def _declare_ops_of_torchvision() -> None:
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:  # its compiled part could not be loaded
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", schema)
