"""The engine: Tensors, ops, tapes, rules, overrides, and the backward pass.

`docs/how_it_works.py` builds this package from scratch. No code here refers to an op type by name,
or to graph mode, jit, TensorFlow or another framework. These register their parts by type.
"""
