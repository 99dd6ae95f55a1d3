"""Run a TensorFlow 1 program as it is. Its `import tensorflow` imports the names of regrad.v1."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from regrad.v1.programs.install import install
from regrad.v1.programs.report import Report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a program, whose `import tensorflow` imports regrad's names."""
    parser = argparse.ArgumentParser(prog="python -m regrad.v1", description=__doc__)
    parser.add_argument("--report", action="store_true", help="print what the program used")
    parser.add_argument("program", help="the file of the program")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.program):
        parser.error(f"there is no file {options.program!r}")
    sys.argv = [options.program, *options.args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
    with install(), Report() if options.report else nullcontext():
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
