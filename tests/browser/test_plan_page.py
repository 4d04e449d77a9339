"""`plan --html` in a real browser: it fetches nothing, complains of nothing, fits a laptop and a phone, shows its figures.

MILES_HPC_SCREENSHOTS names a folder for pictures to look at.
"""

import os
import sys
from pathlib import Path

import pytest

from miles_hpc.cli import main
from tests.browser.chromium import Chromium, find_chromium

ROOT = Path(__file__).resolve().parents[2]
REFUSED = ("--set", "offload.peak_device=cpu")
PAGES = {
    "qwen38": ("jobs/qwen38_full.toml",),
    "refused": ("jobs/qwen38_full.toml", *REFUSED),
    "glm52": ("jobs/glm52_lora_tb2.toml",),
    "demo": ("jobs/demo.toml",),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    assert program, (
        "this group needs Chromium; Debian: apt-get install --no-install-recommends chromium"
    )
    chromium = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages as the command writes them."""
    folder = tmp_path_factory.mktemp("pages")
    for name, (recipe, *more) in PAGES.items():
        path = folder / f"{name}.html"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(
                sys, "argv", ["miles-hpc", "plan", str(ROOT / recipe), *more, "--html", str(path)]
            )
            main()
            sys.exit(0)
        assert path.is_file()
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_loads_alone_and_fits_the_window(browser, pages, name, width, scheme):
    address = (pages / f"{name}.html").as_uri()
    visit = browser.visit(address, width=width, scheme=scheme)
    if folder := os.environ.get("MILES_HPC_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}-{width}-{scheme}.png")
    assert visit.requests == [address]
    assert visit.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    spilled = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') &&"
        " e.getBoundingClientRect().right > window.innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert spilled == []


@pytest.mark.parametrize("name", PAGES)
def test_the_figures_are_drawn_with_their_words_inside(browser, pages, name):
    browser.visit((pages / f"{name}.html").as_uri(), width=1280, scheme="light")
    labels = browser.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].filter(e => e.getBoundingClientRect().height > 50)"
        ".map(e => e.getAttribute('aria-label'))"
    )
    assert {"host memory by phase", "ranks and rollout engines on nodes"} <= set(labels)
    outside = browser.evaluate(
        "[...document.querySelectorAll('svg')].flatMap(s => { const b = s.getBoundingClientRect();"
        " return [...s.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect();"
        " return r.left < b.left - 1 || r.right > b.right + 1 || r.bottom > b.bottom + 1; })"
        ".map(t => t.textContent); })"
    )
    assert outside == []


def test_the_refused_page_says_why_and_what_would_fit(browser, pages):
    browser.visit((pages / "refused.html").as_uri(), width=1280, scheme="light")
    text = browser.evaluate("document.body.innerText")
    assert "MH301" in text
    assert "What would fit" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(browser, pages, scheme):
    browser.visit((pages / "refused.html").as_uri(), width=1280, scheme=scheme)
    ratio = browser.evaluate(CONTRAST)
    assert ratio >= 4.5


CONTRAST = """(() => {
  const ctx = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = c => { ctx.clearRect(0, 0, 1, 1); ctx.fillStyle = c; ctx.fillRect(0, 0, 1, 1);
                     return [...ctx.getImageData(0, 0, 1, 1).data]; };
  const lum = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
                     return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const base = rgb(getComputedStyle(document.documentElement).backgroundColor);
  const ratios = [...document.querySelectorAll('h1, h2, p, li, td, th, dt, dd, pre, svg text')].map(e => {
    const style = getComputedStyle(e);
    const [a, b] = [lum(rgb(e.tagName === 'text' ? style.fill : style.color).slice(0, 3)), lum(base.slice(0, 3))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
  return Math.min(...ratios);
})()"""
