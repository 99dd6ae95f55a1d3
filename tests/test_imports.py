"""What `import regrad` loads, and which module may import which."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import regrad
from regrad import extend
from tests.helpers.paths import ROOT

HEAVY = ["jax", "torch", "matplotlib", "optax", "safetensors", "tqdm", "scipy.special",
         "scipy.linalg", "array_api_compat", "optree", "opt_einsum"]  # fmt: skip
SOURCE = pathlib.Path(regrad.__file__).parent


def loaded(code):
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_import_regrad_loads_nothing_heavy():
    assert loaded("import regrad") == []


def test_this_test_can_fail():
    assert loaded("import regrad, scipy.special") == ["scipy.special"]


def test_work_on_numpy_loads_no_jax():
    assert loaded("import regrad as rg; rg.grad(lambda x: x * x)(2.0)") == ["optree"]


# A module imports only from those before it, inside functions too.
LAYERS = [
    "callers", "interrupts", "errors", "blocks", "hints", "signatures", "files", "state", "dims",
    "shapes",
    "namespaces", "ruleforms",
    "registry", "tensors", "numbers", "placement", "tape", "printing",
    "kernel_errors", "dispatch", "fastpath", "walk", "builtin", "opsheet", "pullback", "pytrees",
    "containers", "reports", "scopes", "overrides", "foreign",
    "shapeforms", "inference", "static_values", "graph", "size_ops", "executor", "deferral",
    "numpy_protocol", "ops", "dtypes", "variables", "gradients", "trails", "custom_nodes", "custom",
    "arguments", "closures", "capture", "regions", "bodies", "verification", "donation", "compiled",
    "devices", "jitted", "batching", "recompute", "loops", "branches", "control", "transforms",
    "rules", "reals", "differences", "findings", "checking", "testing", "linalg",
    "random", "nn", "losses", "extend", "train", "jax", "torch",
]  # fmt: skip


def test_all_names_are_listed():
    """Those that the package imports under their own names, and what it defines."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    lines = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname for node in lines for alias in node.names if alias.asname}
    public = {name for name in names if not name.startswith("_")} | {"variable"}
    assert set(regrad.__all__) == public and len(public) == len(regrad.__all__)
    assert set(extend.__all__) < set(dir(extend))


@pytest.mark.parametrize("name", [name for name in LAYERS if hasattr(regrad, name)])
def test_no_name_of_the_package_hides_a_module(name):
    assert getattr(regrad, name) is importlib.import_module(f"regrad.{name}")


# Imports of the package itself, and of what few programs need. No others are inside functions.
KNOTS = [
    ("callers.py", "regrad"),  # where its files lie
    ("jax/override.py", "regrad.jax.vmaps"),  # stands on JAX's insides
    ("numpy_protocol.py", "regrad"),  # NumPy's functions are those of the package of that name
    ("tensors.py", "regrad"),  # the namespace that the Array API standard asks a Tensor for
]


def nodes(tree):
    """The statements that run: those for type checkers do not."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node
            yield from nodes(node)


def imported(path):
    """The regrad modules that a file imports, by their full names, and whether in a function."""
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "regrad":
            names = [f"regrad.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("regrad."):
                yield name, node.col_offset > 0


def imports(path):
    """The modules of the package that a file imports, by their first names."""
    place = path.relative_to(SOURCE).as_posix()
    names = [name for name, _ in imported(path) if (place, name) not in KNOTS]
    return [name.removeprefix("regrad.").split(".")[0] for name in names]


def test_few_imports_are_inside_functions():
    """(regrad.v1 has knots of its own.)"""
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        for name, late in imported(path)
        if late and path.relative_to(SOURCE).parts[0] != "v1"
    }
    assert found < set(KNOTS)


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*.py")), ids=lambda p: p.stem)
def test_layers(path):
    if path.stem == "__init__":
        return
    allowed = LAYERS[: LAYERS.index(path.stem)]
    assert [m for m in imports(path) if m not in allowed] == []


@pytest.mark.parametrize("path", sorted((SOURCE / "ops").glob("*.py")), ids=lambda p: p.stem)
def test_ops_are_below_the_gradient_functions(path):
    allowed = LAYERS[: LAYERS.index("ops") + 1]
    assert [m for m in imports(path) if m not in allowed] == []


@pytest.mark.parametrize("path", sorted((SOURCE / "train").glob("*.py")), ids=lambda p: p.stem)
def test_nothing_but_train_knows_train(path):
    assert [m for m in imports(path) if m not in LAYERS] == []


@pytest.mark.parametrize("path", sorted((SOURCE / "jax").glob("*.py")), ids=lambda p: p.stem)
def test_nothing_but_jax_knows_jax(path):
    order = ["linear", "vmaps", "primitives", "bridge", "custom", "gradients", "optypes", "keys",
             "boundaries", "closed", "surgery", "override"]  # fmt: skip
    assert [m for m in imports(path) if m not in LAYERS] == []
    inner = [
        name.removeprefix("regrad.jax.")
        for name, _ in imported(path)
        if name.startswith("regrad.jax.")
    ]
    below = order if path.stem == "__init__" else order[: order.index(path.stem)]
    assert [m for m in inner if m not in below] == []


def test_jax_is_loaded_when_it_is_used():
    script = "import sys, regrad; sys.exit('regrad.jax' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
    script = (
        "import sys, regrad as rg; sys.modules['jax'] = None\n"
        "try:\n    rg.jax\nexcept rg.errors.MissingPackageError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install regrad[jax]" in done.stdout


def test_train_is_loaded_when_it_is_used():
    assert loaded("import regrad as rg; rg.train.Optimizer") == []
    script = "import sys, regrad; sys.exit('regrad.train' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def functions():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                doc = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1
                yield path, node.name, lines - doc.count("\n") - bool(doc)


def test_functions_fit_a_screen():
    sizes = sorted(n for _, _, n in functions())
    assert [(p.name, f, n) for p, f, n in functions() if n > 60] == []
    assert sizes[len(sizes) // 2] <= 6


def test_files_are_short():
    paths = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    long = {p.name: len(p.read_text().splitlines()) for p in paths}
    assert {name: n for name, n in long.items() if n > 600} == {}
