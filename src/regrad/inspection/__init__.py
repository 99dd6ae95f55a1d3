"""Inspection of gradients: ops that ran backward, origins of NaNs, differences, memory.

The records of this package (`GradientTrace`, `NonFinite`, …) hold numbers and names, and depend on
no array library: regrad's own tools create them, and so do the tools of `regrad.torch` and
`regrad.jax`. This package defines no ops, and none of its code runs unless a tool is called.
"""
