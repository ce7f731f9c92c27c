"""A bar comes on a terminal only, only when asked for, and not for what is soon done."""

import io
import time

from rich.console import Console

from dcpc.plan.progress_bar import during, shown, tracked


def text_of(terminal: bool, wait_s: float, asked: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80)

    def work() -> list[int]:
        found = []
        for i in tracked([1, 2, 3], "plan", lambda i: f"bucket {i}", wait_s=wait_s):
            time.sleep(0.1)
            found.append(i)
        return found

    if asked:
        with shown(console):
            assert work() == [1, 2, 3]
    else:
        assert work() == [1, 2, 3]
    return out.getvalue()


def test_bar_names_what_is_worked_on():
    assert "plan bucket" in text_of(terminal=True, wait_s=0.01)


def test_no_bar_for_what_is_soon_done():
    assert not text_of(terminal=True, wait_s=60.0)


def test_no_bar_where_there_is_no_terminal_or_nobody_asked():
    assert not text_of(terminal=False, wait_s=0.01)
    assert not text_of(terminal=True, wait_s=0.01, asked=False)


def shown_text(work) -> str:
    out = io.StringIO()
    with shown(Console(file=out, force_terminal=True, width=80)):
        work()
    return out.getvalue()


def test_one_thing_is_shown_without_a_share():
    def work() -> None:
        with during("load", wait_s=0.01):
            time.sleep(0.1)
        for _ in tracked([1], "trace", lambda i: "[4 buckets]", wait_s=0.01):
            time.sleep(0.1)

    text = shown_text(work)
    assert "load" in text
    assert "trace [4 buckets]" in text
    assert "0/1" not in text


def test_a_bar_within_another_is_silent():
    def work() -> None:
        with during("outer", wait_s=0.01):
            assert [*tracked([1, 2], "inner", wait_s=0.0)] == [1, 2]
            time.sleep(0.1)
        for i in tracked([1, 2], "after", wait_s=0.01):
            time.sleep(0.05 * i)

    text = shown_text(work)
    assert "inner" not in text
    assert "outer" in text
    assert "after 2" in text


def test_only_the_first_of_torchruns_ranks_shows_it(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert not text_of(terminal=True, wait_s=0.01)
    monkeypatch.setenv("RANK", "0")
    assert text_of(terminal=True, wait_s=0.01)
