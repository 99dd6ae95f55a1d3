"""The libraries inside of which regrad works (hosts), and the private parts that it needs of them.

To apply rules in a PyTorch or JAX program, regrad uses parts of these libraries that are not public
and may change. Each of them is a `part`, which only the library's `host` module loads. It belongs
to a `Feature`, which does not work without it.

    COMPILING = HOST.feature("overrides in torch.compile", "Call the model without torch.compile.")
    run_node = COMPILING.part("torch._dynamo.utils.run_node", "…", probe=takes("tracer", "node"))

If a part is missing, or its probe does not recognize it, regrad can still be imported. The feature
has *lost* the part: a use of the feature raises a `HostError`, which names the feature, the part,
and the supported versions.

A part that looks unchanged may still behave differently. So a feature also has *promises*: small
programs whose gradients are known. On a version that is newer than all tested versions they run
once, before the first use of the feature (see `Host.check`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import threading
import warnings
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

from regrad.core.callers import PACKAGE, warn_caller
from regrad.errors import HostError, MissingPackageError, UntestedHostWarning

Program = Callable[[], None]


class Host:
    """A library inside of which regrad works.

    Args:
        name: The name in messages.
        module: The module of regrad for this library.
        version: The installed version.
        oldest: The oldest supported version, `"2.10"`.
        newest: The newest tested version.
    """

    def __init__(self, name: str, module: str, version: str, oldest: str, newest: str) -> None:
        self.name = name
        self.version: str = version.partition("+")[0]
        self.release: tuple[int, ...] = _release(version)
        self.oldest = oldest
        self.newest = newest
        self.features: list[Feature] = []
        self.programs: str = f"{module}.promises"  # the module that adds the features' promises
        self._lock = threading.RLock()
        self._warned = False
        if self.release < _release(oldest):
            raise MissingPackageError(
                f"{module} needs {name} {oldest} or newer ({self.range()}), and {self.version} is "
                f"installed. Upgrade {name}."
            )

    def range(self) -> str:
        """Return the versions that were tested, in words."""
        return f"{self.oldest} to {self.newest} are tested"

    @property
    def is_tested(self) -> bool:
        """Return whether the installed version is among the tested versions."""
        return self.release[:2] <= _release(self.newest)[:2]

    def feature(self, name: str, instead: str) -> Feature:
        """Add a feature, with its name in messages and the alternative to recommend without it."""
        found = Feature(self, name, instead)
        self.features.append(found)
        return found

    def check(self, *features: Feature, again: bool = False) -> None:
        """Run the promises of features, unless they have run.

        They run in their own thread, in an empty context. So modes, scopes, transformations and
        defaults of the caller do not affect them, and they leave none behind.
        """
        if _CHECKING.get() or not (again or any(not f.checked for f in features)):
            return
        with self._lock:
            waiting = [f for f in features if again or not f.checked]
            importlib.import_module(self.programs)
            thread = threading.Thread(target=Context().run, args=(_run_all, waiting), daemon=True)
            thread.start()
            thread.join()
            for feature in waiting:
                feature.checked = True
        if not again:
            self._warn()

    def table(self) -> str:
        """Return the features with their state, one per line."""
        width = max(len(feature.name) for feature in self.features)
        rows = [
            f"  {f.name:<{width}}  {'refused: ' + '; '.join(f.losses) if f.losses else 'holds'}"
            for f in self.features
        ]
        return "\n".join([f"{self.name} {self.version} ({self.range()})", *rows])

    def _warn(self) -> None:
        """Warn once, at the user's line, that the version is new, and name the lost features."""
        lost = [f.name for f in self.features if f.losses]
        if self._warned and not lost:
            return
        self._warned = True
        refused = f" regrad now raises HostError for: {', '.join(lost)}." if lost else ""
        library = importlib.import_module(self.programs.split(".")[1])  # (its frames are skipped)
        theirs = os.path.dirname(str(library.__file__)) + os.sep
        warn_caller(
            f"{self.name} {self.version} is newer than the versions that regrad was tested with "
            f"({self.range()}). regrad ran a few programs to check whether rules still work in it."
            f"{refused} `python -m regrad hosts` shows the result.",
            UntestedHostWarning,
            (PACKAGE, theirs),
        )


class Feature:
    """A feature of regrad in a host, with the private parts and the promises that it needs."""

    def __init__(self, host: Host, name: str, instead: str) -> None:
        self.host = host
        self.name = name
        self.instead = instead
        self.parts: list[tuple[str, str]] = []  # paths, and why no public function is enough
        self.losses: list[str] = []  # the reasons why the feature is unsupported
        self.programs: list[Program] = []
        self.checked = False

    def part(
        self, path: str, why: str, probe: Callable[[Any], bool] | None = None, *,
        missing: Any = None, needed: bool = True,
    ) -> Any:  # fmt: skip
        """Return a private part of the host, or a replacement if it is missing or has changed.

        Args:
            path: `module.name`. Alternatives are separated by `|`.
            why: The reason why no public function is enough.
            probe: Returns whether the part is unchanged. An exception counts as False.
            missing: The replacement for a lost part. The default raises when it is used.
            needed: Whether the feature is unsupported without the part. (Pass False if `missing`
                works as well, only slower or with a worse message.)
        """
        self.parts.append((path, why))
        reason = ""
        for each in path.split("|"):
            try:
                found = resolve(each)
                if probe is None or probe(found):
                    return found
                reason = reason or f"{each} is not what it was"
            except Exception as error:
                reason = reason or f"{each} is gone, or is not what it was ({_first_line(error)})"
        if needed and reason not in self.losses:
            self.losses.append(reason)
        return Missing(self) if missing is None else missing

    def promise(self, program: Program) -> Program:
        """Add a program that raises if the feature does not work. (A decorator.)"""
        self.programs.append(program)
        return program

    def run(self) -> None:
        """Run the promises, and record the failed ones. (If a part is lost, no promise runs.)"""
        broken: list[str] = []
        for program in () if self.losses else self.programs:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    program()
            except BaseException as error:
                name = program.__name__.strip("_").replace("_", " ")
                broken.append(f"the program '{name}' does not hold ({_first_line(error)})")
        self.losses += broken

    def lose(self, why: str) -> HostError:
        """Record why the feature is unsupported from now on, and return the error for its use."""
        self.losses.append(why)
        return self.error()

    def require(self) -> None:
        """Raise HostError if the host lacks a part that the feature needs."""
        if self.losses:
            raise self.error()

    def error(self) -> HostError:
        """Return the error for the use of an unsupported feature."""
        host = self.host
        return HostError(
            f"{host.name} {host.version} does not support {self.name}: {'; '.join(self.losses)}. "
            f"Versions {host.range()}. {self.instead}"
        )


class Missing:
    """A placeholder for a part that the host lacks. Every use raises the feature's HostError."""

    def __init__(self, feature: Feature) -> None:
        self._feature = feature

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise self._feature.error()

    __call__: Callable[..., Any] = _refuse
    __enter__: Callable[..., Any] = _refuse
    __exit__: Callable[..., Any] = _refuse
    __iter__: Callable[..., Any] = _refuse
    __contains__: Callable[..., Any] = _refuse
    __getitem__: Callable[..., Any] = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


def resolve(path: str) -> Any:
    """Return the object at a dotted path, importing modules along the path."""
    first, *names = path.split(".")
    found: Any = importlib.import_module(first)
    at = first
    for name in names:
        at = f"{at}.{name}"
        if not hasattr(found, name) and inspect.ismodule(found):
            importlib.import_module(at)
        found = getattr(found, name)
    return found


def takes(*names: str) -> Callable[[Any], bool]:
    """Return a probe: the part's parameters begin with these names (without names: it has none)."""

    def probe(found: Any) -> bool:
        given = [*inspect.signature(getattr(found, "__func__", found)).parameters]
        return given[: len(names)] == [*names] if names else not given

    return probe


# Whether promises are running in this context. They do not trigger further checks.
_CHECKING: ContextVar[bool] = ContextVar("regrad_checking", default=False)


def is_checking() -> bool:
    """Return whether the current program is one of the promises."""
    return _CHECKING.get()


def _run_all(features: list[Feature]) -> None:
    _CHECKING.set(True)
    for feature in features:
        feature.run()


@functools.cache  # (each scope calls this)
def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
