"""Seeing the gradients of PyTorch models: what `regrad.inspection` has, for models as they stand.

While one of the tools runs a function, a mode notes what each torch function wrote into autograd's
graph, and hooks on those nodes look on as the backward pass runs. A note lives with its node, and
no tensor is held; all hooks are taken off when the tool is done. Nothing is installed otherwise.
"""
