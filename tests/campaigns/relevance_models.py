"""Models on which relevance is compared: of torchvision and transformers, and small ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(F.relu(self.a(x)))
        y += x
        return F.relu(y)


class Residual(nn.Module):
    """A ResNet as tutorials write it: functional ReLUs, a sum in place, a mean over the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(F.relu(self.stem(x)), 2)
        return self.head(self.blocks(x).mean((2, 3)))


class BlockOfModules(Block):
    """The same as modules, of which each runs once."""

    def __init__(self, width: int) -> None:
        from zennit.layer import Sum

        super().__init__(width)
        self.relu, self.last, self.sum = nn.ReLU(), nn.ReLU(), Sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.relu(self.a(x)))
        return self.last(self.sum(torch.stack([x, y], -1)))


class OfModules(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(BlockOfModules(16), BlockOfModules(16))
        self.relu, self.pool = nn.ReLU(), nn.AvgPool2d(2)
        self.mean, self.flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.stem(x)))
        return self.head(self.flat(self.mean(self.blocks(x))))


class Averaged(nn.Module):
    """A convolution, and a mean over the pixels as a method of a tensor."""

    def __init__(self, of_modules: bool = False) -> None:
        super().__init__()
        self.conv, self.relu, self.head = (
            nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False),
        )  # fmt: skip
        self.mean = nn.AdaptiveAvgPool2d(1) if of_modules else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv(x))
        return self.head(x.mean((2, 3)) if self.mean is None else self.mean(x).flatten(1))


class Twice(nn.Module):
    """A dense layer that runs twice."""

    def __init__(self, of_modules: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(48, 48, bias=False), nn.Linear(48, 10, bias=False)
        self.relu, self.again = nn.ReLU(), self.first
        if of_modules:
            self.relu2, self.again = nn.ReLU(), nn.Linear(48, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :, :4, :4].flatten(1)
        x = self.relu(self.first(x))
        return self.head((self.relu2 if hasattr(self, "relu2") else self.relu)(self.again(x)))


class Weighted(nn.Module):
    """A dense layer that is a function call, as of a weight that is shared or normalized."""

    def __init__(self, of_modules: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.relu, self.flat = nn.ReLU(), nn.Flatten()
        self.head = nn.Linear(3600, 10, bias=False)
        self.of_modules = of_modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flat(self.relu(self.conv(x)))
        return self.head(x) if self.of_modules else F.linear(x, self.head.weight)


class LastFirst(nn.Module):
    """A network whose modules are not made in the order in which they run."""

    def __init__(self, of_modules: bool = False) -> None:
        super().__init__()
        self.relu, self.flat = nn.ReLU(), nn.Flatten()
        later, first = (nn.Conv2d(i, 4, 3, bias=False) for i in (4, 3))
        if of_modules:
            self.first, self.later = first, later
        else:
            self.later, self.first = later, first
        self.head = nn.Linear(3136, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.flat(self.relu(self.later(self.relu(self.first(x))))))


class Attention(nn.Module):
    """Attention that is written out; its weights may be constants, as in CP-LRP."""

    def __init__(self, constant: bool = False) -> None:
        super().__init__()
        self.constant = constant
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1).reshape(len(x), -1, 16)[:, :32]
        weights = torch.softmax(self.q(x) @ self.k(x).mT / 4, -1)
        y = (weights.detach() if self.constant else weights) @ self.v(x)
        return self.head((x + y)[:, 0])


class VGG(nn.Module):
    """A narrow VGG of torchvision's layers."""

    def __init__(self) -> None:
        from torchvision.models.vgg import make_layers

        super().__init__()
        self.features = make_layers([16, 16, "M", 32, 32, "M", 64, 64, "M"])
        self.classifier = nn.Sequential(
            nn.Linear(1024, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def without_writing() -> nn.Module:
    """A VGG whose ReLUs do not write into what they are given."""
    model = VGG()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def resnet(eps: float = 1e-5) -> nn.Module:
    import torchvision

    norm = partial(nn.BatchNorm2d, eps=eps)
    return torchvision.models.resnet18(weights=None, num_classes=10, norm_layer=norm)


def merged(model: nn.Module | None = None) -> nn.Module:
    """A ResNet-18 whose batch norms are merged into its convolutions, by PyTorch's own function."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    model = settled(resnet().eval()) if model is None else model
    for module in [model, *model.modules()]:
        for name in [n for n, m in module.named_children() if isinstance(m, nn.BatchNorm2d)]:
            if isinstance(module, nn.Sequential):
                conv, put = module[0], 0
            else:
                put = name.replace("bn", "conv")
                conv = getattr(module, put)
            setattr(module, str(put), fuse_conv_bn_eval(conv, getattr(module, name)))
            setattr(module, name, nn.Identity())
    return model


def in_a_row(*activations: nn.Module) -> nn.Module:
    """A convolution, activations, a pool, and dense layers."""
    first, pool = nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(4)
    dense = nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(first, *activations, pool, nn.Flatten(), *dense)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 4, 4, 4, 128, 512, num_classes=10)
    nn.init.normal_(model.class_token)
    return model


def densenet() -> nn.Module:
    import torchvision

    return torchvision.models.densenet121(weights=None, num_classes=10)


HEADS = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 64,
             "bos_token_id": 0, "eos_token_id": 0},
    "Llama": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 64, "intermediate_size": 384,
              "max_position_embeddings": 64, "pad_token_id": 0},
}  # fmt: skip


class Language(nn.Module):
    """A language model of transformers: the logits that follow the last token."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{name}Config")(**SIZES[name], **options)
        config._attn_implementation = "sdpa"
        config.use_cache = False
        self.inner = getattr(transformers, HEADS[name])(config)

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs_embeds=embedded).logits[:, -1]


TEXT = "w5 w9 w33 w17 w40"


def tokens() -> torch.Tensor:
    return torch.tensor([[int(word[1:]) for word in TEXT.split()]])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "VGG": VGG, "ResNet-18": resnet, "ResNet-18, merged": merged, "DenseNet-121": densenet,
    "ViT": vit, "GPT-2": lambda: Language("GPT2"), "Llama": lambda: Language("Llama"),
    "a residual network of functions": Residual, "a residual network of modules": OfModules,
    "a mean over pixels, `x.mean((2, 3))`": Averaged, "a layer that runs twice": Twice,
    "`F.linear`": Weighted, "a layer that is made later": LastFirst,
    "attention, written out": Attention, "ResNet-18, norms of `eps=1e-5`": resnet,
    "ResNet-18, norms of `eps=1e-3`": lambda: resnet(1e-3),
    "a convolutional network": lambda: in_a_row(nn.ReLU()),
    "two activations in a row, ReLU and ReLU": lambda: in_a_row(nn.ReLU(), nn.ReLU()),
    "two activations in a row, ReLU and Tanh": lambda: in_a_row(nn.ReLU(), nn.Tanh()),
    "GPT-2 of tokens": lambda: Language("GPT2", initializer_range=0.2),
}  # fmt: skip
TWINS: dict[str, Callable[[], nn.Module]] = {
    "VGG": without_writing, "ResNet-18": resnet, "a residual network of functions": OfModules,
    "a mean over pixels, `x.mean((2, 3))`": lambda: Averaged(True),
    "a layer that runs twice": lambda: Twice(True), "`F.linear`": lambda: Weighted(True),
    "a layer that is made later": lambda: LastFirst(True),
    "attention, written out": lambda: Attention(True),
}  # fmt: skip


def settled(model: nn.Module) -> nn.Module:
    """Weights that keep values of order 1, and batch norms with statistics, as of a training."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model


def built(name: str, twin: bool = False) -> nn.Module:
    """A model with the weights of its seed, in float64; its twin has the same weights."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model = (model if name.endswith("merged") else settled(model)).double().eval()
    if not twin:
        return model
    if name.startswith("ResNet-18, norms"):
        return merged(model)
    other = TWINS[name]().double().eval()
    if isinstance(other, Twice):
        assert isinstance(model, Twice)
        other.first, other.head = model.first, model.head
        other.again.load_state_dict(model.first.state_dict())
    else:
        other.load_state_dict(model.state_dict())
    return other


def inputs(name: str) -> torch.Tensor:
    torch.manual_seed(1)
    if name == "GPT-2 of tokens":
        model = built(name)
        assert isinstance(model, Language)
        return model.inner.transformer.wte(tokens()).detach()
    if name in ("GPT-2", "Llama"):
        return torch.randn(8, 48, 128, dtype=torch.float64)
    return torch.randn(8, 3, 32, 32, dtype=torch.float64)
