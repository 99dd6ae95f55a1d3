"""Loops of unknown length inside a JAX trace: flat functions under `lax.while_loop`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regrad.autodiff.variables import Variable, assign_all
from regrad.core.sharding import to_jax
from regrad.core.state import current
from regrad.errors import GradientError
from regrad.transforms.bodies import BodyRun, until_all_are_known, with_assigned
from regrad.transforms.replay import Captured
from regrad.transforms.scans import push_loop

if TYPE_CHECKING:
    from regrad.core.backends import Array
    from regrad.core.tensor import Tensor
    from regrad.transforms.region import Flat, Passage


def repeated(test: Flat, flat: Flat, carry: Sequence[Tensor]) -> Sequence[Tensor]:
    """Apply `flat` to the carry as long as `test` of it is true; forward mode only."""
    test, flat = Captured(test, "while_loop"), Captured(flat, "while_loop")
    assigned: list[Variable] = []
    n = len(carry)

    def run() -> tuple[BodyRun, Any]:
        whole = [*carry, *[v._read() for v in assigned]]
        body_run = BodyRun("while_loop", whole, traced=True)
        first = _assigned_first(test, n, assigned), _assigned_first(flat, n, assigned)
        ys = _repeat(body_run, first[0], with_assigned(first[1], assigned))
        return body_run, (body_run, first, ys)

    body_run, (tested, stepped), ys = until_all_are_known(assigned, run)
    m = len(ys)
    functions = body_run.as_function(tested), body_run.as_function(stepped, assigned)

    def repeat(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        test, flat = [lambda xs, f=f: f([*xs, *inputs[m:]]) for f in functions]
        return repeated(test, flat, inputs[:m])

    def push(inputs: Sequence[Tensor], passage: Passage, dxs: Sequence[Tensor]) -> Sequence[Tensor]:
        test = lambda tensors: functions[0]([*tensors[:m], *inputs[m:]])  # noqa: E731
        run = lambda step, carry, _: (repeated(test, step, carry), ())  # noqa: E731
        return push_loop(functions[1], m, m, inputs, passage, dxs, run)

    results = body_run.finish(ys, _refuse, push, repeat, [(i, i) for i in range(m)])
    assign_all(assigned, results[n:])
    return results[:n]


def _assigned_first(flat: Flat, n: int, assigned: Sequence[Variable]) -> Flat:
    """Return a body of n Tensors as a body that also takes the values of these Variables."""

    def more(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        region = current().region  # pyright: ignore[reportOptionalMemberAccess]
        region.values.update(zip(assigned, tensors[n:], strict=True))
        return flat(tensors[:n])

    return more


def _repeat(body_run: BodyRun, test: Flat, step: Flat) -> Sequence[Any]:
    import jax

    def run(flat: Flat, arrays: Array) -> list[Any]:
        inner = body_run.stand_ins(arrays)
        body_run.watched.update(x._id for x in inner)
        return [to_jax(y._data) for y in body_run.run(flat, inner)]

    def goes_on(arrays: Sequence[Array]) -> Any:
        (y,) = run(test, arrays)
        body_run.outputs.pop()
        return y.reshape(())

    def body(arrays: Sequence[Array]) -> Any:
        ys = run(step, arrays)
        del body_run.outputs[:-1]
        return ys

    return jax.lax.while_loop(goes_on, body, [to_jax(x._data) for x in body_run.xs])


def _refuse(*given: object) -> Any:
    raise GradientError(
        "while_loop: under jit, a loop of unknown length has no gradient, because XLA must know "
        "how much memory to reserve. Pass a maximum number of steps, while_loop(…, max_steps=n), "
        "or use scan or fori_loop with a fixed number of steps. (Forward mode, jvp, needs "
        "neither.)"
    )
