"""What takes minutes, and is run by hand."""

from tests import conftest as conftest  # it sets the environment, before NumPy and JAX are loaded
