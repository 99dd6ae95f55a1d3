"""`tf.bitwise`: integers, bit by bit."""

import regrad as rg
from regrad.v1.graph.forms import INTEGERS, define

bitwise_and = define("tf.bitwise.bitwise_and(x, y)", "BitwiseAnd", rg.bitwise_and, INTEGERS,
    shows=("[6]", "[3]", "Tensor([2], dtype=int64)"),
)  # fmt: skip
bitwise_or = define("tf.bitwise.bitwise_or(x, y)", "BitwiseOr", rg.bitwise_or, INTEGERS,
    shows=("[6]", "[3]", "Tensor([7], dtype=int64)"),
)  # fmt: skip
bitwise_xor = define("tf.bitwise.bitwise_xor(x, y)", "BitwiseXor", rg.bitwise_xor, INTEGERS,
    shows=("[6]", "[3]", "Tensor([5], dtype=int64)"),
)  # fmt: skip
invert = define("tf.bitwise.invert(x)", "Invert", rg.bitwise_invert, INTEGERS,
    shows=("[6]", "Tensor([-7], dtype=int64)"),
)  # fmt: skip
left_shift = define("tf.bitwise.left_shift(x, y)", "LeftShift", rg.bitwise_left_shift, INTEGERS,
    shows=("[6]", "[3]", "Tensor([48], dtype=int64)"),
)  # fmt: skip
right_shift = define("tf.bitwise.right_shift(x, y)", "RightShift", rg.bitwise_right_shift, INTEGERS,
    shows=("[6]", "[3]", "Tensor([0], dtype=int64)"),
)  # fmt: skip
