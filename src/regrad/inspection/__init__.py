"""Seeing gradients: what ran backward, where a NaN began, what differs, what is kept.

The records here (`GradientTrace`, `NonFinite`, …) hold numbers and names, and belong to no array
library: regrad's own tools fill them, and so do those of `regrad.torch` and `regrad.jax`. No op is
made here, and nothing here runs unless one of the tools is called.
"""
