"""The picture of the offload measurements is the one of their tables."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "measurements" / "offload.md"


@pytest.fixture
def plot(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    import offload_plot

    yield offload_plot
    sys.modules.pop("offload_plot")


def test_the_picture_in_the_docs_is_drawn_from_the_tables_there(plot):
    panels = plot.panels_of_page(PAGE.read_text(encoding="utf-8"))
    assert len(panels) == 5
    assert all("ours" in [bar.way for bar in one.bars] for one in panels)
    drawn = PAGE.with_suffix(".svg").read_text(encoding="utf-8")
    assert drawn == plot.draw(panels), (
        "stale: python tests/bench/offload_plot.py docs/measurements/offload.md docs/measurements/offload.svg"
    )


def test_a_bar_is_as_long_as_its_ratio(plot):
    page = (
        "## a <machine>\n### 2 rank(s); limit 2.00 GB/s out, 4.00 GB/s back\n"
        "| raw depth 1 | 2.00 | 1.00 | 4.00 | 1.00 | 1 / 1 | 0 / 0 |\n"
        "| ours | 1.00 | 0.50 | 4.00 | 1.00 | 1 / 1 | 0 / 0 |\n"
        "| other | failed: why | | | | | |\n"
        "| host arena | 60 | 30.00 | 60 | 15.00 | 1 / 1 | 0 / 0 |\n"
        "### elsewhere\n| theirs | 1.00 | 0.50 | 4.00 | 1.00 | 1 / 1 | 0 / 0 |\n"
    )
    panels = plot.panels_of_page(page)
    assert [(one.title, [bar.way for bar in one.bars]) for one in panels] == [
        ("a <machine>: 2 rank(s) (limit 2.00 out, 4.00 back, GB/s)", ["ours"])
    ]
    rects = [
        item for item in ElementTree.fromstring(plot.draw(panels)).iter() if "rect" in item.tag
    ]
    out, back = (int(item.attrib["width"]) for item in rects[1:3])
    assert back == 2 * out
