"""The documents as a site: built into a folder, and what its pages link to and load."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).parents[2]
SECONDS = 300
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "next", "prev", "alternate"}


class Page(HTMLParser):
    """What one page has.

    Attributes:
        ids: that a link may lead to.
        links: of its anchors.
        loads: that a browser fetches with it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what a tag links to."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given and given.get("rel") not in NOT_LOADED:
            self.loads.append(given[LOADS[tag]])


def build(folder: Path) -> None:
    """Builds the site as `make docs` does, with warnings as errors."""
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    ran = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def pages(folder: Path) -> dict[Path, Page]:
    """Returns every page of a built site."""
    return {file: Page(file.read_text()) for file in sorted(folder.rglob("*.html"))}


def dead_links(found: dict[Path, Page]) -> list[str]:
    """Returns the links whose page or anchor is not there, with the page that has them."""
    dead = []
    for file, page in found.items():
        for link in [*page.links, *page.loads]:
            if is_outside(link) or file.name == "404.html":  # which is served at any address
                continue
            path, anchor = urldefrag(link)
            target = (file.parent / unquote(path)).resolve() if path else file
            if target.is_dir():
                target /= "index.html"
            there = found[target].ids if target in found else set()
            if not target.is_file() or (anchor and unquote(anchor) not in there):
                dead.append(f"{file.name}: {link}")
    return dead


def is_outside(link: str) -> bool:
    """Whether a link leads out of the site."""
    return link.startswith(("http:", "https:", "//", "mailto:", "data:"))
