"""The libraries that regrad works inside of, and the private parts of them that it needs.

The idea: a rule reaches somebody's PyTorch or JAX program through places that these libraries do
not promise to keep. Each such place is a `part`, taken in the library's `host` module and nowhere
else, and it belongs to a `Feature`: what would not hold without it.

    COMPILING = HOST.feature("overrides in torch.compile", "Call the model without torch.compile.")
    run_node = COMPILING.part("torch._dynamo.utils.run_node", "…", probe=takes("tracer", "node"))

A part that is gone, or that its probe does not recognise, never stops an import. The feature has
*lost* it: what uses the feature raises a `HostError`, which names the feature, the part, and the
versions that are good.

That a part looks as it did does not show that it still does what it did. So a feature also has
*promises*: small programs whose gradients are known. On a version that is newer than all that were
tested they run once, before the feature is first used (see `Host.check`).
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
    """A library that regrad works inside of.

    Args:
        name: as in messages.
        module: the module of regrad that works in it.
        version: that is installed.
        oldest: the oldest version that is good, `"2.10"`.
        newest: the newest version that was tested.
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
        """Return whether the installed version is among those that were tested."""
        return self.release[:2] <= _release(self.newest)[:2]

    def feature(self, name: str, instead: str) -> Feature:
        """Add a feature: what it is called in messages, and what to do without it."""
        found = Feature(self, name, instead)
        self.features.append(found)
        return found

    def check(self, *features: Feature, again: bool = False) -> None:
        """Run the promises of features, unless they have run.

        They run in a thread of their own, in an empty context: there no mode, scope, transformation
        or default of the caller's is seen, and none is left behind.
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
        """Return the features with what holds of them, a line each."""
        width = max(len(feature.name) for feature in self.features)
        rows = [
            f"  {f.name:<{width}}  {'refused: ' + '; '.join(f.losses) if f.losses else 'holds'}"
            for f in self.features
        ]
        return "\n".join([f"{self.name} {self.version} ({self.range()})", *rows])

    def _warn(self) -> None:
        """Say once, at the user's line, that the version is new, and what does not hold in it."""
        lost = [f.name for f in self.features if f.losses]
        if self._warned and not lost:
            return
        self._warned = True
        refused = f" Refused from now on: {', '.join(lost)}." if lost else ""
        library = importlib.import_module(self.programs.split(".")[1])  # which may call our code
        theirs = os.path.dirname(str(library.__file__)) + os.sep
        warn_caller(
            f"{self.name} {self.version} is newer than the versions that regrad was tested with "
            f"({self.range()}). A few programs were run to see whether rules still count in it."
            f"{refused} `python -m regrad hosts` shows the result.",
            UntestedHostWarning,
            (PACKAGE, theirs),
        )


class Feature:
    """Something that regrad does in a host, with the private parts and promises that carry it."""

    def __init__(self, host: Host, name: str, instead: str) -> None:
        self.host = host
        self.name = name
        self.instead = instead
        self.parts: list[tuple[str, str]] = []  # path, and why no public call does it
        self.losses: list[str] = []  # why the feature is refused
        self.programs: list[Program] = []
        self.checked = False

    def part(
        self, path: str, why: str, probe: Callable[[Any], bool] | None = None, *,
        missing: Any = None, needed: bool = True,
    ) -> Any:  # fmt: skip
        """Return a private part of the host; what stands for it if it is not there, or is another.

        Args:
            path: `module.name`; alternatives are separated by `|`.
            why: the reason why no public call will do.
            probe: says whether the part is what it was; raising means no.
            missing: stands for a part that is lost. By default, what raises when it is used.
            needed: whether the feature is refused without the part. (It is not where `missing`
                serves as well, only slower or with a worse message.)
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
        """Add a program that raises if the feature does not hold. (A decorator.)"""
        self.programs.append(program)
        return program

    def run(self) -> None:
        """Run the promises, and remember those that do not hold. (None if a part is lost.)"""
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
        """Note why the feature is refused from now on, and return the error that says so."""
        self.losses.append(why)
        return self.error()

    def require(self) -> None:
        """Raise HostError if the host lacks what the feature needs."""
        if self.losses:
            raise self.error()

    def error(self) -> HostError:
        """Return the error that refuses the feature."""
        host = self.host
        return HostError(
            f"{host.name} {host.version} does not support {self.name}: {'; '.join(self.losses)}. "
            f"Versions {host.range()}. {self.instead}"
        )


class Missing:
    """Stands for a part that is not there: to use it is refused, by name."""

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
    """Return the object that a dotted path names; modules on the way are imported."""
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
    """Return a probe: the parameters of the part begin with these names, or there are none."""

    def probe(found: Any) -> bool:
        given = [*inspect.signature(getattr(found, "__func__", found)).parameters]
        return given[: len(names)] == [*names] if names else not given

    return probe


# Whether promises are being run here: what they use is not checked in its turn.
_CHECKING: ContextVar[bool] = ContextVar("regrad_checking", default=False)


def is_checking() -> bool:
    """Return whether the program that runs is one of the promises."""
    return _CHECKING.get()


def _run_all(features: list[Feature]) -> None:
    _CHECKING.set(True)
    for feature in features:
        feature.run()


@functools.cache  # (each scope asks)
def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
