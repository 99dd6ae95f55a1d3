"""Shapes and dtypes of results, op type by op type, and trials on small arrays where none is told.

Used when a graph is built; eager mode takes the shapes that its kernels give. No kernels and no
rules live here.
"""
