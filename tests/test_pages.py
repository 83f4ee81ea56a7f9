"""The pages of the documentation as a place: each is on the site, each link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snippets import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for folder in (ROOT, DOCS, ROOT / "benchmarks") for path in folder.glob("*.md"))
MADE = {"learn.html"}  # by mkdocs, from docs/learn_page.py
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in DOCS.glob("*.md")}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, on the site and on GitHub."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)).strip().lower() for title in titles]
    return {re.sub(r"\s", "-", each) for each in words} | {re.sub(r"[-\s]+", "-", each) for each in words}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_link_to_a_page_is_named_by_what_it_is_about(page: Path) -> None:
    """And not by its file, which the site does not show."""
    assert not re.findall(r"\[\w+\.md[^\]]*\]\(", FENCED.sub("", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", FENCED.sub("", page.read_text())):
        file, _, anchor = target.partition("#")
        if file in MADE:
            continue
        found = page.parent / file if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target
