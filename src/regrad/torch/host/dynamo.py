"""The functions of Dynamo through which regrad observes what torch.compile traces.

torch.compile calls the open modes during tracing, so its programs contain the rules. Dynamo has no
hooks for other steps (the forward passes of Functions, the bodies of operators, the run of a single
node). So regrad replaces some of Dynamo's functions while scopes are open. If one of them is
missing, all compiled code in scopes raises, because regrad could not detect a skipped rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, NoReturn

import torch

from regrad.core.hosts import Missing, takes
from regrad.errors import RegradError
from regrad.torch.host import COMPILING
from regrad.torch.host.bodies import remade

Make = Callable[[Any], Any]
_VARIABLES = "torch._dynamo.variables"
_OUTPUT = "torch._dynamo.output_graph.OutputGraph"
_SOURCE = "torch._dynamo.source"
_FEWER = "no public API drops a guard for a program that other code compiles"

# The functions to replace, by the name of the maker: their paths, and their first parameters.
# (Before 2.11, the function that traces all regions also traced the forward passes of Functions.)
_ENTRANCES = {
    "begin": (f"{_OUTPUT}.__init__", "self"),
    "call_apply": (f"{_VARIABLES}.misc.AutogradFunctionVariable.call_apply", "self tx args kwargs"),
    "trace_forward": (
        f"{_VARIABLES}.higher_order_ops.AutogradFunctionApplyVariable.trace_forward_graph",
        "self tx ctx fwd_tracer args kwargs",
    ),
    "speculate": (
        f"{_VARIABLES}.higher_order_ops.speculate_subgraph", "tx f sub_args sub_kwargs description",
    ),
    "run_node": ("torch._dynamo.utils.run_node", "tracer node args kwargs nnmodule"),
    "dispatch": (f"{_VARIABLES}.torch_function.dispatch_torch_function", "tx fn args kwargs"),
    "call_user_compiler": (f"{_OUTPUT}.call_user_compiler", "self gm"),
    "call_module": (
        f"{_VARIABLES}.nn_module.UnspecializedNNModuleVariable.call_function", "self tx args kwargs"
    ),
}  # fmt: skip


def entrances(makers: Mapping[str, Make]) -> list[tuple[Any, str, Make]]:
    """Return the functions to replace while a scope is open: owner, name and maker."""
    skipped = "trace_forward" if COMPILING.host.release < (2, 11) else "speculate"
    found: list[tuple[Any, str, Make]] = []
    for name, (path, parameters) in _ENTRANCES.items():
        if name == skipped:
            continue
        why = "observes what Dynamo traces, which no public API does"
        place, _, attribute = path.rpartition(".")
        owner = COMPILING.part(place, why, lambda owner, a=attribute: a in vars(owner))
        COMPILING.part(path, why, takes(*parameters.split()))
        found.append((owner, attribute, makers[name]))
    return [] if COMPILING.losses else found


@cache
def skip_tracing(function: Callable[..., Any], inside: bool = True) -> None:
    """Make torch.compile skip a function of regrad when it is called from code that is not traced.

    The call comes after a graph break. If traced code calls the function, Dynamo still traces into
    it. With `inside`, Dynamo also skips the functions that this function calls.
    (`torch.compiler.disable` creates another function, which the mode's class would not find.)
    """
    why = "no public API makes Dynamo skip an existing function"
    action = COMPILING.part(
        "torch._dynamo.types.FrameAction", why, lambda a: hasattr(a, "SKIP") and a.DEFAULT
    )
    strategy = COMPILING.part(
        "torch._dynamo.types.FrameExecStrategy", why, lambda found: isinstance(found, type)
    )
    setter = COMPILING.part("torch._C._dynamo.eval_frame.set_code_exec_strategy", why)
    if not COMPILING.losses:
        setter(function.__code__, strategy(action.SKIP, action.SKIP if inside else action.DEFAULT))


def break_graph(function: Callable[..., Any], why: str) -> None:
    """Make torch.compile end a program where traced code calls a function of regrad.

    (`torch.compiler.disable` does this too, but imports Dynamo, which takes long.)
    """
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)
    skip_tracing(function)


def as_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile call a function during tracing, and use the result as a constant.

    (`torch.compiler.assume_constant_result` does this too, but imports Dynamo, which takes long.)
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@cache
def dispatch_when_traced(functions: frozenset[Any]) -> None:
    """Make torch.compile call modes for these functions, as torch does in eager mode.

    Dynamo has its own list of functions. The list lacks in-place variants (`torch.relu_`) and
    functions inside torch.nn.functional (`torch._C._nn.silu`), so modes would not receive these.
    """
    asked = COMPILING.part(
        f"{_VARIABLES}.torch.get_overridable_functions", "no public API extends Dynamo's list",
        lambda found: isinstance(found(), set) and found() is found(),
    )  # fmt: skip
    if not isinstance(asked, Missing):
        asked().update(functions)


def _reader(path: str) -> Callable[[Any], Any]:
    """Return a reader of an attribute of Dynamo's objects; it raises if there is none."""
    find = attrgetter(path)

    def read(held: Any) -> Any:
        try:
            return find(held)
        except AttributeError as error:
            why = f"Dynamo has another structure ({error})"
            raise through_dynamo(COMPILING.lose(why)) from None

    return read


modes: Any = _reader("symbolic_torch_function_state.mode_stack")  # a trace's variables, in a list
modes_of: Any = _reader("torch_function_mode_stack")  # the modes at the start of an OutputGraph
function_class: Any = _reader("fn_cls")  # the Function that a variable represents
trace_operator: Any = _reader("_call_function")  # the method that traces the bodies of an operator
_realize = _reader("realize")


def value_of(variable: Any) -> Any:
    """Return the object that a variable represents; None if the trace creates the object."""
    return getattr(_realize(variable)(), "value", None)


def guard_identity(variable: Any) -> None:
    """Guard the program being traced on the identity of this object."""
    source = getattr(variable, "source", None)
    if source is not None:
        _part("guards.install_guard")(source.make_guard(_part("guards.GuardBuilder").ID_MATCH))


def mode_from(tx: Any, variable: Any, number: int) -> Any:
    """Return a variable for one of the `modes` of a mode, by its number."""
    source = _part("source.AttrSource")(variable.source, "modes")
    source = _part("source.GetItemSource")(source, number)
    return _part("variables.base.VariableTracker").build(
        tx, value_of(variable).modes[number], source
    )


@cache
def _part(path: str) -> Any:
    why = "no public API adds a guard, or a value with a guard, to a trace"
    return COMPILING.part(f"torch._dynamo.{path}", why)


def can_trace_operator(variable: Any) -> bool:
    """Return whether a variable represents an operator whose bodies Dynamo traces."""
    return hasattr(variable, "_call_function")


def trace_call(function: Any, tx: Any, args: Sequence[Any], options: Any) -> Any:
    """Trace a call of a function that is a variable of Dynamo."""
    return function.call_function(tx, args, options)


def call_under(tx: Any, run: Any, mode: Any, function: Any, args: Sequence[Any], kw: Any) -> Any:
    """Trace `run(mode, function, *args)`, where the function is one node of the program."""
    traced = _part("variables.functions.UserFunctionVariable")(run)
    node = _part("variables.torch.TorchInGraphFunctionVariable")(function)
    return trace_call(traced, tx, [mode, node, *args], kw)


def through_dynamo(error: RegradError) -> Exception:
    """Return an error in a form that torch.compile raises unchanged."""
    kind = _kind_through_dynamo(type(error))
    return error if kind is None else kind(str(error), first_useful_frame=None)


@cache
def _kind_through_dynamo(kind: type[RegradError]) -> Any:
    shortened = COMPILING.part(
        "torch._dynamo.exc.ShortenTraceback", "Dynamo wraps all other errors", missing=object,
        needed=False,
    )  # fmt: skip
    if shortened is object:
        return None
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (shortened, kind), members)


def refuse_to_compile() -> Any:
    """Make torch.compile raise from now on; the result's `__exit__` ends that."""
    try:
        return torch.compiler.set_stance("default", force_backend=_refusing)
    except ImportError:  # this torch has no Dynamo
        return nullcontext()


def _refusing(graph: Any, inputs: Any) -> NoReturn:
    raise through_dynamo(COMPILING.error())


def bodies(node: Any) -> Iterator[Any]:
    """Yield the graphs that a node of a graph has as arguments, or is itself."""
    root = node.graph.owning_module
    for each in (*node.all_input_nodes, node):
        if each.op == "get_attr" or each.op == "call_module":
            found = _reach(root, each.target)
            if isinstance(found, torch.fx.GraphModule):
                yield found


def _reach(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def drop_guards(output: Any, is_fixed: Callable[[Any], bool]) -> None:
    """Drop the guards on the contents of modes whose class determines the contents.

    Dynamo guards on the class of each open mode. It also guards on everything that it has read from
    a mode. Checking these guards takes longer at each call than a scope does.
    """
    source = COMPILING.part(
        f"{_SOURCE}.TorchFunctionModeStackSource", _FEWER, takes("ind"), missing=int, needed=False
    )
    remove = COMPILING.part(
        "torch._guards.GuardsSet.remove_guards_with_source", _FEWER, takes("self", "source"),
        missing=lambda guards, source: None, needed=False,
    )  # fmt: skip
    for i, mode in enumerate(modes_of(output)):
        if is_fixed(mode):
            remove(output.guards, source(i))


@cache
def traced_body(function: Any) -> Callable[..., Any] | None:
    """Return the copy of a Python function of torch into which torch.compile traces.

    The copy has the same code, but Dynamo calls no mode for it. The checks in the code
    (`has_torch_function`) return False: in a trace they look at the arguments, and not at modes.
    The copy uses torch's own globals, so Dynamo guards on them as it does without regrad.

    Return None for functions into which Dynamo cannot trace. They are single nodes of its graphs,
    and regrad watches these nodes.
    """
    code = function.__code__
    dispatches = code.co_filename.endswith("_jit_internal.py") or (
        "_list_with_default" in code.co_names
    )
    if dispatches or function.__module__ in ("torch.functional", "torch._tensor"):
        return None
    return remade(function, function.__globals__, function.__closure__)


fake_mode: Any = COMPILING.part(
    "torch._guards.detect_fake_mode", "no public API identifies the fake tensors with which "
    "torch.compile runs a program", lambda found: found() is None,
    missing=lambda: None,
)  # fmt: skip


def graph_break(why: str) -> Exception:
    """Return the error that ends a trace, so that the next code runs in Python."""
    return COMPILING.part("torch._dynamo.exc.Unsupported", "no public API ends a trace")(why)


_proxy_mode: Any = COMPILING.part(
    "torch.fx.experimental.proxy_tensor.get_proxy_mode", "no public API shows that ops are "
    "traced into a program", lambda found: found() is None, missing=lambda: None,
)  # fmt: skip
_FASTER = "`get_proxy_mode` takes four times as long"
_PROXY: Any = COMPILING.part(
    "torch._C._TorchDispatchModeKey.PROXY", _FASTER, missing=False, needed=False
)
_mode_of: Any = COMPILING.part(
    "torch._C._get_dispatch_mode", _FASTER, lambda found: found(_PROXY) is None,
    missing=False, needed=False,
)  # fmt: skip
_INFRA = "_ModeStackStateForPreDispatch__infra_modes"  # a list that torch changes in place
_modes_before: Any = COMPILING.part(
    "torch._ops.mode_stack_state_for_pre_dispatch", "its `get` takes four times as long",
    lambda found: getattr(found(), _INFRA)[0] is None is found().get(0),
    missing=False, needed=False,
)  # fmt: skip
_before: Any = getattr(_modes_before(), _INFRA) if _modes_before else ()


def _is_traced() -> bool:
    """Return whether the running ops are being traced into a program."""
    return _before[0] is not None or _mode_of(_PROXY) is not None


is_traced: Callable[[], bool] = (
    _is_traced if _mode_of and _modes_before else lambda: _proxy_mode() is not None
)
