"""Low-bit floating-point formats, and tables of levels."""

from __future__ import annotations

from typing import NamedTuple

POWERS = [2.0**e for e in range(-126, 128)]


class Format(NamedTuple):
    """A floating-point format, with subnormal numbers and without infinities.

    Args:
        bits: The bits of a number, including its sign.
        mantissa: The bits of the mantissa.
        least: The exponent of the smallest normal number.
        most: The exponent of the largest number.
        largest: The largest number.
    """

    bits: int
    mantissa: int
    least: int
    most: int
    largest: float

    @property
    def powers(self) -> list[float]:
        """Return the powers of two from the smallest normal number on."""
        return [2.0**e for e in range(self.least, self.most + 1)]


# OCP 8-bit Floating Point Specification (2023), OCP Microscaling Formats (2023)
FORMATS = {
    "fp8_e4m3": Format(8, 3, -6, 8, 448.0),
    "fp8_e5m2": Format(8, 2, -14, 15, 57344.0),
    "fp6_e2m3": Format(6, 3, 0, 2, 7.5),
    "fp6_e3m2": Format(6, 2, -2, 4, 28.0),
    "fp4_e2m1": Format(4, 1, 0, 2, 6.0),
    "int8": Format(8, 6, 0, 0, 127 / 64),
}

# Quantiles of a normal distribution: Dettmers et al., "QLoRA" (2023), appendix E.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


def powers_of_two(bits: int) -> list[float]:
    """Return 0 and signed powers of two up to 1: Zhou et al. (2017)."""
    some = [2.0**-e for e in range(2 ** (bits - 1) - 1)]
    return sorted([0.0, *some, *(-p for p in some)])


# The exponents of the terms, by bits, as in the authors' code.
_TERMS = {3: [(0, 1, 2)], 4: [(0, 1, 3), (2,)], 5: [(0, 2, 4), (1, 3, 5)]}


def additive_powers_of_two(bits: int) -> list[float]:
    """Return sums of powers of two up to 1, with signs: Li, Dong and Wang, "APoT" (2020)."""
    sums = [0.0]
    for exponents in _TERMS[bits]:
        sums = [a + b for a in sums for b in (0.0, *(2.0**-e for e in exponents))]
    positive = {s / max(sums) for s in sums}
    return sorted({*positive, *(-p for p in positive)})
