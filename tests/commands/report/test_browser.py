"""The page in a browser: it loads without a complaint, and is legible at 1280 and at 800 pixels."""

from pathlib import Path

import pytest
import torch

import dcpc
from dcpc.commands.report import html_page
from models.gpt import GPT, GPTConfig
from tests.cases import browser as browsers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing() or "there is one"),
]
LEAST_FONT_PX = 10.5
LEAST_SCALE = 0.85  # of a picture whose text is 8 points, 11 pixels, or more

SMALLEST_FONT = """
return Math.min(...[...document.body.querySelectorAll('*')].filter(e => e.innerText)
    .map(e => parseFloat(getComputedStyle(e).fontSize)))
"""
SMALLEST_SCALE = "return Math.min(...[...document.images].map(i => i.width / i.naturalWidth))"
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"
REASONS_END = """
return Math.max(...[...document.querySelectorAll('td.why')]
    .map(e => e.getBoundingClientRect().right)) - window.innerWidth
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
    sizes = [{"seq": size} for size in (512, 2048, 32768)]
    with torch.device("meta"):
        model = GPT(GPTConfig(dim=64, n_layers=2, n_heads=4))
    planned = dcpc.api.plan(
        model, dcpc.Buckets(inputs=inputs, sizes=sizes), world=8, device="h200", memory=200e6
    )
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(html_page(planned, "a decoder"))
    return file


@pytest.mark.parametrize("width", [1280, 800])
def test_a_browser_shows_the_page(page, width):
    with browsers.browser() as browser:
        browser.resize(width)
        browser.open(page.as_uri())
        assert not browser.complaints()
        assert "a decoder" in browser.run("return document.querySelector('h1').innerText")
        assert browser.run("return document.images.length") == 3
        assert browser.run(OVERFLOW) <= 0
        assert browser.run(REASONS_END) <= 0
        assert browser.run(SMALLEST_FONT) >= LEAST_FONT_PX
        assert browser.run(SMALLEST_SCALE) >= LEAST_SCALE


def test_complaints_are_heard(tmp_path):
    (tmp_path / "bad.html").write_text(
        "<script>console.error('a fault')</script><img src='no.png'>"
    )
    with browsers.browser() as browser:
        browser.open((tmp_path / "bad.html").as_uri())
        assert len(browser.complaints()) == 2
