"""A GradBench tool: every eval of the suite, written with regrad (`python -m bench.gradbench`).

There is one module for each eval. `protocol` has the shared code, and `run` measures the tool
against others in a checkout of GradBench.
"""
