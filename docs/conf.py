"""How Sphinx builds the site: `python -m sphinx -W docs build/site`."""

import pathlib
import shutil
import sys

import clipgrad

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

# The notebooks are pages of the site, whose sources have to be in one folder.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(
    HERE.parent / "notebooks",
    HERE / "notebooks",
    ignore=shutil.ignore_patterns("*.py", "__pycache__", ".*"),
)
# So is the page of measurements, which README links to from its own folder.
shutil.rmtree(HERE / "benchmarks", ignore_errors=True)
(HERE / "benchmarks" / "results").mkdir(parents=True)
for name in ("RESULTS.md", "results/leaves.png"):
    shutil.copy(HERE.parent / "benchmarks" / name, HERE / "benchmarks" / name)
for copied in (HERE / "notebooks").glob("*.ipynb"):
    copied.write_text(copied.read_text().replace("](../docs/", "](../"))

project = "clipgrad"
version = release = clipgrad.__version__
copyright = "the clipgrad authors"
html_title = f"clipgrad {release}"
html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "breaks",
    "dark",
    "formulas",
    "guarantee",
    "keywords",
    "links",
    "offline",
    "signatures",
    "suggested",
]
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

nitpicky = True
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["torch"]  # of clipgrad.torch, which the site needs not run
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_custom_sections = ["Guarantees"]
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
# Other projects and private types are named, not linked: a build needs no network.
_OTHERS = "jax|optax|numpy|torch|collections|os|pathlib|re"
nitpick_ignore_regex = [("py:.*", rf"({_OTHERS}|clipgrad\._\w+)\..*")]

# The stored outputs are shown; the tests see to it that they are fresh.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
