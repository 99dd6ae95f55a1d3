"""The quantizers of PyTorch, torchao, brevitas and transformers, and ours with their options."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
from regrad.rules import quantize as Q

LINEAR, BOTH = (nn.Linear,), (nn.Linear, nn.Conv2d)
ALL = ("MLP", "ConvNet", "ViT", "Llama")
DENSE = ("MLP", "ViT", "Llama")
F32, F64 = torch.float32, torch.float64


class Way(NamedTuple):
    """One of our quantizers for the weights or the inputs of a layer.

    Args:
        q: The quantizer.
        state: Its state as a function of the values and the parameter that learns, or None.
        shown: The call, as the page has it; "": that of the quantizer.
        factor: A number by which the value is multiplied.
    """

    q: Q.Quantizer
    state: Callable[[torch.Tensor, Any], Mapping[str, Any]] | None = None
    shown: str = ""
    factor: float = 1.0


class Case(NamedTuple):
    """A quantizer of a peer, and ours.

    Args:
        package: The peer.
        name: The peer's name of it.
        convention: The peer's conventions, in words.
        edit: A function of a layer that returns the peer's layer.
        weights, inputs: Ours.
        models: The names of the models.
        dtype: Of the models.
        kinds: The layers that the peer has it for.
        learned: A function of the peer's layer that returns its parameter, which learns.
        usual: Our options as they are if not given, for weights and inputs.
        even: As in `quantize_models.built`.
        off: The parts in which the peer is elsewhere ("value", "inputs", "weights"), by its note.
    """

    package: str
    name: str
    convention: str
    edit: Callable[[Any], nn.Module]
    weights: Way | None = None
    inputs: Way | None = None
    models: tuple[str, ...] = ALL
    dtype: torch.dtype = F64
    kinds: tuple[type, ...] = BOTH
    learned: Callable[[Any], nn.Parameter] | None = None
    usual: tuple[Q.Quantizer | None, Q.Quantizer | None] = (None, None)
    even: tuple[str | int, float] | None = None
    off: tuple[str, ...] = ()


# -- our side --------------------------------------------------------------------------------------


def rules(case: Case, model: nn.Module, given: Mapping[str, nn.Parameter]) -> dict[Any, Any]:
    """Return the map for an unedited model: one rule, or one for each layer if steps learn."""
    keys = {nn.Linear: F.linear, nn.Conv2d: "Conv2D"}
    known = layers(model, case.kinds)
    if case.learned is None:
        return {keys[type(layer)]: rg.replace(value_of(case)) for _, layer in known}
    return {
        rg.at(path, keys[type(layer)]): rg.replace(value_of(case), step=given[path])
        for path, layer in known
    }


def value_of(case: Case) -> Callable[..., torch.Tensor]:
    """Return the value of a layer, with quantized weights and inputs."""

    def of(way: Way | None, v: torch.Tensor, step: Any) -> torch.Tensor:
        if way is None:
            return v
        state = way.state(v, step) if way.state else {}
        return way.factor * way.q(v, **state) if way.factor != 1 else way.q(v, **state)

    def plain(x: Any, w: Any, bias: Any, forward: Any) -> Any:
        return forward(of(case.inputs, x, None), of(case.weights, w, None), bias)

    def learning(x: Any, w: Any, bias: Any, forward: Any, step: Any) -> Any:
        return forward(of(case.inputs, x, step), of(case.weights, w, step), bias)

    return learning if case.learned else plain


def layers(model: nn.Module, kinds: tuple[type, ...]) -> list[tuple[str, nn.Module]]:
    return [(path, m) for path, m in model.named_modules() if type(m) in kinds]


def edited(case: Case, model: nn.Module) -> nn.Module:
    """Return the model with the peer's layers, which have copies of its weights."""
    model = copy.deepcopy(model)
    for path, layer in layers(model, case.kinds):
        model.set_submodule(path, case.edit(layer))
    return model


# -- their side ------------------------------------------------------------------------------------


class Edited(nn.Module):
    """A layer with quantizers of a peer that are functions or modules of their own."""

    def __init__(self, layer: Any, weights: Any = None, inputs: Any = None, step: Any = None):
        super().__init__()
        self.layer = [layer]
        self.weight, self.bias, self.step = layer.weight, layer.bias, step
        self.weights, self.inputs = weights, inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def of(q: Any, v: torch.Tensor) -> torch.Tensor:
            return v if q is None else q(v) if self.step is None else q(v, self.step)

        x, w = of(self.inputs, x), of(self.weights, self.weight)
        if isinstance(self.layer[0], nn.Linear):
            return F.linear(x, w, self.bias)
        return self.layer[0]._conv_forward(x, w, self.bias)


def fixed(v: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(v, 2.0**-6, 3, -8, 7)


def by_channel(w: torch.Tensor) -> torch.Tensor:
    scales, zeros = torch.full((len(w),), 2.0**-6), torch.full((len(w),), 3)
    return torch.fake_quantize_per_channel_affine(w, scales, zeros.int(), 0, -8, 7)


def learned(w: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    op, factor = torch._fake_quantize_learnable_per_tensor_affine, (w.numel() * 7) ** -0.5
    return op(w, step, torch.zeros(1), -8, 7, factor)


def learned_by_channel(w: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    factor, zeros = (w[0].numel() * 7) ** -0.5, torch.zeros(len(w))
    op = torch._fake_quantize_learnable_per_channel_affine
    return op(w, step, zeros, 0, -8, 7, factor)


def given(v: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
    s = 2.0**-6
    return {"low": torch.tensor(s * (-8 - 3)), "high": torch.tensor(s * (7 - 3))}


def torch_cases() -> list[Case]:
    from torch.ao import quantization as ao

    def fake(observer: Any, low: int, high: int, dtype: Any, scheme: Any, **more: Any) -> Any:
        return ao.FakeQuantize(observer, low, high, dtype=dtype, qscheme=scheme, **more)

    def weights() -> Any:
        scheme = torch.per_tensor_symmetric
        return fake(ao.MinMaxObserver, -128, 127, torch.qint8, scheme)

    def channels() -> Any:
        scheme = torch.per_channel_symmetric
        return fake(ao.PerChannelMinMaxObserver, -128, 127, torch.qint8, scheme, ch_axis=0)

    def inputs() -> Any:
        return fake(ao.MinMaxObserver, 0, 255, torch.quint8, torch.per_tensor_affine)

    def step_of(layer: Any, q: Any, n: int) -> Edited:
        return Edited(layer, q, step=nn.Parameter(torch.full((n,), 0.02)))

    tie, range_of = "after; /127.5", "low=s (lo - z), high=s (hi - z)"
    static = Q.affine(4, symmetric=False, range="minmax")
    by = static_by_channel = Q.affine(4, symmetric=False, range="minmax", per="channel")
    u8 = Q.affine(8, signed=False, symmetric=False)
    new = "the step has a gradient; "
    return [
        Case("torch.ao", "FakeQuantize, per_tensor_symmetric", tie,
             lambda m: Edited(m, weights()), Way(Q.affine(8, largest="tie")),
             dtype=F32, usual=(Q.affine(8), None), even=("tensor", 127.5)),
        Case("torch.ao", "FakeQuantize, per_channel_symmetric; quint8 inputs", tie,
             lambda m: Edited(m, channels(), inputs()),
             Way(Q.affine(8, per="channel", largest="tie")), Way(u8),
             dtype=F32, usual=(Q.affine(8), Q.affine(8)), even=("channel", 127.5)),
        Case("torch", "fake_quantize_per_tensor_affine", "after; a given scale and zero point",
             lambda m: Edited(m, fixed), Way(static, given, f"{static}({range_of})"),
             dtype=F32),
        Case("torch", "fake_quantize_per_channel_affine", "after; given scales and zero points",
             lambda m: Edited(m, by_channel), Way(by, given, f"{static_by_channel}({range_of})"),
             dtype=F32),
        Case("torch", "_fake_quantize_learnable_per_tensor_affine", new + "after",
             lambda m: step_of(m, learned, 1),
             Way(Q.lsq(4, clip="after"), lambda w, s: {"step": s}), dtype=F32,
             learned=lambda m: m.step, usual=(Q.lsq(4), None)),
        Case("torch", "_fake_quantize_learnable_per_channel_affine", new + "after",
             lambda m: step_of(m, learned_by_channel, len(m.weight)),
             Way(Q.lsq(4, clip="after", per="channel"), by_row), dtype=F32,
             learned=lambda m: m.step, usual=(Q.lsq(4, per="channel"), None)),
    ]  # fmt: skip


def by_row(w: torch.Tensor, step: torch.Tensor) -> dict[str, torch.Tensor]:
    """The steps of a vector, one for each row of weights of any rank."""
    return {"step": step.reshape(-1, *[1] * (w.dim() - 1))}


def of_brevitas(q: Any, inputs: Any = None) -> Callable[[Any], nn.Module]:
    import brevitas.nn as bn

    def edit(layer: Any) -> nn.Module:
        options = {"weight_quant": q, "input_quant": inputs, "bias": layer.bias is not None}
        if isinstance(layer, nn.Linear):
            made = bn.QuantLinear(layer.in_features, layer.out_features, **options)
        else:
            made = bn.QuantConv2d(
                layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride,
                layer.padding, groups=layer.groups, **options)  # fmt: skip
        made.to(layer.weight.dtype).load_state_dict(layer.state_dict(), strict=False)
        return made

    return edit


def within(v: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
    most = v.abs().max() * (127 / 128)
    return {"low": -most, "high": most}


def constant(v: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
    return {"low": torch.tensor(-0.1), "high": torch.tensor(0.1)}


def brevitas_cases() -> list[Case]:
    from brevitas import quant

    class Learned(quant.Int8WeightPerTensorFloat):
        scaling_impl_type = "parameter_from_stats"
        narrow_range = False
        bit_width = 4

    def scale(layer: Any) -> nn.Parameter:
        return layer.weight_quant.tensor_quant.scaling_impl.value

    straight = {"clip": "straight", "scale_gradient": True, "narrow": True}
    acts = Q.affine(8, range="minmax", scale_gradient=True)
    three = Q.affine(2, clip="straight", narrow=True, range="minmax")
    words = "straight; the scale has a gradient; /127, narrow"
    return [
        Case("brevitas", "Int8WeightPerTensorFloat", words,
             of_brevitas(quant.Int8WeightPerTensorFloat), Way(Q.affine(8, **straight)),
             usual=(Q.affine(8), None)),
        Case("brevitas", "Int8WeightPerChannelFloat", words,
             of_brevitas(quant.Int8WeightPerChannelFloat),
             Way(Q.affine(8, per="channel", **straight)), usual=(Q.affine(8, per="channel"), None)),
        Case("brevitas", "ShiftedUint8WeightPerTensorFloat", "as above, asymmetric",
             of_brevitas(quant.ShiftedUint8WeightPerTensorFloat),
             Way(Q.affine(8, signed=False, symmetric=False, clip="straight", scale_gradient=True)),
             usual=(Q.affine(8, signed=False, symmetric=False), None)),
        Case("brevitas", "SignedBinaryWeightPerTensorConst", "a scale of 0.1; straight",
             of_brevitas(quant.SignedBinaryWeightPerTensorConst),
             Way(Q.sign("identity"), None, "0.1 * sign('identity')", float(torch.tensor(0.1))),
             usual=(Q.sign(), None)),
        Case("brevitas", "SignedTernaryWeightPerTensorConst", "a scale of 0.1; above half of it",
             of_brevitas(quant.SignedTernaryWeightPerTensorConst),
             Way(three, constant, f"{three}(low=-0.1, high=0.1)"), usual=(Q.ternary(), None)),
        Case("brevitas", "Int8WeightPerTensorFloat, 4 bits, parameter_from_stats",
             "the range has a gradient, that of the step as it is; after; /8",
             of_brevitas(Learned), Way(Q.lsq(4, clip="after", gradient_scale=1.0),
                                    lambda w, p: {"step": p / 8}, "lsq(bits=4, clip='after', "
                                    "gradient_scale=1.0)(step=range / 8)"),
             learned=scale, usual=(Q.lsq(4), None)),
        Case("brevitas", "Int8ActPerTensorFloat, the first 300 steps",
             "after; the scale has a gradient; /128",
             of_brevitas(None, quant.Int8ActPerTensorFloat), None,
             Way(acts, within, f"{acts}(high=127/128 max|v|)"), usual=(None, Q.affine(8))),
    ]  # fmt: skip


DENSE_ONLY: dict[str, Any] = {"models": DENSE, "dtype": F32, "kinds": LINEAR}


def torchao_integers() -> list[Case]:
    from torchao.quantization import qat
    from torchao.quantization.qat.linear import FakeQuantizedLinear
    from torchao.quantization.quant_primitives import ZeroPointDomain

    def intx(weights: Any = None, inputs: Any = None) -> Callable[[Any], nn.Module]:
        return lambda layer: FakeQuantizedLinear.from_linear(layer, inputs, weights)

    def config(*args: Any, **options: Any) -> Any:
        return qat.IntxFakeQuantizeConfig(*args, **options)

    def learning(layer: Any) -> nn.Module:
        made = intx(config(torch.int4, group_size=32, is_symmetric=True, is_dynamic=False,
                           range_learning=True))(layer)  # fmt: skip
        qat.initialize_fake_quantizers(made, (torch.zeros(1, layer.in_features),))
        return made

    def of_range(w: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
        groups = w.detach().unflatten(-1, (-1, 32))
        low, high = (f(-1, keepdim=True) for f in (groups.amin, groups.amax))
        return {"step": (high - low) / 15, "offset": low}

    int8 = config(torch.int8, "per_token", is_symmetric=False)
    int4 = config(torch.int4, group_size=32, is_symmetric=True)
    token = Q.affine(8, per="token", symmetric=False)
    return [
        Case("torchao", "IntxFakeQuantizer int8 per_token, int4 groups (8da4w)", "after; /7.5",
             intx(int4, int8), Way(Q.affine(4, per=32, largest="tie")), Way(token), **DENSE_ONLY,
             usual=(Q.affine(4, per=32), Q.affine(8, per="token")), even=(32, 7.5)),
        Case("torchao", "IntxFakeQuantizer uint4 groups, ZeroPointDomain.FLOAT",
             "after; the range need not have 0 in it",
             intx(config(torch.uint4, group_size=32, is_symmetric=False,
                         zero_point_domain=ZeroPointDomain.FLOAT,
                         zero_point_precision=F32)),
             Way(Q.lsq_plus(4, per=32, clip="after"), of_range, "lsq_plus(bits=4, per=32, "
                 "clip='after')(step=(max v - min v) / 15, offset=min v)"), **DENSE_ONLY,
             usual=(Q.affine(4, per=32), None)),
        Case("torchao", "IntxFakeQuantizer uint4 groups, asymmetric (its default domain, INT)",
             "its zero points are real numbers, which are cast to integers, so most are 0, and "
             "negative weights become 0",
             intx(config(torch.uint4, group_size=32, is_symmetric=False)),
             Way(Q.affine(4, per=32, signed=False, symmetric=False)), **DENSE_ONLY,
             off=("value", "inputs", "weights")),
        Case("torchao", "IntxFakeQuantizer int8 per_channel", "after; /127.5",
             intx(config(torch.int8, "per_channel", is_symmetric=True)),
             Way(Q.affine(8, per="channel", largest="tie")), **DENSE_ONLY,
             usual=(Q.affine(8, per="channel"), None), even=("channel", 127.5)),
        Case("torchao", "IntxFakeQuantizer int4 groups, range_learning",
             "the step has a gradient as it is; after", learning,
             Way(Q.lsq(4, per=32, clip="after", gradient_scale=1.0),
                 lambda w, s: {"step": s.unsqueeze(-1)}), **DENSE_ONLY,
             learned=lambda m: m.weight_fake_quantizer.scale, usual=(Q.lsq(4, per=32), None),
             even=(32, 7.5)),
    ]  # fmt: skip


def torchao_floats() -> list[Case]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.qat.mx import MXFakeQuantizeConfig, MXFakeQuantizedLinear
    from torchao.quantization import qat
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    def mx(mode: str, dtype: Any) -> Callable[[Any], nn.Module]:
        made = MXFakeQuantizeConfig(dtype, 32, ScaleCalculationMode[mode])
        return lambda layer: MXFakeQuantizedLinear.from_linear(layer, made, made)

    def nvfp4(v: torch.Tensor) -> torch.Tensor:
        x = v.detach().flatten(0, -2).contiguous()
        q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
        return v + (q.dequantize(v.dtype).view_as(v) - v).detach()

    def nf4(w: torch.Tensor) -> torch.Tensor:
        return w + (to_nf4(w.detach(), 64, 32).get_original_weight() - w).detach()

    def float8(layer: Any) -> nn.Module:
        q = qat.Float8FakeQuantizer(qat.Float8FakeQuantizeConfig())
        return Edited(layer, q, q)

    fp4, fp8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    return [
        Case("torchao", "MXFakeQuantizedLinear MXFP4, FLOOR", "a power of two below the largest",
             mx("FLOOR", fp4), Way(Q.mx()), Way(Q.mx()), ("Llama",), F32, LINEAR),
        Case("torchao", "MXFakeQuantizedLinear MXFP8, FLOOR", "a power of two below the largest",
             mx("FLOOR", fp8), Way(Q.mx("fp8_e4m3")), Way(Q.mx("fp8_e4m3")), ("Llama",), F32,
             LINEAR),
        Case("torchao", "MXFakeQuantizedLinear MXFP4, RCEIL (its default)",
             "a power of two so large that nothing saturates; ours is the specification's",
             mx("RCEIL", fp4), Way(Q.mx()), Way(Q.mx()), ("Llama",), F32, LINEAR,
             off=("value", "inputs", "weights")),
        Case("torchao", "MXFakeQuantizedLinear with biases", "biases get no gradient",
             mx("FLOOR", fp4), Way(Q.mx()), Way(Q.mx()), ("MLP",), F32, LINEAR, off=("weights",)),
        Case("torchao", "NVFP4Tensor", "scales of blocks in e4m3 from 2⁻⁶ on, ours from 2⁻⁹: "
             "apart in blocks below 1/28,672 of the largest number",
             lambda m: Edited(m, nvfp4, nvfp4), Way(Q.nvfp4()), Way(Q.nvfp4()), **DENSE_ONLY),
        Case("torchao", "to_nf4", "scales of blocks are quantized, too",
             lambda m: Edited(m, nf4), Way(Q.nf4()), None, ("Llama",), F32, LINEAR,
             off=("value", "inputs", "weights")),
        Case("torchao", "Float8FakeQuantizer, per row",
             "its backward pass goes through the cast and the scale: gradients are rounded to "
             "float8, too, and small ones are 0",
             float8, Way(Q.fp8(per="channel")), Way(Q.fp8(per="token")), **DENSE_ONLY,
             off=("inputs", "weights")),
    ]  # fmt: skip


def transformers_cases() -> list[Case]:
    import torch._dynamo

    torch._dynamo.config.disable = True  # both are compiled
    from transformers.integrations.bitnet import ActQuant, WeightQuant

    return [
        Case("transformers", "WeightQuant, ActQuant (BitNet b1.58)",
             "straight; computed in float32",
             lambda m: Edited(m, WeightQuant.apply, ActQuant.apply), Way(Q.absmean()),
             Way(Q.absmax()), DENSE, F32, LINEAR),
    ]  # fmt: skip


def cases() -> list[Case]:
    makers = torch_cases, torchao_integers, torchao_floats, brevitas_cases, transformers_cases
    return [case for make in makers for case in make()]
