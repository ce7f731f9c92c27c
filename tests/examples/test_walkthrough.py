"""The walkthrough is what the phases print today."""

import re

from examples import walkthrough


def test_page_is_what_the_phases_print():
    kept, page = walkthrough.OUT.read_text(), walkthrough.page()
    if "_unsafe_view" in page:  # torch 2.15 calls the view of a product with a bias so
        kept, page = (
            re.sub(r"(\b|_unsafe_)view(_default)?(_\d+)?", "view", t) for t in (kept, page)
        )
    assert kept == page, "python -m examples.walkthrough"
