"""Executes the pages in parallel before Sphinx reads them, and keeps their outputs.

MyST-NB finds the output of a page by the code of its cells, in a folder of jupyter-cache. An output
depends on more than the code, so the name of the folder is a hash of everything else: `key`.
`tests/project/test_page_cache.py` leaves out each part of the key.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the tests run without Sphinx
    from nbformat import NotebookNode
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "out" / "pages"
KEPT = 3  # folders: a change of branch, and back, executes nothing
# Prefixes of the environment variables that change numbers, warnings or pictures.
SETTINGS = "CUDA", "JAX", "KERAS", "MKL", "MPL", "OMP", "OPENBLAS", "PYTHON", "TORCH", "XLA"
LOCAL = {"PYTHONPATH"}  # where the sources are: their content counts
ENVIRONMENT = {**os.environ}  # (torch and others set variables when they are imported)
QUIET = {"extra_arguments": ["--IPKernelApp.log_level=ERROR"]}


def key(
    sources: Iterable[tuple[str, bytes]],
    libraries: Iterable[tuple[str, str]],
    python: str,
    settings: Mapping[str, str],
) -> str:
    """Return a hash of everything that the output of a page depends on, except for its code.

    The key is complete because a page reads nothing else: regrad's sources, the installed
    libraries by their versions, the interpreter, and the variables of the environment that
    these libraries read. No page reads another file of the repository, the clock or the network.
    """
    digest = hashlib.sha256()
    for name, content in sorted(sources):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    digest.update(json.dumps([sorted(libraries), python, sorted(settings.items())]).encode())
    return digest.hexdigest()[:16]


def present_key() -> str:
    """Return the key of this checkout in this environment."""
    return key(sources(), libraries(), python(), settings(ENVIRONMENT))


def sources() -> Iterator[tuple[str, bytes]]:
    """Yield the files of regrad that Python or a page reads."""
    for path in sorted((ROOT / "src").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyi":
            yield path.relative_to(ROOT).as_posix(), path.read_bytes()


def libraries() -> set[tuple[str, str]]:
    """Return the names and versions of all installed packages, except for regrad's own."""
    found = {(d.metadata["Name"] or "", d.version) for d in distributions()}
    return {(name, version) for name, version in found if name != "regrad"}


def python() -> str:
    """Return the interpreter and the kind of the machine."""
    return f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}"


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the environment that the libraries read."""
    return {k: v for k, v in environment.items() if k.startswith(SETTINGS) and k not in LOCAL}


def folder(within: Path = FOLDER) -> Path:
    """Return the folder of the outputs; of the folders of other keys, the newest stay."""
    chosen = within / present_key()
    chosen.mkdir(parents=True, exist_ok=True)
    os.utime(chosen)
    others = sorted(within.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in others[KEPT:]:
        shutil.rmtree(old)
    return chosen


def read_notebook(app: Sphinx, docname: str) -> NotebookNode | None:
    """Return a page as MyST-NB reads it, or None for a page without cells."""
    from myst_nb.core.read import create_nb_reader

    source = [(path := Path(app.env.doc2path(docname))).read_text(encoding="utf-8")]
    app.emit("source-read", docname, source)
    env: Any = app.env
    reader = create_nb_reader(str(path), env.myst_config, env.mystnb_config, source[0])
    notebook = reader.read(source[0]) if reader else None
    return notebook if notebook and code_of(notebook) else None


def code_of(notebook: NotebookNode) -> str:
    """Return the code of a notebook."""
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def execute_pages(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Execute the pages whose outputs are not in the folder, the longest programs first."""
    from jupyter_cache import get_cache
    from jupyter_cache.base import CacheBundleIn
    from jupyter_cache.executors.utils import single_nb_execution
    from sphinx.errors import ExtensionError
    from sphinx.util.display import status_iterator

    cache = get_cache(cache_path(env))
    known = {record.hashkey for record in cache.list_cache_records()}
    pages = {n: nb for n in docnames if (nb := read_notebook(app, n)) is not None}
    waiting = {n: nb for n, nb in pages.items() if cache.create_hashed_notebook(nb)[1] not in known}
    order = sorted(waiting, key=lambda n: len(code_of(waiting[n])), reverse=True)

    def execute(name: str) -> tuple[str, Any]:
        place = str(Path(env.doc2path(name)).parent)
        return name, single_nb_execution(
            waiting[name], place, app.config.nb_execution_timeout, False, **QUIET
        )

    logging.getLogger("traitlets").setLevel(logging.WARNING)  # it reports each kernel
    failed = []
    with ThreadPoolExecutor(app.parallel) as pool:  # (each page has a process: its kernel)
        done = pool.map(execute, order)
        for name, result in status_iterator(
            done, "executing pages... ", "brown", len(order), stringify_func=lambda d: d[0]
        ):
            if result.err is not None:
                failed.append(f"{name}: {result.exc_string}")
                continue
            bundle = CacheBundleIn(result.nb, name, data={"execution_seconds": result.time})
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    if failed:
        raise ExtensionError("pages raise:\n" + "\n".join(failed))


def choose_folder(app: Sphinx) -> None:
    """Have MyST-NB look for outputs in the folder of this key.

    (In conf.py a new folder would be a changed setting, for which Sphinx reads all pages again.)
    """
    env: Any = app.env
    env.mystnb_config = env.mystnb_config.copy(execution_cache_path=str(folder()))


def outdated(
    app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Return the pages to read again, since regrad or a library has changed."""
    before, env.executed_in = getattr(env, "executed_in", None), cache_path(env)
    if before in (None, env.executed_in):
        return []
    return [name for name in env.found_docs if read_notebook(app, name)]


def cache_path(env: Any) -> str:
    """Return the folder that was chosen."""
    return env.mystnb_config.execution_cache_path


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the execution."""
    app.connect("builder-inited", choose_folder, priority=900)  # MyST-NB has read its settings
    app.connect("env-get-outdated", outdated)
    app.connect("env-before-read-docs", execute_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
