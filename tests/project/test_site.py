"""The site of `make docs`: all pages are reached, all names are shown."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.optional import ABSENT
from tests.helpers.paths import DOCS

pytestmark = pytest.mark.slow

PAGES = sorted(p for p in DOCS.rglob("*.md") if "_ext" not in p.parts)
TREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.M | re.S)
DOC = re.compile(r"\{doc\}`(?:[^`<]*<)?([^`>]+)>?`")
NEEDED = {"jax", "matplotlib", "optax", "safetensors", "sklearn", "torch"}
needs_all = pytest.mark.skipif(bool(NEEDED & {*ABSENT}), reason="needs the optional packages")


def relative(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.fixture(scope="module")
def public_names():
    spec = importlib.util.spec_from_file_location("public_names", DOCS / "_ext/public_names.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["public_names"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["public_names"]


# -- the reference ---------------------------------------------------------------------------------


@needs_all
def test_the_reference_shows_every_public_name(public_names):
    assert public_names.missing() == set()
    assert {"regrad.sin", "regrad.nn.relu", "regrad.torch.draw"} <= public_names.public_names()


@needs_all
def test_a_name_without_a_place_is_noticed(public_names, tmp_path, monkeypatch):
    (tmp_path / "one.md").write_text("```{api} regrad\n:names: sin\n```\n")
    monkeypatch.setattr(public_names, "PAGES", tmp_path)
    assert "regrad.cos" in public_names.missing()
    assert "regrad.sin" not in public_names.missing()


@needs_all
def test_pages_of_names_differ_in_more_than_capitals(public_names):
    """Else a disk that does not see capitals has one page for `rg.Tensor` and `rg.tensor`."""
    files = public_names.files_of(public_names.public_names())
    assert len({name.lower() for name in files.values()}) == len(files) > 500
    assert files["regrad.sin"] == "regrad.sin"
    assert files["regrad.tensor"] == "regrad.tensor"
    assert files["regrad.Tensor"] == "regrad.Tensor-class"


def test_rows_of_tensorflow_names_are_shown_and_exist(public_names):
    assert public_names.rows_shown() == public_names.tensorflow_rows().keys()
    assert "regrad.v1.nn.relu" in public_names.tensorflow_rows()["tf.nn"]


# -- pages and links -------------------------------------------------------------------------------


def entries(page: Path) -> list[Path]:
    """The pages that the toctrees of a page name."""
    found = []
    for tree in TREE.findall(page.read_text(encoding="utf-8")):
        for line in tree.splitlines():
            if line and not line.startswith(":"):
                name = re.sub(r".*<(.*)>", r"\1", line)
                found.append(page.parent / name)
    return found


def test_every_page_is_in_a_toctree():
    reached, waiting = set(), [DOCS / "index"]
    while waiting:
        stem = waiting.pop().resolve()
        page = stem.with_name(f"{stem.name}.md")
        if page.exists():
            reached.add(page)
            waiting += entries(page)
        else:
            assert stem.with_name(f"{stem.name}.py").exists(), stem
    assert {relative(p) for p in PAGES} == {relative(p) for p in reached}


def references():
    for page in PAGES:
        for target in DOC.findall(page.read_text(encoding="utf-8")):
            yield pytest.param(page, target, id=f"{relative(page)} {target}")


@pytest.mark.parametrize(("page", "target"), list(references()))
def test_references_to_pages_lead_somewhere(page, target):
    folder = DOCS if target.startswith("/") else page.parent
    stem = folder / target.lstrip("/")
    assert any(stem.with_name(stem.name + suffix).exists() for suffix in (".md", ".py"))


# -- cheat sheets ----------------------------------------------------------------------------------

SHEETS = (
    "pytorch", "jax", "tf1", "tfjs", "zennit", "captum", "grad_cam", "shap", "inseq", "snntorch",
    "brevitas",
)  # fmt: skip
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
ROW = re.compile(r"^\| .* \| (`.*) \|$", re.M)


def cells(sheet: str) -> list[str]:
    text = (DOCS / f"coming_from/{sheet}.md").read_text(encoding="utf-8")
    return [code for row in ROW.findall(text) for code in re.findall(r"`([^`]+)`", row)]


@needs_all
@pytest.mark.parametrize("sheet", SHEETS)
def test_cells_of_cheat_sheets_run(sheet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where they write files
    text = (DOCS / f"coming_from/{sheet}.md").read_text(encoding="utf-8")
    given = {}
    for program in PROGRAM.findall(text):
        exec(program, given)
    assert len(cells(sheet)) > 6
    for cell in cells(sheet):
        scope = {**given}
        try:
            exec(cell, scope)
        except Exception as error:
            error.add_note(f"in the cell {cell}")
            raise


# -- how-tos ---------------------------------------------------------------------------------------


def test_every_how_to_has_a_card_with_a_picture():
    """Pictures of a few kilobytes: the page shows all of them."""
    gallery = (DOCS / "howto/index.md").read_text(encoding="utf-8")
    pages = {p.stem for p in (DOCS / "howto").glob("*.md")} - {"index"}
    assert set(re.findall(r"^:link: (\w+)$", gallery, re.M)) == pages
    assert set(re.findall(r"pictures/howto/(\w+)\.png$", gallery, re.M)) == pages
    sizes = [p.stat().st_size for p in (DOCS / "pictures/howto").glob("*.png")]
    assert len(sizes) == len(pages) and sum(sizes) < 300_000


# -- search ----------------------------------------------------------------------------------------

# Queries, and for each the page that Sphinx's search must list.
QUERIES = {
    "STE": "straight_through", "straight-through estimator": "straight_through",
    "BNN": "straight_through", "QAT": "quantize", "fake quantization": "quantize",
    "QAT jax": "quantize_jax", "DANN": "reversal_jax", "gradient reversal layer": "reversal_torch",
    "reverse gradient JAX": "reversal_jax", "reverse gradient PyTorch": "reversal_torch",
    "guided backprop": "saliency", "surrogate gradient": "spiking", "SNN": "spiking",
    "LRP": "relevance", "gradcheck": "check_rule", "vanishing gradient": "dead_network",
    "gradient clipping": "clipping", "Hessian-vector product": "second_order",
    "custom op": "new_op", "GNN": "graph_network", "message passing": "graph_network",
}  # fmt: skip
SEARCH = re.compile(r"^search: (.+)$", re.M)


def search_entries(page: Path) -> list[str]:
    """The entries of the index that a page has for the search, as the site has them."""
    front_matter = page.read_text(encoding="utf-8").partition("\n---\n")[0]
    return [e.strip().lower() for line in SEARCH.findall(front_matter) for e in line.split(",")]


def finds(query: str, entries: list[str]) -> bool:
    """Whether Sphinx's searchtools.js lists a page for an entry of the index."""
    query = query.lower()
    return any(query in entry and len(query) >= len(entry) / 2 for entry in entries)


@pytest.mark.parametrize("query", QUERIES)
def test_search_finds_a_page_by_the_words_of_the_field(query):
    page = DOCS / f"howto/{QUERIES[query]}.md"
    assert finds(query, search_entries(page))


def test_every_how_to_has_words_for_the_search():
    for page in sorted((DOCS / "howto").glob("*.md")):
        assert page.stem == "index" or search_entries(page), relative(page)
        assert not any("!" in entry or ";" in entry for entry in search_entries(page))


INDEX = DOCS.parent / "out/site/searchindex.js"
WRITTEN = max(p.stat().st_mtime for p in [Path(__file__), *(DOCS / "howto").glob("*.md")])
BUILT = INDEX.exists() and INDEX.stat().st_mtime > WRITTEN


@pytest.mark.skipif(not BUILT, reason="there is no site of these pages: make docs")
@pytest.mark.parametrize("query", QUERIES)
def test_the_built_index_has_the_words(query):
    text = INDEX.read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(")\n;"))
    page = index["docnames"].index(f"howto/{QUERIES[query]}")
    found = [
        file
        for entry, places in index["indexentries"].items()
        if finds(query, [entry])
        for file, _, is_main in places
        if is_main
    ]
    assert page in found
