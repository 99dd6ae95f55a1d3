"""Gradients of functions that have none: solvers, and ops that saturate."""

from __future__ import annotations

from math import inf
from typing import Any

from regrad.autodiff.once import once_differentiable
from regrad.core.made import remade
from regrad.core.signatures import helpful
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, brief
from regrad.ops.binary import greater, greater_equal, logical_and, where
from regrad.ops.creation_like import full_like
from regrad.rules.making import Rule


@remade
@helpful("blackbox")
def blackbox(lam: float) -> Rule:
    """Return the gradient of a solver by a second solution: `(forward(x + lam * dy) - y) / lam`.

    For a function that returns the y of least cost `sum(x * y)`: a shortest path, an assignment,
    the one-hot vector of the least element. Its output is constant by pieces. The rule is the
    gradient of an interpolation that is continuous, and runs the solver once in the backward pass.
    The key is the solver: an op of your own (`regrad.extend.op`), a `torch.autograd.Function` or
    `torch.library.custom_op`, a `jax.jit` function. The rule cannot be differentiated again.

    Args:
        lam: The width of the interpolation, not 0: about the size at which a change of the costs
            changes the solution. It is negative for a solver that returns the y of greatest value.

    Returns:
        A rule `(dy, x, y, forward)` for `gradient_override_map` and `rg.jax.override`.

    Raises:
        ArgumentError: lam is 0, or not a number.
        GradientError: (when its gradients are differentiated) names the rule.

    Source: Vlastelica, Paulus, Musil, Martius and Rolínek, "Differentiation of Blackbox
    Combinatorial Solvers" (2020).

    >>> import regrad as rg
    >>> from regrad.extend import op
    >>> @op("CheapestOfDocs")
    ... def cheapest(xp, x: rg.Tensor) -> rg.Tensor:
    ...     return xp.astype(x == xp.min(x), x.dtype)
    >>> with rg.gradient_override_map({"CheapestOfDocs": rg.rules.blackbox(2.0)}):
    ...     dx = rg.grad(lambda costs: cheapest(costs)[0])(rg.tensor([1.0, 2.0, 4.0]))
    >>> dx.tolist()
    [-0.5, 0.5, 0.0]
    """
    if isinstance(lam, bool) or not isinstance(lam, int | float) or not abs(lam) > 0:
        raise ArgumentError(f"blackbox: lam is a number other than 0, got {brief(lam)}")

    @once_differentiable
    def blackbox(dy: Any, x: Any, y: Any, forward: Any) -> Any:
        return (forward(x + lam * dy) - y) / lam

    return blackbox


@remade
@helpful("clamped_straight_through")
def clamped_straight_through(inclusive: bool = True) -> Rule:
    """Return a rule that passes the gradient where x is in the range of the values of the op.

    For ops that saturate (`ClipByValue`, `Relu6`, `Sign`), and ops that round and clip: the bounds
    are the values of the op at -∞ and ∞. PyTorch and JAX differ in the gradient of a clip at its
    bounds; under this rule they agree. Bounds that are Tensors keep the gradients that the op has
    for them. `straight_through` passes the gradient everywhere.

    Args:
        inclusive: Whether the gradient passes at the bounds.

    Returns:
        A rule `(dy, x, …)` for `gradient_override_map` and `rg.jax.override`.

    Raises:
        ArgumentError: inclusive is not a bool.
        RuleError: (when the scope opens) the op has no input x.

    Source: Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized Neural Networks" (2016);
    for clips, Esser et al., "Learned Step Size Quantization" (2020).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Relu6": rg.rules.clamped_straight_through()}):
    ...     print(rg.grad(rg.nn.relu6)(rg.tensor([-1.0, 0.0, 3.0, 6.0, 7.0])).tolist())
    [0.0, 1.0, 1.0, 1.0, 0.0]
    """
    if not isinstance(inclusive, bool):
        raise ArgumentError(
            f"clamped_straight_through: inclusive is a bool, got {brief(inclusive)}"
        )
    beyond = greater_equal if inclusive else greater

    def clamped_straight_through(
        dy: Any, x: Any, needs: Any, forward: Any, builtin: Any, min: Any = None, max: Any = None
    ) -> Any:
        bounds = (min, max)[: len(needs) - 1]
        low, high = (forward(full_like(x, end), *bounds) for end in (-inf, inf))
        dx: Tensor = where(logical_and(beyond(x, low), beyond(high, x)), dy, 0)
        return [dx, *builtin(dy)[1:]] if bounds else dx

    return clamped_straight_through
