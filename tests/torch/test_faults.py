"""Faults planted in PyTorch models: each is found by a tool, which names the op and the line."""

import pathlib

import pytest

import regrad.torch as rt
from tests.torch import faulty

SOURCE = pathlib.Path(faulty.__file__)
LINES = SOURCE.read_text().splitlines()


def line_of(marker):
    (number,) = [i for i, text in enumerate(LINES, 1) if text.endswith(f"# {marker}")]
    return f"{SOURCE}:{number}"


def by_check(f, args, order=1):
    report = rt.gradient_report(f, args, order=order)
    assert not report.ok
    return [(cause.op_type, cause.line, cause.kind) for cause in report.causes]


def by_check_of_second_order(f, args):
    return by_check(f, args, order=2)


def by_nan(f, args):
    found = rt.find_nan(f)(*args)
    return [(found.op_type, found.line, found.phase)]


def by_trace(f, args):
    return [(s.step.op_type, s.step.line, s.kind) for s in rt.trace_gradients(f)(*args).worst()]


def by_comparison(f, args):
    found = rt.compare_gradients(f, faulty.intended_surrogate())(*args)
    assert not found.ok
    (argument,) = [row for row in found.rows if row.kind == "argument"]
    rows = [row for row in found.worst() if row.kind == "op"]
    return [(row.op_type, row.line, f"{argument.ratio:.3g} times") for row in rows]


def by_error(f, args):
    with pytest.raises(RuntimeError, match="inplace") as caught:
        rt.trace_gradients(f)(*args)
    (note,) = caught.value.__notes__
    words = note.removeprefix("in the backward pass of ").removesuffix(", or after it")
    op, line = words.split(" at ")
    return [(op, line, "error")]


# fault: what finds it, the op, and what else is said
FAULTS = {
    "wrong_factor": (by_check, "Gelu", "scaled by 0.5"),
    "missing_sum": (by_check, "ScaleAndShift", "a missing sum"),
    "transposed": (by_check, "Dense", "transposed"),
    "swapped": (by_check, "Product", "that of 'b'"),
    "wrong_sign": (by_check, "softplus", "wrong sign"),
    "mean_for_sum": (by_check, "Total", "scaled by 0.2, a mean in place of a sum?"),
    "stale": (by_check, "Cached", "stale value"),
    "stale_data": (by_check, "sin", "stale value"),
    "dropped_in_second_order": (by_check_of_second_order, "Cube", "missing"),
    "nan_behind_where": (by_nan, "sqrt", "backward"),
    "log_of_zero": (by_nan, "log", "forward"),
    "root_in_norm": (by_nan, "sqrt", "backward"),
    "division": (by_nan, "div", "forward"),
    "overflow": (by_nan, "exp", "forward"),
    "masked_row": (by_nan, "softmax", "forward"),
    "dead_relu": (by_trace, "relu", "dead"),
    "exploding": (by_trace, "mv", "grows"),
    "vanishing": (by_trace, "sigmoid", "decays"),
    "detached": (by_trace, "detach", "cut"),
    "under_no_grad": (by_trace, "linear", "cut"),
    "clipped": (by_trace, "sign", "dead"),
    "scaled_surrogate": (by_comparison, "Spike", "10 times"),
    "changed_in_place": (by_error, "exp", "error"),
}


@pytest.mark.slow(but=3)
@pytest.mark.versions
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    tool, op, kind = FAULTS[fault]
    f, args = getattr(faulty, fault)()
    assert tool(f, args)[0] == (op, line_of(fault), kind)
