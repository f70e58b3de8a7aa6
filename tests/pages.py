"""What tests read of the pages and notebooks: tables, anchors, programs and what these print."""

import json
import pathlib
import re

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ALL_PAGES = [*PAGES, *DOCS.glob("[ac]*/*.md")]  # without the copies that the site has
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\b\d+(?:\.\d*)?(?:e[-+]?\d+)?")


def rows(page, heading):
    """The rows of the table on a page that has this in its first line, without backticks."""
    table = (DOCS / page).read_text().split(f"| {heading} |")[1].split("\n\n")[0]
    cells = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return [[cell.strip().strip("`") for cell in row] for row in cells]


def notebook_cells(path, kind):
    """The texts of the cells of a kind, ``"code"`` or ``"markdown"``."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def prose(path):
    """The text of a page without its programs, or that of a notebook."""
    if path.suffix == ".ipynb":
        return "\n\n".join(notebook_cells(path, "markdown"))
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors of a page, as GitHub and the site make them of its headings."""
    included = re.findall(r"^```\{include\} (\S+)", path.read_text(), re.MULTILINE)
    text = "\n".join([prose(path), *(prose(path.parent / name) for name in included)])
    headings = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def pytorch_beside_jax():
    """The programs of the first notebook's tables with a column for PyTorch and one for JAX."""
    text = "\n".join(notebook_cells(NOTEBOOKS[0], "markdown"))
    tables = re.findall(r'<table class="two">.*?</table>', text, re.S)
    return [PROGRAM.findall(table) for table in tables]


# Which element rounding moves most, and by how much, is another answer on another processor.
ROUNDED = re.compile(r"largest error \de-\d+, at .*")


def assert_printed(printed, shown, rtol=0.02, atol=1e-20):
    """The same text, and the same numbers but for their last digits and errors of rounding."""
    printed, shown = (ROUNDED.sub("largest error of rounding", text) for text in (printed, shown))
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    numbers = [np.array(NUMBER.findall(text), float) for text in (printed, shown)]
    np.testing.assert_allclose(*numbers, rtol=rtol, atol=atol)
