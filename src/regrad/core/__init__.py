"""The engine: Tensors, ops, tapes, rules, overrides, and the one walk backwards.

`docs/how_it_works.py` builds this package from nothing. Nothing here knows an op by name, graph
mode, jit, TensorFlow or another framework: they register what the core asks for by type.
"""
