"""Run a TensorFlow 1 program as it is. Its `import tensorflow` imports the names of regrad.v1."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from regrad.core.bindings import CountedRule
from regrad.graph.graph import OpGraph
from regrad.v1.graph.graphs import MADE, get_default_graph
from regrad.v1.graph.regions import all_nodes
from regrad.v1.programs.differences import DIFFERENCES
from regrad.v1.programs.install import USED, install


class Report:
    """A context manager that prints a report of a program at its end.

    The report lists the names of TensorFlow that the program read, the ops of all graphs by type,
    the overrides with the ops that they bound, and the differences from TensorFlow (the table in
    docs/tf1.md) that concern these names and op types.

    >>> import regrad.v1
    >>> from regrad.v1.__main__ import Report
    >>> with regrad.v1.Graph().as_default(), regrad.v1.install():
    ...     import tensorflow as tf
    ...     report = Report()
    ...     with report, tf.Graph().as_default():
    ...         _ = tf.sign(tf.constant([1.0, 2.0]))
    regrad.v1: names, ops and overrides of the program
    3 names: tf.Graph, tf.constant, tf.sign
    2 ops: 1 Const, 1 Sign
    """

    def __enter__(self) -> Report:
        USED.clear()
        self._graphs: list[OpGraph] = [get_default_graph()]
        MADE.append(self._graphs.append)
        return self

    def __exit__(self, *error: object) -> None:
        MADE.remove(self._graphs.append)
        for line in self.lines():
            print(textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        nodes = [node for graph in self._graphs for node in all_nodes(graph.nodes)]
        types = Counter(node.op.type.lstrip("_") for node in nodes)
        rules = [node.rule for node in nodes if isinstance(node.rule, CountedRule)]
        yield "regrad.v1: names, ops and overrides of the program"
        yield f"{len(USED)} names: {', '.join(sorted(USED)) or 'none'}"
        listed = [f"{count} {op_type}" for op_type, count in types.most_common()]
        yield f"{len(nodes)} ops: {', '.join(listed) or 'none'}"
        yield from dict.fromkeys(f"override: {rule.hit}" for rule in rules)
        used = {name.rpartition(".")[2] for name in USED} | types.keys()
        for keys, case, here in DIFFERENCES:
            if used & set(keys.split()):
                yield f"difference: {case}: {here}"


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
