"""Function transforms: jit, vmap, checkpoint, loops and branches, derivatives.

The body of a transform runs in a region and becomes one record outside of it, and its Python runs
once. This package defines no ops.
"""
