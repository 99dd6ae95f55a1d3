"""Graphs: ops as nodes whose values a later run computes, and the plans that run them.

The engine is the same as in eager mode, but adds a node where eager mode runs a kernel. Names and
functions of TensorFlow belong in `regrad.v1`.
"""
