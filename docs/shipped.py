"""The pages that a wheel has for `clipgrad help`: texts without pictures, in the site's folders."""

import json
import pathlib
import re

_PICTURE = re.compile(r"\[?!\[[^\]]*\]\([^)]*\.png\)(\]\([^)]*\.png\))?\n?")
_INCLUDED = re.compile(r"```\{include\} (\S+)\n(?::relative-docs:.*\n)?```\n?")
_TREE = re.compile(r"```\{toctree\}\n.*?```\n?", re.DOTALL)
_TABLES = ("keywords.json", "synonyms.json")
# The site copies these into docs/ while it is built.
_COPIES = ("notebooks", "benchmarks")


def shipped_texts(root: pathlib.Path) -> dict[str, str]:
    """The text of each page of the site, and the words that they are found by, by its path."""
    docs = root / "docs"
    pages = {path: path.relative_to(docs) for path in docs.rglob("*.md")}
    pages = {path: name for path, name in pages.items() if name.parts[0] not in _COPIES}
    more = [root / "benchmarks" / "RESULTS.md", *root.glob("notebooks/*.ipynb")]
    pages |= {path: path.relative_to(root) for path in more}
    texts = {name.as_posix(): _text_of(path) for path, name in pages.items()}
    tables = {name: (docs / name).read_text(encoding="utf-8") for name in _TABLES}
    return dict(sorted(texts.items())) | tables


def _text_of(path: pathlib.Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return _without_outputs(text)
    parts = lambda match: (path.parent / match[1]).read_text(encoding="utf-8")  # noqa: E731
    text = _TREE.sub("", _INCLUDED.sub(parts, text))
    return _PICTURE.sub("", text).replace("](../docs/", "](../")


def _without_outputs(notebook: str) -> str:
    """A notebook of cells with their sources alone, whose links are those of the site."""
    cells = [
        {"cell_type": cell["cell_type"], "source": [_PICTURE.sub("", "".join(cell["source"]))]}
        for cell in json.loads(notebook)["cells"]
    ]
    return json.dumps({"cells": cells}).replace("](../docs/", "](../")


def write_pages(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes all of these into a folder."""
    for name, text in shipped_texts(root).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
