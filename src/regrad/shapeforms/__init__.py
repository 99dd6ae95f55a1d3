"""How the shapes and dtypes of results follow from those of inputs, op type by op type."""
