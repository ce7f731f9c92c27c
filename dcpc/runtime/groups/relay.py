"""Rank 0's plans on their way to the other ranks, through the process group's own store.

    {seq}        the message, JSON after its checksum
    {seq}/read   how many ranks have read it; the last one deletes both
    {name}/0 ..  bytes beside the messages, such as a stream's samples, in parts; likewise

So the store holds as many messages as steps are planned ahead. A message is a few bytes a sample,
and each rank reads it once. An error on rank 0 is a message as well; a rank that hears nothing
within the time limit raises an error that names rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from dcpc.errors import DcpcError, PlanError, class_named
from dcpc.runtime.groups.groups import Groups

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.1
# torch's store takes values of at most 8 MiB.
_PART_BYTES = 4 * 2**20
# Bytes given last, by name: those not taken when the loop is left are deleted.
_REMEMBERED = 4096

Message = dict[str, Any]


class ClosedError(Exception):
    """The loop that wanted the message has ended."""


class Relay:
    """The messages of one iteration, in order.

    Attributes:
        timeout_s: seconds that a rank waits for a message.
    """

    def __init__(self, groups: Groups, name: str, timeout_s: float) -> None:
        """Opens a connection of its own, so that a waiting rank does not hold up the others.

        Args:
            groups: groups of several ranks.
            name: name of the relay, the same on every rank, used once.
            timeout_s: seconds that a rank waits for a message.
        """
        pg = groups.control(groups.world)
        assert pg is not None, "a rank alone relays nothing"
        own = pg.get_group_store().clone()  # type: ignore[attr-defined]
        self._store: Store = PrefixStore(f"dcpc/plans/{name}", own)
        self._sends = groups.rank == 0
        self._readers = groups.world - 1
        self._sender = groups.global_ranks[0]
        self._watch = groups.watch
        self._sent = 0
        self._failed = False
        self._given: deque[tuple[int, str, int]] = deque(maxlen=_REMEMBERED)
        self._closed = threading.Event()
        self.timeout_s = timeout_s

    def send(self, messages: Iterator[tuple[Message, Any]]) -> Iterator[Any]:
        """Sends each message and yields the value beside it; an error is sent, then raised."""
        while True:
            try:
                found = next(messages, None)
            except BaseException as e:
                self._put({"error": type(e).__name__, "text": str(e)})
                self._failed = True
                raise
            self._put({"end": True} if found is None else found[0])
            if found is None:
                return
            yield found[1]

    def receive(self) -> Iterator[Message]:
        """Yields rank 0's messages.

        Raises:
            DcpcError: rank 0 had an error; its class and text.
            PlanError: rank 0 sent nothing in time, its message is damaged, or the store is gone.
            GroupError: a rank is lost.
            ClosedError: `close` was called while waiting.
        """
        for seq in itertools.count():
            message = self._get(seq)
            if "error" in message:
                raise _error(self._sender, message)
            if "end" in message:
                return
            yield message

    def stop(self) -> None:
        """Ends waiting; nothing is sent any more."""
        self._closed.set()

    def close(self, used: int = 0) -> None:
        """Ends waiting; on rank 0 also deletes the messages after the first `used`, no error."""
        self.stop()
        if self._sends:
            with contextlib.suppress(RuntimeError):
                for seq in range(used, self._sent - self._failed):
                    self._store.delete_key(str(seq))
                    self._store.delete_key(f"{seq}/read")
                for seq, name, parts in self._given:
                    if seq >= used:
                        self._delete(name, parts)

    def give(self, name: str, data: bytes, readers: int) -> None:
        """Puts bytes into the store for so many ranks, before the message that tells of them."""
        parts = range(0, len(data), _PART_BYTES)
        with contextlib.suppress(RuntimeError):  # as in _put
            for n, at in enumerate(parts):
                part: Any = data[at : at + _PART_BYTES]  # torch's stub says text; it takes both
                self._store.set(f"{name}/{n}", part)
            told = {"parts": len(parts), "readers": readers, "digest": _digest(data)}
            self._store.set(name, json.dumps(told))
        self._given.append((self._sent, name, len(parts)))

    def taken(self, name: str, closes: bool) -> bytes:
        """Returns the bytes that rank 0 gave under a name; the last reader deletes them.

        Args:
            name: name of the bytes.
            closes: whether `close` ends the waiting.

        Raises:
            PlanError: rank 0 gave nothing in time, the bytes are damaged, or the store is gone.
            ClosedError: `close` was called while waiting.
        """
        try:
            self._await(name, closes)
            told = json.loads(self._store.get(name))
            data = b"".join(self._store.get(f"{name}/{n}") for n in range(told["parts"]))
            if self._store.add(f"{name}/read", 1) == told["readers"]:
                self._delete(name, told["parts"])
        except RuntimeError as e:
            lost = self._watch.explained()
            raise lost or PlanError(self._silence(name, str(e).splitlines()[0])) from e
        if _digest(data) != told["digest"]:
            raise PlanError(_damage(name, self._sender))
        return data

    def _delete(self, name: str, parts: int) -> None:
        for key in (name, f"{name}/read", *(f"{name}/{n}" for n in range(parts))):
            self._store.delete_key(key)

    def _await(self, key: str, closes: bool = True) -> None:
        deadline, poll_s = time.monotonic() + self.timeout_s, _FIRST_POLL_S
        while not self._store.check([key]):
            if closes and self._closed.is_set():
                raise ClosedError
            self._closed.wait(poll_s) if closes else time.sleep(poll_s)
            self._watch.look()
            if time.monotonic() > deadline:
                raise PlanError(self._silence(key, f"nothing within {self.timeout_s:g} s"))
            poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)

    def _put(self, message: Message) -> None:
        if self._closed.is_set():
            raise ClosedError
        # A peer that hosts the store may be gone: then the step's own checks say so.
        with contextlib.suppress(RuntimeError):
            text = json.dumps(message)
            self._store.set(str(self._sent), f"{_digest(text.encode())} {text}")
        self._sent += 1

    def _get(self, seq: int) -> Message:
        key = str(seq)
        try:
            self._await(key)
            digest, _, text = self._store.get(key).decode(errors="replace").partition(" ")
            if self._store.add(f"{key}/read", 1) == self._readers:
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/read")
        except RuntimeError as e:
            lost = self._watch.explained()
            raise lost or PlanError(self._silence(key, str(e).splitlines()[0])) from e
        if digest != _digest(text.encode()):
            raise PlanError(_damage(key, self._sender))
        message: Message = json.loads(text)
        return message

    def _silence(self, key: str, what: str) -> str:
        return (
            f"plan {key} of this iteration: got {what} from rank {self._sender}, which plans for "
            f"all ranks; expected its plan; look at the log of rank {self._sender}, iterate the "
            "loader on every rank alike, or raise plan_timeout_s="
        )


def _damage(key: str, sender: int) -> str:
    return (
        f"plan {key} of this iteration: got a message whose checksum is another than when rank "
        f"{sender} sent it; expected its plan; look whether something else writes to the "
        "rendezvous store, and start the job again"
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _error(sender: int, message: Message) -> DcpcError:
    kind, text = message["error"], message["text"]
    found = class_named(kind)
    if found is not None:
        return found(f"planner of rank {sender}: {text}")
    return PlanError(
        f"planner of rank {sender}: got {kind}: {text}; expected a plan; look at its log"
    )
