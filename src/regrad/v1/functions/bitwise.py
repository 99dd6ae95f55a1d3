"""`tf.bitwise`: bitwise operations on integers."""

import regrad as rg
from regrad.v1.graph.kinds import INTEGERS
from regrad.v1.graph.rows import elementwise

bitwise_and, bitwise_or, bitwise_xor = elementwise(
    INTEGERS, rg.bitwise_and, rg.bitwise_or, rg.bitwise_xor, place="tf.bitwise"
)
invert, left_shift, right_shift = elementwise(
    INTEGERS, place="tf.bitwise", invert=rg.bitwise_invert, left_shift=rg.bitwise_left_shift,
    right_shift=rg.bitwise_right_shift,
)  # fmt: skip
