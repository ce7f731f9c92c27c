"""A bar comes on a terminal only, only when asked for, and not for what is soon done."""

import io
import time

from rich.console import Console

from dcpc.plan.progress import shown, tracked


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
