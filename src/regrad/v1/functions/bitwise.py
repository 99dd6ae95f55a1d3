"""`tf.bitwise`: integers, bit by bit."""

import regrad as rg
from regrad.v1.graph.kinds import INTEGERS
from regrad.v1.graph.rows import define

bitwise_and = define(
    "tf.bitwise.bitwise_and(x, y)", "BitwiseAnd", rg.bitwise_and, INTEGERS, "[6]", "[3]", "[2]"
)
bitwise_or = define(
    "tf.bitwise.bitwise_or(x, y)", "BitwiseOr", rg.bitwise_or, INTEGERS, "[6]", "[3]", "[7]"
)
bitwise_xor = define(
    "tf.bitwise.bitwise_xor(x, y)", "BitwiseXor", rg.bitwise_xor, INTEGERS, "[6]", "[3]", "[5]"
)
invert = define("tf.bitwise.invert(x)", "Invert", rg.bitwise_invert, INTEGERS, "[6]", "[-7]")
left_shift = define(
    "tf.bitwise.left_shift(x, y)", "LeftShift", rg.bitwise_left_shift, INTEGERS, "[6]", "[3]",
    "[48]",
)  # fmt: skip
right_shift = define(
    "tf.bitwise.right_shift(x, y)", "RightShift", rg.bitwise_right_shift, INTEGERS, "[6]", "[3]",
    "[0]",
)  # fmt: skip
