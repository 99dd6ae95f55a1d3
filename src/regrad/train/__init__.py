"""Training: optax's optimizers for Variables, checkpoints in the safetensors format, a loop.

Gradients do not need this package. It imports JAX, optax and safetensors on first use.
"""

from regrad.core.hints import hint_in as _hint_in
from regrad.train.checkpoint import Stored as Stored
from regrad.train.checkpoint import list_variables as list_variables
from regrad.train.checkpoint import restore as restore
from regrad.train.checkpoint import save as save
from regrad.train.loop import History as History
from regrad.train.loop import fit as fit
from regrad.train.optimizer import Optimizer as Optimizer

_hint_in(__name__)
