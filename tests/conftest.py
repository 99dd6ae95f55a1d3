"""One thread per library (the machine has two cores and pytest runs two workers), x64 JAX."""

import gc
import os
import shutil
import sys
from importlib.metadata import version

import pytest

from tests.helpers import choices, progress
from tests.helpers.optional import ABSENT, absent_in, is_installed

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_X64"] = "1"

# Nearly every program of the tests runs once, on few numbers: its time is that of compiling it.
# Without these passes XLA takes a quarter of the time. `helpers.quick.full_effort` puts them back.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
XLA = version("jaxlib") if is_installed("jaxlib") else ""
if XLA.startswith("0.10."):  # (XLA ends the process over a flag it does not know)
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
    )

# Some hundred processes that tests start import regrad, and find it compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# (Inductor's own processes, which compile in parallel, cost more to start than our programs.)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# What needs a GPU is for machines that have one.
collect_ignore = [] if shutil.which("nvidia-smi") else ["torch/test_cuda.py"]


# -- how much of the tests runs, and how far they are ----------------------------------------------


def pytest_addoption(parser):
    for level, words in (("test-all", "slow tests too"), ("proof", "slow tests, and every choice")):
        parser.addoption(
            f"--{level.removeprefix('test-')}", dest="level", action="store_const", const=level,
            default="test", help=f"{words} (tests/helpers/choices.py)",
        )  # fmt: skip


def pytest_configure(config):
    choices.level = config.option.level


def pytest_sessionstart(session):
    plugins = session.config.pluginmanager
    if terminal := plugins.get_plugin("terminalreporter"):  # (a worker of pytest-xdist has none)
        plugins.register(progress.Progress(session, terminal))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect the tests without looking for garbage: nearly all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Leave out slow tests, unless they are asked for."""
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"the name of a test has an address: {unstable[0]}")
    asked = config.option.markexpr or any("::" in arg for arg in config.args)
    if not asked and choices.level == "test":
        slow = choices.left_out(items)
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        progress.describe(item, report)
    return report


# -- without optional packages ---------------------------------------------------------------------


class Module(pytest.Module):
    """A test file, which is skipped if it imports a package that is not installed."""

    def _getobj(self):
        try:
            return super()._getobj()
        except Exception as error:
            if name := absent_in(error):
                pytest.skip(f"needs {name}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path) if ABSENT else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that fails for the absence of a package."""
    try:
        return (yield)
    except Exception as error:
        if name := absent_in(error):
            pytest.skip(f"needs {name}")
        raise


pytest_runtest_setup = pytest_runtest_call


def pytest_terminal_summary(terminalreporter):
    """Say in one line what was not tested, and why."""
    if ABSENT:
        count = len(terminalreporter.stats.get("skipped", ()))
        terminalreporter.write_line(
            f"{count} tests and files were skipped; not installed: {', '.join(ABSENT)}"
        )


# -- fixtures --------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Check that JAX, which keys its traces by overrides, knows those in force after a test."""
    result = yield
    if (scopes := sys.modules.get("regrad.jax.scopes")) and scopes.is_behind():
        scopes._tell(None)[0]()
        pytest.fail("JAX was told of other overrides than are in force after the test")
    return result


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """What lives on from former modules (JAX's programs, mostly) is not searched for garbage again.

    Tests collect it to see that nothing is left; with millions of old objects that takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def graph():
    """The default graph of a test: a new one for each."""
    import regrad.v1 as tf

    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def session(graph):
    """A session of that graph."""
    import regrad.v1 as tf

    with tf.Session() as session:
        yield session
