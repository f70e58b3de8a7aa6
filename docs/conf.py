"""How Sphinx builds the site: `python -m sphinx -W docs build/site`."""

import pathlib
import sys

import clipgrad

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from copies import copy_pages  # noqa: E402

copy_pages()

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
    "sections",
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
