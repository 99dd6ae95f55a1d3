"""Calls of a program without active scopes or tapes, through code generated for its inputs.

The generated code does the same as `Program.__call__`, without the branches that are never taken in
this case: such a call takes a few microseconds, so each microsecond matters. Take a program of one
argument `v1` that reads a Tensor of its closure, whose array is `c1`, and a NumPy array `c2`,
updates two Variables `c3` and `c4`, and returns a list. Its code is

    if program.quick is not variant: shortcuts.clear(); return program.call_plainly((v1, ), closure)
    try:
        with UPDATES:
            c3t = c3._tensor
            c4t = c4._tensor
            if not (type(d := c3t._data) is Array and …): return program.call_plainly(…)
            x2 = written[2]                    # the array's old content, and its JAX array
            x2 = x2[1] if c2.tobytes() == x2[0] else convert_array(2, c2)
            results = compiled(v1, c1, x2, c3t._data, c4t._data)
            if type(results) is tuple: return program.take(variant, results)    # not as usual
            d0, d1, d2 = results
            y0 = Tensor(); y0._data = d0; y0._id = 0
            …
            if LIVE: y0._id = next_id(); …
            if not (c3._tensor is c3t and c4._tensor is c4t): return program.call_plainly(…)
            c3._tensor = y1; c3._lent = False
            c4._tensor = y2; c4._lent = False
            return [y0, ]
    except SourceFound: …

Signal handlers run, and threads switch, where Python calls something. Between the assignments the
code calls nothing and frees nothing (`c3t` is alive), so other code sees all of them or none. If a
handler has assigned to a Variable in the meantime, the program is called again with the new value.
If the program overwrites the Variables, signals are deferred, and other threads that read them
wait:

        with UPDATES, Deferred():
            …
            try:
                c3._away = c4._away = True
                results = compiled(v1, c1, x2, c3t._data.copy() if c3._lent else c3t._data, …)
                …
            finally: c3._away = c4._away = False
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.variables import UPDATES, Variable
from regrad.core.interrupts import Deferred
from regrad.core.sharding import to_jax
from regrad.core.state import LIVE, next_id
from regrad.core.tensor import Tensor
from regrad.transforms.arguments import private
from regrad.transforms.traces import SourceFound, Trace, find_jax

if TYPE_CHECKING:
    from regrad.transforms.closures import Closure
    from regrad.transforms.program import Program

SMALL = 16_384  # bytes of a NumPy array up to which comparing is faster than converting for JAX


class Writer:
    """Writes a function; `scope` maps names to the objects that the function uses."""

    def __init__(self, **scope: Any) -> None:
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {**SCOPE, **scope, "Array": array_type()}
        self.names: dict[int, str] = {}

    def write(self, line: str, depth: int) -> None:
        self.lines.append(" " * depth + line)

    def bind(self, value: Any) -> str:
        """Return a name for an object."""
        name = self.names.setdefault(id(value), f"c{len(self.names)}")
        self.scope[name] = value
        return name

    def made(self, name: str) -> Any:
        exec(_compiled("\n".join(self.lines)), self.scope)
        return self.scope[name]


@functools.lru_cache(maxsize=128)
def _compiled(source: str) -> Any:
    return compile(source, __file__, "exec")  # tracebacks treat its frames as regrad's


class QuickCall:
    """Writes the call of a program, for the current closure, and the names of its arguments.

    The caller of the generated code checks that the closure is current.
    """

    def __init__(
        self, writer: Writer, program: Program, closure: Closure, given: list[str]
    ) -> None:
        self.writer = writer
        self.program = program
        self.closure = closure
        self.given = given
        self.variant: Any = program.quick
        self.names: dict[Variable, str] = {}
        self.watched: set[int] = {id(read) for read, _ in closure.places}
        arrays = "".join([f"{name}, " for name in given])
        self.plainly: str = f"return program.call_plainly(({arrays}), closure)"
        writer.scope |= {"program": program, "closure": closure, "variant": program.quick}

    def function(self) -> Callable[..., Any]:
        """Return a function of the arguments."""
        self.writer.write(f"def quick({', '.join(self.given)}):", 0)
        self.write_call()
        return self.writer.made("quick")

    def write_call(self) -> None:
        """Write the call and its key: everything on which the call depends besides its road.

        The key is complete. The road checks that no tape watches. The generated code checks the
        other parts of `Program._key`: the layouts of Variables, and JAX's search for NaN. The call
        reads each source at its place: a Variable, a place of the closure, the content of an array.
        The variant counts its sources, and a result with a mark comes from another trace.
        """
        write, variant, assigned = self.writer.write, self.variant, self.program.assigned
        write(f"if program.quick is not variant: shortcuts.clear(); {self.plainly}", 2)
        if variant is None:  # the program has no quick call
            write(self.plainly, 2)
            return
        single = self.program.jax.sharding.SingleDeviceSharding
        self.writer.scope |= {
            "compiled": variant.compiled, "convert": variant.convert,
            "convert_array": variant.convert_array, "written": variant.written, "single": single,
            "config": self.program.jax.config,
        }  # fmt: skip
        write("try:", 2)
        if variant.threads:
            write(f"with UPDATES{', Deferred()' if variant.donated else ''}:", 3)
        if assigned:  # all checks come before the first donation, which cannot be undone
            searches = "(config.jax_debug_nans or config.jax_debug_infs)"
            usual = [f"not {searches}"] if variant.donates else []
            for v in assigned:
                name = self.names[v] = self.writer.bind(v)
                # keeps the old Tensor alive during the assignments
                write(f"{name}t = {name}._tensor", 4)
                data = f"(d := {name}t._data)"
                usual.append(f"type{data} is Array and type(d.sharding) is single")
            self.leave_unless(" and ".join(usual))
        sources = enumerate(self.program.sources, len(self.given))
        inputs = [*self.given, *[self.source(i, source) for i, source in sources]]
        self.write_run([inputs[i] for i in (*variant.kept, *variant.places)])
        write("except SourceFound:", 2)  # for other shapes, the body captures more
        write(f"program.forget(); shortcuts.clear(); {self.plainly}", 3)
        write("except (TypeError, ValueError, NotImplementedError) as error:", 2)
        write(f"program.check_quick(error, [{', '.join(self.given)}])", 3)
        write("raise", 3)

    def leave_unless(self, condition: str) -> None:
        self.writer.write(f"if not ({condition}): {self.plainly}", 4)

    def source(self, i: int, source: Any) -> str:
        """Write the code that reads a source, and return the expression for it."""
        bind, write = self.writer.bind, self.writer.write
        if isinstance(source, Variable):
            name = self.names.get(source) or bind(source)
            if i in self.variant.donated:
                return f"{name}t._data.copy() if {name}._lent else {name}t._data"
            if source in self.names:
                return f"{name}t._data"
            write(f"x{i} = {name}._tensor._data", 4)
            write(f"if type(x{i}) is not Array: x{i} = convert({i}, {name}._tensor)", 4)
            return f"x{i}"
        value = self.program.source(source)
        if type(source) is int:
            read = self.closure.tensors[source]
            if id(read) not in self.watched:
                self.leave_unless(f"{bind(read)}() is {bind(value)}")
        if isinstance(value, Tensor):  # a Tensor of the closure never changes
            return bind(self.variant.convert(i, value))
        if type(value) is array_type():
            return bind(to_jax(np.asarray(value)))
        if type(value) is not np.ndarray or value.nbytes > SMALL:
            return f"to_jax(private(asarray({bind(value)})))"
        self.variant.convert_array(i, value)
        write(f"x{i} = written[{i}]", 4)
        name = bind(value)
        known = f"x{i}[1] if {name}.tobytes() == x{i}[0]"
        write(f"x{i} = {known} else convert_array({i}, {name})", 4)
        return f"x{i}"

    def write_run(self, inputs: list[str]) -> None:
        """Write the call of the compiled function, the assignments and the result."""
        write, usual = self.writer.write, self.variant.usual
        first = len(self.given)
        away = [self.names[self.program.sources[i - first]] for i in self.variant.donated]
        depth = 5 if away else 4
        if away:
            write("try:", 4)
            # From now on, other threads that read the Variables wait; earlier reads have a copy.
            write(" = ".join([f"{v}._away" for v in away]) + " = True", 5)
        write(f"results = compiled({', '.join(inputs)})", depth)
        write("if type(results) is tuple: return program.take(variant, results)", depth)
        ys = [f"y{i}" for i in range(usual.count + len(usual.assigned))]
        data = ["results"] if len(ys) == 1 else [f"d{i}" for i in range(len(ys))]
        if len(ys) > 1:
            write(f"{', '.join(data)} = results", depth)
        for y, array in zip(ys, data, strict=True):
            write(f"{y} = Tensor(); {y}._data = {array}; {y}._id = 0", depth)
        write(f"if LIVE: {'; '.join([f'{y}._id = next_id()' for y in ys]) or 'pass'}", depth)
        same = [f"{self.names[v]}._tensor is {self.names[v]}t" for v in usual.assigned]
        # (Otherwise a handler has assigned to the Variable, and the handler's value must be used.)
        if same and not away:
            write(f"if not ({' and '.join(same)}): {self.plainly}", depth)
        for v, y in zip(usual.assigned, ys[usual.count :], strict=True):
            write(f"{self.names[v]}._tensor = {y}; {self.names[v]}._lent = False", depth)
        if away:
            write("finally: " + " = ".join([f"{v}._away" for v in away]) + " = False", 4)
        write(f"return {self.closed(usual, ys[: usual.count])}", 4)

    def closed(self, trace: Trace, ys: list[str]) -> str:
        """Return the expression for the results in their containers."""
        if trace.note.full:
            try:
                return _display(trace.note.rebuild(list(range(len(ys)))))
            except TypeError:
                pass
        return f"{self.writer.bind(trace.note)}([{', '.join(ys)}])"


def _display(value: Any) -> str:
    """Return the expression for a container of results, which are identified by number."""
    if type(value) is int:
        return f"y{value}"
    if value is None:
        return "None"
    if type(value) is dict and all(type(key) is str for key in value):
        return f"{{{', '.join([f'{key!r}: {_display(part)}' for key, part in value.items()])}}}"
    if type(value) in (tuple, list):
        parts = "".join([f"{_display(part)}, " for part in value])
        return f"({parts})" if type(value) is tuple else f"[{parts}]"
    raise TypeError


SCOPE: dict[str, Any] = {
    "UPDATES": UPDATES, "Deferred": Deferred, "SourceFound": SourceFound, "LIVE": LIVE,
    "next_id": next_id, "to_jax": to_jax, "asarray": np.asarray, "Tensor": Tensor,
    "private": private,
}  # fmt: skip


@functools.cache
def array_type() -> type:
    """Return the type of JAX arrays that have values."""
    return type(find_jax().numpy.zeros(()))
