"""Every link in the documentation resolves, every page is reachable, and every command it shows exists."""

import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, name_of, project_files

PAGES = [path for path in project_files() if path.suffix == ".md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that the headings of a page get, as code hosts make them."""
    headings = re.findall(r"^#+ +(.+)$", prose_of(page), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
        for heading in headings
    }


def local_links(page: Path):
    for target in LINK.findall(prose_of(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor, target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_resolves(page):
    broken = []
    for path, anchor, target in local_links(page):
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(target)
    assert broken == []


def test_every_page_is_reachable_from_the_readme():
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page in reached:
            continue
        reached.add(page)
        pending += [
            path for path, _, _ in local_links(page) if path.suffix == ".md" and path.exists()
        ]
    assert [name_of(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_a_page_names_exists(page):
    """Paths of this repository in code spans, such as `jobs/demo.toml`; other projects' stand in plain text."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:jobs|env|docs|tests|miles_hpc|\.ci)/[\w./-]*)[`* ]", text)
    missing = [path for path in sorted(set(named)) if not (ROOT / path).exists()]
    assert missing == []
