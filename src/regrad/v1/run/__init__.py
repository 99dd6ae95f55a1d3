"""Sessions: how the graph that was built is run, by NumPy or compiled through JAX."""
