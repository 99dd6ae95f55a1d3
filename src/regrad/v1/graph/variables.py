"""Variables: state in a session that ops of the graph read and write."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from regrad.core.bindings import CountedRule
from regrad.core.callers import find_caller
from regrad.core.dims import is_known
from regrad.core.parameters import PARAMETER, binding_of
from regrad.core.registry import OPS, Input, Op
from regrad.core.rule import Rule
from regrad.core.state import current
from regrad.core.tape import rule_in_force
from regrad.core.tensor import Readable, TensorLike
from regrad.errors import ArgumentError, DTypeError, GraphError, ShapeError
from regrad.graph.graph import INNERMOST, NO_RULE, OpGraph, Symbol, chain, graph_op, put_down
from regrad.graph.plan import PlanRun
from regrad.shapes.infer import Spec
from regrad.v1 import errors
from regrad.v1.dtypes import DTypeLike
from regrad.v1.graph.control import cond, group
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.graphs import (
    GraphKeys,
    add_op,
    control_dependencies,
    current_graph,
    get_collection,
    get_default_graph,
)
from regrad.v1.graph.static_shapes import ShapeLike
from regrad.v1.graph.tensors import (
    InGraph,
    Operation,
    Runs,
    Tensor,
    default_session,
    face,
    refusing,
)

__all__ = [
    "Variable", "all_variables", "assign", "assign_add", "assign_sub", "global_variables",
    "global_variables_initializer", "initialize_all_variables", "is_variable_initialized",
    "local_variables", "local_variables_initializer", "model_variables", "trainable_variables",
    "variables_initializer",
]  # fmt: skip

# -- the ops, which read and write the state of the run ------------------------------------------


def read_state(run: PlanRun, ref: Any, key: str) -> Any:
    """Return the value of a variable in a run. This is the kernel of read ops."""
    try:
        return run.read(key)
    except KeyError:
        raise errors.FailedPreconditionError(
            f"Attempting to use uninitialized value {key}. Run tf.global_variables_initializer() "
            "in this session first."
        ) from None


def _is_set(run: PlanRun, ref: Any, key: str) -> np.ndarray:
    return np.asarray(key in run.written or key in run.variables)


def _writing(combine: Callable[[Any, Any], Any] | None = None) -> Callable[..., Any]:
    """Return the kernel that writes a value, or the old value combined with it."""

    def kernel(run: PlanRun, ref: Any, value: Any, key: str, shape: Any = None) -> Any:
        old = None if combine is None else read_state(run, ref, key)
        due = shape if old is None else old.shape
        if due is not None and np.shape(value) != due:
            raise ShapeError(f"a write to {key!r}: expected the shape {due}, got {np.shape(value)}")
        return run.write(key, value if combine is None else combine(old, value))

    return kernel


state_op: Callable[..., Op] = partial(
    graph_op, stateful=True
)  # makes an op whose kernel receives the run
VARIABLE = state_op("VariableV2", lambda run, dtype, shape: None, attrs="dtype shape")
ASSIGN = state_op("Assign", _writing(), "ref value", "key shape")
ASSIGN_ADD = state_op("AssignAdd", _writing(operator.add), "ref value", "key")
ASSIGN_SUB = state_op("AssignSub", _writing(operator.sub), "ref value", "key")
IS_INITIALIZED = state_op("IsVariableInitialized", _is_set, "ref", "key")
# As in TensorFlow, a read is an Identity to rules and overrides. Only its kernel differs.
READ = Op("Identity", "identity", read_state, [Input("x", "one")], ["key"], stateful=True)
READ.rule = OPS["Identity"].rule


class _RuleOfRead(CountedRule):
    """The rule of a scope for a read of a Variable. Its input is the value of the variable."""

    def __init__(self, rule: CountedRule, variable: Variable) -> None:
        super().__init__(rule.rule, rule.hit, rule.key, rule.once)
        self.variable = variable

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Any:
        seen = copy(record)
        seen.xs = (record.y if record.op is READ else self.variable._snapshot._tensor,)
        return super().pull(seen, dy, wanted)


# -- Variable ------------------------------------------------------------------------------------


class Variable(InGraph, Readable):
    """A variable of the graph. Each session has its own value of the variable.

    Args:
        initial_value: A value or tensor, or a function that returns one. Ints become int32, floats
            float32.
        trainable: Whether optimizers change the variable. If true, it is in TRAINABLE_VARIABLES.
        collections: The collections to add the variable to, by default GLOBAL_VARIABLES.
        validate_shape: Whether the variable always keeps the shape of its initial value.
        name: The name of the op, by default `Variable`, `Variable_1`, ….
        dtype: The dtype, by default the initial value's dtype.
        constraint: A function of the variable that optimizers apply after an update.
        use_resource: Stored as an attribute. Reads and writes do not depend on it.
        caching_device, variable_def, expected_shape, import_scope: Without effect.
        synchronization, aggregation, shape: Without effect.

    A Variable makes the ops `name/initial_value`, `name`, `name/Assign` and `name/read`. The op
    `name/read` is an Identity, so an active override of Identity binds to it. Using the variable
    reads its value at the beginning of the run. Within `tf.control_dependencies`, using it reads
    the value after these ops have run.

    Raises:
        GraphError: the initial value is missing, or the variable is made in a branch or a loop.

    Source: `tf.Variable` (of reference kind).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(3)
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run([v, v * 2]), v)
    [3, 6] <tf.Variable 'Variable:0' shape=() dtype=int32_ref>
    """

    def __init__(
        self, initial_value: TensorLike = None, trainable: bool = True,
        collections: Sequence[str] | None = None, validate_shape: bool = True,
        caching_device: str | Callable[..., Any] | None = None, name: str | None = None,
        variable_def: Any = None, dtype: DTypeLike | None = None, expected_shape: ShapeLike = None,
        import_scope: str | None = None, constraint: Callable[..., Any] | None = None,
        use_resource: bool | None = None, synchronization: int | None = None,
        aggregation: int | None = None, shape: ShapeLike = None,
    ) -> None:  # fmt: skip
        if initial_value is None:
            raise GraphError("initial_value must be specified.")
        if INNERMOST.get() is not None:
            raise GraphError(
                "a Variable cannot be made inside a branch or a loop; make it before and use it "
                "inside"
            )
        graph = get_default_graph()
        self.trainable = trainable
        self.constraint = constraint
        self.use_resource: bool = bool(use_resource)  # reads and writes do not depend on it
        self._validate = validate_shape
        with graph.name_scope(name or "Variable") as scope:
            called = callable(initial_value)
            with graph.name_scope("Initializer") if called else nullcontext():
                value = initial_value() if called else initial_value
                self.initial_value: Tensor = convert_to_tensor(value, dtype, name="initial_value")
            symbol = self.initial_value._symbol
            spec = symbol.spec if validate_shape else Spec(None, symbol.dtype)
            with graph.naming("VariableV2", scope):
                attrs = {"dtype": symbol.dtype, "shape": symbol.shape}
                self._variable = face(graph.add(VARIABLE, NO_RULE, (), attrs, specs=[spec]))
            self._symbol: Symbol = self._variable._symbol
            self._key = self._symbol.node.name
            self._variable.op.variable = self
            self.initializer: Operation = self._write(ASSIGN, self.initial_value).op
            self._snapshot = self._new_read(self._variable)
            if not validate_shape:  # a run finds the shape by the value, which the op itself lacks
                self._symbol.shape.source = self._snapshot._symbol
        self._controls = graph.controls
        self._ruled: dict[Any, Tensor] = {}  # copies of `_variable` for scopes, by rule
        self._reads = {self._variable: self._snapshot}
        keys = [GraphKeys.GLOBAL_VARIABLES] if collections is None else collections
        more = [GraphKeys.TRAINABLE_VARIABLES] if trainable else []
        graph.add_to_collections([*keys, *more], self)

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> Any:
        return self.value()._tensor

    def _ref(self) -> Tensor:
        """Return the output of the variable's op, which is the variable and not its value."""
        return self._variable

    def _source(self) -> Tensor:
        """Return the tensor to read: `_ref`, or its copy for the scope with a rule for it.

        The gradients of all reads in the scope arrive at the copy, and its gradient is the rule.
        """
        state = current()
        overrides = state and state.overrides
        binding = binding_of(self, overrides, self.graph) if overrides else None
        if binding is None:
            return self._variable
        if binding.rule not in self._ruled:
            counted = binding.counted_at(find_caller(), self.op.name)
            counted.hit.add(self._symbol.shape)
            made = PARAMETER, _RuleOfRead(counted, self), (self._variable._tensor,), {}
            names = self.graph.name_scope(f"{self.op.name}/")
            with OpGraph.control_dependencies(self.graph, None), names:
                copied = face(put_down(self.graph, *made, specs=[self._symbol.spec]))
            copied.op.variable = self
            self._ruled[binding.rule] = copied
        return self._ruled[binding.rule]

    def _new_read(
        self, ref: Tensor, graph: OpGraph | None = None, rule: Rule | None = None
    ) -> Tensor:
        graph = graph or current_graph()
        region = graph if self.graph in chain(graph) else self.graph
        x, state = region.entering(ref._tensor), current()
        if rule is None:
            rule = READ.rule if state is None else rule_in_force(state, READ, (x,), self.graph)
            rule = _RuleOfRead(rule, self) if isinstance(rule, CountedRule) else rule
        attrs, specs = {"key": self._key}, [self._symbol.spec]
        with region.naming("Identity", "read"):
            return face(region.add(READ, rule, (x,), attrs, specs=specs))

    def value(self) -> Tensor:
        """Return the value as a tensor, read after the open control dependencies, if any."""
        ref = self._source()
        for graph in chain(current_graph()):
            if graph.controls and graph.controls != self._controls:
                return self._new_read(ref, graph)
        if (
            ref not in self._reads
        ):  # as in TensorFlow, it has the overrides of the Variable's creation
            self._reads[ref] = self._new_read(ref, self.graph, self._snapshot._symbol.node.rule)
        return self._reads[ref]

    def read_value(self) -> Tensor:
        """Return a new op that reads the value after the open control dependencies."""
        return self._new_read(self._source())

    def initialized_value(self) -> Tensor:
        """Return the value, or the initial value if the variable is uninitialized."""
        with control_dependencies(None):
            known = is_variable_initialized(self)
            return cond(known, self.read_value, lambda: self.initial_value)

    def eval(self, session: Runs | None = None) -> Any:
        """Return the value in a session, by default the default session."""
        return self.value().eval(session=session)

    def load(self, value: TensorLike, session: Runs | None = None) -> None:
        """Set the value of the variable in a session, by default the default session."""
        session = session or default_session("load")
        session.run(self.initializer, {self.initializer.inputs[1]: value})

    # -- writing ---------------------------------------------------------------------------------

    def assign(
        self, value: TensorLike, use_locking: bool = False, name: str | None = None
    ) -> Tensor:
        """Return an op that assigns a value to the variable. Fetching it returns the new value."""
        return self._write(ASSIGN, value, name)

    def assign_add(
        self, delta: TensorLike, use_locking: bool = False, name: str | None = None
    ) -> Tensor:
        """Return an op that adds to the variable. Fetching it returns the new value."""
        return self._write(ASSIGN_ADD, delta, name)

    def assign_sub(
        self, delta: TensorLike, use_locking: bool = False, name: str | None = None
    ) -> Tensor:
        """Return an op that subtracts from the variable. Fetching it returns the new value."""
        return self._write(ASSIGN_SUB, delta, name)

    def _write(
        self, op: Op, value: TensorLike, name: str | None = None, validate: bool = True
    ) -> Tensor:
        """Return an op that changes the variable. If `validate` is false, it may get any shape."""
        try:
            value = convert_to_tensor(value, self.dtype.base_dtype)
        except DTypeError as error:
            raise DTypeError(f"{op.type} to {self.name!r}: {error}") from None
        if validate and not self.shape.is_compatible_with(value.shape):
            raise ShapeError(
                f"{op.type} to {self.name!r}: its shape is {self.shape}, got {value.shape}."
                + " Pass validate_shape=False if its shape may change." * (op is ASSIGN)
            )
        symbol, attrs = self._symbol, dict[str, Any](key=self._key)
        if op is ASSIGN:
            attrs["shape"] = symbol.shape if validate and is_known(symbol.shape) else None
        spec = symbol.spec if self._validate else value._symbol.spec
        xs = [self._variable._tensor, value._tensor]
        return face(add_op(op, name or op.type, xs, attrs, [spec], NO_RULE))

    def set_shape(self, shape: ShapeLike) -> None:
        """Refine the static shape. Raises ValueError if the shapes are incompatible."""
        super().set_shape(shape)
        self._snapshot.set_shape(shape)

    def __repr__(self) -> str:
        return f"<tf.Variable {self.name!r} shape={self.shape} dtype={self.dtype.name}>"

    __iter__: Callable[..., Any] = refusing("'Variable' object is not iterable.")

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return bool(self.value())

    def __eq__(self, other: object) -> bool:
        return self is other


def variable_of(x: TensorLike) -> Variable:
    """Return x if it is a Variable, or the Variable whose op returns x. Else raise TypeError."""
    if isinstance(x, Variable):
        return x
    if isinstance(x, Tensor) and x.op.variable is not None:
        return x.op.variable
    raise ArgumentError(f"expected a Variable, got {x!r:.80}")


def assign(
    ref: Readable, value: TensorLike, validate_shape: bool | None = None,
    use_locking: bool | None = None, name: str | None = None,
) -> Tensor:  # fmt: skip
    """Return an op that assigns a value to a variable. Fetching it returns the new value.

    Args:
        ref: The variable.
        value: A tensor or array, or a number, of the variable's dtype.
        validate_shape: Whether the value must have the variable's shape.
        use_locking: Without effect, since a run changes all variables at once.
        name: The name of the op in the graph.

    Returns:
        A tensor with the new value. Its op has the value None in a run.

    Raises:
        ArgumentError: ref is not a variable.
        DTypeError: the value has another dtype.
        ShapeError: the value cannot have the variable's shape.

    Op type: `Assign`. Source: `tf.assign`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable([1.0, 2.0])
    ...     print(sess.run(tf.assign(v, [3.0, 4.0])))
    [3. 4.]
    """
    return variable_of(ref)._write(ASSIGN, value, name, validate_shape is not False)


def assign_add(
    ref: Readable, value: TensorLike, use_locking: bool | None = None, name: str | None = None
) -> Tensor:
    """Return an op that adds to a variable. Fetching it returns the new value.

    Args:
        ref: The variable.
        value: A tensor or array, or a number, of the variable's dtype.
        use_locking: Without effect, since a run changes all variables at once.
        name: The name of the op in the graph.

    Returns:
        A tensor with the new value.

    Raises:
        ArgumentError: ref is not a variable.
        DTypeError: the value has another dtype.
        ShapeError: the value cannot have the variable's shape.
        FailedPreconditionError: in the run, the variable is not initialized.

    Op type: `AssignAdd`. Source: `tf.assign_add`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(1.0)
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run(tf.assign_add(v, 2.0)))
    3.0
    """
    return variable_of(ref).assign_add(value, name=name)


def assign_sub(
    ref: Readable, value: TensorLike, use_locking: bool | None = None, name: str | None = None
) -> Tensor:
    """Return an op that subtracts from a variable. Fetching it returns the new value.

    Args:
        ref: The variable.
        value: A tensor or array, or a number, of the variable's dtype.
        use_locking: Without effect, since a run changes all variables at once.
        name: The name of the op in the graph.

    Returns:
        A tensor with the new value.

    Raises:
        ArgumentError: ref is not a variable.
        DTypeError: the value has another dtype.
        ShapeError: the value cannot have the variable's shape.
        FailedPreconditionError: in the run, the variable is not initialized.

    Op type: `AssignSub`. Source: `tf.assign_sub`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(5.0)
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run(tf.assign_sub(v, 2.0)))
    3.0
    """
    return variable_of(ref).assign_sub(value, name=name)


# -- all of them ---------------------------------------------------------------------------------


def global_variables(scope: str | None = None) -> list[Any]:
    """Return the variables of the default graph, in the order of creation.

    Args:
        scope: A regular expression. Only variables whose names begin with a match are listed.

    Returns:
        A list of Variables.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.global_variables`.

    >>> with tf.Graph().as_default():
    ...     v, w = tf.Variable(1.0, name="a/v"), tf.Variable(1.0, name="b/w")
    ...     print([v.name for v in tf.global_variables()], len(tf.global_variables("a/")))
    ['a/v:0', 'b/w:0'] 1
    """
    return get_collection(GraphKeys.GLOBAL_VARIABLES, scope)


def trainable_variables(scope: str | None = None) -> list[Any]:
    """Return the variables that optimizers change.

    Args:
        scope: A regular expression. Only variables whose names begin with a match are listed.

    Returns:
        A list of Variables.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.trainable_variables`.

    >>> with tf.Graph().as_default():
    ...     v, step = tf.Variable(1.0), tf.Variable(0, trainable=False)
    ...     print(tf.trainable_variables() == [v])
    True
    """
    return get_collection(GraphKeys.TRAINABLE_VARIABLES, scope)


def local_variables(scope: str | None = None) -> list[Any]:
    """Return the variables in the collection LOCAL_VARIABLES.

    Args:
        scope: A regular expression. Only variables whose names begin with a match are listed.

    Returns:
        A list of Variables.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.local_variables`.

    >>> with tf.Graph().as_default():
    ...     v = tf.Variable(0, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    ...     print(tf.local_variables() == [v], tf.global_variables())
    True []
    """
    return get_collection(GraphKeys.LOCAL_VARIABLES, scope)


def model_variables(scope: str | None = None) -> list[Any]:
    """Return the variables in the collection MODEL_VARIABLES.

    Args:
        scope: A regular expression. Only variables whose names begin with a match are listed.

    Returns:
        A list of Variables.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.model_variables`.

    >>> with tf.Graph().as_default():
    ...     v = tf.Variable(0, collections=[tf.GraphKeys.MODEL_VARIABLES])
    ...     print(tf.model_variables() == [v])
    True
    """
    return get_collection(GraphKeys.MODEL_VARIABLES, scope)


all_variables = global_variables


def variables_initializer(var_list: Iterable[Variable], name: str = "init") -> Operation:
    """Return an op that initializes these variables.

    Args:
        var_list: Variables.
        name: The name of the op in the graph.

    Returns:
        The Operation.

    Raises:
        ArgumentError: an argument is missing.

    Source: `tf.variables_initializer`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(3.0)
    ...     sess.run(tf.variables_initializer([v]))
    ...     print(sess.run(v))
    3.0
    """
    return group(*[v.initializer for v in var_list], name=name)


def global_variables_initializer() -> Operation:
    """Return an op that initializes all variables.

    Returns:
        The Operation.

    Source: `tf.global_variables_initializer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     print(tf.global_variables_initializer().name)
    init
    """
    return variables_initializer(global_variables())


initialize_all_variables = global_variables_initializer


def local_variables_initializer() -> Operation:
    """Return an op that initializes the local variables.

    Returns:
        The Operation.

    Source: `tf.local_variables_initializer`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(3, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    ...     sess.run(tf.local_variables_initializer())
    ...     print(sess.run(v))
    3
    """
    return variables_initializer(local_variables(), name="init")


def is_variable_initialized(variable: Readable) -> Tensor:
    """Return whether a variable has a value in the session.

    Args:
        variable: The variable.

    Returns:
        A bool tensor of rank 0.

    Raises:
        ArgumentError: the argument is not a variable.

    Op type: `IsVariableInitialized`. Source: `tf.is_variable_initialized`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(3.0)
    ...     known = tf.is_variable_initialized(v)
    ...     print(sess.run(known), sess.run(v.initializer), sess.run(known))
    False None True
    """
    found = variable_of(variable)
    xs, attrs = [found._variable._tensor], {"key": found._key}
    return face(add_op(IS_INITIALIZED, None, xs, attrs, [Spec((), np.dtype(bool))], NO_RULE))
