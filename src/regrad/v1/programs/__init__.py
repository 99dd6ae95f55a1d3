"""Programs of TensorFlow 1 as they are: the modules that they import, and their data."""
