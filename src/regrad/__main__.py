"""The command line: `python -m regrad check|trace|nan|compare|draw module:f`; `info`, `hosts`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import regrad
from regrad.core.hints import makes_rules
from regrad.core.signatures import misfit, parameters_of
from regrad.errors import ArgumentError, MissingPackageError, RegradError, UnusedOverrideWarning

PACKAGES = ("numpy", "scipy", "optree", "jax", "jaxlib", "optax", "torch", "matplotlib", "graphviz")
LIBRARIES = ("regrad", "torch", "jax")
OVERRIDE = "try a rule: one of regrad.rules, a registered name, or module:function; may be repeated"
DESCRIPTION = """\
Inspect and check the gradients of a function.

The function is written as module:function or file.py:function, its arguments as a JSON list:
--args '[[1.0, 0.0]]' calls it with one argument of two elements. A torch.nn.Module is called on
tensors, a function of JAX (--library jax) on its arrays.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 for a finding, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (RegradError, ImportError) as error:
        if isinstance(error, AssertionError):  # the result of a check
            print(error)
            return 1
        print(f"regrad {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m regrad",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=what)
        sub.set_defaults(run=run)
        if name not in ("info", "hosts"):
            sub.add_argument("function", help="module:function or file.py:function")
            sub.add_argument("--args", default="[]", help="the arguments, as a JSON list")
            sub.add_argument("--override", metavar="OPTYPE=RULE", action="append", default=[],
                             help=OVERRIDE)  # fmt: skip
            sub.add_argument("--library", choices=LIBRARIES, help="default: the function's library")
        return sub

    check = command("check", _check, "compare the gradients with finite differences")
    check.add_argument("--order", type=int, default=1, help="the highest order (default: 1)")
    trace = command("trace", _trace, "report what ran backward, and the most likely fault")
    trace.add_argument("--plot", metavar="FILE", help="draw the norms into a picture")
    command("nan", _nan, "find the first NaN or infinity, forward or backward")
    compare = command("compare", _compare, "compare the gradients with the true ones, or another's")
    compare.add_argument("--other", metavar="FUNCTION", help="the function to compare with")
    draw = command("draw", _draw, "draw the ops that run")
    draw.add_argument("--out", default="drawing.html", help="a file, .html or .svg")
    draw.add_argument("--gradients", action="store_true", help="the backward pass, too")
    command("info", _info, "list versions, backends and devices, for a bug report")
    command("hosts", _hosts, "run programs that check what works in this PyTorch and this JAX")
    return parser


# -- the commands --------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    with _target(options) as (f, args, library):
        where = "regrad.testing" if library == "regrad" else f"regrad.{library}"
        report = import_module(where).gradient_report(f, args, options.order)
        print(report)
    return 0 if report.ok else 1


def _trace(options: argparse.Namespace) -> int:
    with _target(options) as (f, args, library):
        trace = _tool(library, "trace_gradients")(f)(*args)
        print(trace)
    if options.plot:
        trace.plot().figure.savefig(options.plot)
        print(f"Drawn: {options.plot}")
    return 1 if trace.worst() else 0


def _nan(options: argparse.Namespace) -> int:
    with _target(options) as (f, args, library):
        found = _tool(library, "find_nan")(f)(*args)
        print(found or "all is finite, forward and backward")
    return 1 if found else 0


def _compare(options: argparse.Namespace) -> int:
    other = () if options.other is None else (_function(options.other),)
    with _target(options) as (f, args, library):
        comparison = _tool(library, "compare_gradients")(f, *other)(*args)
        print(comparison)
    return 0 if comparison.ok else 1


def _draw(options: argparse.Namespace) -> int:
    more = {"gradients": True} if options.gradients else {}
    with _target(options) as (f, args, library):
        drawing = _tool(library, "draw")(f, *args, **more)
    if options.out.endswith(".svg"):
        drawing.svg(options.out)
    elif options.out.endswith(".html"):
        drawing.html(options.out)
    else:
        raise ArgumentError(f"--out is a file .html or .svg, got {options.out!r}")
    print(f"Drawn: {options.out} ({len(drawing.boxes)} ops)")
    return 0


def _info(options: argparse.Namespace) -> int:
    print(f"regrad {regrad.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} is not installed")
    if util.find_spec("jax"):
        jax = import_module("jax")
        print(f"JAX devices: {', '.join(map(str, jax.devices()))}")
        print(f"JAX x64: {'on' if jax.config.jax_enable_x64 else 'off'}")
    if util.find_spec("torch"):
        torch = import_module("torch")
        count = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(i) for i in range(count)]
        print(f"PyTorch devices: {', '.join(['cpu', *names])}")
    return 0


def _hosts(options: argparse.Namespace) -> int:
    lost = 0
    for library in LIBRARIES[1:]:
        try:
            host = import_module(f"regrad.{library}.host").HOST
        except MissingPackageError as error:
            print(error)
            continue
        print(f"Running the programs for {host.name}: some seconds.", file=sys.stderr)
        host.check(*host.features, again=True)
        print(host.table())
        lost += any(feature.losses for feature in host.features)
    return 1 if lost else 0


# -- the arguments of the command line -----------------------------------------------------------


@contextmanager
def _target(options: argparse.Namespace) -> Iterator[tuple[Any, list[Any], str]]:
    """Yield the function, its arguments, and their library, under the rules of --override."""
    f = _function(options.function)
    if isinstance(f, type):
        raise ArgumentError(f"{options.function} is a class; name a function or an instance")
    library = options.library or _library_of(f)
    args = _arguments(options.args, library)
    if misfit(getattr(f, "forward", f), args, {}):
        raise ArgumentError(
            f"{options.function} takes {parameters_of(getattr(f, 'forward', f))}; pass --args, a "
            f"JSON list with an entry for each argument, got {options.args}"
        )
    rules = dict(map(_override, options.override))
    if not rules:
        yield f, args, library
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedOverrideWarning)  # assert_fired reports more
        if library == "jax":
            used = f = import_module("regrad.jax").override(f, rules)
            yield f, args, library
        else:
            with _tool(library, "gradient_override_map")(rules) as used:
                yield f, args, library
    print(used.table())
    if options.command != "draw":  # (draw may run no gradient)
        used.assert_fired()


def _override(text: str) -> tuple[str, Any]:
    """Return the op type and the rule of `--override Relu=guided_relu`."""
    op_type, _, name = text.partition("=")
    if not op_type or not name:
        raise ArgumentError(f"--override is OPTYPE=RULE, as in Relu=guided_relu, got {text!r}")
    rule = _function(name) if ":" in name else getattr(regrad.rules, name, name)
    return op_type, rule() if callable(rule) and makes_rules(rule) else rule


def _function(text: str) -> Any:
    """Return the function that `module:function` or `file.py:function` names."""
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise ArgumentError(f"expected module:function or file.py:function, got {text!r}")
    path = Path(module)
    if path.suffix == ".py":
        if not path.exists():
            raise ArgumentError(f"there is no file {module}")
        sys.path.insert(0, str(path.parent.resolve()))
        module = path.stem
    elif "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{module} has no {name!r}")
        found = getattr(found, part)
    return found


def _library_of(f: Any) -> str:
    """Return the library of a function, as far as its module shows it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(f, torch.nn.Module):
        return "torch"
    module = sys.modules.get(getattr(f, "__module__", ""))
    names = {} if module is None else vars(module)
    modules = [v.__name__ for v in names.values() if isinstance(v, ModuleType)]
    roots = {name.partition(".")[0] for name in modules}
    return next((library for library in LIBRARIES if library in roots), "regrad")


def _arguments(text: str, library: str) -> list[Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"--args is a JSON list, got {text!r}: {error}") from None
    if not isinstance(values, list):
        raise ArgumentError(f"--args is a JSON list with an entry for each argument, got {text!r}")
    try:
        if library == "torch":
            torch = import_module("torch")
            return [_torch_tensor(torch, v) for v in values]
        if library == "jax":
            jnp = import_module("jax.numpy")
            return [jnp.asarray(v) for v in values]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"--args: {error}") from None
    return values


def _torch_tensor(torch: Any, value: Any) -> Any:
    tensor = torch.tensor(value)
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _tool(library: str, name: str) -> Callable[..., Any]:
    return getattr(import_module("regrad" if library == "regrad" else f"regrad.{library}"), name)


if __name__ == "__main__":
    sys.exit(main())
