"""The tools of `regrad.inspection` for the gradients of unmodified PyTorch models.

While a tool runs a function, a mode records the nodes that each torch function added to autograd's
graph, and hooks on these nodes observe the backward pass. A note lives as long as its node, and
holds no tensor. The tool removes all hooks at its end. Outside of the tools, nothing is installed.
"""
