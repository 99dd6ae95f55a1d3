"""Gradients of functions (`grad` and its kin), custom gradients, and Variables.

All of it stands on the core's tapes and its walk. Nothing here traces or compiles a function.
"""
