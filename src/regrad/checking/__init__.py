"""The numerical check of gradients: functions of arrays in, findings out.

It knows no Tensors, so that it can check other libraries' functions, too; `regrad.testing` is its
face for regrad's.
"""
