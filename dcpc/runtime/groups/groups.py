"""Process groups of every degree, made once.

For degree d the ranks form aligned blocks `[k*d, (k+1)*d)`, d over the divisors of the world size:

    world 4    d=4: 0 1 2 3      d=2: 0 1 | 2 3      d=1: 0 | 1 | 2 | 3

Each block has a data group (the variants' collectives, gradients) and a control group (gloo: small
facts on which its ranks must agree), so that a rank that checks never meets a peer that computes. A
rank alone has neither. Over gloo a planned step may also use any range of consecutive ranks:
`prepare` makes data groups for those that it names, and keeps the `MOST_RANGES` used last.

"World" is the group given to `Groups.default`: its ranks are numbered from 0; errors name the
numbers in the default group, which a launcher's logs show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sympy import divisors

from dcpc.errors import GroupError
from dcpc.runtime.groups.breaking import break_connections
from dcpc.runtime.groups.launch import launched, local_device, refuse_one_queue, take_device
from dcpc.runtime.groups.new_groups import GroupMaker, connects_at_once, watched
from dcpc.runtime.groups.watch import SILENCE_S, Watch

# Ranks of a group may be this far apart: compiling a variant on first use takes minutes.
TIMEOUT_S = 600.0
# Data groups of ranges that are no aligned block, over all ranks: each costs connections.
MOST_RANGES = 64
_CPU = torch.device("cpu")
# Name of the parent, device, time limit -> groups, for good: whether the last user of one rank is
# gone is not known on the others (Python frees an object when it likes), who would make new ones.
_kept: dict[tuple[str, str, float], Groups] = {}


@dataclass(frozen=True)
class Groups:
    """The process groups this rank is in.

    Attributes:
        world: number of ranks.
        rank: this rank, from 0 to `world - 1`.
        device: device of this rank.
        timeout_s: seconds that a rank waits for a peer.
        global_ranks: for each rank: its number in the default group.
        whole: whether these are all ranks of the default group. If not, only aligned blocks can be
            groups: ranks elsewhere do not take part in naming new ones.
        watch: watch that reports lost ranks.
    """

    world: int = 1
    rank: int = 0
    device: torch.device = _CPU
    timeout_s: float = TIMEOUT_S
    global_ranks: tuple[int, ...] = (0,)
    _data: dict[int, dist.ProcessGroup] = field(default_factory=dict, repr=False)
    _control: dict[int, dist.ProcessGroup] = field(default_factory=dict, repr=False)
    whole: bool = True
    # (first rank, degree) -> group, None on other ranks; every rank has all, the last used last.
    _ranges: dict[tuple[int, int], dist.ProcessGroup | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    # degree -> checks made so far (agreement.py); equal on all ranks of a block.
    checks: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    _numbers: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    _gradients: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)
    _broken: set[tuple[int, int]] = field(default_factory=set, repr=False, compare=False)
    _across: dict[int, dist.ProcessGroup] = field(default_factory=dict, repr=False, compare=False)
    _separate: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)
    # (what for, ranks) -> group, None on other ranks.
    _shared: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    watch: Watch = field(default_factory=Watch, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Lets the watch end waits in these groups."""
        self.watch.follow(self)

    @classmethod
    def default(
        cls,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = TIMEOUT_S,
        silence_s: float = SILENCE_S,
    ) -> Groups:
        """Returns the groups of `group`, of the default group, or of one rank alone.

        Those of one group are made once, and are the same each time, unless a connection broke.
        Where the default group is not initialised and a launcher's environment is there, it is
        initialised from it (gloo, with nccl for a CUDA device) and destroyed at exit. A CUDA device
        becomes this process's current one.

        Args:
            group: ranks to use; None: all of them. Collective: each of its ranks calls this.
            device: device of this rank; None: its CUDA device if it has one, else the CPU.
            timeout_s: seconds that a rank waits for a living peer before it is an error.
            silence_s: seconds without a sign of life after which a rank is lost.

        Raises:
            GroupError: this rank is not in `group`, a rank of it did not call this in time, or the
                rank's GPU is not there or has one queue.
        """
        device = local_device(device)
        take_device(device)
        if not dist.is_available() or not (dist.is_initialized() or launched(device, timeout_s)):
            return cls(device=device, timeout_s=timeout_s)
        parent = dist.group.WORLD if group is None else group
        if not isinstance(parent, dist.ProcessGroup) or dist.get_rank(parent) < 0:
            raise GroupError(
                f"rank {dist.get_rank()} called with group=, got a group that it is not in; "
                "expected one of its ranks; call it only on the ranks of the group"
            )
        ranks = tuple(dist.get_process_group_ranks(parent))
        rank = dist.get_rank(parent)
        if len(ranks) == 1:
            return cls(device=device, timeout_s=timeout_s, global_ranks=ranks)
        refuse_one_queue(device)
        whole = len(ranks) == dist.get_world_size()
        fake = dist.get_backend(parent) == "fake"
        key = str(parent.group_name), str(device), timeout_s
        kept = _kept.get(key)
        has = kept is not None and kept._data.get(kept.world) is parent and not kept.watch.spoiled
        watch, all_have = Watch(), False
        if not fake:
            watch, all_have = watched(parent, ranks, rank, timeout_s, silence_s, has)
        if kept is not None and all_have:
            return kept
        watch.mend()
        make = GroupMaker(ranks, rank, whole, device, timeout_s)
        make.connect(parent)
        data = {len(ranks): parent}
        control = {}
        for degree in divisors(len(ranks))[1:]:
            control[degree] = make.block(degree, "fake" if fake else "gloo")
        found = cls(len(ranks), rank, device, timeout_s, ranks, data, control, whole, watch=watch)
        if connects_at_once(parent):
            for degree in found.degrees:
                found.of(degree)
            found.of_gradients()
        if not fake:
            _kept[key] = found
        return found

    @property
    def maker(self) -> GroupMaker:
        """Makes further groups of these ranks."""
        return GroupMaker(self.global_ranks, self.rank, self.whole, self.device, self.timeout_s)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The divisors of the world size, ascending."""
        return tuple(divisors(self.world))

    def of(self, sp: int) -> dist.ProcessGroup | None:
        """Returns the data group of this rank's block of `sp` ranks; None where a rank is alone.

        Over gloo all are there. Elsewhere, as each takes memory of a GPU, a group is made when it
        is first asked for: that is collective over all ranks.

        Raises:
            GroupError: `sp` does not divide the world size.
        """
        self._check(sp)
        if sp > 1 and self._data and sp not in self._data:
            self._data[sp] = self.maker.block(sp)
        return self._data.get(sp) if sp > 1 else None

    @property
    def made(self) -> dict[int, dist.ProcessGroup]:
        """Degree -> the data group of this rank's block, of those that are there."""
        return dict(self._data)

    def control(self, sp: int) -> dist.ProcessGroup | None:
        """Returns the gloo group of the same ranks for small CPU tensors; None alone.

        Raises:
            GroupError: `sp` does not divide the world size.
        """
        self._check(sp)
        return self._control.get(sp) if sp > 1 else None

    def of_gradients(self) -> dist.ProcessGroup | None:
        """Returns the group of all ranks for the sum of gradients alone; None alone.

        The sum is on the way while variants still run, so it must not meet their collectives. As
        `of`, it is collective over all ranks when it is first asked for.
        """
        if self._data and not self._gradients:
            self._gradients.append(self.maker.block(self.world, what="gradients"))
        return self._gradients[0] if self._gradients else None

    def across(self, block: int) -> dist.ProcessGroup | None:
        """Returns the data group of the ranks with this one's place in their blocks; None of one.

            world 4, blocks of 2    0 1 | 2 3    across: 0 2 | 1 3

        Collective over all ranks when it is first asked for.

        Raises:
            GroupError: it does not divide the world size.
        """
        self._check(block)
        if block == self.world:
            return None
        if block not in self._across:
            every = [self.global_ranks[place::block] for place in range(block)]
            desc = f"dcpc data across blocks of {block}"
            self._across[block] = self.maker.one_of(every, self.rank % block, desc)
        return self._across[block]

    def separate(self, what: str) -> dist.ProcessGroup | None:
        """Returns a new gloo group of all ranks, in which nobody else sends; None alone.

        Collective over all ranks.
        """
        if self.control(self.world) is None:
            return None
        made = self.maker.block(self.world, "gloo", what)
        self._separate.append(made)
        return made

    def shared(
        self, members: Sequence[int], desc: str, connected: bool = True, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Returns the data group of some ranks, None on others; made once for each `desc`.

        Collective over all ranks.
        """
        key = desc, tuple(members)
        if key not in self._shared:
            self._shared[key] = self.maker.some(members, desc, connected, backend)
        return self._shared[key]

    def leave(self) -> None:
        """Takes down that a user is gone; the last one's call closes all groups but the parent.

        Collective over all ranks, each of which counts its users by `number("users")`.
        """
        self._numbers["users"] -= 1
        if self._numbers["users"] or not self._data:
            return
        for key in [key for key, groups in _kept.items() if groups is self]:
            del _kept[key]
        parent = self._data.pop(self.world)
        for pg in {id(pg): pg for pg in self.every() if pg is not parent}.values():
            dist.destroy_process_group(pg)
        for made in (self._data, self._control, self._ranges, self._across, self._shared):
            made.clear()
        self._separate.clear()
        self._gradients.clear()
        self._numbers["closed"] = 1

    def every(self) -> list[dist.ProcessGroup]:
        """Returns all process groups that this rank is in."""
        named = (*self._data.values(), *self._control.values(), *self._ranges.values(),
                 *self._shared.values())  # fmt: skip
        more = (*self._across.values(), *self._separate, *self._gradients)
        return [pg for pg in (*named, *more) if pg is not None]

    def ranks(self, sp: int) -> tuple[int, ...]:
        """Returns the ranks (from 0 to `world - 1`) of this rank's block of `sp`.

        Raises:
            GroupError: `sp` does not divide the world size.
        """
        self._check(sp)
        first = self.rank // sp * sp
        return tuple(range(first, first + sp))

    def number(self, kind: str) -> int:
        """Returns 1, 2, ...: the same on every rank if all make things of a kind in one order."""
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return self._numbers[kind]

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Makes the data groups that these ranges of ranks lack; forgets others, last used first.

        Collective over all ranks, which pass the same ranges in the same order: only so do all of
        them give a new group the same name.

        Raises:
            GroupError: a range is not within the world, or is no aligned block where those alone
                can be groups.
        """
        for first, degree in ranges:
            if self._is_block(first, degree):
                self.of(degree)
                continue
            if first < 0 or degree < 1 or first + degree > self.world or self.only_blocks:
                part = "" if self.whole else ", part of a larger job"
                raise GroupError(
                    f"process group of ranks {first} to {first + degree - 1}: got a world of "
                    f"{self.world} ranks{part}; expected "
                    f"{'an aligned block' if self.only_blocks else 'a range within it'}; plan for "
                    "this world and backend"
                )
            known = (first, degree) in self._ranges
            pg = self._ranges.pop((first, degree)) if known else self._make(first, degree)
            self._ranges[first, degree] = pg
        self.forget(max(MOST_RANGES, len(ranges)))

    def forget(self, but: int) -> None:
        """Destroys the groups that `prepare` made, except those used last; alike on every rank."""
        while len(self._ranges) > but:
            oldest = self._ranges.pop(next(iter(self._ranges)))
            if oldest is not None:
                dist.destroy_process_group(oldest)

    def over(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns the data group of consecutive ranks, this one among them; None of one alone.

        Raises:
            GroupError: `prepare` was not called for them.
        """
        first, degree = ranks[0], len(ranks)
        if self._is_block(first, degree):
            return self.of(degree)
        pg = self._ranges.get((first, degree))
        if pg is None:
            raise GroupError(
                f"process group of ranks {first} to {first + degree - 1}: got none on rank "
                f"{self.rank}; expected one made by Groups.prepare; run the step by train_step"
            )
        return pg

    @property
    def only_blocks(self) -> bool:
        """Whether only aligned blocks can be groups.

        So it is in a part of a larger job; and over NCCL, where each group takes memory of the GPU
        (`Device.communicator_bytes`): blocks of the degrees that a plan has are few.
        """
        if not self.whole:
            return True
        return bool(self._data) and not connects_at_once(self._data[self.world])

    @property
    def can_break(self) -> bool:
        """Whether peers that wait for this rank in a group can be woken, and the group made anew.

        Over gloo, whose operations end when a peer closes its connections. NCCL's are not waited
        for where they are called, and parts of a larger job make no groups during a step.
        """
        if not self.whole or self.world == 1 or not dist.is_initialized():
            return False
        return dist.get_backend(self._data[self.world]) == "gloo"

    def break_apart(self, ranks: Sequence[int]) -> None:
        """Closes this rank's connections in the group of some ranks: whoever waits is woken."""
        key = (ranks[0], len(ranks))
        pg = self.over(ranks)
        assert pg is not None, "a rank alone waits for nobody"
        if key not in self._broken:
            self._broken.add(key)
            break_connections(pg)

    @property
    def broken(self) -> frozenset[tuple[int, int]]:
        """(first rank, degree) of the groups that this rank broke apart."""
        return frozenset(self._broken)

    def renew(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Makes data groups anew that some rank broke apart; collective over all ranks."""
        self._broken.clear()
        for key in ranges:
            if key in self._ranges:  # `prepare` makes it when it is needed again
                self._destroy(self._ranges.pop(key))
        for degree in sorted({d for f, d in ranges if self._is_block(f, d)}):
            self._destroy(self._data.get(degree))
            self._data[degree] = self.maker.block(degree)

    @staticmethod
    def _destroy(pg: dist.ProcessGroup | None) -> None:
        if pg is not None:
            dist.destroy_process_group(pg)

    def _is_block(self, first: int, degree: int) -> bool:
        """Whether a range has a group for good.

        All ranks have: the default group. A group of theirs that may be broken is another one.
        """
        if degree == self.world and self.can_break:
            return False
        return degree == 1 or (self.world % degree == 0 and first % degree == 0)

    def _make(self, first: int, degree: int) -> dist.ProcessGroup | None:
        if not dist.is_initialized():
            return None
        desc = f"dcpc data ranks {first} to {first + degree - 1}"
        return self.maker.some(range(first, first + degree), desc)

    def _check(self, sp: int) -> None:
        if self._numbers.get("closed"):
            raise GroupError(
                f"process group of degree {sp}: got a closed one; expected a compiled model that "
                "is open; compile again, or call close() after the last step"
            )
        if sp < 1 or self.world % sp:
            raise GroupError(
                f"process group of degree {sp}: got a world of {self.world} ranks; expected a "
                f"degree in {', '.join(map(str, self.degrees))}; choose sp among these"
            )
