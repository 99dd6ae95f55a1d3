"""Roads of usual compiled calls, and donation: each part of their keys is needed."""

import inspect
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.core import registry
from regrad.transforms import donation, program, shortcuts, variants
from tests.helpers.quick import nothing_is_left_open
from tests.helpers.rewritten import rewritten, strike

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)

X = rg.asarray(jnp.array([1.0, -2.0, 3.0], jnp.float32))
N = np.array([4.0, 5.0, 6.0], np.float32)


def outcome(call):
    """What a call returns or raises, to be compared."""
    try:
        y = call()
    except Exception as error:
        return type(error).__name__
    return (str(y.dtype), y.tolist()) if isinstance(y, rg.Tensor) else y


def elsewhere(f):
    """What a call in another thread does, while this one differentiates by its argument."""
    found = []

    def g(x):
        thread = threading.Thread(target=lambda: found.append(outcome(lambda: f(x))))
        thread.start()
        thread.join()
        return rg.sum(x)

    rg.grad(g)(X)
    return found[0]


def registered(f):
    """A call after a rule has been registered that f has no name for."""
    op = registry.OPS["Sin"]
    rule = op.rule
    op.rule, registry.version = registry.OPS["Sign"].rule, registry.version + 1
    try:
        return f(X)
    finally:
        op.rule, registry.version = rule, registry.version + 1


def under_another_default(f):
    with rg.default_dtype("float16"):
        f(X)
    return f.cache_info().programs  # (where `regrad.jax` is loaded, JAX itself traces again)


def without_x64(*args):
    def call(f):
        with jax.enable_x64(False):
            return f(*args)

    return call


def under_a_rule(f):
    with rg.gradient_override_map({"Sin": lambda dy: dy * 7.0}):
        return f(X)


def changed(f):
    """A call after a name that f reads has changed."""
    FACTORS["k"] = 3.0
    try:
        return f(X)
    finally:
        FACTORS["k"] = 2.0


FACTORS = {"k": 2.0}
slope = rg.grad(lambda x: rg.sum(rg.sin(x)))
double = lambda x, **more: x * 2.0 + sum(more.values())  # noqa: E731
difference = lambda p: rg.subtract(*p.values())  # noqa: E731
by_class = lambda p: p[0] * (2.0 if type(p) is list else 3.0)  # noqa: E731
# A part of the key, what is in its place in the lines that are written, a function, a call that
# comes first, and one that this part alone tells from it.
PARTS = {
    "nothing in force": (r"current\(\) is None", "True", slope, (X,), under_a_rule),
    "no tape in another thread": ("not OPEN", "True", double, (X,), elsewhere),
    "the registry": (r"registry\.version == version", "True",
                     slope, (X,), registered),
    "the default dtype": (r"\(PROCESS.* is default", "True", lambda x: rg.ones((2,)), (X,),
                          under_another_default),
    "how many": (r"len\(args\) == \d", "True", lambda x, y=2.0: x * y, (X,), lambda f: f(X, 3.0)),
    "no keywords": ("not kwargs", "True", double, (X,), lambda f: f(X, k=3.0)),
    "the closure": ("usual = .*", "usual = True", lambda x: x * FACTORS["k"], (X,), changed),
    "the class": (r"type\(v\d+\) is c\d+ and", "", by_class, ([X],), lambda f: f((X,))),
    "the length": (r"len\(v\d+\) == \d+", "True", by_class, ([X],), lambda f: f([X, X])),
    "the order of keys": (r"\(\*v\d+,\) == \([^)]*\)", "True", difference,
                          ({"a": X, "b": X * 2.0},), lambda f: f({"b": X * 2.0, "a": X})),
    "the class of a number": ("type\\(v\\d+\\) is int and", "", lambda x, k: k, (X, 2),
                              lambda f: f(X, True)),
    "the size of a number": (r"-\d+ <= v\d+ < \d+", "True", lambda x, k: k, (X, 2),
                             without_x64(X, 2**40)),
    "a static value": (r"known\.get\(.*\)$", "next(iter(known.values()))",
                       lambda x, fixed: x * fixed, (X, 2), lambda f: f(X, 3)),
    "the class of a static value": (r"type\(v\d+\) is c\d+", "True",
                                    lambda x, fixed: x * len(str(fixed)), (X, 1),
                                    lambda f: f(X, True)),
    "the dtype of an array": (r"v\d+\.dtype in TAKEN", "True", double, (N,),
                             without_x64(np.full(3, 0.1))),
}  # fmt: skip


def without(old, new, monkeypatch):
    """Leave a part out of the lines that are written; return how often it was there."""
    made, hits = shortcuts._ShortcutWriter.made, []

    def with_less(self, name):
        lines = [re.subn(old, new, line) for line in self.lines]
        hits.extend(n for _, n in lines if n)
        self.lines = [line for line, _ in lines]
        return made(self, name)

    monkeypatch.setattr(shortcuts._ShortcutWriter, "made", with_less)
    return hits


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_key_of_a_road_is_needed(part, monkeypatch):
    old, new, body, given, call = PARTS[part]

    def last():
        static = [name for name in inspect.signature(body).parameters if name == "fixed"]
        f = rg.jit(body, static_argnames=static)
        for _ in range(3):
            f(*given)
        assert f.road.__name__ == "road"
        return outcome(lambda: call(f))

    due = last()
    hits = without(old, new, monkeypatch)
    assert last() != due and hits


# -- the call of the program -----------------------------------------------------------------------


def stepping(size=3):
    """A compiled step that adds its argument to a Variable, called until its road is written."""
    v = rg.Variable(jnp.zeros(size, "float32"))
    f = rg.jit(lambda x: (v.assign_add(x[:size]), x * 2.0)[1])
    x = rg.asarray(jnp.ones(size, "float32"))
    for _ in range(3):
        f(x)
    assert f.road.__name__ == "road"
    return v, f, x


def assigned_doubles():
    """A Variable holds an array of NumPy that JAX cannot."""
    v, f, x = stepping()
    with jax.enable_x64(False):
        v._tensor = rg.tensor(np.zeros(3), dtype="float64")
        return outcome(lambda: f(x))


def laid_out_otherwise():
    v, f, x = stepping()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    v.assign(rg.asarray(jax.device_put(np.ones(3, "float32"), spread)))
    f(x)
    return sum(len(program.variants) for program in f.programs.values())


def while_nan_is_searched():
    v, f, x = stepping(100_000)
    jax.config.update("jax_debug_nans", True)
    try:
        held = v._tensor._data
        f(x)
        return held.is_deleted()
    finally:
        jax.config.update("jax_debug_nans", False)


def held_by_others():
    v, f, x = stepping(100_000)
    held = v.value
    f(x)
    return outcome(lambda: held[0])


def another_tensor():
    held = [X]
    f = rg.jit(lambda x: x * held[0])
    for _ in range(3):
        f(X)
    held[0] = X * 2.0
    return f(X).tolist()


def filled_again():
    array = N.copy()
    f = rg.jit(lambda x: rg.multiply(x, array))
    for _ in range(3):
        f(X)
    array[:] = 7.0
    return f(X).tolist()


def of_another_shape():
    f = rg.jit(lambda x: [x] if x.shape == (3,) else (x, x * 2.0))
    for _ in range(3):
        f(X)
    return outcome(lambda: len(f(X[:2])))


def taken_by_another_shape():
    """A Tensor that the function takes for other shapes alone."""
    extra = rg.asarray(jnp.ones(2, "float32"))
    f = rg.jit(lambda x: x * 2.0 if x.shape == (3,) else x + extra)
    for _ in range(3):
        f(X)
    return outcome(lambda: f(X[:2]))


def found_by_a_gradient():
    """A Tensor that the gradient of a call has found, for a program that a road shares."""
    extra = rg.asarray(jnp.ones(2, "float32"))
    f = rg.jit(lambda x: x + extra if x.shape == (2,) else x * 2.0)
    for _ in range(3):
        f(X)
    rg.grad(lambda x: rg.sum(f(x)))(X[:2])
    return outcome(lambda: f(X[:1]))


def assigned_by_a_handler():
    v, f, x = stepping()
    strike(f.road, lambda: v.assign([10.0] * 3))
    f(x)
    return v.tolist()


QUICK = {
    "an array of JAX": (r"type\(.*?\) is Array and type\(d\.sharding\) is single", "True",
                        assigned_doubles),
    "the layout": (r"type\(d\.sharding\) is single", "True", laid_out_otherwise),
    "no search for NaN": (r"not \(config\.jax_debug_nans or config\.jax_debug_infs\)", "True",
                          while_nan_is_searched),
    "nobody holds it": (r"c\d+t\._data\.copy\(\) if c\d+\._lent else", "", held_by_others),
    "the Tensor": (r"c\d+\(\) is c\d+", "True", another_tensor),
    "the content": (r"c\d+\.tobytes\(\) == x\d+\[0\]", "True", filled_again),
    "the trace": ("type\\(results\\) is tuple", "False", of_another_shape),
    "the variant": ("program.quick is not variant", "False", found_by_a_gradient),
    "no news": ("except SourceFound:", "except ZeroDivisionError:", taken_by_another_shape),
    "still the same": (r"not \(c\d+\._tensor is c\d+t\)", "False", assigned_by_a_handler),
}  # fmt: skip


@pytest.mark.parametrize("part", QUICK)
def test_each_part_of_the_key_of_a_call_is_needed(part, monkeypatch):
    old, new, last = QUICK[part]
    due = last()
    hits = without(old, new, monkeypatch)
    assert last() != due and hits


# -- donation --------------------------------------------------------------------------------------


ONES = rg.asarray(jnp.ones(100_000, "float32"))


def held_on_a_tape():
    """The gradient of a square whose argument has been given away."""
    f = rg.jit(lambda x: x * x, donate="x")
    return outcome(lambda: rg.grad(lambda x: rg.sum(f(x)))(ONES + 1.0)[:2])


def held_by_the_caller():
    v = rg.Variable(jnp.ones(100_000, "float32"))
    held, f = v.value, rg.jit(lambda x: v.assign_add(x))
    f(1.0)
    return outcome(lambda: held[0])


def small():
    """Where nothing is worth it, signals need not wait."""
    v, f, x = stepping()
    held = v._tensor._data
    f(x)
    return held.is_deleted()


DONATION = {
    "no tape": (variants.Variant, "__init__", "donates and not wanted", "donates", held_on_a_tape),
    "nobody holds it": (variants.Variant, "_donate", "variable._lent or", "", held_by_the_caller),
    "worth it": (program.Program, "find", "size >= WORTH", "True", small),
    "no search for NaN": (donation, "may_donate", "not searches_nan(jax)", "True",
                          while_nan_is_searched),
}  # fmt: skip


@pytest.mark.parametrize("part", DONATION)
def test_each_part_of_the_key_of_donation_is_needed(part, monkeypatch):
    owner, name, old, new, last = DONATION[part]
    due = last()
    made = rewritten(owner, name, old, new)
    for place in (owner, program) if name == "may_donate" else (owner,):
        monkeypatch.setattr(place, name, made)
    assert last() != due
