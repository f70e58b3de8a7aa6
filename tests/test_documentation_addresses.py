"""Addresses of the documentation that messages give to people who installed the package."""

import pathlib
import tomllib

from clipgrad._docs import docs_page

ROOT = pathlib.Path(__file__).parents[1]


def test_a_page_has_the_address_that_the_project_gives():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    address = docs_page("nan")
    assert address == f"{urls['Source']}/blob/main/docs/nan.md"
    # The same way of writing an address of the repository as that of the changelog.
    assert urls["Changelog"].startswith(address.removesuffix("docs/nan.md"))
