"""PyTorch models with a fault in each, as public code has them; a comment marks the line."""

import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- wrong rules ---------------------------------------------------------------------------------


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(1.702 * x)
        return 0.5 * dy * (s + 1.702 * x * s * (1 - s))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.up(x)
        h = Gelu.apply(h)  # wrong_factor
        return x + self.down(h)


def wrong_factor():
    return FeedForward(), [numbers(2, 3)]


class ScaleAndShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, shift):
        ctx.save_for_backward(x, scale)
        return x * scale + shift

    @staticmethod
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        return dy * scale, (dy * x).sum(0), dy[0]


def missing_sum():
    def f(x, scale, shift):
        return ScaleAndShift.apply(x, scale, shift).tanh()  # missing_sum

    return f, [numbers(4, 3), numbers(3), numbers(3)]


class Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w.T, (x.T @ dy).T


class DenseLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 3))

    def forward(self, x):
        return torch.tanh(
            Dense.apply(x, self.weight)  # transposed
        )


def transposed():
    return nn.Sequential(nn.Linear(2, 3), DenseLayer()), [numbers(4, 2)]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy * a, dy * b


def swapped():
    def gate(x, g):
        g = torch.sigmoid(g)
        return Product.apply(x, g).sum()  # swapped

    return gate, [numbers(3), numbers(3, seed=1)]


@regrad.torch.custom_grad
def softplus(x):
    return torch.log1p(torch.exp(x)), lambda dy: -dy * torch.sigmoid(x)


def wrong_sign():
    def f(x):
        h = torch.cos(x)
        return softplus(h)  # wrong_sign

    return f, [numbers(4)]


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, dy):
        return dy.expand(ctx.shape) / ctx.shape.numel()


def mean_for_sum():
    def f(x):
        return Total.apply(x.square())  # mean_for_sum

    return f, [numbers(5)]


class Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.x * dy


def stale():
    def f(x):
        h = 3 * x
        y = Cached.apply(h)  # stale
        with torch.no_grad():
            h.clamp_(-1, 1)  # a buffer that is used again
        return y

    return f, [numbers(4)]


def stale_data():
    def f(x):
        h = 1 * x
        y = torch.sin(h)  # stale_data
        h.data.mul_(2)
        return y + h.detach()

    return f, [numbers(4)]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * (3 * x.detach() ** 2)


def dropped_in_second_order():
    def f(x):
        return Cube.apply(x).sum()  # dropped_in_second_order

    return f, [numbers(3)]


# -- NaN and infinity ----------------------------------------------------------------------------


def nan_behind_where():
    def f(x):
        root = torch.sqrt(x)  # nan_behind_where
        return torch.where(x > 0, root, torch.zeros_like(x)).sum()

    return f, [torch.tensor([4.0, 0.0, 1.0], requires_grad=True)]


class Entropy(nn.Module):
    def forward(self, logits):
        p = F.softmax(logits, -1)
        log = p.log()  # log_of_zero
        return -(p * log).sum()


def log_of_zero():
    return nn.Sequential(nn.Identity(), Entropy()), [
        torch.tensor([[0.0, 500.0], [1.0, 2.0]], requires_grad=True)
    ]


def root_in_norm():
    def distance(a, b):
        d = (a - b).pow(2).sum(-1)
        return d.sqrt().mean()  # root_in_norm

    a = numbers(3, 2).requires_grad_()
    return distance, [a, a.detach().clone() * torch.tensor([[1.0], [2.0], [3.0]])]


class Normalise(nn.Module):
    def forward(self, x):
        spread = x.std(-1, keepdim=True)
        x = x - x.mean(-1, keepdim=True)
        return x / spread  # division


def division():
    x = numbers(2, 3)
    x[1] = 1.0
    return nn.Sequential(nn.ReLU(), Normalise()), [x.requires_grad_()]


def overflow():
    def attention(scores):
        scores = scores.half()
        weights = scores.exp()  # overflow
        return (weights / weights.sum(-1, keepdim=True)).float().square().sum()

    return attention, [torch.tensor([[1.0, 12.0, 3.0]], requires_grad=True)]


def masked_row():
    def attention(scores, mask):
        scores = scores.masked_fill(mask, float("-inf"))
        return torch.softmax(scores, -1).square().sum()  # masked_row

    mask = torch.tensor([[False, True], [True, True]])
    return attention, [numbers(2, 2).requires_grad_(), mask]


# -- no gradient, too much, too little -----------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        nn.init.constant_(self.layer.bias, -100.0)

    def forward(self, x):
        h = self.layer(x)
        h = F.relu(h)  # dead_relu
        return self.last(h).square().sum()


def dead_relu():
    return Classifier(), [numbers(5, 3)]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(3.0 * torch.eye(4))

    def forward(self, x):
        h = torch.zeros(4)
        for step in x:
            h = torch.mv(self.weight, h) + step  # exploding
        return h.sum()


def exploding():
    return Recurrent(), [numbers(12, 4)]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(10))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sigmoid(layer(x))  # vanishing
        return x.sum()


def vanishing():
    torch.manual_seed(0)
    model = Deep()
    for layer in model.layers:
        nn.init.orthogonal_(layer.weight)
    return model, [numbers(2, 4)]


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.project = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        z = self.encode(x)
        target = z.detach()  # detached
        return self.project(target).square().sum()


def detached():
    return TwoBranches(), [numbers(4, 3)]


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        with torch.no_grad():
            h = self.features(x)  # under_no_grad
        return self.head(h).square().sum()


def under_no_grad():
    return Frozen(), [numbers(4, 3)]


def clipped_to_zero(dy, x):
    return torch.where(x.abs() <= 1, dy, torch.zeros_like(dy))


def clipped():
    def f(w):
        with regrad.torch.gradient_override_map({"Sign": clipped_to_zero}):
            binary = torch.sign(w)  # clipped
        return (binary * numbers(3)).sum()

    return f, [torch.tensor([3.0, -2.0, 5.0], requires_grad=True)]


class Spike(torch.autograd.Function):
    scale = 10.0

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, dy):
        (v,) = ctx.saved_tensors
        return Spike.scale * dy / (1 + 10 * v.abs()) ** 2


def spiking(spike):
    def f(v):
        v = 0.5 * v
        return spike(v).sum()  # scaled_surrogate

    return f


def scaled_surrogate():
    return spiking(Spike.apply), [numbers(6).requires_grad_()]


def intended_surrogate():
    return spiking(regrad.torch.custom_grad(_superspike))


def _superspike(v):
    return (v > 0).to(v.dtype), lambda dy: dy / (1 + 10 * v.abs()) ** 2


def changed_in_place():
    def f(x):
        h = torch.exp(x)  # changed_in_place
        y = h * 2
        h.add_(1)
        return y.sum() + h.sum()

    return f, [numbers(3).requires_grad_()]
