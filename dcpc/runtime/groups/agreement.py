"""Checks that the ranks of a group are about to do the same thing, before they do it.

Fast path: one all-reduce of 32 bytes, the maximum of a fingerprint and of its complement: they are
each other's complement if and only if all fingerprints are equal. Everything else happens only in
trouble, over the rendezvous store: each rank that is there publishes its text, and all of them
raise the same error.

    mismatch    everyone has arrived: read all texts, name who had what
    absence     the first rank whose time is up writes the verdict: who has not published
    a broken connection is an absence that is noticed early; watch.py says who is lost

After an absence the group's connections are broken: the job has to be started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dcpc.errors import DcpcError, GroupError, class_named
from dcpc.fx.torch_api.torch_collectives import failed
from dcpc.runtime.groups.groups import Groups

_POLL_S = 0.05
# A rank that waits on the wire looks for trouble at its peers this often.
LOOK_S = 0.25
# From the first report of trouble to the verdict: every rank that waits has looked by then.
_GRACE_S = 8 * LOOK_S
# After a connection broke (a peer died) the ranks that live still get this long to arrive.
_DEAD_S = 10.0
_BITS = 62
_WAITED = "waited"
# Between the parts of a value: where ranks disagree, parts that all have are left out.
PART = "; "


def agree(groups: Groups, sp: int, what: str, value: str, problem: DcpcError | None = None) -> None:
    """Returns once all ranks of this rank's block of `sp` are known to have the same value.

    Collective over the block. Costs one small all-reduce on its control group.

    Args:
        groups: the process groups.
        sp: degree of the block whose ranks compare; 1: nothing to do.
        what: name of the thing compared, for the error; part of the text compared.
        value: text of the thing; its parts between `PART` are compared one by one in the error.
        problem: error of this rank because of which it cannot go on.

    Raises:
        DcpcError: the first rank's problem, where one has any, with its class and text, on every
            rank of the block.
        GroupError: on every rank of the block, naming which ranks had which value, or which ranks
            did not arrive.
    """
    pg = groups.control(sp)
    if pg is None:
        if problem is not None:
            raise problem
        return
    check = groups.checks.get(sp, 0)
    groups.checks[sp] = check + 1
    talk = _Trouble(groups, sp, pg, check)
    own = "" if problem is None else f"{type(problem).__name__} {problem}"
    # Before any text: whoever reads a rank's text finds its problem.
    talk.tell_problem(own)
    text = f"{what} {value}{own and PART}{own}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    words = [int.from_bytes(digest[i : i + 8], "big") >> (64 - _BITS) for i in (0, 8)]
    x = torch.tensor(words + [-w for w in words], dtype=torch.int64)
    broken = talk.reduce(x)
    low_high = x.tolist()
    if broken is None and low_high[:2] == [-w for w in low_high[2:]]:
        if problem is not None:
            raise problem
        return
    if broken is not None:
        groups.watch.spoil()
    message = talk.explain(text, broken)
    raise talk.problem or GroupError(message)


def largest(groups: Groups, sp: int, number: int) -> int:
    """Returns the largest number that a rank of this rank's block of `sp` has."""
    pg = groups.control(sp)
    if pg is None:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX, pg)
    return int(found)


def from_first(groups: Groups, text: str) -> str:
    """Returns the first rank's text; collective over all ranks."""
    pg = groups.control(groups.world)
    if pg is None:
        return text
    data = text.encode() if groups.rank == 0 else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=pg, group_src=0)
    sent = torch.empty(int(size), dtype=torch.uint8)
    if groups.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(sent, group=pg, group_src=0)
    return bytes(sent.tolist()).decode()


class _Trouble:
    """Messages of a block's ranks over the store when a check fails."""

    def __init__(self, groups: Groups, sp: int, pg: dist.ProcessGroup, check: int) -> None:
        self.ranks = [groups.global_ranks[r] for r in groups.ranks(sp)]
        self.rank = groups.global_ranks[groups.rank]
        self.pg = pg
        self.check = check
        self.limit_s = groups.timeout_s
        self.watch = groups.watch
        self.deadline = time.monotonic() + self.limit_s
        self.store = PrefixStore(f"dcpc/agree/{check}", pg.get_group_store())
        self.problem: DcpcError | None = None  # of some rank, once `explain` has looked

    def reduce(self, x: torch.Tensor) -> str | None:
        """Returns None once `x` is the maximum of all ranks, or why this rank stopped waiting."""
        try:
            work = dist.all_reduce(x, dist.ReduceOp.MAX, group=self.pg, async_op=True)
        except RuntimeError as e:
            return self._broken(e)
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError as e:
                over = failed(work)
                # gloo has the same limit for an operation: it may be up before this rank looks.
                if time.monotonic() > self.deadline or (over and "Timed out" in str(e)):
                    return f"{_WAITED} {self.limit_s:g} s"
                if over:
                    return self._broken(e)
                self.watch.look()
                try:
                    if self.store.check(["trouble"]):
                        return "a peer reported trouble"
                except RuntimeError as lost:
                    return self._broken(lost)
            else:
                return None

    def tell_problem(self, own: str) -> None:
        """Tells the other ranks why this one cannot go on, if it cannot."""
        if own:
            with contextlib.suppress(RuntimeError):  # the store is gone: `reduce` finds out
                self.store.set(f"problem/{self.rank}", own)

    def _any_problem(self) -> DcpcError | None:
        """Returns the problem of the first rank that has told one."""
        for rank in self.ranks:
            if self.store.check([f"problem/{rank}"]):
                kind, _, said = self._read(f"problem/{rank}").partition(" ")
                return (class_named(kind) or GroupError)(f"rank {rank}: {said}")
        return None

    def explain(self, text: str, broken: str | None) -> str:
        """Returns the error's message; every rank that is there gets the same findings."""
        try:
            self.store.set(f"why/{self.rank}", broken or "")
            self.store.set(f"text/{self.rank}", text)
            self.store.set("trouble", "yes")
            absent, why = self._absent(broken or "")
            texts = {r: self._read(f"text/{r}") for r in self.ranks if r not in absent}
            self.problem = self._any_problem()
        except RuntimeError as e:
            return (
                f"check {self.check} on rank {self.rank} ({text}): {broken or 'ranks disagree'}, "
                f"and the rendezvous store does not answer ({str(e).splitlines()[0]}); expected "
                "every rank to live; look at the log of the rank that hosts it (rank 0, or "
                "torchrun)"
            )
        everyone = _names(self.ranks)
        had = "; ".join(f"{_names(rs)}: {t}" for t, rs in _by_text(texts).items())
        if absent:
            gone = _names(absent)
            return (
                f"check {self.check} of {everyone}: {gone} did not arrive ({why}); got {had}; "
                f"expected all of {everyone}; look at the log of {gone}: dcpc waits no longer"
            )
        if len(set(texts.values())) == 1:
            return (
                f"check {self.check} of {everyone} ({text}): all arrived, but {broken}; expected "
                "working connections between them; check the network"
            )
        about, parts = _differing(texts)
        had = "; ".join(f"{_names(rs)}: {t}" for t, rs in _by_text(parts).items())
        return (
            f"ranks disagree in check {self.check}{about}: got {had}; expected the same on all of "
            f"{everyone}; give every rank the same script, data, seed and arguments"
        )

    def _broken(self, e: RuntimeError) -> str:
        found = self.watch.explained()
        if found is not None:
            raise found from e
        self.deadline = min(self.deadline, time.monotonic() + _DEAD_S)
        return f"a connection broke: {str(e).splitlines()[0]}"

    def _absent(self, why: str) -> tuple[list[int], str]:
        """Returns the ranks that did not publish and why they are not waited for.

        The first rank to decide decides for all.
        """
        while True:
            if self.store.check(["verdict"]):
                absent, reason = json.loads(self._read("verdict"))
                return absent, reason
            absent = [r for r in self.ranks if not self.store.check([f"text/{r}"])]
            if not absent:
                return [], why
            if time.monotonic() > self.deadline + _GRACE_S:
                # One that waited in vain breaks its peers' connections when it gives up.
                there = [self._read(f"why/{r}") for r in self.ranks if r not in absent]
                why = next((w for w in there if w.startswith(_WAITED)), why)
                # An empty expected value means: only if nobody has written.
                self.store.compare_set("verdict", "", json.dumps([absent, why]))
            time.sleep(_POLL_S)

    def _read(self, key: str) -> str:
        return self.store.get(key).decode()


def _differing(texts: dict[int, str]) -> tuple[str, dict[int, str]]:
    """Returns how all texts begin, and of each the parts that are not the same on all ranks."""
    parts = {rank: text.split(PART) for rank, text in texts.items()}
    if len({len(p) for p in parts.values()}) > 1:
        return "", texts
    alike = [len(set(column)) == 1 for column in zip(*parts.values(), strict=True)]
    first = next(iter(parts.values()))[0]
    kept = {
        rank: PART.join(part for part, same in zip(own, alike, strict=True) if not same)
        for rank, own in parts.items()
    }
    return f" ({first})" if alike[0] else "", kept


def _by_text(texts: dict[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(text, []).append(rank)
    return found


def _names(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ",".join(map(str, ranks))
