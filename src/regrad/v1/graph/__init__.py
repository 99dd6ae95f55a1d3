"""Graphs as TensorFlow 1 shows them: tensors, ops, scopes, variables, control flow, gradients.

Each stands on a node of `regrad.graph`. No function of TensorFlow's API that computes lives here.
"""
