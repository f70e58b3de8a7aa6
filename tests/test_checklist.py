"""The checklist of what is taught where: every row is ticked by a link that leads somewhere."""

import pathlib
import re

import nbformat
import pytest

pytestmark = pytest.mark.exhaustive

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXT = (DOCS / "checklist.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and "| here |" not in line]
PAGES = [DOCS / name for name in ("checklist.md", "coming_from.md", "exploding.md")]
PAGES += sorted((DOCS / "coming_from").glob("*.md"))


def place(page, target):
    """The file that a link of a page of the site leads to; notebooks lie beside docs."""
    path = (page.parent / target).resolve()
    inside = path.relative_to(DOCS) if path.is_relative_to(DOCS) else path
    return ROOT / inside if str(inside).startswith("notebooks/") else path


def prose(path):
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def anchors(path):
    """The anchors of a page, as GitHub and the site make them of its headings."""
    text = re.sub(r"^```.*?^```", "", prose(path), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


@pytest.mark.kinds()
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for target in targets:
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = place(page, name) if name else page
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


def test_every_row_is_ticked_by_a_link():
    assert ROWS
    for row in ROWS:
        assert re.search(r"\| ✓ \[.+?\]\(\w", row), row
