"""The site's settings for Sphinx. `python docs/build.py` builds it; docs/_ext has what is particular to heedful."""

import importlib.util
import shutil
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent / "src")]
with (DOCS.parent / "pyproject.toml").open("rb") as file:
    PROJECT = tomllib.load(file)["project"]
MATHJAX = Path(importlib.util.find_spec("mathjax").submodule_search_locations[0]) / "static" / "mathjax" / "es5"

project, author = "heedful", "the authors of heedful"
version = release = PROJECT.get("version", "")
project_copyright = f"{author}, {PROJECT['license']}"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.mathjax",
    "reference",
    "settings_page",
    "peers_page",
    "repository",
    "lessons",
    "mixed_search",
]
exclude_patterns = ["_ext"]
suppress_warnings = ["config.cache"]  # linkcode_resolve is a function, which is not cached

# Markdown as GitHub shows it: ```math, $x$, an anchor for every heading
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "page", "source"]
nb_execution_mode = "off"  # build.py --execute sets it
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
default_role = "py:obj"
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "heedful"
html_search_language = "mixed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
templates_path = ["_templates"]
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
mathjax_path = "mathjax/tex-chtml.js"
mathjax3_config = {"options": {"enableMenu": False}}
html_sidebars = {"index": [], "search": [], "source/**": []}
html_context = {"default_mode": "auto"}
html_theme_options = {
    "header_links_before_dropdown": 5,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher"],
    "article_header_start": ["breadcrumbs", "lesson"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_nav_level": 1,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "logo": {"text": "heedful"},
}


def copy_mathjax(app, exception):
    """Put the mathematics renderer and its fonts beside the pages, so that formulas need no network."""
    if exception or app.builder.format != "html":
        return
    target = Path(app.outdir, "_static", "mathjax")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(MATHJAX / "tex-chtml.js", target)
    for folder in ("output/chtml/fonts/woff-v2", "input/tex/extensions"):
        shutil.copytree(MATHJAX / folder, target / folder, dirs_exist_ok=True)


def setup(app):
    app.connect("build-finished", copy_mathjax)
