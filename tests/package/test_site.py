"""The site in a browser: nothing is cut, no link is broken, the search answers.

``CLIPGRAD_SITE=build/site pytest -m slow tests/package/test_site.py``, after Sphinx has built
the site there; Chromium is that of the machine, or of ``playwright install chromium``.
"""

import http.server
import os
import pathlib
import shutil
import threading
import urllib.parse

import pytest

pytestmark = pytest.mark.slow
SITE = pathlib.Path(os.environ.get("CLIPGRAD_SITE", "build/site")).resolve()
PAGES = ["index", "nan", "my_run_blew_up", "api/diagnose", "notebooks/2_error_clip"]
WIDTHS = [1400, 400]
# What is wider than its place. A phone scrolls code and wide tables; outputs wrap everywhere.
WIDER = """(selector) => [...document.querySelectorAll(selector)]
    .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1)
    .map((e) => e.textContent.slice(0, 80))"""
LINKS = """() => [...document.querySelectorAll('article a[href], .sidebar-tree a[href]')]
    .map((a) => a.href)"""
BROKEN = """() => [...document.images]
    .filter((i) => i.complete && !i.naturalWidth && i.offsetParent).map((i) => i.src)"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Of the site, without a log."""

    def __init__(self, *args):
        super().__init__(*args, directory=str(SITE))

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    """Where the site is served: a page that is opened from a disk cannot read others."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not (SITE / "index.html").exists():
        pytest.skip(f"no site in {SITE}")
    with playwright.sync_playwright() as started:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        installed = pathlib.Path(started.chromium.executable_path)
        if not (path or installed.exists()):
            pytest.skip("no Chromium: playwright install chromium")
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def page_of(browser, address, name, width, query=""):
    """The page, and what its scripts and files complained of."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.goto(f"{address}/{name}.html{query}")
    return page, errors


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_of_a_page_is_cut(browser, address, name, width):
    page, errors = page_of(browser, address, name, width)
    assert not errors
    assert not page.evaluate(WIDER, ".highlight-text pre, .cell_output pre")
    assert not page.evaluate(WIDER, "html")
    if width > 1000:
        assert not page.evaluate(WIDER, "article .highlight-python pre, article .highlight-py pre")
    if name == "index":
        assert not page.evaluate(WIDER, ".table-wrapper")
    for image in page.locator("article img:visible").all():
        image.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    assert not page.evaluate(BROKEN)
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_each_link_of_a_page_leads_to_a_place_of_the_site(browser, address, name):
    page, _ = page_of(browser, address, name, 1400)
    links = [urllib.parse.urlsplit(link) for link in page.evaluate(LINKS)]
    page.close()
    inside = [link for link in links if link.netloc.startswith("127.0.0.1")]
    assert len(inside) > 20
    for link in inside:
        path = SITE / urllib.parse.unquote(link.path).lstrip("/")
        assert path.is_file(), link
        anchor = urllib.parse.unquote(link.fragment)
        assert not anchor or f'id="{anchor}"' in path.read_text(), link


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("why is my gradient zero", "zero.html"),
        ("training diverged", "my_run_blew_up.html"),
        ("clip_grad_norm_", "coming_from/pytorch.html"),
        ("clip_per_example", "api/"),
    ],
)
def test_the_search_of_the_site_answers_first_with_the_page_of_the_command(
    browser, address, question, answer
):
    page, errors = page_of(
        browser, address, "search", 1400, f"?q={urllib.parse.quote_plus(question)}"
    )
    first = page.locator("#search-results li a").first
    first.wait_for()
    assert answer in first.get_attribute("href") and not errors
    page.close()
