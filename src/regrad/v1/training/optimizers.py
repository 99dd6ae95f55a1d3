"""TensorFlow 1's optimizers, which make ops that change variables.

Each update of a variable is one op (see `updates`). Ops run in the order of creation, so all
gradients are computed from the old values of the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from regrad.core import containers
from regrad.core.registry import Op
from regrad.core.tensor import Readable, TensorLike
from regrad.errors import ArgumentError, GraphError, ShapeError
from regrad.v1.dtypes import DType
from regrad.v1.functions.creation import zeros_like
from regrad.v1.functions.math import cast
from regrad.v1.graph.control import group
from regrad.v1.graph.conversion import constant, convert_to_tensor
from regrad.v1.graph.gradients import gradients
from regrad.v1.graph.graphs import Graph, GraphKeys, current_graph, get_default_graph
from regrad.v1.graph.rows import constructor
from regrad.v1.graph.tensors import IndexedSlices, Operation, Tensor, is_tensor
from regrad.v1.graph.variables import Variable, assign_add, trainable_variables, variable_of
from regrad.v1.training.updates import add_update, find_rows, update_op

__all__ = [
    "AdadeltaOptimizer", "AdagradOptimizer", "AdamOptimizer", "FtrlOptimizer",
    "GradientDescentOptimizer", "MomentumOptimizer", "Optimizer", "RMSPropOptimizer",
]  # fmt: skip


Hyperparameter = float | np.ndarray | Readable | Callable[[], Any]

# -- Optimizer -----------------------------------------------------------------------------------


class Optimizer:
    """The base class of optimizers.

    A subclass overrides `_apply_dense(grad, var)`, which returns an op. It may also override
    `_create_slots(var_list)`, `_prepare()` and `_finish(update_ops, name_scope)`.

    Args:
        use_locking: Without effect.
        name: The name of the train op. An empty name raises ValueError (GraphError).

    Source: `tf.train.Optimizer`.

    >>> import regrad.v1 as tf
    >>> class SignDescent(tf.train.Optimizer):
    ...     def _apply_dense(self, grad, var):
    ...         return var.assign_sub(0.5 * tf.sign(grad))
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable([4.0, -2.0])
    ...     step = SignDescent(name="sign").minimize(tf.reduce_sum(w * w))
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(step)
    ...     print(sess.run(w))
    [ 3.5 -1.5]
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
        """Return the name."""
        return self._name

    def minimize(
        self, loss: TensorLike, global_step: Readable | None = None,
        var_list: Iterable[Readable] | Readable | None = None, gate_gradients: int = GATE_OP,
        aggregation_method: int | None = None, colocate_gradients_with_ops: bool = False,
        name: str | None = None, grad_loss: TensorLike = None,
    ) -> Operation:  # fmt: skip
        """Return an op that changes the variables to reduce `loss`.

        Args:
            loss: A tensor of floats. The op minimizes the sum of its elements.
            global_step: A variable that counts the steps.
            var_list: The variables to change, by default all trainable variables.
            name: The name of the op, by default the optimizer's name.
            grad_loss: The gradient of the loss itself, by default ones.

        Raises ValueError if the list of variables is empty, or none of them gets a gradient.
        """
        options = gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
        pairs = self.compute_gradients(loss, var_list, *options)
        return self.apply_gradients(pairs, global_step, name)

    def compute_gradients(
        self, loss: TensorLike, var_list: Iterable[Readable] | Readable | None = None,
        gate_gradients: int = GATE_OP, aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False, grad_loss: TensorLike = None,
    ) -> list[tuple[Any, Variable]]:  # fmt: skip
        """Return pairs (gradient, variable). The gradient is None if the loss ignores it."""
        if gate_gradients not in (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH):
            raise GraphError(
                f"gate_gradients must be GATE_NONE, GATE_OP or GATE_GRAPH, not {gate_gradients!r}"
            )
        if isinstance(var_list, Iterable) and not isinstance(var_list, Mapping | Readable):
            var_list = list(var_list)
        listed = trainable_variables() if var_list is None else containers.flatten(var_list)[0]
        if not listed:
            raise GraphError("No variables to optimize.")
        variables = list(map(variable_of, listed))
        loss = convert_to_tensor(loss)
        if grad_loss is not None:
            grad_loss = convert_to_tensor(grad_loss, name="grad_loss")
        _check_floats([loss, grad_loss])
        grads = gradients(loss, variables, grad_loss, aggregation_method=aggregation_method)
        pairs = list(zip(grads, variables, strict=True))
        _check_floats([v for grad, v in pairs if grad is not None])
        return pairs

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[TensorLike, Readable]],
        global_step: Readable | None = None, name: str | None = None,
    ) -> Operation:  # fmt: skip
        """Return an op that changes variables by their gradients. Pairs with None are ignored.

        The caller may change the gradients that `compute_gradients` returns. With `global_step`,
        the op adds 1 to it after the other changes.
        """
        pairs = [_check_pair(*pair) for pair in grads_and_vars]
        if not pairs:
            raise GraphError("No variables provided.")
        wanted = [(grad, v) for grad, v in pairs if grad is not None]
        if not wanted:
            raise GraphError(
                "No gradients provided for any variable, check your graph for ops that do not "
                f"support gradients, between variables {[str(v) for _, v in pairs]} and the loss."
            )
        self._create_slots([v for _, v in wanted])
        with current_graph().name_scope(name or self._name) as scope:
            self._prepare()
            updates = [self._update(grad, v) for grad, v in wanted]
            if global_step is None:
                step = self._finish(updates, scope)
            else:
                with get_default_graph().control_dependencies([self._finish(updates, "update")]):
                    step = assign_add(global_step, 1, name=scope)
        step = step if isinstance(step, Operation) else step.op
        get_default_graph().add_to_collection(GraphKeys.TRAIN_OP, step)
        return step

    def _update(self, grad: Tensor, var: Variable) -> Operation | Tensor:
        """Return the op that changes a variable, and applies its constraint."""
        with current_graph().name_scope(f"update_{var.op.name}"):
            update = self._apply_dense(grad, var)
            if var.constraint is None:
                return update
            with get_default_graph().control_dependencies([update]):
                return var.assign(var.constraint(var.read_value()))

    # -- for subclasses --------------------------------------------------------------------------

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        """Make the variables that the optimizer needs."""

    def _prepare(self) -> None:
        """Make the tensors that all updates use."""

    def _apply_dense(self, grad: Tensor, var: Variable) -> Any:
        """Return an op that changes `var` by its gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define _apply_dense(grad, var)")

    def _finish(self, update_ops: Sequence[Operation | Tensor], name_scope: str) -> Operation:
        """Return the op for the whole step."""
        return group(*update_ops, name=name_scope)

    # -- slots -----------------------------------------------------------------------------------

    def get_slot(self, var: Readable, name: str) -> Variable | None:
        """Return the slot of a variable with this name, or None."""
        return self._slots.get(name, {}).get(variable_of(var))

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots."""
        return sorted(self._slots)

    def variables(self) -> list[Variable]:
        """Return the variables of the optimizer in the default graph, sorted by name."""
        slots = [v for slots in self._slots.values() for v in slots.values()]
        found = [v for v in [*slots, *self._non_slots.values()] if v.graph is get_default_graph()]
        return sorted(found, key=lambda v: v.name)

    def _get_or_make_slot(
        self, var: Variable, val: TensorLike | Callable[[], Tensor], slot_name: str, op_name: str
    ) -> Variable:
        """Return the slot of a variable. A new slot starts at this value."""
        slots = self._slots.setdefault(slot_name, {})
        if var not in slots:
            known = var.shape.is_fully_defined()
            slots[var] = _make_state(val, f"{var.op.name}/{op_name}", validate_shape=known)
        return slots[var]

    def _zeros_slot(
        self, var: Variable, slot_name: str, op_name: str, fill: float = 0.0
    ) -> Variable:
        """Return the slot of a variable. A new slot starts at zeros, or at another number."""

        def value() -> Tensor:
            if var.shape.is_fully_defined():
                return constant(fill, var.dtype.base_dtype, var.shape)
            return zeros_like(var.initialized_value()) + fill

        return self._get_or_make_slot(var, value, slot_name, op_name)

    def _create_non_slot_variable(
        self, initial_value: TensorLike | Callable[[], Tensor], name: str,
        colocate_with: Variable | None = None,
    ) -> Variable:  # fmt: skip
        """Return a variable of the optimizer that is not a slot, and make it if needed."""
        key = name, get_default_graph()
        if key not in self._non_slots:
            self._non_slots[key] = _make_state(initial_value, name)
        return self._non_slots[key]

    def _get_non_slot_variable(self, name: str, graph: Graph | None = None) -> Variable | None:
        """Return the variable that `_create_non_slot_variable` made."""
        return self._non_slots.get((name, graph or get_default_graph()))

    def _call_if_callable(self, param: Hyperparameter | None) -> Any:
        """Return a parameter, or its result if it is a function."""
        return param() if callable(param) else param


def _make_state(
    value: TensorLike | Callable[[], Tensor], name: str, validate_shape: bool = True
) -> Variable:
    """Make a variable of an optimizer, with a full name that ignores open name scopes."""
    graph = get_default_graph()
    with graph.name_scope(None), graph.control_dependencies(None):
        return Variable(value, trainable=False, validate_shape=validate_shape, name=name)


def _check_floats(tensors: Iterable[Any]) -> None:
    for x in tensors:
        if x is not None and not x.dtype.is_floating:
            raise GraphError(f"Invalid type {x.dtype!r} for {x.name}: optimizers need floats")


def _check_pair(grad: TensorLike, var: Readable) -> tuple[Any, Variable]:
    """Convert a gradient to a tensor of its variable's dtype, and check its shape."""
    var = variable_of(var)
    if grad is None:
        return None, var
    if not is_tensor(grad) and not isinstance(grad, IndexedSlices):
        raise ArgumentError(f"Gradient must be a Tensor, IndexedSlices, or None: {grad!r:.80}")
    grad = convert_to_tensor(grad, var.dtype.base_dtype)
    if not var.shape.is_compatible_with(grad.shape):
        shapes = f"{grad.shape}, expected {var.shape}"
        raise ShapeError(f"the gradient for {var.name!r} has the shape {shapes}")
    return grad, var


# -- optimizers given by a formula -----------------------------------------------------------------


def _takes(first: str, name: str, *last: str, locking: str = "use_locking=False") -> Any:
    """Make a constructor, with the two parameters that all optimizers have."""
    declared = ", ".join([first, locking, f"name={name!r}", *last])
    return constructor(declared, __name__, usual="Hyperparameter")


# The arguments for inputs of ops that have other names.
ARGUMENTS = {
    "lr": "learning_rate", "alpha": "learning_rate", "rho": "decay",
    "lr_power": "learning_rate_power", "l1": "l1_regularization_strength",
    "l2": "l2_regularization_strength", "l2_shrinkage": "l2_shrinkage_regularization_strength",
}  # fmt: skip


class _FormulaOptimizer(Optimizer):
    """An optimizer with one op for each update, which takes its arguments by name.

    `slots` has the initial values of the slots by name, in the order of the op's inputs. A value
    may be the name of an argument. Unless `dense_only` is true, an update does not change rows of a
    variable that were not gathered.
    """

    op: Op
    slots: Mapping[str, float | str]
    dense_only = False

    def __init_subclass__(cls, slots: Mapping[str, float | str] | None = None) -> None:
        if slots is not None:
            cls.slots, cls.__init__.__qualname__ = slots, f"{cls.__name__}.__init__"

    def _take(self, **given: Any) -> None:
        super().__init__(given.pop("use_locking"), given.pop("name"))
        self._fills = {k: given[v] if isinstance(v, str) else v for k, v in self.slots.items()}
        inputs = [i.name for i in self.op.inputs]
        self._names = {n: n if n in given else ARGUMENTS.get(n, n) for n in inputs}
        self._numbers = {n: given[long] for n, long in self._names.items() if long in given}
        self._options = {attr: given[attr] for attr in self.op.attrs if attr in given}

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        self._dtypes = dict.fromkeys(var.dtype.base_dtype for var in var_list)
        for var in var_list:
            for name, fill in self._fills.items():
                self._zeros_slot(var, name, self._name, fill)

    def _prepare(self) -> None:
        self._tensors: dict[tuple[str, DType], Tensor] = {}
        for dtype in self._dtypes:
            for name in self._numbers:
                self._number(name, dtype)

    def _number(self, name: str, dtype: DType) -> Tensor:
        """Return a number as a tensor of a variable's dtype."""
        if (name, dtype) not in self._tensors:
            self._tensors[name, dtype] = self._as_tensor(name, dtype, self._names[name])
        return self._tensors[name, dtype]

    def _as_tensor(self, name: str, dtype: DType | np.dtype, tensor_name: str) -> Tensor:
        value = self._call_if_callable(self._numbers[name])
        return cast(value, dtype) if is_tensor(value) else constant(value, dtype, name=tensor_name)

    def _apply_dense(self, grad: Tensor, var: Variable) -> Tensor:
        states = [var, *[self._slots[name][var] for name in self._fills]]
        names = [i.name for i in self.op.inputs[len(states) : -1]]
        values = [grad if n == "grad" else self._number(n, var.dtype.base_dtype) for n in names]
        rows = [] if self.dense_only else find_rows(grad)
        return add_update(self.op, states, [*values, *rows], self._options)


class GradientDescentOptimizer(_FormulaOptimizer, slots={}):
    """Gradient descent: `var -= learning_rate * grad`.

    Args:
        learning_rate: A number, a tensor (such as a placeholder or a decaying rate), or a function
            that returns a number or tensor.
        use_locking: Without effect.
        name: The name of the train op.

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

    dense_only = True  # rows of zeros change nothing, since there is no state

    __init__ = _takes("learning_rate", "GradientDescent")

    @update_op("ApplyGradientDescent", states=1)
    def op(xp: Any, var, alpha, grad):
        return (var - alpha * grad,)


class MomentumOptimizer(_FormulaOptimizer, slots={"momentum": 0.0}):
    """Gradient descent with momentum.

        accum = momentum * accum + grad
        var -= learning_rate * accum

    Args:
        learning_rate: A number, a tensor, or a function that returns a number or tensor.
        momentum: The weight of the past, in the form of `learning_rate`.
        use_locking: Without effect.
        name: The name of the train op, and of the slots.
        use_nesterov: Subtract `learning_rate * (grad + momentum * accum)`.

    Source: `tf.train.MomentumOptimizer`; Sutskever et al., "On the importance of initialization
    and momentum in deep learning", ICML 2013.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable(8.0)
    ...     step = tf.train.MomentumOptimizer(1.0, 0.5).minimize(w)  # the gradient is 1
    ...     sess.run(tf.global_variables_initializer())
    ...     print([sess.run([step, w.read_value()])[1] for _ in range(2)])
    [7.0, 5.5]
    """

    __init__ = _takes("learning_rate, momentum", "Momentum", "use_nesterov=False")

    @update_op("ApplyMomentum", states=2)
    def op(xp: Any, var, accum, lr, grad, momentum, *, use_nesterov):
        accum = accum * momentum + grad
        return var - lr * (grad + momentum * accum if use_nesterov else accum), accum


class AdamOptimizer(_FormulaOptimizer, slots={"m": 0.0, "v": 0.0}):
    """Adam, with TensorFlow's epsilon ("epsilon hat" in the paper).

        rate = learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t)
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        var -= rate * m / (sqrt(v) + epsilon)

    Args:
        learning_rate: A number, a tensor, or a function that returns a number or tensor.
        beta1: The decay of the mean gradient, in the form of `learning_rate`.
        beta2: The decay of the mean squared gradient, in the form of `learning_rate`.
        epsilon: The number added to the root, in the form of `learning_rate`.
        use_locking: Without effect.
        name: The name of the train op, and of the slots.

    Source: `tf.train.AdamOptimizer`; Kingma and Ba, "Adam: a method for stochastic optimization",
    2014 (arXiv:1412.6980).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable(3.0)
    ...     step = tf.train.AdamOptimizer(0.5).minimize(w * w)
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(step)
    ...     print(f"{sess.run(w):.4f}")  # the first step is as large as the learning rate
    2.5000
    """

    dense_only = True

    __init__ = _takes("learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8", "Adam")

    @update_op("ApplyAdam", states=3, attrs="use_nesterov=no")
    def op(xp: Any, var, m, v, beta1_power, beta2_power, lr, beta1, beta2, epsilon, grad):
        rate = lr * xp.sqrt(1 - beta2_power) / (1 - beta1_power)
        m = m + (grad - m) * (1 - beta1)
        v = v + (grad * grad - v) * (1 - beta2)
        return var - rate * m / (xp.sqrt(v) + epsilon), m, v

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        # The dtype is the widest of the dtypes, because 1 - beta2_power loses digits.
        dtype = np.result_type(*[v.dtype.base_dtype.as_numpy_dtype for v in var_list], np.float32)
        for name in ("beta1", "beta2"):
            self._numbers[f"{name}_power"] = self._create_non_slot_variable(
                lambda name=name: self._as_tensor(name, dtype, "Const"), f"{name}_power"
            )
        super()._create_slots(var_list)

    def _finish(self, update_ops: Sequence[Operation | Tensor], name_scope: str) -> Operation:
        powers = []
        for name in ("beta1", "beta2"):
            power: Any = self._numbers[f"{name}_power"]
            powers.append(power.assign(power * self._number(name, power.dtype.base_dtype)))
        return group(*update_ops, *powers, name=name_scope)


class RMSPropOptimizer(_FormulaOptimizer, slots={"rms": 1.0, "momentum": 0.0}):
    """RMSProp, which divides the gradient by the root of its mean square, with momentum.

        mean_square = decay * mean_square + (1 - decay) * grad**2
        mom = momentum * mom + learning_rate * grad / sqrt(mean_square + epsilon)
        var -= mom

    Args:
        learning_rate: A number, a tensor, or a function that returns a number or tensor.
        decay: The decay of the mean square, in the form of `learning_rate`. The mean square begins
            at 1.
        momentum: The weight of the previous step, in the form of `learning_rate`.
        epsilon: The number added within the root, in the form of `learning_rate`.
        use_locking: Without effect.
        centered: Subtract the square of the mean gradient, with the same decay, within the root.
        name: The name of the train op, and of the slots.

    Source: `tf.train.RMSPropOptimizer`; Tieleman and Hinton, lecture 6.5 of "Neural networks for
    machine learning", 2012; for `centered`, Graves, 2013 (arXiv:1308.0850).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable(3.0)
    ...     step = tf.train.RMSPropOptimizer(0.5, decay=0.0).minimize(w * w)
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(step)
    ...     print(f"{sess.run(w):.4f}")
    2.5000
    """

    __init__ = _takes(
        "learning_rate, decay=0.9, momentum=0.0, epsilon=1e-10",
        "RMSProp",
        locking="use_locking=False, centered=False",
    )

    def _take(self, **given: Any) -> None:
        if given.pop("centered"):
            self.slots, self.op = {"mg": 0.0, **self.slots}, self.centered_op
        super()._take(**given)

    @update_op("ApplyRMSProp", states=3)
    def op(xp: Any, var, ms, mom, lr, rho, momentum, epsilon, grad):
        ms = ms + (grad * grad - ms) * (1 - rho)
        mom = momentum * mom + lr * grad / xp.sqrt(ms + epsilon)
        return var - mom, ms, mom

    @update_op("ApplyCenteredRMSProp", states=4)
    def centered_op(xp: Any, var, mg, ms, mom, lr, rho, momentum, epsilon, grad):
        ms = ms + (grad * grad - ms) * (1 - rho)
        mg = mg + (grad - mg) * (1 - rho)
        mom = momentum * mom + lr * grad / xp.sqrt(ms - mg * mg + epsilon)
        return var - mom, mg, ms, mom


class AdagradOptimizer(_FormulaOptimizer, slots={"accumulator": "initial_accumulator_value"}):
    """Adagrad: `accum += grad**2; var -= learning_rate * grad / sqrt(accum)`.

    Args:
        learning_rate: A number, a tensor, or a function that returns a number or tensor.
        initial_accumulator_value: The initial value of `accum`. A value that is not positive raises
            ValueError (GraphError).
        use_locking: Without effect.
        name: The name of the train op, and of the slots.

    Source: `tf.train.AdagradOptimizer`; Duchi, Hazan and Singer, "Adaptive subgradient methods
    for online learning and stochastic optimization", JMLR 12, 2011.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable(2.0)
    ...     step = tf.train.AdagradOptimizer(1.0, initial_accumulator_value=9.0).minimize(w * w)
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(step)
    ...     print(f"{sess.run(w):.4f}")  # 2 - 4 / sqrt(9 + 16)
    1.2000
    """

    dense_only = True  # rows of zeros change nothing

    __init__ = _takes("learning_rate, initial_accumulator_value=0.1", "Adagrad")

    def _take(self, **given: Any) -> None:
        if (value := given["initial_accumulator_value"]) <= 0.0:
            raise GraphError(f"initial_accumulator_value must be positive: {value}")
        super()._take(**given)

    @update_op("ApplyAdagrad", states=2, attrs="update_slots=yes")
    def op(xp: Any, var, accum, lr, grad):
        accum = accum + grad * grad
        return var - lr * grad / xp.sqrt(accum), accum


class AdadeltaOptimizer(_FormulaOptimizer, slots={"accum": 0.0, "accum_update": 0.0}):
    """Adadelta, which scales gradients by the ratio of earlier steps to earlier gradients.

        accum = rho * accum + (1 - rho) * grad**2
        step = sqrt(accum_update + epsilon) / sqrt(accum + epsilon) * grad
        accum_update = rho * accum_update + (1 - rho) * step**2
        var -= learning_rate * step

    Args:
        learning_rate: A number, a tensor, or a function that returns a number or tensor.
        rho: The decay of the means, in the form of `learning_rate`.
        epsilon: The number added within the roots, in the form of `learning_rate`.
        use_locking: Without effect.
        name: The name of the train op, and of the slots.

    Source: `tf.train.AdadeltaOptimizer`; Zeiler, "ADADELTA: an adaptive learning rate method",
    2012 (arXiv:1212.5701), whose learning rate is 1.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable(3.0)
    ...     step = tf.train.AdadeltaOptimizer(1.0, rho=0.0, epsilon=4.0).minimize(w)
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(step)
    ...     print(f"{sess.run(w):.4f}")  # 3 - sqrt(4) / sqrt(1 + 4)
    2.1056
    """

    __init__ = _takes("learning_rate=0.001, rho=0.95, epsilon=1e-8", "Adadelta")

    @update_op("ApplyAdadelta", states=3)
    def op(xp: Any, var, accum, accum_update, lr, rho, epsilon, grad):
        accum = rho * accum + (1 - rho) * grad * grad
        step = xp.sqrt(accum_update + epsilon) / xp.sqrt(accum + epsilon) * grad
        return var - lr * step, accum, rho * accum_update + (1 - rho) * step * step


class FtrlOptimizer(_FormulaOptimizer, slots={"accum": "initial_accumulator_value", "linear": 0.0}):
    """Follow the regularized leader, with L1 and L2 regularization ("FTRL-proximal").

        grown = accum + grad**2
        linear += grad + 2 * shrinkage * var
                  - (grown**-power - accum**-power) / learning_rate * var
        var = (sign(linear) * l1 - linear) / (grown**-power / learning_rate + 2 * l2)
              if abs(linear) > l1 else 0
        accum = grown

    Args:
        learning_rate: A number, a tensor, or a function that returns a number or tensor.
        learning_rate_power: `power`, 0 or less.
        initial_accumulator_value: The initial value of `accum`.
        l1_regularization_strength: `l1`.
        l2_regularization_strength: `l2`.
        use_locking: Without effect.
        name: The name of the train op, and of the slots.
        accum_name: Without effect.
        linear_name: Without effect.
        l2_shrinkage_regularization_strength: `shrinkage`.

    A negative strength or initial value raises ValueError (GraphError).

    Source: `tf.train.FtrlOptimizer`; McMahan et al., "Ad click prediction: a view from the
    trenches", KDD 2013.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = tf.Variable(0.0)
    ...     step = tf.train.FtrlOptimizer(1.0, l1_regularization_strength=2.0).minimize(w)
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(step)
    ...     print(sess.run(w))  # l1 is larger than the gradient, 1
    0.0
    """

    __init__ = _takes(
        "learning_rate, learning_rate_power=-0.5, initial_accumulator_value=0.1, "
        "l1_regularization_strength=0.0, l2_regularization_strength=0.0",
        "Ftrl",
        "accum_name=None, linear_name=None, l2_shrinkage_regularization_strength=0.0",
    )

    def _take(self, **given: Any) -> None:
        checked = {k: given[k] for k in given if k.endswith(("strength", "value"))}
        checked["the negative of learning_rate_power"] = -given["learning_rate_power"]
        for what, value in checked.items():
            if value < 0.0:
                raise GraphError(f"{what} must not be negative: {value}")
        super()._take(**given)

    @update_op("ApplyFtrlV2", states=3)
    def op(xp: Any, var, accum, linear, grad, lr, l1, l2, l2_shrinkage, lr_power):
        grown = accum + grad * grad
        old_rate, rate = accum**-lr_power / lr, grown**-lr_power / lr
        linear = linear + grad + 2 * l2_shrinkage * var - (rate - old_rate) * var
        shrunk = (xp.sign(linear) * l1 - linear) / (rate + 2 * l2)
        return xp.where(xp.abs(linear) > l1, shrunk, 0).astype(var.dtype), grown, linear
