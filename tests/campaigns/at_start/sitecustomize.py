"""Python runs this file at its start where its folder is in PYTHONPATH: see `mutants`."""

import json
import os

if _changed := os.environ.get("REGRAD_CHANGED"):
    import atexit
    import builtins
    import marshal
    import sys
    from importlib.machinery import PathFinder, SourceFileLoader
    from pathlib import Path

    _CODES = json.loads(Path(_changed).read_text(encoding="utf-8"))
    _HITS: dict[str, int] = {}
    builtins.__dict__["__regrad_hits__"] = _HITS

    class _Loader(SourceFileLoader):
        """Give a module the code that was made for it."""

        def get_code(self, fullname):
            return marshal.loads(Path(_CODES[fullname]).read_bytes())

    class _Finder(PathFinder):
        @classmethod
        def find_spec(cls, fullname, path=None, target=None):
            spec = super().find_spec(fullname, path, target) if fullname in _CODES else None
            if spec is not None:
                spec.loader = _Loader(fullname, spec.origin)
            return spec

    sys.meta_path.insert(0, _Finder)

    def _leave_hits():
        """A process that a test has started writes down the lines that it has executed."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if test and _HITS and (folder := os.environ.get("REGRAD_HITS")):
            line = json.dumps([test, sorted(_HITS), 0.0])
            with open(f"{folder}/child-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(line + "\n")

    atexit.register(_leave_hits)
