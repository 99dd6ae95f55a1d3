"""Shapes and dtypes of results: a form per op type, or a trial on small arrays without a form.

Graphs use this package while they are built. Eager mode uses the shapes that its kernels return.
The package contains no kernels and no rules.
"""
