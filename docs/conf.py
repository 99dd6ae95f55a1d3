"""How Sphinx builds the site: `make docs`."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

import page_cache  # noqa: E402, F401 (it reads the environment, which imports below change)
import pages  # noqa: E402

import regrad  # noqa: E402

project = "regrad"
author = "The regrad developers"
copyright = author
release = version = regrad.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "api_reference",
    "costs",
    "name_pages",
    "notebooks",
    "op_table",
    "page_cache",
    "pages",
    "search_words",
]
suppress_warnings = ["myst.header"]  # a page may leave out a level of headings
exclude_patterns = ["_ext", "conf.py"]

# -- prose and notebooks ---------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_custom_formats = {".py": "pages.read_script"}
nb_execution_mode = "cache"  # in a folder of `page_cache`, which notices that regrad changed
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

# -- the API reference -----------------------------------------------------------------------------

default_role = "py:obj"  # a name in backticks leads to its entry, if it has one
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# -- the theme -------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"regrad {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["filter.js", "moved.js", "names.js"]
html_search_scorer = str(DOCS / "_static/scorer.js")
if pages.REPOSITORY:
    html_theme_options = {
        "source_repository": pages.REPOSITORY,
        "source_branch": "main",
        "source_directory": "docs/",
    }
