"""The pictures of pages: each is in both themes, can be read on a phone, and shows what is said."""

import importlib
import re
import struct
import sys

import numpy as np
import pytest

from tests.pages import DOCS, ROOT

pytestmark = pytest.mark.usefixtures("users_promotion")

NAMES = re.findall(r'^    "(\w+)": \w+,$', (DOCS / "pictures.py").read_text(), re.MULTILINE)
# The page of each picture, if it has not the name of the picture.
PAGES = {"diagnose": "nan", "convolutions": "which_clip", "coordinates": "recipes"}
PHONE = 400  # pixels across


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("pictures")
    finally:
        sys.path.remove(str(DOCS))


def size(path):
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:])


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_stands_on_its_page_in_both_themes_with_a_description(name):
    page = (DOCS / f"{PAGES.get(name, name)}.md").read_text()
    (description,) = re.findall(rf"!\[([^\]]+)\]\({name}\.png\)", page)
    assert len(description) > 60
    light, dark = (size(DOCS / f"{name}{suffix}.png") for suffix in ("", "_dark"))
    assert light == dark and light[0] >= 1.9 * PHONE


def test_guides_have_pictures():
    guides = {"nan", "zero", "my_run_blew_up", "which_clip", "exploding", "rules", "per_example",
              "two_versions", "layout", "check", "port", "logging", "which_layer"}  # fmt: skip
    assert guides <= {PAGES.get(name, name) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_text_of_a_picture_can_be_read_on_a_phone(name, pictures):
    with pictures.theme("_dark"):
        figure = pictures.PICTURES[name]()
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(lambda a: hasattr(a, "get_fontsize"))]
        smallest = min(text.get_fontsize() for text in texts if text.get_text().strip())
    width, height = figure.get_size_inches()
    assert smallest / 72 * PHONE / width >= 9  # pixels
    box = figure.get_tightbbox()
    assert -0.03 < box.x0 and box.x1 < width + 0.03 and -0.03 < box.y0 and box.y1 < height + 0.03


@pytest.mark.slow
def test_the_picture_of_readme_shows_what_its_description_says(pictures):
    text = (ROOT / "README.md").read_text()
    (panel,) = pictures.where_it_breaks().axes
    norms = np.array([bar.get_width() for bar in panel.patches])
    modules = [label.get_text() for label in panel.get_yticklabels()]
    broken = modules.index("block_2/attn")
    assert len(modules) == 12 and "twelve modules" in text
    assert np.isnan(norms[:broken]).all() and np.isfinite(norms[broken:]).all()
    assert [t.get_text() for t in panel.texts].count("NaN") == broken
    low, high = (round(float(end(norms[broken:]))) for end in (min, max))
    assert f"back to block_2/attn it is between {low} and {high}" in text
    assert "VJP of sqrt" in panel.texts[-1].get_text() and "operation there: sqrt" in text


@pytest.mark.slow
def test_the_pictures_of_a_cut_three_witnesses_and_two_versions_show_these(pictures):
    (panel,) = pictures.zero().axes
    assert [t.get_text() for t in panel.texts if re.fullmatch(r"[\d.]+", t.get_text())] == [
        "1", "0.9", "0", "0",
    ]  # fmt: skip
    (panel,) = pictures.witnesses().axes
    rule, plain, slopes = np.reshape([bar.get_height() for bar in panel.patches[:18]], (3, 6))
    np.testing.assert_allclose(plain, slopes, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rule, plain * [1, 1, 1, 1 / 8, 1 / 8, 1 / 8], rtol=1e-4, atol=1e-5)
    (panel,) = pictures.versions().axes
    widths, limits = [bar.get_width() for bar in panel.patches], panel.lines[0].get_xdata()
    assert [w > limit for w, limit in zip(widths, limits, strict=True)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.slow
def test_the_descriptions_of_curves_have_the_numbers_of_the_curves(pictures):
    """Exploding, bfloat16, port and the coordinate check: what their descriptions say."""
    grows, stays, falls = (line.get_ydata() for line in pictures.exploding().axes[0].lines)
    assert 1e9 < grows[0] < 3e9 and np.ptp(stays) < 1e-4 and 5e-15 < falls[0] < 3e-14
    (value, *_), names = (panel := pictures.precision().axes[0]).lines, panel.get_xticklabels()
    error, norm = value.get_ydata(), [name.get_text() for name in names].index("4/norm")
    assert max(error[:norm]) < 0.01 < 0.1 < error[norm]
    assert "0.9% apart" in [text.get_text() for text in pictures.port().axes[0].texts]
    standard, mup = pictures.coordinates().axes
    ends = [tuple(line.get_ydata()[[0, -1]]) for line in standard.lines[1:]]
    assert [(round(a, 1), round(b)) for a, b in ends] == [(1.1, 9), (2.5, 22)]
    assert all(0.95 < y < 1.25 for line in mup.lines for y in line.get_ydata())
