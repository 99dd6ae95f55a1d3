"""Functions made of functions: jit, vmap, checkpoint, loops and branches, derivatives.

A body runs in a region and becomes one record outside, and its Python runs once. No op is defined
here.
"""
