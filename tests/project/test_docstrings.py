"""The docstrings of public names are whole: summary, arguments, results, errors, an example."""

import pytest

from tests.helpers import docstrings


@pytest.mark.parametrize("module", docstrings.MODULES)
def test_docstrings_are_whole(module):
    gaps = {name: docstrings.missing(value) for name, value in docstrings.public(module)}
    assert {name: parts for name, parts in gaps.items() if parts} == {}
    assert len(gaps) >= 4


def classes():
    for module in [*docstrings.MODULES, "regrad.rules.attribution", "regrad.rules.quantize"]:
        for name, value in docstrings.public(module):
            if isinstance(value, type) and not issubclass(value, BaseException):
                yield name, value


def test_every_public_class_has_an_example():
    """Also records that only functions return, whose other parts `missing` does not ask for."""
    found = dict(classes())
    assert len(found) > 40
    assert [name for name, value in found.items() if ">>>" not in (value.__doc__ or "")] == []


def test_gaps_are_found():
    def headless(x, y):
        """What x is.

        Args:
            x: A number.
        """

    found = docstrings.missing(headless)
    assert found == [
        "a summary in the imperative, not 'What x is.'", "Raises", "Args: y", "an example",
    ]  # fmt: skip
    assert docstrings.missing(lambda: 0) == ["a docstring"]
