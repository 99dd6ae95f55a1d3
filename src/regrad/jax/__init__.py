"""Overrides, custom gradients and inspection for unedited JAX programs: Flax, Equinox, Haiku.

This package needs JAX, and is loaded when it is first used.
"""

from regrad.core.extras import missing as _missing
from regrad.core.hints import hint_in as _hint_in

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise _missing("jax", "jax", "regrad.jax", error) from error

import regrad.jax.host as _host  # noqa: F401  (first: it refuses a JAX that is too old)
from regrad.jax.bridge import from_regrad as from_regrad
from regrad.jax.checks import check_gradients as check_gradients
from regrad.jax.checks import gradient_report as gradient_report
from regrad.jax.custom import custom_grad as custom_grad
from regrad.jax.drawing import draw as draw
from regrad.jax.override import override as override
from regrad.jax.tools import compare_gradients as compare_gradients
from regrad.jax.tools import find_nan as find_nan
from regrad.jax.tools import gradient_path as gradient_path
from regrad.jax.tools import saved_bytes as saved_bytes
from regrad.jax.tools import trace_gradients as trace_gradients

_hint_in(__name__)
