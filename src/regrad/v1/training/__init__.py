"""Optimizers, learning rates, layers, initializers and saved variables of TensorFlow 1."""
