"""TensorFlow 1's functions that compute, as rows that name regrad's functions and their arguments.

No kernel and no gradient lives here: those are in `regrad.ops`.
"""
