"""The programs that explain models: regrad's, and those of zennit, Captum and lxt.

A program is text that leaves the relevance of the inputs in `R`; it sees the names of `names()`, a
`model` and its input `x`. Its lines are what a user writes, imports aside.
"""

import contextlib
import importlib
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.campaigns import public_table


class Case(NamedTuple):
    """A model, and two programs for one answer; or a third that returns the expected one."""

    model: str
    name: str
    peer: str  # the package
    ours: str
    theirs: str
    due: str = ""  # a program of the peer's for `twin`, the model as the peer needs it
    note: str = ""  # what the peer does not see


# -- the programs ----------------------------------------------------------------------------------


def names() -> dict[str, Any]:
    """The names that programs use: the libraries, with lxt made importable."""
    import captum.attr
    import captum.attr._utils.lrp_rules as captum_rules
    import zennit.composites
    import zennit.rules
    import zennit.torchvision
    import zennit.types
    from zennit.attribution import Gradient

    import regrad as rg
    import regrad.torch

    found: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "rg": rg, "lrp": rg.rules.lrp,
                             "override": regrad.torch.gradient_override_map}  # fmt: skip
    modules = (zennit.rules, zennit.types, zennit.composites, zennit.torchvision,
               captum.attr, captum_rules)  # fmt: skip
    for module in modules:
        for name, value in vars(module).items():
            if name[0].isupper():
                if name in ("LRP", "DeepLift", "Deconvolution") or "Rule" in name:
                    found[name] = value
                elif module not in (captum.attr, captum_rules):
                    found.setdefault(name, value)
    found["Gradient"] = Gradient
    found["captum"] = captum.attr
    return found


def lxt_names() -> dict[str, Any]:
    """lxt's names; what it imports from transformers and is not there is a stub."""
    public_table.prepared("transformers")
    from torchvision.models import vision_transformer

    for _ in range(30):
        try:
            importlib.import_module("lxt.efficient")
            break
        except ModuleNotFoundError as error:
            sys.modules[str(error.name)] = ModuleType(str(error.name))
        except ImportError as error:
            lacking = str(error).split("'")[1]
            setattr(sys.modules[str(error.name)], lacking, None)
            STUBS.append(f"{error.name}.{lacking}")
    from lxt.efficient import models, monkey_patch
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    def patched(module: Any, *args: Any) -> None:
        """Patch, and give the table of attention functions the method that transformers calls."""
        monkey_patch(module, *args)
        table = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
        if type(table) is dict:
            module.ALL_ATTENTION_FUNCTIONS = Functions(table)

    return {"monkey_patch": patched, "vision_transformer": vision_transformer,
            "modeling_gpt2": modeling_gpt2, "modeling_llama": modeling_llama,
            "gpt2": models.gpt2, "llama": models.llama}  # fmt: skip


class Functions(dict[str, Any]):
    """The attention functions of a model of transformers, by name."""

    def get_interface(self, name: str, default: Any) -> Any:
        return self.get(name, default)


STUBS: list[str] = []  # what lxt imports, and transformers has not
PATCHED = ("forward", "original_forward", "eager_attention_forward", "ALL_ATTENTION_FUNCTIONS")


@contextlib.contextmanager
def unpatched(scope: dict[str, Any]) -> Generator[None]:
    """A block after which what lxt has put into classes and modules is taken out again."""
    places: list[Any] = [nn.GELU, nn.LayerNorm, nn.MultiheadAttention, nn.Dropout]
    for name in ("modeling_gpt2", "modeling_llama"):
        module = scope.get(name)
        if module is not None:
            places += [module, *[v for v in vars(module).values() if isinstance(v, type)]]
    before = [(p, n, p.__dict__[n]) for p in places for n in PATCHED if n in p.__dict__]
    tables = [(t, dict(t)) for _, n, t in before if n == "ALL_ATTENTION_FUNCTIONS"]
    try:
        yield
    finally:
        for place in places:
            for name in PATCHED:
                if name in place.__dict__:
                    delattr(place, name)
        for place, name, value in before:
            setattr(place, name, value)
        for table, items in tables:
            for key, value in items.items():
                table[key] = value


def function(program: str, scope: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """A program as a function of a model and its input."""
    body = textwrap.indent(program, "    ")
    code = f"def run(model, x, twin=None):\n{body}\n    return R"
    known = dict(scope)
    exec(code, known)
    return known["run"]


def lines(program: str) -> int:
    return len(program.splitlines())


# -- the cases -------------------------------------------------------------------------------------

LINEAR = '(F.linear, "Conv2D")'


def of_zennit(composite: str, model: str = "model") -> str:
    return (
        "of_class = lambda y: y * torch.eye(10, dtype=y.dtype)[3]\n"
        f"with Gradient({model}, {composite}) as attributor:\n"
        "    _, R = attributor(x, of_class)"
    )


def of_rule(rule: str) -> str:
    return of_zennit(f"LayerMapComposite([(Activation, Pass()), (Linear, {rule})])")


def relevance(rules: str) -> str:
    return f"R = lrp.relevance(model, x, 3, {rules}).inputs"


def by_rule(rule: str) -> str:
    return relevance(f'{{"Relu": lrp.pass_, **dict.fromkeys({LINEAR}, {rule})}}')


def gradient(rule: str) -> str:
    return (
        f'with override({{"Relu": {rule}}}):\n'
        "    (R,) = torch.autograd.grad(model(x.requires_grad_())[:, 3].sum(), x)"
    )


def of_lxt(patch: str) -> str:
    return (
        f"monkey_patch({patch})\n"
        "model(x.requires_grad_())[:, 3].sum().backward()\n"
        "R = x * x.grad"
    )  # fmt: skip


def deep_lift(model: str) -> str:
    return f"R = DeepLift({model}).attribute(x, x.flip(0), target=3)"


DEEP_LIFT = "R = lrp.relevance(model, x, 3, lrp.deep_lift(), reference=x.flip(0)).inputs"
GRADIENTS = (
    "seed = torch.eye(10, dtype=x.dtype)[[3] * len(x)]\n"
    "with Gradient(model, {}) as attributor:\n"
    "    _, R = attributor(x, seed)"
)
RULES = {
    "epsilon": ("lrp.epsilon(0.1)", "Epsilon(0.1)"), "gamma": ("lrp.gamma(0.3)", "Gamma(0.3)"),
    "z_plus": ("lrp.z_plus()", "ZPlus()"),
    "alpha_beta": ("lrp.alpha_beta(2, 1)", "AlphaBeta(2, 1)"),
    "z_box": ("lrp.z_box(-5.0, 5.0)", "ZBox(-5.0, 5.0)"),
    "w_square": ("lrp.w_square()", "WSquare()"),
    "flat": ("lrp.flat()", "Flat()"),
}  # fmt: skip
COMPOSITES = {
    "epsilon_plus": ("EpsilonPlus", ""), "epsilon_plus_flat": ("EpsilonPlusFlat", ""),
    "epsilon_gamma_box": ("EpsilonGammaBox", "-5.0, 5.0"),
    "epsilon_alpha2_beta1": ("EpsilonAlpha2Beta1", ""),
    "epsilon_alpha2_beta1_flat": ("EpsilonAlpha2Beta1Flat", ""),
    "excitation": ("ExcitationBackprop", ""),
}  # fmt: skip
NORM = ("stabilizer=1e-12", "epsilon=1e-12")  # (where average pools of zennit's have a stabilizer)


def stable(name: str, args: str) -> str:
    return ", ".join(filter(None, [args, *NORM[: 1 if name == "excitation" else 2]]))


def composite_cases() -> Iterator[Case]:
    for name, (ours, theirs) in RULES.items():
        yield Case("VGG", name, "zennit", by_rule(ours), of_rule(theirs))
    for name, (theirs, args) in COMPOSITES.items():
        ours = relevance(f"lrp.{name}({args})")
        yield Case("VGG", name, "zennit", ours, of_zennit(f"{theirs}({args})"))
    for name, theirs, rule in (
        ("guided", "GuidedBackprop()", "rg.rules.guided_relu"),
        ("deconvnet", "DeconvNet()", "rg.rules.deconvnet_relu"),
    ):
        theirs = GRADIENTS.format(theirs)
        yield Case("VGG", name, "zennit", gradient(rule), theirs)
    for name, (theirs, args) in COMPOSITES.items():
        if name == "excitation":  # (zennit's has no rule for norms, and scales relevance by them)
            continue
        ours = relevance(f"lrp.{name}({stable(name, args)})")
        canonizers = "canonizers=[ResNetBasicBlockCanonizer()]"
        of = f"{theirs}({stable(name, args)}, {canonizers})"
        yield Case("ResNet-18", name, "zennit", ours, of_zennit(of))
    for name, (theirs, args) in COMPOSITES.items():
        ours = relevance(f"lrp.{name}({stable(name, args)})")
        of = f"{theirs}({stable(name, args)}, canonizers=[ResNetBasicBlockCanonizer()])"
        yield Case("ResNet-18, merged", name, "zennit", ours, of_zennit(of))


def captum_cases() -> Iterator[Case]:
    yield Case("VGG", "epsilon", "captum", by_rule("lrp.epsilon(1e-9)"),
               "R = LRP(model).attribute(x, target=3)")  # fmt: skip
    for name, method, rule in (
        ("guided", "GuidedBackprop", "rg.rules.guided_relu"),
        ("deconvnet", "Deconvolution", "rg.rules.deconvnet_relu"),
    ):
        theirs = f"R = captum.{method}(model).attribute(x, target=3)"
        yield Case("VGG", name, "captum", gradient(rule), theirs)
    model = "a residual network of modules"
    yield Case(model, "deep_lift", "captum", DEEP_LIFT, deep_lift("model"))


def lxt_cases() -> Iterator[Case]:
    for model, name, patch in (
        ("ViT", "cp_lrp", "vision_transformer"),
        ("GPT-2", "attn_lrp", "modeling_gpt2, gpt2.attnLRP"),
        ("GPT-2", "cp_lrp", "modeling_gpt2, gpt2.cp_LRP"),
        ("Llama", "attn_lrp", "modeling_llama, llama.attnLRP"),
    ):
        yield Case(model, name, "lxt", relevance(f"lrp.{name}()"), of_lxt(patch))


def wrong_cases() -> Iterator[Case]:
    smooth = GRADIENTS.replace("model", "{}", 1)
    theirs, due = (smooth.format(net, "BetaSmooth(10.0)") for net in ("model", "twin"))
    yield Case("VGG", "beta_smooth", "zennit", gradient("lrp.beta_smooth(10.0)"), theirs, due,
               "what `nn.ReLU(inplace=True)` was given: it has been written over")  # fmt: skip
    plus, small = "epsilon_plus", "1e-12, 1e-12"
    ours, theirs = relevance(f"lrp.{plus}({small})"), of_zennit(f"EpsilonPlus({small})")
    due = of_zennit(f"EpsilonPlus({small})", "twin")
    canonized = f"EpsilonPlus({small}, canonizers=[ResNetBasicBlockCanonizer()])"
    yield Case("ResNet-18", plus, "zennit", ours, theirs, of_zennit(canonized, "twin"),
               "`out += identity`, without the canonizer for this class of model")  # fmt: skip
    for model, note in (
        ("a residual network of functions", "the sums, the mean"),
        ("a mean over pixels, `x.mean((2, 3))`", "the mean: all pixels have the same relevance"),
        ("a layer that runs twice", "both calls get the input of the last"),
        ("`F.linear`", "the layer: it has its gradient"),
    ):
        yield Case(model, plus, "zennit", ours, theirs, due, note)
    ours, theirs = relevance("lrp.epsilon_plus_flat()"), "EpsilonPlusFlat()"
    yield Case("a layer that is made later", "epsilon_plus_flat", "zennit", ours,
               of_zennit(theirs), of_zennit(theirs, "twin"),
               "which layer is first: it takes the one that was made first")  # fmt: skip
    constant = "R = x * torch.autograd.grad(twin(x.requires_grad_())[:, 3].sum(), x)[0]"
    for model, due in (("ViT", ""), ("attention, written out", constant)):
        yield Case(model, "cp_lrp", "zennit", relevance("lrp.cp_lrp()"),
                   of_zennit("EpsilonPlus()"), due, "products, softmax")  # fmt: skip
    basic = ", canonizers=[ResNetBasicBlockCanonizer()]"
    for model, options, note in (
        ("ResNet-18", basic, "a ReLU module that runs twice, the sums"),
        ("a residual network of functions", "", "the sums, the means"),
        ("a layer that runs twice", "", ""),
        ("ViT", None, ""),
    ):
        due = "" if options is None else of_zennit(f"LayerMapComposite({EVERY}{options})", "twin")
        yield Case(model, "epsilon", "captum", of_every("lrp.epsilon(1e-12)"),
                   "R = LRP(model).attribute(x, target=3)", due, note)  # fmt: skip
    for model, due, note in (
        ("ResNet-18", "", ""),
        ("a residual network of functions", deep_lift("twin"), "`F.relu`"),
        ("VGG", "sum", "max pooling: the sum is not the difference of the outputs"),
    ):
        yield Case(model, "deep_lift", "captum", DEEP_LIFT, deep_lift("model"), due, note)
    guided = "R = captum.GuidedBackprop({}).attribute(x, target=3)"
    yield Case("a residual network of functions", "guided", "captum",
               gradient("rg.rules.guided_relu"), guided.format("model"), guided.format("twin"),
               "`F.relu`")  # fmt: skip


EVERY = (
    "[(Activation, Pass()), ((Sum, AvgPool), Norm(1e-12)), ((Linear, BatchNorm), Epsilon(1e-12))]"
)


def of_every(rule: str) -> str:
    """The same rule for linear layers and batch norms."""
    keys = '(F.linear, "Conv2D", F.batch_norm)'
    return relevance(f'{{"Relu": lrp.pass_, **dict.fromkeys({keys}, {rule})}}')


def cases() -> list[Case]:
    return [*composite_cases(), *captum_cases(), *lxt_cases(), *wrong_cases()]
