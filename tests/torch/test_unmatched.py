"""Ops that no rule covers: what is known of them, and what is looked at at each call."""

import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch as rt
from regrad.core import callers
from regrad.errors import PassedOverError
from regrad.torch import below, enclosing
from regrad.torch.host import HOST
from regrad.torch.nodes import types_of
from tests.campaigns import torch_samples

RULES = {"Sigmoid": lambda dy: dy * 7}


@pytest.fixture
def watched(monkeypatch):
    """Return the blocks in which each op is watched where torch dispatches it."""
    found = []

    class Counted(below.Below):
        def __init__(self):
            found.append(self)
            super().__init__()

    monkeypatch.setattr(enclosing, "Below", Counted)
    return found


def function_of(f):
    """Return an `autograd.Function` with this forward pass, and the gradient of the identity."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return f(x)

        @staticmethod
        def backward(ctx, dy):
            return dy

    return Own


def runs(f, rules=RULES, x=None):
    """Run a Function with this forward pass in a scope."""
    x = torch.linspace(-1, 1, 4).requires_grad_() if x is None else x
    with rt.gradient_override_map({k: rg.rules.optional(r) for k, r in rules.items()}):
        return function_of(f).apply(x)


KNOWN = {
    "a quantizer": lambda x: torch.clamp(torch.round(x / 0.5), -8, 7) * 0.5,
    "a spike": lambda x: (x > 0).to(x.dtype),
    "a spike as a float": lambda x: x.gt(0.5).float().detach().clone(),
    "a scale": lambda x: x.abs().mean() / x.numel() * torch.ones_like(x),
    "in place": lambda x: x.clone().mul_(2).relu_().clamp_(max=1),
    "a number": lambda x: x * x.max().item(),
    "made of others": lambda x: torch.where(x > 0, x.square(), x).reshape(2, 2).flatten(),
    "of torch.nn.functional": lambda x: torch._C._nn.gelu(x),
}


@pytest.mark.parametrize("name", KNOWN)
def test_single_ops_in_a_function_are_known_by_their_names(name, watched):
    for _ in range(2):
        runs(KNOWN[name])
    assert not watched


WATCHED = {
    "made of others": torch.diff,
    "written in Python": F.silu,
    "of several": lambda x: torch.chunk(x, 2),
    "in a list": lambda x: torch.cat([x, x]),
    "a name that another op has": lambda x: torch.ops.aten.mul(x, x),
}


@pytest.mark.parametrize("name", WATCHED)
def test_all_else_is_watched_each_time(name, watched):
    for count in (1, 2):
        runs(lambda x: (WATCHED[name](x), x * 1)[1], {"Tanh": lambda dy: dy})
        assert len(watched) == count


def test_what_torch_may_put_before_an_op_is_watched(watched):
    """A copy of what was conjugated lazily, say."""
    for count in (1, 2):
        runs(torch.exp, {"Identity": lambda dy: dy})
        assert len(watched) == count


HIDING = {
    "the op": torch.sigmoid,
    "in place": lambda x: x.clone().sigmoid_(),
    "by its overload": torch.ops.aten.sigmoid.default,
    "inside of another": torch._C._nn.silu,
    "in place, inside": lambda x: torch._C._nn.silu_(x.clone()),
    "inside, in Python": F.silu,
    "the gate of a layer": lambda x: F.glu(x, 0).repeat(2),
}


@pytest.mark.parametrize("name", HIDING)
def test_an_op_that_only_the_second_call_runs_is_refused(name):
    """One forward pass does not tell which ops the next one runs."""
    steps = iter([lambda x: x * 2, lambda x: x * 2, HIDING[name]])
    own = function_of(lambda x: next(steps)(x))
    x = torch.linspace(-1, 1, 4).requires_grad_()
    with rt.gradient_override_map({"Sigmoid": rg.rules.optional(lambda dy: dy)}):
        own.apply(x)
        own.apply(x)
        with pytest.raises(PassedOverError, match="'Sigmoid' would never run"):
            own.apply(x)


class Ours(torch.Tensor):
    """A subclass, whose class might decide on what ops are."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_subclasses_are_watched(watched):
    for count in (1, 2):
        runs(lambda x: (x.clone().as_subclass(Ours) * 2).as_subclass(torch.Tensor))
        assert len(watched) >= count


def test_transformations_part_ops_as_they_like(watched):
    for count in (1, 2):
        runs(lambda x: torch.vmap(lambda each: each * 2)(x))
        assert len(watched) >= count


SAMPLES = """
abs add addmm amax baddbmm clamp cumsum div_no_rounding_mode fill gather index_select lerp mm mul
masked_fill mean nn_functional_gelu nn_functional_hardtanh nn_functional_relu nn_functional_silu
nn_functional_softplus pow prod reshape round rsub sigmoid sign sort square sum tanh to topk where
flatten max_binary max_reduction_no_dim max_reduction_with_dim min_binary min_reduction_with_dim
view_as
"""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", SAMPLES.split())
def test_a_function_runs_what_its_name_says(name):
    class Looks(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            options = kwargs or {}
            known = below.types_run_by(func)
            if known is None or not below.are_plain(args, options):
                return func(*args, **options)
            with below.Below() as seen:
                result = func(*args, **options)
            assert seen.types <= known, func
            return result

    for case in torch_samples.cases(torch_samples.load()[name], 4):
        x, args, options = case.given
        with torch.no_grad(), Looks():
            if not case.in_place:  # (which some shapes do not allow)
                case.function(x, *args, **options)


# -- with a gradient ---------------------------------------------------------------------------


def test_one_node_of_a_kind_is_looked_at_once_and_counted_each_time():
    x = torch.ones(3, requires_grad=True)
    with rt.gradient_override_map({"Sin": rg.rules.optional(lambda dy: dy)}) as used:
        for _ in range(3):
            torch.relu(x)
        F.linear(x, torch.ones(2, 3, requires_grad=True))
    line = test_one_node_of_a_kind_is_looked_at_once_and_counted_each_time.__code__.co_firstlineno
    assert [(r[0], r[1]) for r in used.untouched().rows] == [
        ("Relu", "3"), ("torch.nn.functional.linear (MatMul)", "1"),
    ]  # fmt: skip
    assert [int(r[2].rpartition(":")[2]) - line for r in used.untouched().rows] == [4, 5]


PLACES = {
    "before an op": lambda f, x: torch.relu(f(x)),
    "before the op under a rule": lambda f, x: torch.sin(f(x)),
    "last": lambda f, x: f(torch.sin(x)),
    "alone": lambda f, x: f(x),
    "before a linear": lambda f, x: F.linear(f(x), torch.ones(2, 3)),
    "in a checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
}


class InTwoParts(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("own", [function_of(lambda x: x * 1), InTwoParts], ids=["one", "two"])
def test_functions_of_others_are_listed_wherever_they_run(own, place):
    x = torch.ones(3, requires_grad=True)
    name = f"{__name__}.{own.__qualname__} (autograd.Function)"
    sine = {"Sin": rg.rules.optional(lambda dy: dy)}
    with rt.gradient_override_map(sine) as used:
        PLACES[place](own.apply, x)
        own.apply(x.detach())
    assert [r[1] for r in used.untouched().rows if r[0] == name] == ["1"]
    with rt.gradient_override_map({own: lambda dy, x: 7 * dy, **sine}) as used:
        PLACES[place](own.apply, x)
    assert name not in str(used.untouched())


def test_a_function_without_a_gradient_is_not_listed():
    own = function_of(lambda x: x * 1)
    x = torch.ones(3, requires_grad=True)
    with rt.gradient_override_map({"Sin": rg.rules.optional(lambda dy: dy)}) as used:
        with torch.no_grad():
            own.apply(x)
        function_of(lambda x: own.apply(x)).apply(x)
    assert len(used.untouched()) == 1


def test_nodes_of_other_threads_are_not_those_of_a_call():
    """Each thread counts its own nodes, and may be far ahead."""
    found = []

    def work():
        y = torch.ones(1, 3, requires_grad=True)
        for _ in range(200):
            y = torch.sin(y)
        found.append(y)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    w = torch.ones(2, 3, requires_grad=True)
    rules = {"Sin": rg.rules.optional(lambda dy: dy)}
    with rt.gradient_override_map(rules) as used:
        F.linear(found[0], w, torch.ones(2, requires_grad=True))
    assert [r[0] for r in used.untouched().rows] == ["torch.nn.functional.linear (MatMul)"]


def test_lines_of_code_that_is_made_anew_are_its_own():
    for n in range(1, 2 * callers.KEPT // 100):
        scope = {"find": callers.find_caller}
        exec(compile("\n" * n + "def f():\n    return find()", f"made_{n}.py", "exec"), scope)
        assert scope["f"]() == f"made_{n}.py:{n + 2}" == scope["f"]()
    assert len(callers._LINES) <= callers.KEPT


def test_two_calls_on_a_line_are_of_that_line():
    a, b = (callers.find_caller(), callers.find_caller())
    assert a == b
    assert a.endswith(f":{sys._getframe().f_lineno - 2}")


def test_code_is_not_kept_alive_by_its_lines():
    scope = {"find": callers.find_caller}
    exec("def f():\n    return find()", scope)
    assert scope["f"]() == "<string>:2"
    code = weakref.ref(scope.pop("f").__code__)
    gc.collect()
    assert code() is None


# -- the names of autograd's nodes -----------------------------------------------------------------

# Those of the newest torch that belong to no op type of regrad's. Some compute one among others
# (`Lerp` multiplies), as steps that a reader of the program does not see; `untouched()` lists them.
OF_NO_TYPE = """
AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D Addcdiv Addcmul Addr
AffineGridGenerator Angle AsStrided AsStridedScatter BatchNorm BatchNormNoUpdate
BatchNormWithUpdate Bernoulli BinaryCrossEntropy BlockDiag Cauchy Cdist Celu ChannelShuffle
CholeskyInverse CholeskySolve Chunk Coalesce Col2Im Complex ConstantPadNd ConvTbc Copy CtcLoss
CudnnAffineGridGenerator CudnnBatchNorm CudnnConvolutionTranspose CudnnCtcLoss CudnnGridSampler
Cummax Cummin Deg2Rad DiagEmbed Diagonal DiagonalScatter Dist Embedding EmbeddingBag
EmbeddingBagDense EmbeddingDense EmbeddingRenorm Eq EuclideanDist Exp2 Expand Exponential
FakeQuantizeLearnablePerChannelAffine FakeQuantizeLearnablePerTensorAffine
FakeQuantizePerChannelAffineCachemask FakeQuantizePerTensorAffineCachemask
FakeQuantizePerTensorAffineCachemaskTensorQparams FftC2C FftC2R FftR2C Fill Flip Fmod ForeachNorm
Frac FractionalMaxPool2D FractionalMaxPool3D Frexp FusedDropout FusedMovingAvgObsFqHelper
FusedRmsNorm Gather Ge Geometric Geqrf GridSampler2D GridSampler2DCpuFallback GridSampler3D Gt
Hardshrink HuberLoss I0 Igamma Igammac Im2Col Index IndexAdd IndexCopy IndexFill IndexPut
IndexPutImpl IndexReduce IndexSelect Kthvalue LazyClone Ldexp Le Lerp Lift LiftFresh LinalgCross
LinalgDet LinalgEig LinalgEigh LinalgHouseholderProduct LinalgLstsq LinalgLu LinalgLuFactorEx
LinalgLuSolve LinalgMatrixSqrth LinalgPinv LinalgPolar LinalgQr LinalgSlogdet LinalgSolveEx
LinalgSolveTriangular LinalgSvd LinalgVectorNorm LogNormal Logaddexp2 Logcumsumexp Logit Logsumexp
Lt LuUnpack MaskedFill MaskedScatter MaskedSelect MaxUnpool2D MaxUnpool3D Median MiopenBatchNorm
MiopenConvolutionTranspose MiopenCtcLoss MkldnnAdaptiveAvgPool2D Mode MpsConvolutionTranspose
MseLoss MultiMarginLoss MultilabelMarginLoss Mvlgamma Nanmedian Nansum NarrowCopy NativeBatchNorm
NativeBatchNormLegit NativeBatchNormLegitNoTraining NativeDropout NativeGroupNorm NativeLayerNorm
Ne NegView NestedFromPadded NestedFromPaddedTensor NestedGetValues NestedTensorFromMask
NestedTensorFromTensorList NestedViewFromBuffer NestedViewFromJagged Nextafter NllLoss NllLoss2D
Norm Normal Ormqr PackPaddedSequence Pdist Permute PinMemory PixelShuffle PixelUnshuffle Poisson
Polar Polygamma Put Rad2Deg Random ReflectionPad1D ReflectionPad2D ReflectionPad3D Renorm Repeat
ReplicationPad1D ReplicationPad2D ReplicationPad3D Roll Rot90 RreluWithNoise
RreluWithNoiseFunctional Scatter ScatterAdd ScatterReduce SegmentReduce Select SelectScatter
SendRpc Slice SliceInverse SliceScatter SlowConvTranspose2D SlowConvTranspose3D SmoothL1Loss
SoftMarginLoss Softshrink Sort SparseCompressedTensor SparseCooTensorWithDimsAndTensors SparseMask
SpecialBesselJ0 SpecialBesselJ1 SpecialBesselY0 SpecialBesselY1 SpecialEntr SpecialErfcx
SpecialI0E SpecialI1 SpecialI1E SpecialLogNdtr SpecialModifiedBesselI0 SpecialModifiedBesselI1
SpecialModifiedBesselK0 SpecialModifiedBesselK1 SpecialNdtri SpecialXlog1Py SpecialZeta Split
SplitWithSizes Squeeze StandardGamma StandardGammaGrad Std StdMean T Take
TestAutogradMultipleDispatch TestAutogradMultipleDispatchView TestWarnInAutograd Threshold ToCopy
ToDense ToMkldnn ToPaddedTensor ToSparse ToSparseBsc ToSparseBsr ToSparseCsc ToSparseCsr Topk
Trace Transpose TriangularSolve Tril Trilinear Triu Unbind UndefinedGrad Unfold Uniform Unique
Unique2 UniqueConsecutive UniqueDim UniqueDimConsecutive UnsafeIndex UnsafeIndexPut
UnsafeMaskedIndex UnsafeMaskedIndexPutAccumulate UnsafeSplit UnsafeSplitWithSizes Unsqueeze
UpsampleBicubic2D UpsampleBicubic2DAa UpsampleBilinear2D UpsampleBilinear2DAa UpsampleLanczos2DAa
UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D
UpsampleNearestExact2D UpsampleNearestExact3D UpsampleTrilinear3D Values Var VarMean ViewAsComplex
ViewAsReal WeightNormInterface Zero
"""


@pytest.mark.skipif(not HOST.is_tested or HOST.newest not in torch.__version__, reason="its names")
def test_each_node_of_torch_is_of_an_op_type_or_known_to_be_of_none():
    nodes = {
        name.partition("Backward")[0] for name in dir(torch._C._functions) if "Backward" in name
    }
    none = {name for name in nodes if not types_of(f"{name}Backward1ScalarList")}
    assert none - {""} == {*OF_NO_TYPE.split()}


FOREACH = {
    "abs": ("Abs", ()), "exp": ("Exp", ()), "sqrt": ("Sqrt", ()), "sigmoid": ("Sigmoid", ()),
    "add": ("AddV2", ([2.0], "tensors", 2.0, "tensor")), "sub": ("Sub", ([2.0], "tensors", 2.0)),
    "mul": ("Mul", ([2.0], "tensors", 2.0, "tensor")),
    "div": ("RealDiv", ([2.0], "tensors", 2.0, "tensor")),
    "pow": ("Pow", ([2.0], "tensors", 2.0)), "clamp_max": ("ClipByValue", ([2.0], "tensors", 2.0)),
    "maximum": ("Maximum", ("tensors",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREACH)
def test_functions_of_lists_of_tensors_are_refused(name):
    """The kind of argument stands in the name of the node."""
    op_type, others = FOREACH[name]
    x = torch.rand(3, requires_grad=True)
    own = {"tensors": [torch.rand(3)], "tensor": torch.tensor(2.0)}
    for other in others or (None,):
        args = () if other is None else (own[other] if isinstance(other, str) else other,)
        for function in (f"_foreach_{name}", f"_foreach_{name}_"):
            with rt.gradient_override_map({"Sin": rg.rules.optional(lambda dy: dy)}):
                getattr(torch, function)([x * 1], *args)
            with pytest.raises(PassedOverError, match=op_type), rt.gradient_override_map({
                op_type: rg.rules.optional(lambda dy, builtin: builtin(dy))
            }):  # fmt: skip
                getattr(torch, function)([torch.sin(x)], *args)
