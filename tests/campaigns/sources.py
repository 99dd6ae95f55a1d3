"""Where the choices of random programs come from."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


class Source:
    """Choices, all made of whole numbers. The smaller the number, the simpler what is chosen.

    Args:
        draw: Returns a number from the first to the second: `random.Random(seed).randint`, or
            a draw of hypothesis.

    `choices` are the numbers so far.
    """

    def __init__(self, draw: Callable[[int, int], int]) -> None:
        self.draw = draw
        self.choices: list[int] = []

    def integer(self, low: int, high: int) -> int:
        if low == high:
            return low
        self.choices.append(self.draw(low, high))
        return self.choices[-1]

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def weighed(self, options: Sequence[T], weights: Sequence[int]) -> T:
        n = self.integer(1, sum(weights))
        return next(o for o, end in zip(options, accumulate(weights), strict=True) if n <= end)

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent

    def times(self, least: int, most: int) -> range:
        return range(self.integer(least, most))

    def number(self, low: float, high: float) -> float:
        return self.integer(round(100 * low), round(100 * high)) / 100
