"""`tf.bitwise`: bitwise operations on integers."""

import regrad as rg
from regrad.v1.graph.kinds import INTEGERS
from regrad.v1.graph.rows import define, row


@row("tf.bitwise", "BitwiseAnd", rg.bitwise_and, INTEGERS)
def bitwise_and(x, y):
    """Return `x & y`, the bits that are set in both, of integers or bools.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.bitwise.bitwise_and(rg.asarray([6]), rg.asarray([3]))
    Tensor([2], dtype=int64)
    """


@row("tf.bitwise", "BitwiseOr", rg.bitwise_or, INTEGERS)
def bitwise_or(x, y):
    """Return `x | y`, the bits that are set in either, of integers or bools.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.bitwise.bitwise_or(rg.asarray([6]), rg.asarray([3]))
    Tensor([7], dtype=int64)
    """


@row("tf.bitwise", "BitwiseXor", rg.bitwise_xor, INTEGERS)
def bitwise_xor(x, y):
    """Return `x ^ y`, the bits that are set in exactly one of the two, of integers or bools.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.bitwise.bitwise_xor(rg.asarray([6]), rg.asarray([3]))
    Tensor([5], dtype=int64)
    """


invert = define("tf.bitwise.invert(x)", "Invert", rg.bitwise_invert, INTEGERS, "[6]", "[-7]")


@row("tf.bitwise", "LeftShift", rg.bitwise_left_shift, INTEGERS)
def left_shift(x, y):
    """Return `x << y`, the bits of integers moved up by y places.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.bitwise.left_shift(rg.asarray([6]), rg.asarray([3]))
    Tensor([48], dtype=int64)
    """


@row("tf.bitwise", "RightShift", rg.bitwise_right_shift, INTEGERS)
def right_shift(x, y):
    """Return `x >> y`, the bits of integers moved down by y places. The sign is kept.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.bitwise.right_shift(rg.asarray([6]), rg.asarray([3]))
    Tensor([0], dtype=int64)
    """
