"""`tf.bitwise`: integers, bit by bit."""

import regrad as rg
from regrad.v1.forms import INTEGERS, binary, unary

bitwise_and = binary("BitwiseAnd", "bitwise_and", rg.bitwise_and, INTEGERS)
bitwise_or = binary("BitwiseOr", "bitwise_or", rg.bitwise_or, INTEGERS)
bitwise_xor = binary("BitwiseXor", "bitwise_xor", rg.bitwise_xor, INTEGERS)
invert = unary("Invert", "invert", rg.bitwise_invert, INTEGERS)
left_shift = binary("LeftShift", "left_shift", rg.bitwise_left_shift, INTEGERS)
right_shift = binary("RightShift", "right_shift", rg.bitwise_right_shift, INTEGERS)
