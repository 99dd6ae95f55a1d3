"""The numerical check of gradients: functions of arrays in, findings out.

This package does not depend on Tensors, so that it can check other libraries' functions as well;
`regrad.testing` is its interface for regrad's functions.
"""
