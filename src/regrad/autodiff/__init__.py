"""Gradients of functions (`grad` and related functions), custom gradients, and Variables.

Everything here is built on the core's tapes and its backward pass, and traces or compiles nothing.
"""
