"""TensorFlow 1's graphs: tensors, ops, scopes, variables, control flow and gradients.

Each op wraps a node of `regrad.graph`. The functions that compute are in `regrad.v1.functions`.
"""
