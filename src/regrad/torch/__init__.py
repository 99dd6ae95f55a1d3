"""Gradients of other people's PyTorch models, overridden; custom gradients for torch tensors.

>>> import torch
>>> import regrad.torch
>>> with regrad.torch.gradient_override_map({"Sign": "Identity"}):
...     x = torch.tensor([-2.0, 3.0], requires_grad=True)
...     x.sign().sum().backward()
>>> x.grad
tensor([1., 1.])
"""

from regrad.errors import MissingPackageError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise MissingPackageError("regrad.torch needs PyTorch: pip install 'regrad[torch]'") from error

from regrad.torch.bridge import from_regrad as from_regrad
from regrad.torch.custom import custom_grad as custom_grad
from regrad.torch.drawing import draw as draw
from regrad.torch.overriding import gradient_override_map as gradient_override_map
