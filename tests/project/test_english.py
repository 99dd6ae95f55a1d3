"""The English of docs, docstrings, comments and messages (see `tests.helpers.english`)."""

import pytest

from tests.helpers.english import count, files_of, marks_of, texts_of

# Marks in 1,000 words. NumPy's docstrings have 0.7.
CEILING = 1.0
TEXTS = [text for file in files_of() for text in texts_of(file)]


@pytest.mark.parametrize("kind", ["docs", "docstrings", "messages", "comments"])
def test_prose_is_plain(kind):
    texts = [text for text in TEXTS if text.kind == kind]
    words, marks = count(texts)
    assert words > 10_000, "the texts are not found"
    found = [
        f"{text.path.name}:{line}: {mark}: …{words_around}…"
        for text in texts
        for line, mark, words_around in marks_of(text)
    ]
    assert 1000 * marks / words <= CEILING, "\n".join(found)


@pytest.mark.parametrize(("prose", "mark"), [
    ("Its value is that of the op.", "pro-form"),
    ("It returns nothing. What remains is zero.", "what-clause"),
    ("The caller is told.", "passive"),
    ("The scope knows no rule.", "mind"),
    ("The rule was skipped in silence.", "idiom"),
    ("It is zero; so is the rest.", "inversion"),
])  # fmt: skip
def test_a_mark_is_found(prose, mark, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n```python\nwhat is that of it\n```\n\n{prose}\n")
    (text,) = texts_of(page)
    assert [(line, name) for line, name, _ in marks_of(text)] == [(7, mark)]


def test_each_kind_of_text_is_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""Skipped in silence."""\n\n# in silence\nraise ValueError(f"{1} goes by in silence")\n'
    )
    kinds = [text.kind for text in texts_of(module) for _ in marks_of(text)]
    assert kinds == ["docstrings", "messages", "comments"]
