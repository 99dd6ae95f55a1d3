"""Override gradients in unmodified PyTorch models; define custom gradients for torch tensors.

>>> import torch
>>> import regrad.torch
>>> with regrad.torch.gradient_override_map({"Sign": "Identity"}):
...     x = torch.tensor([-2.0, 3.0], requires_grad=True)
...     x.sign().sum().backward()
>>> x.grad
tensor([1., 1.])
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from regrad.core.extras import missing as _missing
from regrad.core.hints import refuse_name as _refuse_name

try:
    import torch as _torch  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise _missing("torch", "torch", "regrad.torch", error) from error

import regrad.torch.host  # noqa: F401 (raises for versions of PyTorch that are too old)
from regrad.torch.bridge import from_regrad as from_regrad
from regrad.torch.custom import custom_grad as custom_grad
from regrad.torch.drawing import draw as draw
from regrad.torch.overriding import gradient_override_map as gradient_override_map

if _TYPE_CHECKING:
    from regrad.torch.seeing.checks import check_gradients as check_gradients
    from regrad.torch.seeing.checks import gradient_report as gradient_report
    from regrad.torch.seeing.tools import compare_gradients as compare_gradients
    from regrad.torch.seeing.tools import find_nan as find_nan
    from regrad.torch.seeing.tools import gradient_path as gradient_path
    from regrad.torch.seeing.tools import saved_bytes as saved_bytes
    from regrad.torch.seeing.tools import trace_gradients as trace_gradients

_TOOLS = {  # imported at first use
    "check_gradients": "checks",
    "compare_gradients": "tools",
    "find_nan": "tools",
    "gradient_path": "tools",
    "gradient_report": "checks",
    "saved_bytes": "tools",
    "trace_gradients": "tools",
}


def __getattr__(name: str) -> object:
    """Import tools at first use."""
    from importlib import import_module

    if name in _TOOLS:
        return getattr(import_module(f"regrad.torch.seeing.{_TOOLS[name]}"), name)
    return _refuse_name(__name__, name)
