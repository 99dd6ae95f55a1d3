"""Graphs: ops as nodes, whose values a later run computes, and the plans that run them.

The engine is the same as in eager mode; only where a kernel would run, a node is added. What
TensorFlow calls things belongs in `regrad.v1`.
"""
