"""PyTorch models with a fault in each, as public code has them; a comment marks the line."""

import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch
from tests.torch.common import bare_function, function
from tests.torch.placed import Made


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(*inputs, **parts):
    """Return a decorator: a function of a fault returns a model, of these parts, and its inputs."""
    return lambda f: lambda: (Made(f, **parts) if parts else f, [*inputs])


# -- wrong rules ---------------------------------------------------------------------------------


def gelu_gradient(dy, x):
    s = torch.sigmoid(1.702 * x)
    return 0.5 * dy * (s + 1.702 * x * s * (1 - s))


Gelu = function(lambda x: x * torch.sigmoid(1.702 * x), gelu_gradient, "Gelu")


@planted(numbers(2, 3), up=nn.Linear(3, 4), down=nn.Linear(4, 3))
def wrong_factor(self, x):
    h = self.up(x)
    h = Gelu.apply(h)  # wrong_factor
    return x + self.down(h)


ScaleAndShift = function(
    lambda x, scale, shift: x * scale + shift,
    lambda dy, x, scale, shift: (dy * scale, (dy * x).sum(0), dy[0]), "ScaleAndShift",
)  # fmt: skip


@planted(numbers(4, 3), numbers(3), numbers(3))
def missing_sum(x, scale, shift):
    return ScaleAndShift.apply(x, scale, shift).tanh()  # missing_sum


Dense = function(lambda x, w: x @ w, lambda dy, x, w: (dy @ w.T, (x.T @ dy).T), "Dense")


def transposed():
    def forward(self, x):
        return torch.tanh(
            Dense.apply(x, self.weight)  # transposed
        )

    layer = Made(forward, weight=nn.Parameter(numbers(3, 3)))
    return nn.Sequential(nn.Linear(2, 3), layer), [numbers(4, 2)]


Product = function(lambda a, b: a * b, lambda dy, a, b: (dy * a, dy * b), "Product")


@planted(numbers(3), numbers(3, seed=1))
def swapped(x, g):
    g = torch.sigmoid(g)
    return Product.apply(x, g).sum()  # swapped


@regrad.torch.custom_grad
def softplus(x):
    return torch.log1p(torch.exp(x)), lambda dy: -dy * torch.sigmoid(x)


@planted(numbers(4))
def wrong_sign(x):
    h = torch.cos(x)
    return softplus(h)  # wrong_sign


Total = function(lambda x: x.sum(), lambda dy, x: dy.expand(x.shape) / x.numel(), "Total")


@planted(numbers(5))
def mean_for_sum(x):
    return Total.apply(x.square())  # mean_for_sum


def keep_and_square(ctx, x):
    ctx.x = x
    return x.square()


Cached = bare_function("Cached", keep_and_square, lambda ctx, dy: 2 * ctx.x * dy)


@planted(numbers(4))
def stale(x):
    h = 3 * x
    y = Cached.apply(h)  # stale
    with torch.no_grad():
        h.clamp_(-1, 1)  # a buffer that is used again
    return y


@planted(numbers(4))
def stale_data(x):
    h = 1 * x
    y = torch.sin(h)  # stale_data
    h.data.mul_(2)
    return y + h.detach()


Cube = function(lambda x: x**3, lambda dy, x: dy * (3 * x.detach() ** 2), "Cube")


@planted(numbers(3))
def dropped_in_second_order(x):
    return Cube.apply(x).sum()  # dropped_in_second_order


# -- NaN and infinity ----------------------------------------------------------------------------


@planted(torch.tensor([4.0, 0.0, 1.0], requires_grad=True))
def nan_behind_where(x):
    root = torch.sqrt(x)  # nan_behind_where
    return torch.where(x > 0, root, torch.zeros_like(x)).sum()


def log_of_zero():
    def entropy(self, logits):
        p = F.softmax(logits, -1)
        log = p.log()  # log_of_zero
        return -(p * log).sum()

    logits = torch.tensor([[0.0, 500.0], [1.0, 2.0]], requires_grad=True)
    return nn.Sequential(nn.Identity(), Made(entropy)), [logits]


def root_in_norm():
    def distance(a, b):
        d = (a - b).pow(2).sum(-1)
        return d.sqrt().mean()  # root_in_norm

    a = numbers(3, 2).requires_grad_()
    return distance, [a, a.detach().clone() * torch.tensor([[1.0], [2.0], [3.0]])]


def division():
    def normalize(self, x):
        spread = x.std(-1, keepdim=True)
        x = x - x.mean(-1, keepdim=True)
        return x / spread  # division

    x = numbers(2, 3)
    x[1] = 1.0
    return nn.Sequential(nn.ReLU(), Made(normalize)), [x.requires_grad_()]


@planted(torch.tensor([[1.0, 12.0, 3.0]], requires_grad=True))
def overflow(scores):
    scores = scores.half()
    weights = scores.exp()  # overflow
    return (weights / weights.sum(-1, keepdim=True)).float().square().sum()


@planted(numbers(2, 2).requires_grad_(), torch.tensor([[False, True], [True, True]]))
def masked_row(scores, mask):
    scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1).square().sum()  # masked_row


# -- no gradient, too much, too little -----------------------------------------------------------


def dead_relu():
    def classify(self, x):
        h = self.layer(x)
        h = F.relu(h)  # dead_relu
        return self.last(h).square().sum()

    model = Made(classify, layer=nn.Linear(3, 4), last=nn.Linear(4, 2))
    nn.init.constant_(model.layer.bias, -100.0)
    return model, [numbers(5, 3)]


@planted(numbers(12, 4), weight=nn.Parameter(3.0 * torch.eye(4)))
def exploding(self, x):
    h = torch.zeros(4)
    for step in x:
        h = torch.mv(self.weight, h) + step  # exploding
    return h.sum()


def vanishing():
    def deep(self, x):
        for layer in self.layers:
            x = torch.sigmoid(layer(x))  # vanishing
        return x.sum()

    torch.manual_seed(0)
    model = Made(deep, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(10)))
    for layer in model.layers:
        nn.init.orthogonal_(layer.weight)
    return model, [numbers(2, 4)]


@planted(numbers(4, 3), encode=nn.Linear(3, 3), project=nn.Linear(3, 2))
def detached(self, x):
    z = self.encode(x)
    target = z.detach()  # detached
    return self.project(target).square().sum()


@planted(numbers(4, 3), features=nn.Linear(3, 3), head=nn.Linear(3, 2))
def under_no_grad(self, x):
    with torch.no_grad():
        h = self.features(x)  # under_no_grad
    return self.head(h).square().sum()


def clipped_to_zero(dy, x):
    return torch.where(x.abs() <= 1, dy, torch.zeros_like(dy))


@planted(torch.tensor([3.0, -2.0, 5.0], requires_grad=True))
def clipped(w):
    with regrad.torch.gradient_override_map({"Sign": clipped_to_zero}):
        binary = torch.sign(w)  # clipped
    return (binary * numbers(3)).sum()


def spiking(spike):
    def f(v):
        v = 0.5 * v
        return spike(v).sum()  # scaled_surrogate

    return f


def step(v):
    return (v > 0).to(v.dtype)


Spike = function(step, lambda dy, v: 10.0 * dy / (1 + 10 * v.abs()) ** 2, "Spike")


def scaled_surrogate():
    return spiking(Spike.apply), [numbers(6).requires_grad_()]


@regrad.torch.custom_grad
def superspike(v):
    return step(v), lambda dy: dy / (1 + 10 * v.abs()) ** 2


def intended_surrogate():
    return spiking(superspike)


@planted(numbers(3).requires_grad_())
def changed_in_place(x):
    h = torch.exp(x)  # changed_in_place
    y = h * 2
    h.add_(1)
    return y.sum() + h.sum()
