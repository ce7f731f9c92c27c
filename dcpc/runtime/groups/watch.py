"""Reports lost ranks, and why: a thread of every rank tells the others and ends their waits.

    a rank that fails       tells its error over the store; the others' waits end
    a rank whose process    on this host: the kernel tells at once (life.py)
      has ended             elsewhere: its heartbeat stops; known sooner where a connection broke
    a rank that is stopped  its heartbeat stops for the time limit
    a rank that compiles    its thread's heart beats on: it is waited for

    beat/{rank}   a counter, one more every second      place/{rank}  its process
    news/{rank}   what became of it: one `News`         news          how many were written

Each rank looks at the heartbeat of the next one that lives, and at all processes of its host. The
first news that is not a consequence of another is the cause, and all raise an error that names it.
A rank that waits within gloo is woken: its thread breaks its own connections. One that waits for a
GPU is, too: its communicators are aborted, and their results are lost.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dcpc.errors import DcpcError, GroupError, chain, class_named
from dcpc.runtime.groups.breaking import aborts_of, break_connections, run_all
from dcpc.runtime.groups.life import Processes, place_of_process

BEAT_S = 1.0
# How long a rank that lives may be without a sign of life; `dcpc.compile(timeout=)`.
SILENCE_S = 60.0
# After a connection broke, a rank of another host without a heartbeat for so long is lost.
_BROKEN_SILENCE_S = 5 * BEAT_S
# How long a rank whose connection broke waits to hear why.
_VERDICT_S = 3 * _BROKEN_SILENCE_S
# Ranks that fail alike raise their own errors: those that are not through by then waited for one.
_FAILED_GRACE_S = 2.0
# A rank that has ended as it should has sent all that the others wait for; it arrives by then.
_ENDED_GRACE_S = 10.0
_POLL_S = 0.05
_STORE_S = 10.0  # a store that does not answer so long is gone

FAILED, ENDED, LOST = "failed", "ended", "lost"


@dataclass(frozen=True, slots=True)
class News:
    """The end or failure of a rank.

    Attributes:
        rank: number of the rank, as launchers count.
        kind: `FAILED` in a section, and may go on; `ENDED`: its process, by itself; or `LOST`
            without a word.
        text: reason, in words.
        error: class of its error; "": it has ended without one.
        section: number of the section in which it failed.
        order: number in the order of all news.
        follows: whether another rank was the cause.
    """

    rank: int
    kind: str
    text: str
    error: str = ""
    section: int = 0
    order: int = 0
    follows: bool = False


class Connected(Protocol):
    """An object with connections to other ranks."""

    def every(self) -> Iterable[dist.ProcessGroup]:
        """Returns all of its process groups."""


class Watch:
    """Watches the ranks of one process group for each other.

    Attributes:
        silence_s: seconds without a sign of life after which a rank is lost.
    """

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        """Watches nobody before `start`; a rank alone never does."""
        self.silence_s = SILENCE_S
        self._ranks = tuple(ranks)
        self._me = self._ranks[rank]
        self._store: Store | None = None
        self._news: dict[int, News] = {}
        self._heard_s: dict[int, float] = {}  # when news of a rank came
        self._seen = 0
        self._section, self._inside = 0, 0
        self._raised: dict[tuple[int, int], DcpcError] = {}
        self._connected: list[weakref.ref[Connected]] = []
        self._broken = self._spoiled = self._aborted = False
        self._urgent = self._asked = self._over = False
        self._gone = ""  # why the store does not answer
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and since when
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # --------------------------------------------------------------------------- begin and end

    def start(self, store: Store) -> None:
        """Begins to watch; collective over all ranks."""
        own = store.clone()  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError, NotImplementedError):
            own.set_timeout(timedelta(seconds=_STORE_S))
        self._store = PrefixStore("dcpc/watch", own)
        self._store.set(f"place/{self._me}", json.dumps(place_of_process()))
        places = {r: json.loads(self._store.get(f"place/{r}")) for r in self._ranks}
        self._processes = Processes(places)
        self._thread = threading.Thread(target=self._run, name="dcpc watch", daemon=True)
        self._thread.start()
        _at_work.append(self)
        if sys.excepthook is not _excepthook:
            _excepthooks.append(sys.excepthook)
            sys.excepthook = _excepthook
        atexit.register(self.leave)

    def leave(self) -> None:
        """Tells that this process ends, and ends the thread."""
        if self._thread is None or os.getpid() != self._process:
            return
        self.ended(None)
        self._wake()
        self._over = True
        # It must not be within torch's C++ while Python ends: see data/ahead.py.
        self._thread.join(_STORE_S)
        self._thread = None
        _at_work.remove(self)

    @property
    def spoiled(self) -> bool:
        """Whether a connection of this rank broke, by whomever: its groups are of no more use."""
        return self._broken or self._spoiled

    def mend(self) -> None:
        """Takes down that other groups are made in place of those that broke."""
        self._broken = self._spoiled = self._aborted = False

    def spoil(self) -> None:
        """Takes down that a connection broke, or that a wait for a rank was given up."""
        self._spoiled = True

    def follow(self, connected: Connected) -> None:
        """Breaks these connections, too, when this rank waits in vain."""
        self._connected.append(weakref.ref(connected))

    # ------------------------------------------------------------------------ what a rank tells

    @contextmanager
    def section(self, what: str) -> Iterator[None]:
        """Runs something that all ranks do together, and in one order with all other sections.

        An error of this rank alone is told to the others; one that comes of another rank's is
        raised as that rank's.

        Raises:
            DcpcError: another rank failed, ended or is lost.
        """
        if self._inside:
            yield
            return
        self._section += 1
        self._inside += 1
        try:
            with self.naming():
                yield
        except BaseException as e:
            self.failed(e, what)
            raise
        finally:
            self._inside -= 1

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Raises the error of the rank that is lost in place of that of a connection.

        Raises:
            DcpcError: another rank failed, ended or is lost.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        # torch.distributed.checkpoint's own error is no Exception.
        except BaseException as e:
            if self._follows(e) or not self._of_connection(e):
                raise
            self.spoil()
            found = self.explained()
            if found is None:
                raise
            raise found from e
        # Kernels of an aborted communicator end without an error, with any numbers.
        lost = self.explained() if self._aborted else None
        if lost is not None:
            raise lost

    def failed(self, error: BaseException, what: str, ahead: bool = False) -> None:
        """Tells the others that this rank failed.

        Args:
            error: error of this rank.
            what: name of the section it was in.
            ahead: whether before the next section, in which the others will miss it.
        """
        if self._store is None or self._follows(error):
            return
        kind = type(error).__name__
        if ahead and not isinstance(error, DcpcError):
            kind = "DataError"
        text = f"{_text(error)} in {what}"
        self._tell(News(self._me, FAILED, text, kind, self._section + ahead))

    def ended(self, error: BaseException | None) -> None:
        """Tells the others that this process ends."""
        known = self._news.get(self._me)
        if (
            self._store is None
            or os.getpid() != self._process
            or (known is not None and known.kind == ENDED)
        ):
            return
        text, kind = "its process has ended", ""
        if error is not None:
            text, kind = _text(error), type(error).__name__
            if known is not None and text in known.text:
                text, kind = known.text, known.error  # says where, too
        self._tell(News(self._me, ENDED, text, kind, self._section, follows=self._follows(error)))

    # ---------------------------------------------------------------------- what a rank is told

    def look(self) -> None:
        """Raises if a rank that this one waits for will not come.

        Raises:
            DcpcError: naming it.
        """
        found = self._trouble()
        if found is not None:
            raise found

    def explained(self) -> DcpcError | None:
        """Returns the error of the rank because of which a connection broke; waits to know it."""
        if self._store is None:
            return None
        begin_s, limit_s = time.monotonic(), BEAT_S if self._asked else _VERDICT_S
        self._urgent = self._asked = True
        self._wake()
        try:
            while time.monotonic() < begin_s + (min(limit_s, BEAT_S) if self._gone else limit_s):
                found = self._trouble(0.0)
                if found is not None:
                    return found
                time.sleep(_POLL_S)
        finally:
            self._urgent = False
        return self._silent_store()

    def _trouble(self, grace_s: float | None = None) -> DcpcError | None:
        """Returns the error that this rank raises because of another; None: there is none.

        Args:
            grace_s: minimum age of the news in seconds; None: by its kind.
        """
        now = time.monotonic()
        found = []
        for rank, news in list(self._news.items()):
            grace = {FAILED: _FAILED_GRACE_S, ENDED: 0.0 if news.error else _ENDED_GRACE_S}
            least_s = grace.get(news.kind, 0.0) if grace_s is None else grace_s
            if rank != self._me and now - self._heard_s[rank] >= least_s and self._concerns(news):
                found.append(news)
        if not found:
            return None
        cause = min(found, key=lambda news: (news.follows, not news.error, news.order))
        key = cause.rank, cause.section if cause.kind == FAILED else 0
        return self._raised.setdefault(key, self._error(cause))

    def _concerns(self, news: News) -> bool:
        """Whether this rank waits for that one in vain."""
        if self._alike(news):
            return False
        if news.kind != FAILED or not self._inside:
            return news.kind != FAILED or news.section in (self._section, self._section + 1)
        return news.section == self._section

    def _alike(self, news: News) -> bool:
        """Whether this rank failed there, too: each has raised its own error, and may go on."""
        own = self._news.get(self._me)
        return own is not None and own.kind == news.kind == FAILED and own.section == news.section

    def _error(self, news: News) -> DcpcError:
        every = f"all of {len(self._ranks)} ranks to go on"
        again = "look at its log, then start the job again: it goes on from its last checkpoint"
        if news.follows:
            return GroupError(news.text)
        make = class_named(news.error) or GroupError
        verb = "failed" if news.error else "is lost" if news.kind == LOST else "has ended"
        return make(f"rank {news.rank} {verb}: got {news.text}; expected {every}; {again}")

    def _follows(self, error: BaseException | None) -> bool:
        """Whether an error came of another rank's."""
        return any(one is each for one in chain(error) for each in self._raised.values())

    def _of_connection(self, error: BaseException | None) -> bool:
        """Whether an error came of a connection, of gloo or of the store."""
        for one in chain(error):
            text = str(one)
            if isinstance(one, dist.DistError) or any(word in text for word in _CONNECTION):
                return True
            if self._broken and isinstance(one, RuntimeError):
                return True
        return False

    def _silent_store(self) -> DcpcError | None:
        if not self._gone:
            return None
        found = GroupError(
            f"the rendezvous store does not answer: got {self._gone}; expected it to live as long "
            "as the job; look at the log of the process that has it (torchrun's, or rank 0), and "
            "start the job again: it goes on from its last checkpoint"
        )
        return self._raised.setdefault((-1, 0), found)

    # ------------------------------------------------------------------------------- the thread

    def _wake(self) -> None:
        if self._processes is not None and not self._over:
            self._processes.wake()

    def _run(self) -> None:
        processes = self._processes
        assert processes is not None, "started"
        while not self._over:
            try:
                if not self._gone:
                    self._listen()
            except RuntimeError as e:
                self._gone = _line(e)
            self._wake_those_who_wait()
            for rank in processes.ended(_POLL_S if self._urgent else BEAT_S):
                self._lost(rank, "the end of its process (killed, or a crash)")
        processes.close()

    def _listen(self) -> None:
        """Beats, reads the news, and looks at other hearts."""
        store = self._store
        assert store is not None, "started"
        store.add(f"beat/{self._me}", 1)
        written = store.add("news", 0)
        if written != self._seen:
            for rank in self._ranks:
                if rank != self._me and store.check([f"news/{rank}"]):
                    self._hear(News(**json.loads(store.get(f"news/{rank}"))))
            self._seen = written
        limit_s = min(_BROKEN_SILENCE_S, self.silence_s) if self._urgent else self.silence_s
        for rank in self._others() if self._urgent else self._others()[:1]:
            beat, now = store.add(f"beat/{rank}", 0), time.monotonic()
            last, since_s = self._beats.get(rank, (-1, now))
            if beat != last:
                since_s = now
            self._beats[rank] = beat, since_s
            if now - since_s > limit_s:
                self._lost(rank, f"no sign of life for {limit_s:g} s")

    def _others(self) -> list[int]:
        """Returns the other ranks that were not heard to have ended, the next one first."""
        at = self._ranks.index(self._me)
        after = self._ranks[at + 1 :] + self._ranks[:at]
        return [r for r in after if (n := self._news.get(r)) is None or n.kind == FAILED]

    def _hear(self, news: News) -> None:
        if self._news.get(news.rank) != news:
            self._news[news.rank] = news
            self._heard_s[news.rank] = time.monotonic()

    def _lost(self, rank: int, how: str) -> None:
        """Takes down that a rank is lost, unless it has told more itself."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and not self._gone and self._store.check([f"news/{rank}"]):
                self._hear(News(**json.loads(self._store.get(f"news/{rank}"))))
        known = self._news.get(rank)
        if known is not None and known.kind != FAILED:
            return
        if known is not None and self._alike(known):
            known = None  # it went on from that
        text = how if known is None else f"{known.text}, then {how}"
        error = "" if known is None else known.error
        section = 0 if known is None else known.section
        self._tell(News(rank, LOST, text, error, section))

    def _tell(self, news: News) -> None:
        if self._store is None or self._gone:
            self._hear(news)
            return
        try:
            news = replace(news, order=self._store.add("order", 1))
            self._hear(news)
            self._store.set(f"news/{news.rank}", json.dumps(asdict(news)))
            self._store.add("news", 1)
        except RuntimeError as e:
            self._gone = _line(e)

    def _wake_those_who_wait(self) -> None:
        """Breaks this rank's connections once it waits in vain, and aborts its communicators.

        Whatever waits for one of them raises, at the end of its section at the latest.
        """
        if self._broken or not self._waits_in_vain():
            return
        self._broken = True
        there = [connected for ref in self._connected if (connected := ref()) is not None]
        every = [pg for connected in there for pg in tuple(connected.every())]
        for pg in every:
            with contextlib.suppress(RuntimeError, ValueError):
                break_connections(pg)
        aborts = aborts_of(every)
        self._aborted = bool(aborts)
        run_all(aborts)

    def _waits_in_vain(self) -> bool:
        """Whether a rank will not come that this one waits for, or that will be missed for good."""
        final = any(n.kind == LOST or (n.kind == ENDED and n.error)
                    for r, n in list(self._news.items()) if r != self._me)  # fmt: skip
        return (final or self._inside > 0) and self._trouble() is not None


_at_work: list[Watch] = []
_excepthooks: list[Callable[..., object]] = []


def uncaught(error: BaseException) -> None:
    """Tells the other ranks of an error that ends this process."""
    for watch in _at_work:
        watch.ended(error)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    uncaught(error)
    _excepthooks[-1](kind, error, trace)


_CONNECTION = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "caused pair closure",
    "Connection refused", "gloo/transport",
)  # fmt: skip


def _text(error: BaseException) -> str:
    text = "; ".join([str(error).strip(), *getattr(error, "__notes__", ())])
    kind = "" if isinstance(error, DcpcError) else f"{type(error).__name__}: "
    return f"{kind}{text}" if text else type(error).__name__


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
