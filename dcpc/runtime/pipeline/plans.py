"""Steps of pipelines as plans: JSON with a digest, made ahead by rank 0, checked before they run.

A plan is data alone: samples, sizes, orders. Every rank checks the plan that it read (its digest,
its step, and that each schedule ends), and all ranks agree on it before anything is sent.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcpc.errors import DcpcError, PlanError
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.relay import Relay
from dcpc.runtime.pipeline.schedule import Action, PipelineSchedule, check

VERSION = 1


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """What one pipeline runs in a step.

    Attributes:
        samples: ids, by micro-batch.
        sizes: length of every dim, by micro-batch.
        schedule: of its stages.
    """

    samples: tuple[tuple[int, ...], ...]
    sizes: tuple[Mapping[str, int], ...]
    schedule: PipelineSchedule


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """What all pipelines run in a step.

    Attributes:
        index: number of the step.
        replicas: one plan a pipeline.
    """

    index: int
    replicas: tuple[ReplicaPlan, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, with its digest."""
        data = {
            "version": VERSION,
            "index": self.index,
            "replicas": [
                {
                    "samples": [list(ids) for ids in r.samples],
                    "sizes": [dict(sizes) for sizes in r.sizes],
                    "orders": [" ".join(map(str, order)) for order in r.schedule.orders],
                    "settings": [list(row) for row in r.schedule.settings],
                }
                for r in self.replicas
            ],
        }
        return {**data, "digest": _digest(data)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], index: int) -> PipelineStep:
        """Returns what `to_json` gave, once it is known to run to its end.

        Args:
            data: the message.
            index: of the step that is to run.

        Raises:
            PlanError: it is damaged, of another step or version, or its schedule does not end.
        """
        plain = {key: value for key, value in data.items() if key != "digest"}
        if data.get("digest") != _digest(plain) or data.get("version") != VERSION:
            raise PlanError(
                f"pipeline plan of step {index}: got version {data.get('version')} with digest "
                f"{data.get('digest')}; expected version {VERSION} with {_digest(plain)}: it was "
                "damaged on its way; run the same dcpc on all ranks"
            )
        if data["index"] != index:
            raise PlanError(
                f"pipeline plan: got step {data['index']}, expected step {index}; iterate on every "
                "rank alike"
            )
        try:
            step = cls(index, tuple(_replica(r) for r in data["replicas"]))
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise PlanError(
                f"pipeline plan of step {index}: got {type(e).__name__} {e}; expected what "
                "PipelineStep.to_json gives; run the same dcpc on all ranks"
            ) from e
        for replica in step.replicas:
            check(replica.schedule, len(replica.samples))
        return step


def plans_ahead(
    plans: Iterator[PipelineStep], groups: Groups, timeout_s: float, ahead: int = 1
) -> Iterator[PipelineStep]:
    """Yields on every rank the plans that rank 0 makes, `ahead` steps before they run.

    Collective: all ranks iterate alike.

    Args:
        plans: used on rank 0 alone, in a thread.
        groups: of all ranks.
        timeout_s: how long a rank waits for a plan.
        ahead: plans made before they are asked for.

    Raises:
        DcpcError: of the class of the planner's error, on every rank.
        PlanError: the planner is late, or a plan is refused, on every rank.
    """
    if groups.world == 1:
        messages: Iterator[Mapping[str, Any]] = (step.to_json() for step in plans)
        yield from (PipelineStep.from_json(m, n) for n, m in enumerate(messages))
        return
    relay = Relay(groups, f"pipeline/{groups.number('pipeline plans')}", timeout_s)
    used = 0
    try:
        found = _own(plans, relay, timeout_s, ahead) if groups.rank == 0 else relay.receive()
        for index, message in enumerate(found):
            used += 1
            yield _agreed(message, index, groups)
        used += 1  # the message that there are no more: the others may not have read it yet
    finally:
        relay.close(used)


def _agreed(message: Mapping[str, Any], index: int, groups: Groups) -> PipelineStep:
    """Returns the plan once all ranks are known to have the same and to let it run."""
    step, problem = None, None
    try:
        step = PipelineStep.from_json(message, index)
    except DcpcError as e:
        problem = e
    said = f"refused: {problem}" if problem else str(message.get("digest"))
    agree(groups, groups.world, f"pipeline plan of step {index}", said)
    if problem is not None:
        raise problem
    assert step is not None, "read or refused"
    return step


def _own(
    plans: Iterator[PipelineStep], relay: Relay, timeout_s: float, ahead: int
) -> Iterator[Mapping[str, Any]]:
    """Yields on rank 0 what a thread there plans and sends; the others hear of its end, too."""
    room, left = threading.Semaphore(ahead + 1), threading.Event()
    ready: queue.Queue[Mapping[str, Any] | BaseException | None] = queue.Queue()

    def work() -> None:
        try:
            for message in relay.send((m, m) for m in (step.to_json() for step in plans)):
                ready.put(message)
                room.acquire()
                if left.is_set():
                    return
            ready.put(None)
        except BaseException as e:  # told to the loop, which raises it
            ready.put(e)

    room.acquire()
    thread = threading.Thread(target=work, name="dcpc-pipeline-plans", daemon=True)
    thread.start()
    try:
        for number in range(1 << 62):
            try:
                found = ready.get(timeout=timeout_s)
            except queue.Empty:
                raise PlanError(
                    f"pipeline plan {number}: got nothing within {timeout_s:g} s from this rank's "
                    "planner; expected a plan; look at what it waits for, or raise the time limit"
                ) from None
            if isinstance(found, BaseException):
                raise found
            if found is None:
                return
            room.release()
            yield found
    finally:
        left.set()
        relay.stop()
        room.release()
        thread.join(min(timeout_s, 30.0))


def _replica(data: Mapping[str, Any]) -> ReplicaPlan:
    orders = tuple(
        tuple(Action(word[0], int(word[1:])) for word in text.split()) for text in data["orders"]
    )
    return ReplicaPlan(
        tuple(tuple(int(i) for i in ids) for ids in data["samples"]),
        tuple({str(k): int(v) for k, v in sizes.items()} for sizes in data["sizes"]),
        PipelineSchedule(orders, tuple(tuple(int(k) for k in row) for row in data["settings"])),
    )


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
