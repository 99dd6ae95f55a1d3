"""A GradBench tool: every eval of the suite, written with regrad (`python -m bench.gradbench`).

One module for each eval, `protocol` for what they share, and `run` to measure the tool beside
others in a checkout of GradBench.
"""
