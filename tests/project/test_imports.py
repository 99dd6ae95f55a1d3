"""What `import regrad` loads, and which module may import which."""

import ast
import graphlib
import importlib
import pathlib
import subprocess
import sys
from functools import cache

import pytest

import regrad
from regrad import extend
from tests.helpers.paths import ROOT, tree_of

HEAVY = ["jax", "torch", "matplotlib", "optax", "safetensors", "tqdm", "scipy.special",
         "scipy.linalg", "array_api_compat", "optree", "opt_einsum"]  # fmt: skip
SOURCE = pathlib.Path(regrad.__file__).parent


def loaded(code):
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    return printed(script).split()


def printed(script):
    """Return what a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


@pytest.mark.slow
def test_import_regrad_loads_nothing_heavy():
    assert loaded("import regrad") == []


@pytest.mark.slow
def test_this_test_can_fail():
    assert "scipy.special" in loaded("import regrad, scipy.special")  # (newer ones load more)


@pytest.mark.slow
def test_work_on_numpy_loads_no_jax():
    assert loaded("import regrad as rg; rg.grad(lambda x: x * x)(2.0)") == ["optree"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize(("name", "old", "oldest"), [
    ("NumPy", "2.0.2", "2.1"), ("SciPy", "1.12.0", "1.13"), ("SciPy", "1.9.3", "1.13"),
])  # fmt: skip
def test_older_packages_are_refused_at_import(tmp_path, name, old, oldest, imported):
    package = name.lower()
    code = f"import {package}; {package}.__version__ = {old!r}; import regrad"
    if not imported and name == "SciPy":  # as it is installed, and not imported
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise AssertionError")
        (tmp_path / package / "version.py").write_text(f'full_version = ""\nversion = "{old}"\n')
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import regrad"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = f"MissingPackageError: regrad needs {name} {oldest} or newer, and {old} is installed"
    assert wanted in done.stderr


# A package imports only from those before it, inside functions too. In a package the imports make
# no circle. `core` is what docs/how_it_works.py builds; the last is TensorFlow 1 on top of all.
PACKAGES = [
    "errors", "core", "shapes", "graph", "ops", "autodiff", "transforms", "checking",
    "inspection", "rules", "fft", "linalg", "random", "nn", "losses", "testing", "plot", "extend",
    "train", "jax", "torch", "", "v1", "__main__",
]  # fmt: skip


def test_all_names_are_listed():
    """Those that the package imports, at once or for type checkers, and what it defines."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = [alias for node in lines for alias in node.names]
    shown = {alias.name for alias in found if alias.asname == alias.name}  # without being listed
    public = {a.asname or a.name for a in found} - shown - {"import_module"} | {"variable"}
    public = {name for name in public if not name.startswith("_")}
    assert set(regrad.__all__) == public and len(public) == len(regrad.__all__)
    assert set(extend.__all__) < set(dir(extend))
    assert {*regrad.__all__, *shown} <= set(dir(regrad))


def test_type_checkers_are_told_of_what_is_imported_late():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    [block] = [node for node in tree.body if ast.unparse(node).startswith("if _typing.TYPE")]
    told = {alias.name: node.module for node in block.body for alias in node.names}
    late = {name: f"regrad.{module}" for name, module in regrad._TOOLS.items()}
    assert told == {**dict.fromkeys(regrad._PARTS, "regrad"), **late}


@pytest.mark.parametrize("name", [name for name in PACKAGES if name in vars(regrad)])
def test_no_name_of_the_package_hides_a_module(name):
    assert getattr(regrad, name) is importlib.import_module(f"regrad.{name}")


# Imports inside functions: of the package itself, and of what few programs need.
LAZY = {""}  # the package's own `__getattr__`
KNOTS = {
    ("core.callers", ""),  # where its files lie
    ("core.tensor", ""),  # the namespace that the Array API standard asks a Tensor for
    ("ops.numpy_protocol", ""),  # NumPy's functions are those of the package of that name
    ("rules.lrp", "torch.relevance"),  # runs models of PyTorch
    ("rules.lrp", "jax.relevance"),  # runs functions of JAX
    ("rules.attribution", "torch.attributing"),
    ("rules.attribution", "jax.attributing"),  # runs functions of JAX
    ("jax.override", "jax.vmaps"),  # stands on JAX's insides
    ("v1.run.session", "v1.run.compiled_plans"),  # needs JAX
}


def name_of(path):
    """The name of a module inside of the package: `core.walk`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}


@cache
def imports(name):
    """The modules of the package that one imports: each, whether in a block, whether to checkers.

    In a block means not as the module or a class of its own is made.
    """
    tree = tree_of(MODULES[name])
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    at_once = {*tree.body, *(node for each in classes for node in each.body)}
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    typing = [node for node in blocks if ast.unparse(node.test).endswith("TYPE_CHECKING")]
    checked = {inner for node in typing for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        else:
            continue
        for each in full:
            top, _, inner = each.partition(".")
            if top == "regrad":
                module = inner if inner in MODULES else inner.rpartition(".")[0]
                found.append((module, node not in at_once, node in checked))
    return found


@cache
def graph(typing=False):
    """The modules that each module imports; with `typing` also those it names to checkers alone."""
    return {
        name: {m for m, _, checked in imports(name) if typing >= checked and (name, m) not in KNOTS}
        for name in MODULES
    }


# The circles that imports for type checkers close: modules that are named in one another's
# signatures, and so are read together.
CIRCLES = [
    {  # the engine's knot
        "core.registry",
        "core.rule",
        "core.rule_forms",
        "core.state",
        "core.tape",
        "core.tensor",
    },
]
BACK_UP = {("", "v1")}  # imports for type checkers that point to a later package


@pytest.mark.slow
def test_few_imports_are_inside_functions():
    found = {
        (name, m) for name in MODULES for m, late, checked in imports(name) if late and not checked
    }
    assert {knot for knot in found if knot[0] not in LAZY} <= KNOTS


def package_of(name):
    """The package of a module; of the modules at the top, the module itself."""
    return name.split(".")[0]


def back_up(name, modules):
    """Those of the modules that belong to a later package than `name` does."""
    place = PACKAGES.index(package_of(name))
    return {m for m in modules if PACKAGES.index(package_of(m)) > place}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_packages_import_one_way(name):
    assert back_up(name, graph()[name]) == set()
    assert {m for m in back_up(name, graph(typing=True)[name]) if (name, m) not in BACK_UP} == set()


def test_no_imports_make_a_circle():
    order = list(graphlib.TopologicalSorter(graph()).static_order())
    assert set(order) == set(MODULES)


def reached(graph, name):
    """The modules to which imports lead from a module, by any number of steps."""
    found, ahead = set(), [name]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def circles(graph):
    """The sets of modules that lead to one another."""
    ahead = {name: reached(graph, name) for name in graph}
    found = {frozenset(m for m in ahead[n] if n in ahead[m]) for n in graph if n in ahead[n]}
    return [set(circle) for circle in found]


def without_allowed(graph):
    """The same imports without those back up that are allowed."""
    return {n: {m for m in graph[n] if (n, m) not in BACK_UP} for n in graph}


def test_imports_for_type_checkers_make_no_other_circles():
    assert [c for c in circles(without_allowed(graph(typing=True))) if c not in CIRCLES] == []


def test_a_circle_across_packages_is_found():
    wrong = without_allowed(graph(typing=True))
    wrong["core.tensor"] |= {"ops.methods"}
    widest = max(circles(wrong), key=len)
    assert {"core.tensor", "ops.methods", "graph.graph"} <= widest
    assert back_up("core.tensor", wrong["core.tensor"]) == {"ops.methods"}


def test_a_circle_is_found():
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({**graph(), "errors": {"v1"}}).prepare()


@pytest.mark.slow
def test_jax_is_loaded_when_it_is_used():
    script = "import sys, regrad; sys.exit('regrad.jax' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
    script = (
        "import sys, regrad as rg; sys.modules['jax'] = None\n"
        "try:\n    rg.jax\nexcept rg.errors.MissingPartError as e:\n    print(e)\n"
        "print(hasattr(rg, 'jax'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install '.[jax]' in a clone" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.slow
def test_train_is_loaded_when_it_is_used():
    assert loaded("import regrad as rg; rg.train.Optimizer") == []
    script = "import sys, regrad; sys.exit('regrad.train' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def functions():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1
                yield path, node.name, lines - doc.count("\n") - bool(doc)


@pytest.mark.slow
def test_functions_fit_a_screen():
    sizes = sorted(n for _, _, n in functions())
    assert [(p.name, f, n) for p, f, n in functions() if n > 60] == []
    assert sizes[len(sizes) // 2] <= 6


def length(path):
    """The lines of a file, without those of docstrings and other strings of several lines."""
    text = path.read_text()
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return len(text.splitlines()) - sum(string.count("\n") for string in strings)


@pytest.mark.slow
def test_files_are_short():
    paths = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): length(p) for p in paths}
    assert {name: n for name, n in long.items() if n > 600} == {}
