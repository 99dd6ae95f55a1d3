"""One thread per library (the machine has two cores and pytest runs two workers), x64 JAX."""

import gc
import os
import shutil
from importlib.metadata import version

import pytest

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_X64"] = "1"

# Nearly every program of the tests runs once, on few numbers: its time is that of compiling it.
# Without these passes XLA takes a quarter of the time. `helpers.quick.full_effort` puts them back.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if version("jaxlib").startswith("0.10."):  # (XLA ends the process over a flag it does not know)
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
    )

# What needs a GPU is for machines that have one.
collect_ignore = [] if shutil.which("nvidia-smi") else ["torch/test_cuda.py"]


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
