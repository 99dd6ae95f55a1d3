"""Runs a program that is wrong, and judges what its author is told."""

import inspect
import warnings


def told(program):
    """Return what a program raised (None if nothing), and its warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            program()
        except Exception as error:
            return error, found
    return None, found


def judge(program, kind, words):
    """Assert that a program raises, or warns, of this kind, with all of these words.

    A warning has to name the line of the program, and an error must not be one of Python's own
    or another library's in disguise: its class is asked for by name.
    """
    error, found = told(program)
    if issubclass(kind, Warning):
        if error is not None:
            raise error
        mine = [w for w in found if w.category is kind]
        assert mine, f"no {kind.__name__}"
        assert mine[0].filename == inspect.getsourcefile(program)
        text = str(mine[0].message)
    else:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    missing = [word for word in words if word not in text]
    assert not missing, f"no {missing} in: {text}"
