"""`f.lower`: the program of a compiled function as JAX lowers it."""

from __future__ import annotations

import pytest

import regrad as rg
from regrad.errors import ArgumentError, StateError


def test_the_program_is_lowered_and_compiled_but_does_not_run():
    w = rg.Variable([1.0, 2.0])

    @rg.jit
    def step(x):
        w.assign_sub(0.1 * x)
        return rg.sin(w)

    lowered = step.lower(rg.scalar(2.0))
    assert "stablehlo.sine" in lowered.as_text()
    assert lowered.compile().memory_analysis() is not None
    assert w.numpy().tolist() == [1.0, 2.0]
    step(rg.scalar(2.0))
    assert step.cache_info().traces == 1  # which the call found


def test_static_arguments_and_shapes_are_in_it():
    f = rg.jit(lambda x, n: x * n, static_argnames="n")
    assert "dense<3.0" in f.lower(rg.zeros((2, 5)), n=3).as_text()
    assert "2x5xf32" in f.lower(rg.zeros((2, 5)), n=3).as_text()


def test_overrides_are_built_in_and_count_as_fired():
    gradient = rg.jit(rg.grad(rg.sin))
    assert "cosine" in gradient.lower(1.0).as_text()
    with rg.gradient_override_map({"Sin": lambda dy: dy * 7}) as overrides:
        text = gradient.lower(1.0).as_text()
    assert "cosine" not in text
    assert "7.0" in text
    overrides.assert_fired("Sin")


def test_a_method_is_lowered_for_its_object():
    class Scaled:
        by = 3.0

        @rg.jit
        def apply(self, x):
            return self.by * x

    scaled = Scaled()
    assert "dense<3.0" in scaled.apply.lower(1.0).as_text()
    scaled.by = 5.0
    assert "dense<5.0" in scaled.apply.lower(1.0).as_text()


def test_where_it_would_be_misunderstood_it_is_refused():
    f = rg.jit(lambda x: x * 2)
    with pytest.raises(StateError, match=r"lower a compiled one"):
        rg.grad(lambda x: (f.lower(x), x)[1])(1.0)
    with pytest.raises(StateError, match="lower"):
        rg.jit(lambda x: (f.lower(x), x)[1])(1.0)


def test_wrong_arguments_are_refused_as_by_a_call():
    with pytest.raises(ArgumentError, match="expected Tensors"):
        rg.jit(lambda x: x).lower(object())
