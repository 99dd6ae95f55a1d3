"""Functions of PyTorch and JAX on Tensors: a message of ours. Conversions and operators go on."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, DetachedTensorWarning, GradientError
from tests.helpers.optional import optional
from tests.helpers.rows import refused

torch, jax = optional("torch"), optional("jax")
T = rg.tensor([1.0, 2.0])
V = rg.Variable([1.0, 2.0])

IN_TORCH = {
    "sin": lambda t: torch.sin(t), "relu": lambda t: torch.nn.functional.relu(t),
    "linear": lambda t: torch.nn.Linear(2, 2)(t), "stack": lambda t: torch.stack([t, t]),
    "where": lambda t: torch.where(torch.ones(2) > 0, t, torch.ones(2)),
    "add_": lambda t: torch.ones(2).add_(t), "clamp": lambda t: torch.ones(2).clamp(t),
    "softmax": lambda t: torch.softmax(t, 0),
}  # fmt: skip
INSTEAD = {"sin": "regrad.sin", "relu": "regrad.nn.relu", "stack": "regrad.stack"}


@pytest.mark.versions
@pytest.mark.parametrize("x", [T, V])
@pytest.mark.parametrize("name", IN_TORCH)
def test_a_function_of_torch_says_what_to_call(name, x):
    refused(lambda: IN_TORCH[name](x), ArgumentError, f"PyTorch's {name} was given a regrad Tensor",
            INSTEAD.get(name, "regrad.torch"), "regrad.torch.from_regrad",
            r"torch.asarray\(x\) returns the values")  # fmt: skip


IN_JAX = {
    "sin": lambda t: jax.numpy.sin(t), "sum": lambda t: jax.numpy.sum(t * t),
    "relu": lambda t: jax.nn.relu(t), "softmax": lambda t: jax.nn.softmax(t),
    "a primitive": lambda t: jax.lax.sin(t),
    "two arguments": lambda t: jax.lax.add(t, jax.numpy.ones(2)),
    "stack": lambda t: jax.numpy.stack([t, t]),
    "where": lambda t: jax.numpy.where(jax.numpy.ones(2) > 0, t, 0.0),
    "dot": lambda t: jax.numpy.dot(jax.numpy.ones(2), t),
    "reshape": lambda t: jax.numpy.reshape(t, (1, 2)),
    "set": lambda t: jax.numpy.ones(2).at[0].set(t), "jit": lambda t: jax.jit(lambda x: x)(t),
    "grad": lambda t: jax.grad(lambda x: x.sum())(t),
    "what is differentiated": lambda t: jax.grad(lambda x: rg.sum(rg.sign(x)))(jax.numpy.ones(2)),
    "vmap": lambda t: jax.vmap(lambda x: x)(t),
    "scan": lambda t: jax.lax.scan(lambda c, x: (c, x), 0.0, t),
    "device_put": lambda t: jax.device_put(t),
}  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("x", [T, V])
@pytest.mark.parametrize("name", IN_JAX)
def test_a_function_of_jax_says_what_to_call(name, x):
    assert rg.jax  # (primitives know of Tensors as soon as this is imported)
    words = "regrad.jax.from_regrad", r"jax.numpy.asarray\(x\) returns the values"
    call = lambda: IN_JAX[name](x)  # noqa: E731
    refused(call, GradientError, "a function of JAX was given a regrad Tensor", *words)


def test_where_the_user_s_function_is_differentiated_by_regrad():
    with pytest.raises(ArgumentError, match=r"Use regrad\.sin"):
        rg.grad(lambda v: torch.sin(v).sum())(T)
    with pytest.raises(GradientError, match=r"regrad\.jax\.from_regrad"):
        rg.grad(lambda v: jax.numpy.sum(v**2))(T)


CONVERSIONS = {
    "torch.asarray": lambda t: torch.asarray(t), "torch.as_tensor": lambda t: torch.as_tensor(t),
    "torch.tensor": lambda t: torch.tensor(np.array(t)),
    "torch.tensor of a Tensor": lambda t: torch.tensor(t),
    "torch.from_dlpack": lambda t: torch.from_dlpack(t),
    "jnp.asarray": lambda t: jax.numpy.asarray(t),
    "jnp.asarray as": lambda t: jax.numpy.asarray(t, dtype="float32"),
    "jnp.array": lambda t: jax.numpy.array(t),
    "jnp.array of a list": lambda t: jax.numpy.array([t, t])[0],
    "jnp.from_dlpack": lambda t: jax.numpy.from_dlpack(t),
    "jit of a conversion": lambda t: jax.jit(lambda: jax.numpy.asarray(t))(), "numpy": np.asarray,
}  # fmt: skip


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_go_on(name):
    assert np.asarray(CONVERSIONS[name](T)).tolist() == [1.0, 2.0]


@pytest.mark.versions
@pytest.mark.parametrize("make", ["torch", "jax", "traced"])
def test_operators_are_ours_from_both_sides(make):
    def both(x):
        pairs = (x + T, T + x), (x * T, T * x), (x - T, -(T - x)), (x @ T, T @ x), (x == T, x == T)
        for one, other in pairs:
            assert type(one) is type(other) is rg.Tensor
        return (x / T).data

    if make == "torch":
        found = both(torch.ones(2))
    else:
        run = jax.jit(both) if make == "traced" else both
        found = run(jax.numpy.ones(2, "float32"))
    assert np.asarray(found).tolist() == [1.0, 0.5]


def test_nothing_is_seen_by_who_only_looks():
    assert not hasattr(T, "__jax_array__")
    assert not torch.is_tensor(T)


def test_neither_library_is_imported_for_it():
    program = "import regrad, sys; regrad.ones(2); print({'torch', 'jax'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


# -- a torch tensor that requires grad -------------------------------------------------------------

TAKEN = {
    "an op": lambda h: rg.sum(h), "an operator": lambda h: h + T,
    "in a list": lambda h: rg.stack([h, h]), "tensor": lambda h: rg.tensor(h),
    "grad": lambda h: rg.grad(lambda x: rg.sum(x * x))(h),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_tensor_that_requires_grad_warns_where_torch_s_record_ends(name):
    leaf = torch.ones(2, requires_grad=True)
    for h in (leaf, leaf * 2):
        with pytest.warns(DetachedTensorWarning, match="torch's gradient ends here") as caught:
            TAKEN[name](h)
        assert {w.filename for w in caught} == {__file__}
        assert "regrad.torch.from_regrad" in str(caught[0].message)
        assert "x.detach()" in str(caught[0].message)


@pytest.mark.parametrize("name", TAKEN)
def test_nothing_warns_where_no_record_ends(name):
    h = torch.ones(2, requires_grad=True) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TAKEN[name](torch.ones(2))
        TAKEN[name](h.detach())
        with torch.no_grad():
            TAKEN[name](h)


@pytest.mark.slow
def test_a_line_warns_once():
    h = torch.ones(2, requires_grad=True) * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            rg.sum(h)
    assert len(caught) == 1


def test_regrad_in_torch_does_not_warn():
    def mixed(dy, x):
        assert x.dtype not in (torch.int64, torch.int32)
        return rg.sin(x) * dy

    for rule in (mixed, lambda dy, x: rg.sin(x) * dy, lambda dy: rg.rules.clip_gradient(dy, -1, 1)):
        with rg.torch.gradient_override_map({"Sign": rule}):
            for _ in range(2):
                x = torch.ones(2, requires_grad=True)
                torch.autograd.grad(torch.sign(x * 1.0).sum(), x, create_graph=True)
    f = rg.torch.from_regrad(lambda x: rg.sum(rg.sin(x)))
    f(torch.ones(2, requires_grad=True) * 2).backward()
