"""Pages of the site whose sources are elsewhere: the notebooks, and the page of measurements."""

import json
import pathlib
import shutil

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent


def copy_pages() -> None:
    """Copies them into the folder of the site."""
    for name in ("notebooks", "benchmarks"):
        shutil.rmtree(DOCS / name, ignore_errors=True)
    (DOCS / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = notebook_page(path.name, path.read_text(encoding="utf-8"))
        (DOCS / "notebooks" / path.name).write_text(text, encoding="utf-8")
    (DOCS / "benchmarks" / "results").mkdir(parents=True)
    for name in ("RESULTS.md", "results/leaves.png"):
        shutil.copy(ROOT / "benchmarks" / name, DOCS / "benchmarks" / name)


def notebook_page(name: str, text: str) -> str:
    """A notebook with links of the site, and with one that downloads it below its title."""
    notebook = json.loads(text.replace("](../docs/", "](../"))
    files = [name, "plots.py"] if "import plots" in text else [name]
    links = [f"{{download}}`{file} <../../notebooks/{file}>`" for file in files]
    first = notebook["cells"][0]
    title, _, rest = "".join(first["source"]).partition("\n")
    first["source"] = f"{title}\n\nDownload {' and '.join(links)}.\n{rest}"
    return json.dumps(notebook)
