"""Optimizers as TensorFlow 1 has them: ops that change variables.

Each update of a variable is one op (see `regrad.v1.updates`). All gradients are computed from the
variables as they were, for ops run in the order of their making.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from regrad import containers
from regrad.errors import ArgumentError, GraphError, ShapeError
from regrad.registry import Op
from regrad.tensors import Readable
from regrad.v1.control import group
from regrad.v1.gradients import gradients
from regrad.v1.graphs import GraphKeys, control_dependencies, current_graph, get_default_graph
from regrad.v1.math import cast
from regrad.v1.tensors import (
    IndexedSlices,
    Operation,
    Tensor,
    constant,
    convert_to_tensor,
    is_tensor,
)
from regrad.v1.updates import (
    ADADELTA,
    ADAGRAD,
    ADAM,
    CENTERED_RMSPROP,
    FTRL,
    GRADIENT_DESCENT,
    MOMENTUM,
    RMSPROP,
    apply,
    touched,
)
from regrad.v1.variables import Variable, assign_add, trainable_variables, variable_of

# -- Optimizer -----------------------------------------------------------------------------------


class Optimizer:
    """The base of all optimizers.

    A subclass of yours overrides `_apply_dense(grad, var)`, which returns an op, and as needed
    `_create_slots(var_list)`, `_prepare()` and `_finish(update_ops, name_scope)`.

    Source: `tf.train.Optimizer`.
    """

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

    def __init__(self, use_locking: bool = False, name: str = "") -> None:
        if not name:
            raise GraphError("Must specify the optimizer name")
        self._use_locking = use_locking
        self._name = name
        self._slots: dict[str, dict[Variable, Variable]] = {}
        self._non_slots: dict[tuple[str, Any], Variable] = {}

    def get_name(self) -> str:
        """The name."""
        return self._name

    def minimize(
        self,
        loss: Any,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> Operation:
        """An op that changes the variables so as to make `loss` smaller: both parts in one.

        Args:
            loss: A tensor of floats; of a vector the sum is minimized.
            global_step: A variable that counts the steps.
            var_list: The variables to change (by default all trainable ones).
            name: The name of the op (by default that of the optimizer).
            grad_loss: The gradient of the loss itself (by default ones).

        Raises ValueError if there are no variables, or no gradient reaches any of them.
        """
        pairs = self.compute_gradients(
            loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops,
            grad_loss,
        )  # fmt: skip
        if all(grad is None for grad, _ in pairs):
            raise GraphError(
                "No gradients provided for any variable, check your graph for ops that do not "
                f"support gradients, between variables {[str(v) for _, v in pairs]} and loss "
                f"{loss}."
            )
        return self.apply_gradients(pairs, global_step, name)

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Any, Variable]]:
        """Pairs of a gradient and its variable; None for variables that the loss ignores."""
        if gate_gradients not in (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH):
            raise GraphError(
                "gate_gradients must be one of: Optimizer.GATE_NONE, Optimizer.GATE_OP, "
                f"Optimizer.GATE_GRAPH, not {gate_gradients!r}"
            )
        loss = convert_to_tensor(loss)
        self._assert_floats([loss])
        variables = _listed(trainable_variables() if var_list is None else var_list)
        if not variables:
            raise GraphError("No variables to optimize.")
        if grad_loss is not None:
            grad_loss = convert_to_tensor(grad_loss, name="grad_loss")
            self._assert_floats([grad_loss])
        grads = gradients(loss, variables, grad_loss, aggregation_method=aggregation_method)
        pairs = list(zip(grads, variables, strict=True))
        self._assert_floats([v for grad, v in pairs if grad is not None])
        return pairs

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None
    ) -> Operation:
        """An op that changes variables by their gradients; pairs whose gradient is None do nothing.

        The gradients may have been changed since `compute_gradients` gave them. With
        `global_step` the op adds 1 to it, after the other changes.
        """
        pairs = [_checked_pair(*pair) for pair in grads_and_vars]
        if not pairs:
            raise GraphError("No variables provided.")
        wanted = [(grad, v) for grad, v in pairs if grad is not None]
        if not wanted:
            raise GraphError(
                f"No gradients provided for any variable: {[str(v) for _, v in pairs]}."
            )
        self._create_slots([v for _, v in wanted])
        graph = current_graph()
        with graph.name_scope(name or self._name) as scope:
            self._prepare()
            updates = [self._updated(grad, v) for grad, v in wanted]
            if global_step is None:
                step = self._finish(updates, scope)
            else:
                with control_dependencies([self._finish(updates, "update")]):
                    step = assign_add(global_step, 1, name=scope)
        step = step if isinstance(step, Operation) else step.op
        get_default_graph().add_to_collection(GraphKeys.TRAIN_OP, step)
        return step

    def _updated(self, grad: Any, var: Variable) -> Any:
        """The op that changes a variable, and applies its constraint."""
        with current_graph().name_scope(f"update_{var.op.name}"):
            update = self._apply_rows(grad, var)
            if update is None:
                update = self._apply_dense(grad, var)
            if var.constraint is None:
                return update
            with control_dependencies([update]):
                return var.assign(var.constraint(var.read_value()))

    def _assert_floats(self, tensors: Iterable[Any]) -> None:
        for t in tensors:
            dtype = t.dtype.base_dtype
            if not dtype.is_floating:
                raise GraphError(
                    f"Invalid type {dtype!r} for {t.name}, expected: ['float16', 'float32', "
                    "'float64']."
                )

    # -- for subclasses --------------------------------------------------------------------------

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        """Make the variables that the optimizer needs."""

    def _prepare(self) -> None:
        """Make the tensors that the updates share."""

    def _apply_dense(self, grad: Any, var: Variable) -> Any:
        """An op that changes `var` by its gradient."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _apply_dense(grad, var), which returns an op"
        )

    def _apply_rows(self, grad: Any, var: Variable) -> Any:
        """An op that changes only the rows of `var` that were gathered; None if that is no use."""
        return None

    def _finish(self, update_ops: Sequence[Any], name_scope: str) -> Operation:
        """The op that stands for the whole step."""
        return group(*update_ops, name=name_scope)

    # -- slots -----------------------------------------------------------------------------------

    def get_slot(self, var: Any, name: str) -> Variable | None:
        """The variable kept for another under this name, None if there is none."""
        return self._slots.get(name, {}).get(variable_of(var))

    def get_slot_names(self) -> list[str]:
        """The names of the slots."""
        return sorted(self._slots)

    def variables(self) -> list[Variable]:
        """The variables of the optimizer in the default graph, sorted by name."""
        slots = [v for slots in self._slots.values() for v in slots.values()]
        graph = get_default_graph()
        found = [v for v in [*slots, *self._non_slots.values()] if v.graph is graph]
        return sorted(found, key=lambda v: v.name)

    def _zeros_slot(self, var: Variable, slot_name: str, op_name: str) -> Variable:
        """The slot of a variable, made of zeros if it is new."""
        return self._slot(var, 0.0, slot_name, op_name)

    def _get_or_make_slot(self, var: Variable, val: Any, slot_name: str, op_name: str) -> Variable:
        """The slot of a variable, made with this value if it is new."""
        slots = self._slots.setdefault(slot_name, {})
        if var not in slots:
            slots[var] = _state(val, f"{var.op.name}/{op_name}")
        return slots[var]

    def _slot(self, var: Variable, fill: float, slot_name: str, op_name: str) -> Variable:
        def value() -> Tensor:
            shape, dtype = var.initial_value._symbol.shape, var.dtype.base_dtype
            if var.shape.is_fully_defined():
                return constant(np.full(shape, fill, dtype.as_numpy_dtype))
            begin: Any = var.initialized_value()
            return convert_to_tensor(begin * 0 + fill)

        return self._get_or_make_slot(var, value, slot_name, op_name)

    def _create_non_slot_variable(
        self, initial_value: Any, name: str, colocate_with: Any = None
    ) -> Variable:
        """A variable of the optimizer that belongs to no other, made if it is new."""
        key = name, get_default_graph()
        if key not in self._non_slots:
            self._non_slots[key] = _state(initial_value, name)
        return self._non_slots[key]

    def _get_non_slot_variable(self, name: str, graph: Any = None) -> Variable | None:
        """The variable that `_create_non_slot_variable` made."""
        return self._non_slots.get((name, graph or get_default_graph()))

    def _call_if_callable(self, param: Any) -> Any:
        """A parameter, or what the function that was given for it returns."""
        return param() if callable(param) else param


def _state(value: Any, name: str) -> Variable:
    """A variable of an optimizer; its name begins at the root of the graph."""
    graph = get_default_graph()
    with graph.name_scope(None), graph.control_dependencies(None):
        return Variable(value, trainable=False, name=name)


def _listed(var_list: Any) -> list[Variable]:
    """The variables in a nest or an iterable; one alone will do."""
    if isinstance(var_list, Iterable) and not isinstance(var_list, Readable):
        var_list = var_list if isinstance(var_list, Mapping) else list(var_list)
        if not var_list:
            return []
    return [variable_of(v) for v in containers.flatten(var_list)[0]]


def _checked_pair(grad: Any, var: Any) -> tuple[Any, Variable]:
    """A gradient as a tensor of its variable's dtype."""
    var = variable_of(var)
    if grad is None:
        return None, var
    if not is_tensor(grad) and not isinstance(grad, IndexedSlices):
        raise ArgumentError(f"Gradient must be a Tensor, IndexedSlices, or None: {grad!r:.80}")
    grad = convert_to_tensor(grad, var.dtype.base_dtype)
    if not var.shape.is_compatible_with(grad.shape):
        raise ShapeError(
            f"the gradient for {var.name!r} has the shape {grad.shape}, due is that of the "
            f"variable, {var.shape}"
        )
    return grad, var


# -- the optimizers ------------------------------------------------------------------------------


class _ByFormula(Optimizer):
    """An optimizer whose updates are one op each.

    `slots` are the names of the slots and what they are filled with, in the order in which the
    op takes them; `numbers` its other inputs, `options` its attributes. `by_rows` says whether
    it leaves alone the rows of a variable that were not gathered.
    """

    op: Op
    by_rows = False

    def __init__(
        self,
        use_locking: bool,
        name: str,
        slots: dict[str, float] | None = None,
        options: dict[str, Any] | None = None,
        **numbers: Any,
    ) -> None:
        super().__init__(use_locking, name)
        self._fills = slots or {}
        self._options = options or {}
        self._numbers = numbers
        self._dtypes: dict[Any, None] = {}
        self._tensors: dict[Any, Tensor] = {}

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        self._dtypes = dict.fromkeys(var.dtype.base_dtype for var in var_list)
        for var in var_list:
            for name, fill in self._fills.items():
                self._slot(var, fill, name, self._name)

    def _prepare(self) -> None:
        self._tensors = {}
        for dtype in self._dtypes:
            for name in self._numbers:
                self._number(name, dtype)

    def _number(self, name: str, dtype: Any) -> Tensor:
        """A number as a tensor of a variable's dtype."""
        if (name, dtype) not in self._tensors:
            value = self._call_if_callable(self._numbers[name])
            if is_tensor(value):
                value = cast(value, dtype)
            else:
                value = constant(value, dtype, name=_LONG.get(name, name))
            self._tensors[name, dtype] = value
        return self._tensors[name, dtype]

    def _apply_dense(self, grad: Any, var: Variable) -> Tensor:
        return self._applied(grad, var, [])

    def _apply_rows(self, grad: Any, var: Variable) -> Tensor | None:
        indices = touched(grad) if self.by_rows else []
        return self._applied(grad, var, indices) if indices else None

    def _applied(self, grad: Tensor, var: Variable, indices: list[Tensor]) -> Tensor:
        dtype = var.dtype.base_dtype
        states = [var, *[self._slots[name][var] for name in self._fills]]
        names = [i.name for i in self.op.inputs[len(states) : -1]]
        values = [grad if n == "grad" else self._number(n, dtype) for n in names]
        return apply(self.op, states, [*values, *indices], len(indices), self._options)


_LONG = {"lr": "learning_rate", "alpha": "learning_rate"}


class GradientDescentOptimizer(_ByFormula):
    """`var -= learning_rate * grad`.

    `learning_rate` is a number or a tensor (a placeholder, a decaying one).

    Source: `tf.train.GradientDescentOptimizer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable([4.0, -2.0])
    ...     step = tf.train.GradientDescentOptimizer(0.25).minimize(tf.reduce_sum(w * w))
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(step)
    ...     print(step.name, sess.run(w))
    GradientDescent [ 2. -1.]
    """

    op = GRADIENT_DESCENT

    def __init__(
        self, learning_rate: Any, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        super().__init__(use_locking, name, alpha=learning_rate)


class MomentumOptimizer(_ByFormula):
    """`accum = momentum * accum + grad; var -= learning_rate * accum`.

    With `use_nesterov`, `var -= learning_rate * (grad + momentum * accum)`.

    Source: `tf.train.MomentumOptimizer`; Sutskever et al., "On the importance of initialization
    and momentum in deep learning", ICML 2013.
    """

    op = MOMENTUM
    by_rows = True

    def __init__(
        self,
        learning_rate: Any,
        momentum: Any,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        slots, options = {"momentum": 0.0}, {"use_nesterov": use_nesterov}
        super().__init__(use_locking, name, slots, options, lr=learning_rate, momentum=momentum)


class AdamOptimizer(_ByFormula):
    """Adam, with TensorFlow's epsilon ("epsilon hat" in the paper).

        rate = learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t)
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        var -= rate * m / (sqrt(v) + epsilon)

    Source: `tf.train.AdamOptimizer`; Kingma and Ba, "Adam: a method for stochastic optimization",
    2014 (arXiv:1412.6980).
    """

    op = ADAM

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        super().__init__(
            use_locking, name, {"m": 0.0, "v": 0.0}, None,
            lr=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon,
        )  # fmt: skip

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        # in the widest of the dtypes: 1 - beta2_power loses digits
        dtype = np.result_type(*[v.dtype.base_dtype.as_numpy_dtype for v in var_list], np.float32)
        for name in ("beta1", "beta2"):
            power = self._create_non_slot_variable(
                lambda name=name: self._as_state(self._numbers[name], dtype), f"{name}_power"
            )
            self._numbers[f"{name}_power"] = power
        super()._create_slots(var_list)

    def _as_state(self, value: Any, dtype: Any) -> Tensor:
        value = self._call_if_callable(value)
        return cast(value, dtype) if is_tensor(value) else constant(value, dtype)

    def _finish(self, update_ops: Sequence[Any], name_scope: str) -> Operation:
        powers = []
        for name in ("beta1", "beta2"):
            power: Any = self._numbers[f"{name}_power"]
            beta = self._number(name, power.dtype.base_dtype)
            powers.append(power.assign(power * beta))
        return group(*update_ops, *powers, name=name_scope)


class RMSPropOptimizer(_ByFormula):
    """The gradient over the root of its mean square, with momentum.

        mean_square = decay * mean_square + (1 - decay) * grad**2
        mom = momentum * mom + learning_rate * grad / sqrt(mean_square + epsilon)
        var -= mom

    With `centered`, the mean gradient (which decays likewise) is squared and subtracted within
    the root.

    Source: `tf.train.RMSPropOptimizer`; Tieleman and Hinton, lecture 6.5 of "Neural networks for
    machine learning", 2012; for `centered`, Graves, 2013 (arXiv:1308.0850).
    """

    by_rows = True

    def __init__(
        self,
        learning_rate: Any,
        decay: Any = 0.9,
        momentum: Any = 0.0,
        epsilon: Any = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        slots = {"rms": 1.0, "momentum": 0.0}
        self.op = CENTERED_RMSPROP if centered else RMSPROP
        super().__init__(
            use_locking, name, {"mg": 0.0, **slots} if centered else slots, None,
            lr=learning_rate, rho=decay, momentum=momentum, epsilon=epsilon,
        )  # fmt: skip


class AdagradOptimizer(_ByFormula):
    """`accum += grad**2; var -= learning_rate * grad / sqrt(accum)`.

    Source: `tf.train.AdagradOptimizer`; Duchi, Hazan and Singer, "Adaptive subgradient methods
    for online learning and stochastic optimization", JMLR 12, 2011.
    """

    op = ADAGRAD

    def __init__(
        self,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        if initial_accumulator_value <= 0.0:
            raise GraphError(
                f"initial_accumulator_value must be positive: {initial_accumulator_value}"
            )
        super().__init__(
            use_locking, name, {"accumulator": initial_accumulator_value}, lr=learning_rate
        )


class AdadeltaOptimizer(_ByFormula):
    """Steps as large as the steps before, relative to the gradients.

        accum = rho * accum + (1 - rho) * grad**2
        step = sqrt(accum_update + epsilon) / sqrt(accum + epsilon) * grad
        accum_update = rho * accum_update + (1 - rho) * step**2
        var -= learning_rate * step

    Source: `tf.train.AdadeltaOptimizer`; Zeiler, "ADADELTA: an adaptive learning rate method",
    2012 (arXiv:1212.5701), whose learning rate is 1.
    """

    op = ADADELTA
    by_rows = True

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: Any = 0.95,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        slots = {"accum": 0.0, "accum_update": 0.0}
        super().__init__(use_locking, name, slots, None, lr=learning_rate, rho=rho, epsilon=epsilon)


class FtrlOptimizer(_ByFormula):
    """Follow the regularized leader, with L1 and L2 regularization ("FTRL-proximal").

        grown = accum + grad**2
        linear += grad + 2 * shrinkage * var
                  - (grown**-power - accum**-power) / learning_rate * var
        var = (sign(linear) * l1 - linear) / (grown**-power / learning_rate + 2 * l2)
              if abs(linear) > l1 else 0
        accum = grown

    Source: `tf.train.FtrlOptimizer`; McMahan et al., "Ad click prediction: a view from the
    trenches", KDD 2013.
    """

    op = FTRL
    by_rows = True

    def __init__(
        self,
        learning_rate: Any,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
    ) -> None:
        strengths = {
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
            "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
            "the negative of learning_rate_power": -learning_rate_power,
        }
        for what, value in strengths.items():
            if value < 0.0:
                raise GraphError(f"{what} must not be negative: {value}")
        super().__init__(
            use_locking, name, {"accum": initial_accumulator_value, "linear": 0.0}, None,
            lr=learning_rate, l1=l1_regularization_strength, l2=l2_regularization_strength,
            l2_shrinkage=l2_shrinkage_regularization_strength, lr_power=learning_rate_power,
        )  # fmt: skip
