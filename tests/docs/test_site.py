"""The documents as a site: it builds, no link is dead, and it is read without a network."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from dcpc.plan.options import CompileOptions
from tests.cases import browser as browsers
from tests.cases.site import Page, build, dead_links, is_outside, pages

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
pytestmark = pytest.mark.slow

SEEN = """
const text = document.querySelector('.md-content__inner');
return {
  wide: text.scrollWidth - text.clientWidth,
  broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  fetched: performance.getEntriesByType('resource').map(entry => entry.name),
  links: [...document.querySelectorAll('a[href]')].map(a => a.href),
  ids: [...document.querySelectorAll('[id], [name]')].map(e => e.id || e.name),
}
"""
OWN = ("data:", "blob:")
TABLE_MARGIN = 16  # pixels by which the theme lets a scrolling table out of the text
SEARCH = """
document.querySelector('#__search').click();
const box = document.querySelector('.md-search__input');
box.focus();
box.value = 'packed sequences';
box.dispatchEvent(new Event('input', {bubbles: true}));
box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


def test_every_link_and_anchor_leads_somewhere(site):
    found = pages(site)
    assert len(found) > 40
    assert sum(len(page.links) for page in found.values()) > 1000
    assert not dead_links(found)


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there"></a><a href="b.html#not"></a>')
    (tmp_path / "b.html").write_text('<p id="there"><a href="c.html">c</a><img src="d.png">')
    assert dead_links(pages(tmp_path)) == ["a.html: b.html#not", "b.html: c.html", "b.html: d.png"]


def test_pages_load_nothing_from_elsewhere(site):
    loads = {load for page in pages(site).values() for load in page.loads}
    assert loads
    assert not [load for load in loads if is_outside(load) and not load.startswith("data:")]
    styles = " ".join(file.read_text() for file in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", styles)
    assert Page('<link rel="stylesheet" href="https://x.org/a.css">').loads  # it would be seen


def test_reference_shows_options_and_examples(site):
    text = re.sub(r"<[^>]+>", "", (site / "reference.html").read_text())
    names = ("save", "load", "count_steps", "evaluate", "reduce_gradients", "TrainerMixin", "stats")
    options = [field.name for field in fields(CompileOptions)]
    assert len(options) >= 20
    for wanted in ("memory: bytes a rank may use", "dcpc.materialize(compiled)", *names):
        assert wanted in text
    assert not [name for name in options if f"{name}: " not in text]


@pytest.mark.timeout(1200)  # a second a page where the machine does something else, too
@pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing() or "there is one")
def test_a_browser_opens_every_page_and_link(site):
    ids: dict[str, set[str]] = {}
    links: set[str] = set()
    with browsers.served(site) as address, browsers.browser() as browser:
        for file in sorted(site.rglob("*.html")):
            url = f"{address}/{file.relative_to(site).as_posix()}"
            browser.resize(1280)
            browser.open(url)
            seen = browser.run(SEEN)
            assert not browser.complaints(), url
            assert not seen["broken"], url
            assert seen["wide"] <= TABLE_MARGIN, url
            assert not [name for name in seen["fetched"] if not name.startswith((*OWN, address))]
            ids[url] = set(seen["ids"])
            links |= set(seen["links"]) if file.name != "404.html" else set()
            if "code" not in file.relative_to(site).parts:
                browser.resize(800)
                assert browser.run(SEEN)["wide"] <= TABLE_MARGIN, url
        ids[f"{address}/"] = ids[f"{address}/index.html"]
    own = {link for link in links if link.startswith(address)}
    assert len(own) > 200
    for link in own:
        page, _, anchor = link.partition("#")
        assert page in ids, link
        assert not anchor or anchor in ids[page], link


@pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing() or "there is one")
def test_the_search_finds_a_page(site):
    with browsers.served(site) as address, browsers.browser() as browser:
        browser.open(f"{address}/index.html")
        browser.run(SEARCH)
        browser.wait_for(".md-search-result__item a[href*='packing.html']")
