"""TensorFlow 1's functions, as rows that name regrad's functions and their arguments.

The kernels and gradients are in `regrad.ops`.
"""
