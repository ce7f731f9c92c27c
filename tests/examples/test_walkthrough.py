"""The walkthrough is what the phases print today."""

from examples import walkthrough


def test_page_is_what_the_phases_print():
    assert walkthrough.OUT.read_text() == walkthrough.page(), "python -m examples.walkthrough"
