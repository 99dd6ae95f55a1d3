"""The benchmark suite: regrad against its peers, interleaved in one run (`python -m bench`)."""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # the libraries read it at import
# JAX's kernels on the CPU have separate threads
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
