"""`tf.app`: `run`, and command-line flags (also called `tf.flags`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from regrad.core.hints import unknown
from regrad.errors import near
from regrad.v1.graph.row_docs import fill_in

__all__ = ["flags", "run"]


class Flags:
    """The values of flags, as attributes. The first access reads them from `sys.argv`.

    Source: `tf.app.flags.FLAGS`.

    >>> import regrad.v1 as tf
    >>> tf.flags.DEFINE_float("rate_of_docs", 0.5, "The learning rate.")
    >>> tf.flags.FLAGS.rate_of_docs
    0.5
    """

    def __init__(self) -> None:
        self._parser = argparse.ArgumentParser(allow_abbrev=False)
        self._flag_names: set[str] = set()

    def __call__(self, argv: Sequence[str] | None = None) -> list[str]:
        """Read the flags, and return the name of the program and the other arguments."""
        words = list(sys.argv if argv is None else argv)
        read, rest = self._parser.parse_known_args(words[1:])
        self.__dict__.update({k: v for k, v in vars(read).items() if k not in self.__dict__})
        return [*words[:1], *rest]

    _parse_flags = __call__

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name not in self._flag_names:
            hint = near(name, self._flag_names)
            raise unknown(
                f"no flag {name!r} is defined.{hint} Define it with tf.flags.DEFINE_…", self
            )
        self()
        return getattr(self, name)

    def flag_values_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        self()
        return {k: v for k, v in vars(self).items() if k[0] != "_"}


FLAGS = Flags()


def _boolean(text: str) -> bool:
    return ["false", "f", "0", "no", "true", "t", "1", "yes"].index(text.lower()) >= 4


_boolean.__name__ = "boolean"  # argparse says of a ValueError: invalid boolean value


def _definer(name: str, convert: Callable[[str], Any], example: str) -> Callable[..., None]:
    def define(
        flag_name: str, default_value: Any = None, docstring: str = "", *rest: Any, **options: Any
    ) -> None:
        """Define a flag, `--flag_name=value` on the command line.

        Args:
            flag_name: The name, an attribute of `FLAGS`.
            default_value: The value if the command line does not set the flag.
            docstring: The text for `--help`.
            *rest: Without effect.
            **options: Without effect.

        Source: `tf.app.flags.{name}`.

        >>> import regrad.v1 as tf
        >>> tf.flags.{name}("{name}_of_docs", {example}, "An example.")
        >>> tf.flags.FLAGS.{name}_of_docs
        {example}
        """
        dest = flag_name.replace("-", "_")
        setting: dict[str, Any] = {"dest": dest, "default": default_value}
        FLAGS._flag_names.add(dest)
        if convert is _boolean:
            negated = f"--no{flag_name}", f"-no{flag_name}"
            FLAGS._parser.add_argument(*negated, action="store_false", **setting)
            setting |= {"nargs": "?", "const": True}
        setting |= {"type": convert, "help": docstring.replace("%", "%%")}
        FLAGS._parser.add_argument(f"--{flag_name}", f"-{flag_name}", **setting)

    return fill_in(define, name, example=example)


# How the command line's text becomes a value, and an example.
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "DEFINE_string": (str, "'a'"), "DEFINE_integer": (int, "3"), "DEFINE_float": (float, "0.5"),
    "DEFINE_boolean": (_boolean, "True"), "DEFINE_bool": (_boolean, "True"),
}  # fmt: skip
flags = ModuleType("regrad.v1.flags", "The functions of `tf.app.flags`.")
vars(flags).update({name: _definer(name, *kind) for name, kind in KINDS.items()}, FLAGS=FLAGS)


def run(main: Callable[[list[str]], Any] | None = None, argv: list[str] | None = None) -> NoReturn:
    """Call `main` with the arguments that are not flags, and exit with its result.

    Args:
        main: A function of a list of strings, by default `main` of the program.
        argv: The program and its arguments, by default `sys.argv`.

    Source: `tf.app.run`.

    >>> import regrad.v1 as tf
    >>> try:
    ...     tf.app.run(lambda words: print(words), ["program.py", "word"])
    ... except SystemExit as end:
    ...     print(end.code)
    ['program.py', 'word']
    None
    """
    function = sys.modules["__main__"].main if main is None else main
    sys.exit(function(FLAGS(argv)))
