"""`builtin` and `forward` in rules for PyTorch: three times torch's own gradient, in every way.

And rules that name the bias, and the other parameters of linear, convolutions and norms.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import GradientError, RuleError
from tests.helpers.hosts import scaled, scaled_by_regrad
from tests.torch.common import D, close, fired, function, grad, numbers, override, under

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# -- three ways to write it ------------------------------------------------------------------------


def scaled_dy(dy, builtin):  # written with torch's functions
    return builtin(torch.mul(dy, 3))


RULES = [scaled, scaled_dy, scaled_by_regrad]
three_ways = pytest.mark.parametrize("rule", RULES)


def gradients(f, xs, order=1):
    """Those of a weighted sum of what `f(*xs)` returns."""
    xs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in xs]
    leaves = [x for x in xs if x.requires_grad]
    y = f(*xs)
    weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    for _ in range(order):
        total, options = (y * weights).sum(), {"create_graph": True, "materialize_grads": True}
        found = torch.autograd.grad(total, leaves, **options)
        y, weights = torch.cat([dx.flatten() for dx in found]), 0.7
    return [dx.detach() for dx in found]


def in_scope(key, rule, f, way="eager", scopes=None):
    """Return a function that runs another one under a rule."""

    def run(*xs):
        with override({key: rule}) as used:
            y = WAYS[way](f)(*xs)
        if scopes is not None:
            scopes.append(used)
        return y

    return run


# -- every way -------------------------------------------------------------------------------------

CASES = {
    "Tanh": ("Tanh", torch.tanh, [numbers(3)]),
    "a product of itself": ("Mul", lambda x: x * x, [numbers(3)]),
    "broadcast": ("Mul", torch.mul, [numbers(3), numbers(2, 3)]),
    "a number": ("Mul", lambda x: x * 2.0, [numbers(3)]),
    "MatMul": ("MatMul", torch.matmul, [numbers(2, 3), numbers(3, 4)]),
    "in place": ("Relu", lambda x: F.relu(x * 1, inplace=True), [numbers(5)]),
    "a list": ("ConcatV2", lambda a, b: torch.cat([a, b]), [numbers(2), numbers(3)]),
    "several outputs": (torch.sort, lambda x: torch.sort(x)[0], [numbers(3, 2)]),
    "linear": (F.linear, F.linear, [numbers(3, 2), numbers(4, 2), numbers(4)]),
    "layer norm": (F.layer_norm, lambda x, w, b: F.layer_norm(x, (3,), w, b),
                   [numbers(2, 3), numbers(3, seed=1), numbers(3, seed=2)]),
}  # fmt: skip
WAYS = {
    "eager": lambda f: f,
    "checkpoint": lambda f: lambda *xs: checkpoint(f, *xs, use_reentrant=False),
    "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


@pytest.mark.slow(but=30)
@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
@three_ways
@pytest.mark.parametrize("name", CASES)
def test_three_times_torchs_gradient(name, rule, way):
    key, f, xs = CASES[name]
    if rule is scaled_dy and name == "several outputs":
        rule = lambda dy, builtin: builtin((3 * dy[0], None))  # noqa: E731
    expected = [3 * dx for dx in gradients(f, xs)]
    close(gradients(in_scope(key, rule, f, way), xs), expected)


@three_ways
@pytest.mark.parametrize("name", ["Tanh", "MatMul", "layer norm", "linear"])
def test_higher_orders_are_those_of_torch(name, rule):
    key, f, xs = CASES[name]
    for order in (2, 3) if name in ("Tanh", "layer norm") else (2,):  # (of products, 0 from there)
        expected = [3 * dx for dx in gradients(f, xs, order)]
        close(gradients(in_scope(key, rule, f), xs, order), expected)


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum()),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: (f(x) ** 2).sum())),
    "grad of vmap": lambda f: torch.func.grad(lambda x: (torch.func.vmap(f)(x) ** 2).sum()),
    "jacrev": torch.func.jacrev,
}


@pytest.mark.slow(but=3)
@pytest.mark.versions
@three_ways
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_under_torch_func(transform, rule, compiled):
    f, x = lambda x: x.softmax(-1), numbers(4, 3)
    expected = 3 * TRANSFORMS[transform](f)(x)
    with override({"Softmax": rule}) as used:
        run = TRANSFORMS[transform](f)
        got = (torch.compile(run, backend="aot_eager") if compiled else run)(x)
    used.assert_fired()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


# -- what the forward pass changes, or draws -------------------------------------------------------


@three_ways
@pytest.mark.parametrize("way", WAYS)
def test_buffers_change_once(way, rule):
    found = []
    for ruled in (False, True):
        norm, leaf = nn.BatchNorm1d(3).double(), numbers(5, 3).requires_grad_()
        f = in_scope(F.batch_norm, rule, norm, way) if ruled else WAYS[way](norm)
        (f(leaf) ** 3).sum().backward()
        found.append([norm.running_mean, leaf.grad, norm.weight.grad, norm.bias.grad])
    (mean, *dxs), (ours, *got) = found
    torch.testing.assert_close(ours, mean)
    close(got, [3 * dx for dx in dxs])


def test_random_numbers_are_those_of_the_forward_pass():
    x = torch.ones(100, requires_grad=True)
    y = under({F.dropout: scaled}, F.dropout, x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, 3 * y.detach()) and set(x.grad.tolist()) == {0.0, 6.0}


@pytest.mark.parametrize(("rule", "way"), [(scaled, "checkpoint"), (scaled_by_regrad, "eager")])
def test_random_numbers_that_would_be_drawn_again_are_refused(rule, way):
    x = torch.ones(100, requires_grad=True)
    with override({F.dropout: rule}):
        y = WAYS[way](lambda x: F.dropout(x, 0.5))(x)
    with pytest.raises(GradientError, match="draws random numbers"):
        y.sum().backward()


# -- Functions -------------------------------------------------------------------------------------


# A product, with a number and with another gradient than its own.
of_scaled = lambda dy, a, k, b: (dy * b.sin() * k, None, dy * a.cos() * k)  # noqa: E731
Scaled = function(lambda a, k, b: a * b * k, of_scaled)
InNewForm = function(lambda a, k, b: a * b * k, of_scaled, newer=True)


@pytest.mark.versions
@pytest.mark.parametrize("way", ["eager", "checkpoint"])
@three_ways
@pytest.mark.parametrize("function", [Scaled, InNewForm])
def test_a_function_has_its_own_backward(function, rule, way):
    xs, scopes = [numbers(3), numbers(3, seed=1)], []
    f = lambda a, b: function.apply(a, 2, b)  # noqa: E731
    ruled = in_scope(function, rule, f, way, scopes)
    close(gradients(ruled, xs), [3 * dx for dx in gradients(f, xs)])
    scopes[0].assert_fired()
    a, b = xs
    weights = torch.linspace(1, 2, 3, dtype=D)
    close(gradients(ruled, xs), [6 * b.sin() * weights, 6 * a.cos() * weights])
    close(gradients(ruled, xs, 2), [-4.2 * a.sin() * weights, 4.2 * b.cos() * weights])


# -- rules.builtin, forward ------------------------------------------------------------------------


def test_the_builtin_of_a_callable_is_a_value():
    xs, scopes = CASES["linear"][2], []
    ruled = in_scope(F.linear, rg.rules.builtin(F.linear), F.linear, scopes=scopes)
    close(gradients(ruled, xs), gradients(F.linear, xs))
    assert [(hit.rule, hit.ran) for hit in scopes[0].hits] == [("linear", 1)]


def test_builtins_that_do_not_fit_are_refused():
    with pytest.raises(RuleError, match=r"builtin\(relu\) is not the gradient of 'Tanh'"):
        override({"Tanh": rg.rules.builtin(F.relu)}).__enter__()
    with pytest.raises(RuleError, match="an op type of regrad"):
        rg.gradient_override_map({"Relu": rg.rules.builtin(F.relu)}).__enter__()
    with pytest.raises(RuleError, match="Use the parameter builtin"):
        rg.rules.builtin(F.relu)(torch.ones(1))


@pytest.mark.parametrize("way", WAYS)
def test_forward_is_the_op(way):
    x = numbers(3).requires_grad_()
    rule = lambda dy, x, forward: dy * forward(x + 1)  # noqa: E731
    y = in_scope("Tanh", rule, torch.tanh, way)(x)
    close([grad(y, x)], [(x + 1).tanh()])


def test_forward_of_several_inputs_and_numbers():
    x, twice = numbers(3).requires_grad_(), lambda x: x * 2.0
    y = in_scope("Mul", lambda dy, a, b, forward: (dy * forward(a + 1, b), None), twice)(x)
    close([grad(y, x)], [2 * (x + 1)])
    y = in_scope("Mul", lambda dy, a, b, forward: (dy * forward(a, 3.0), None), twice)(x)
    with pytest.raises(RuleError, match=r"an input is the number 2\.0, and must stay this number"):
        y.sum().backward()


# -- rules that name the bias and other parameters ------------------------------------------------

G = nn.grad


def sizes(*shapes):
    return [numbers(*shape) for shape in shapes]


CHANNELS = [numbers(3, seed=1), numbers(3, seed=2)]
STRIDED = lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2)  # noqa: E731
LAYERS = {
    "linear": (F.linear, F.linear, sizes((3, 2), (4, 2), (4,))),
    "conv1d": (F.conv1d, F.conv1d, sizes((2, 3, 8), (4, 3, 2), (4,))),
    "conv2d": ("Conv2D", F.conv2d, sizes((2, 3, 4, 4), (4, 3, 2, 2), (4,))),
    "conv3d": ("Conv3D", F.conv3d, sizes((1, 2, 3, 3, 3), (3, 2, 2, 2, 2), (3,))),
    "conv_transpose2d": (F.conv_transpose2d, STRIDED, sizes((2, 3, 4, 4), (3, 4, 2, 2), (4,))),
    "layer_norm": (F.layer_norm, lambda x, w, b: F.layer_norm(x, (3,), w, b),
                   [numbers(2, 3), *CHANNELS]),
    "batch_norm": (F.batch_norm, lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
                   [numbers(4, 3), *CHANNELS]),
    "torch.batch_norm": (F.batch_norm,
        lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
        [numbers(4, 3), *CHANNELS]),
    "group_norm": (F.group_norm, lambda x, w, b: F.group_norm(x, 1, w, b),
                   [numbers(4, 3), *CHANNELS]),
    "instance_norm": (F.instance_norm, lambda x, w, b: F.instance_norm(x, None, None, w, b),
                      [numbers(2, 3, 4), *CHANNELS]),
}  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_bias_keeps_its_gradient_unless_the_rule_returns_one(name, way):
    key, f, xs = LAYERS[name]
    seen = []

    def named(dy, x, w, bias, builtin):
        seen.append([x.detach().clone(), w.detach().clone(), bias.detach().clone()])
        return [3 * dx for dx in builtin(dy) if dx is not None][:2]

    def all_three(dy, x, w, bias, builtin):
        return [*named(dy, x, w, bias, builtin), 7 * bias]

    dx, dw, db = gradients(f, xs)
    close(gradients(in_scope(key, named, f, way), xs), [3 * dx, 3 * dw, db])
    torch._dynamo.reset()
    close(gradients(in_scope(key, all_three, f, way), xs), [3 * dx, 3 * dw, 7 * xs[2]])
    if way != "compiled":
        close(seen[0], xs)


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer_norm"])
def test_second_derivatives_are_those_of_the_rule_and_of_torch(name):
    key, f, xs = LAYERS[name]

    def rule(dy, x, w, bias, builtin):
        return [3 * dx for dx in builtin(dy) if dx is not None][:2]

    def scaled(x, w, b):  # the second implementation: hooks on detached values
        y = f(x, w, b)
        return y + 2 * (f(x, w, b.detach()) - f(x, w, b.detach()).detach())

    close(gradients(in_scope(key, rule, f), xs, 2), gradients(scaled, xs, 2))


def test_a_convolution_with_and_without_a_bias():
    found = []

    def rule(dy, x, w, bias, strides, pad, dilations):
        found.append(bias)
        dx = G.conv2d_input(x.shape, w, dy, strides, pad, dilations)
        return dx, G.conv2d_weight(x, w.shape, dy, strides, pad, dilations)

    xs = LAYERS["conv2d"][2]
    strided = lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1)  # noqa: E731
    own = ("Conv2D", F.conv2d)
    for key, f, given in ((*own, xs), (*own, xs[:2]), (F.conv2d, strided, xs)):
        close(gradients(in_scope(key, rule, f), given), gradients(f, given))
    assert torch.equal(found[0], xs[2]) and found[1] is None


def test_a_module_with_statistics():
    norm = nn.BatchNorm1d(3).double()

    def rule(dy, input, running_mean, running_var, weight, bias, training, eps):
        assert training and eps == norm.eps and running_mean is not None
        return [dy * weight, None, None, None]

    x = numbers(4, 3).requires_grad_()
    y = fired({F.batch_norm: rule}, norm, x)
    y.sum().backward()
    close([x.grad, norm.bias.grad], [torch.ones_like(x), torch.full((3,), 4.0).double()])
    assert norm.weight.grad is None


NAMES = {
    F.linear: ["x w", "x weight", "input w", "x w bias", "w x", "input weight bias"],
    F.conv1d: ["x w", "x weight stride", "input weight bias groups", "x w padding dilation"],
    "Conv2D": ["x w groups", "x w bias groups", "input weight stride padding", "w x strides pad"],
    F.conv_transpose2d: ["x w", "input w output_padding", "x weight bias groups"],
    F.layer_norm: ["x", "x w", "x weight eps", "input normalized_shape"],
    F.group_norm: ["x w", "x w num_groups"],
}


@pytest.mark.parametrize(("key", "names"), [(k, n) for k, every in NAMES.items() for n in every])
@pytest.mark.parametrize("count", [2, 3])
def test_rules_name_the_parameters_in_either_way(key, names, count):
    name = key if isinstance(key, str) else key.__name__
    _, f, xs = LAYERS["conv2d" if name == "Conv2D" else name]
    f = (lambda x, w, b=None, f=f: f(x, w, b)) if count == 2 else f
    short = {"x": 0, "input": 0, "w": 1, "weight": 1, "bias": 2}
    seen = {}

    def given(dy, *values):
        seen.update(zip(["builtin", *names.split()], values, strict=True))
        return [3 * dx for dx in values[0](dy) if dx is not None][:2]

    rule = eval(f"lambda dy, builtin, {names.replace(' ', ', ')}: given("
                f"dy, builtin, {names.replace(' ', ', ')})", {"given": given})  # fmt: skip
    dx, dw, *db = gradients(f, xs[:count])
    close(gradients(in_scope(key, rule, f), xs[:count]), [3 * dx, 3 * dw, *db])
    for each in seen.keys() & short.keys():
        due = xs[short[each]] if short[each] < count else None
        assert seen[each] is None if due is None else torch.equal(seen[each], due)


@pytest.mark.parametrize("key", ["Conv2D", F.conv2d])
def test_groups_can_be_named(key):
    x, w = numbers(1, 2, 3, 3).requires_grad_(), numbers(4, 1, 2, 2)
    rule = lambda dy, x, w, groups: [  # noqa: E731
        3 * G.conv2d_input(x.shape, w, dy, groups=groups), None
    ]  # fmt: skip
    f = lambda x, w: F.conv2d(x, w, groups=2)  # noqa: E731
    close([grad(in_scope(key, rule, f)(x, w), x)], [grad(3 * f(x, w), x)])


LISTED = r"takes 'grups'.* it may name (x|input), (w|weight|running_mean)?.*bias"
REFUSED = {
    "Conv2D": ("Conv2D", lambda dy, x, grups: dy, LISTED),
    "linear": (F.linear, lambda dy, x, grups: dy, LISTED),
    "conv1d": (F.conv1d, lambda dy, x, grups: dy, LISTED),
    "layer_norm": (F.layer_norm, lambda dy, x, grups: dy, LISTED),
    "almost": (F.linear, lambda dy, input, wieght: [dy],
               r"takes 'wieght'.* Did you mean 'weight'"),
    # It would be called with the weight as `other`, and the bias as `w`.
    "by place": ("Conv2D", rg.rules.vjp_of(lambda x, other, w: x), "takes 'other'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_message_lists_names_that_work(name):
    key, rule, words = REFUSED[name]
    with pytest.raises(RuleError, match=words), override({key: rule}):
        pass


def test_a_wrong_number_of_gradients_is_refused():
    rule = lambda dy, input, bias: [dy]  # noqa: E731
    with pytest.raises(RuleError, match="returned 1, and the op has 3 inputs"):
        gradients(in_scope(F.linear, rule, F.linear), LAYERS["linear"][2])


# -- one gradient, where one input is differentiated -----------------------------------------------


X = torch.tensor([-2.0, 0.5, 3.0], dtype=D)
SCALE, ZERO = torch.tensor(0.5, dtype=D), torch.tensor(0, dtype=torch.int32)
TABLE = torch.full((4, 3), 2.0, dtype=D)
whole, each = torch.fake_quantize_per_tensor_affine, torch.fake_quantize_per_channel_affine
ONE = {
    "clamp": ("ClipByValue", lambda x: torch.clamp(x, -1, 1)),
    "clamp, one bound": ("ClipByValue", lambda x: torch.clamp(x, min=-1)),
    "clamp, bounds that are tensors": (torch.clamp, lambda x: torch.clamp(x, -SCALE, SCALE)),
    "heaviside": ("Step", lambda x: torch.heaviside(x, SCALE)),
    "heaviside, as a callable": (torch.heaviside, lambda x: torch.heaviside(values=SCALE, input=x)),
    "fake_quantize": (whole, lambda x: whole(x.float(), SCALE.float(), ZERO, 0, 3)),
    "fake_quantize by channels": (
        each, lambda x: each(x.float(), torch.ones(3), torch.zeros(3, dtype=torch.int), 0, 0, 3)),
    "mul by a number": ("Mul", lambda x: x * 5),
    "lerp": (torch.lerp, lambda x: torch.lerp(x, X, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", ONE)
def test_straight_through(name, backward):
    key, f = ONE[name]
    x = X.clone().requires_grad_()
    y = fired({key: rg.rules.straight_through}, f, x)
    torch.testing.assert_close(y, f(X))
    if backward:
        (7 * y).sum().backward()
    dx = x.grad if backward else torch.autograd.grad((7 * y).sum(), x)[0]
    assert dx.tolist() == [7.0] * 3


ANOTHER = {
    "a, b": ("Mul", lambda dy, a, b: dy * b, lambda x: x * 5),
    "b": ("Mul", lambda dy, b: dy * b, lambda x: x * 5),
    "x": ("ClipByValue", lambda dy, x: dy, lambda x: torch.clamp(X, x, 9 * SCALE)),
}


@pytest.mark.parametrize("name", ANOTHER)
def test_one_gradient_for_another_input_is_refused(name):
    """A rule that names another input than the one that is differentiated may mean that one."""
    key, rule, f = ANOTHER[name]
    with pytest.raises(RuleError, match="wrong number of gradients"), override({key: rule}):
        f(X.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("names", ["x", "weight", "x, weight", "input, weight", "xs"])
def test_the_weight_of_an_embedding(names):
    w = TABLE.clone().requires_grad_()
    due = {"x": "7 * x", "xs": "[None, 7 * xs[1]]", "weight": "7 * weight"}
    answer = due.get(names, "(None, 7 * weight)")
    y = fired(
        {F.embedding: eval(f"lambda dy, {names}: {answer}")}, F.embedding, torch.tensor([1, 2]), w
    )
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], 7 * TABLE)


@pytest.mark.parametrize(
    "f", [lambda x, w, forward: forward(x, w), lambda x, forward: forward([x])]
)
def test_forward_with_too_few_inputs(f):
    refused = pytest.raises(RuleError, match=r"forward of the op type.* expected \[1, 1, 1\]")
    with refused, override({F.linear: rg.replace(f)}, values=True):
        F.linear(numbers(3, 2).requires_grad_(), numbers(4, 2), numbers(4))
