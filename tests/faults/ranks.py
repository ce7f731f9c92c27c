"""What ranks run in `benchmarks.faults`: training that is hit, and training that goes on."""

import ctypes
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import dcpc
from dcpc.errors import CheckpointError, DcpcError
from dcpc.fx.torch_api.torch_collectives import GATHER
from dcpc.runtime.checkpoint import checkpoints, tensors
from dcpc.runtime.data import cuts
from dcpc.runtime.groups import relay
from models.gpt import GPT, GPTConfig

STEPS, PER_STEP = 7, 4
SEND = ("all_reduce", GATHER, "all_to_all_single", "broadcast")
Trained = dict[int, tuple[float, list[int]]]


@dataclass(frozen=True)
class Injection:
    """One fault.

    Attributes:
        kind: its name in the table.
        how: what happens: a word of `strike`.
        where: a place that `Trap` knows.
        seed: of the step and of the point within it.
        world: ranks.
        mode: who holds the parameters.
        victim: the rank that is hit; None: all of them.
    """

    kind: str
    how: str
    where: str
    seed: int
    world: int
    mode: str
    victim: int | None

    def random(self) -> random.Random:
        """Returns the numbers that say where it strikes."""
        return random.Random(f"{self.kind} {self.seed}")


class Samples:
    """As many as one epoch of `STEPS` steps has, of 3 to 8 tokens."""

    def __len__(self) -> int:
        return STEPS * PER_STEP

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(11, (3 + i * 5 % 6,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": (ids + 1) % 11}


class Training:
    """A compiled model and what it is trained by."""

    def __init__(self, mode: str = "whole", **loading: Any) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        inputs = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
        buckets = dcpc.Buckets(inputs, sizes=[{"seq": 4}, {"seq": 8}])
        model = GPT(GPTConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, hidden=16)).double()
        self.compiled = dcpc.compile(
            model, buckets, backend="eager", parameters=mode, verify="off", timeout=5.0
        )
        self.loader = dcpc.DataLoader(
            Samples(), self.compiled, samples_per_step=PER_STEP, weight="labels", seed=3,
            pad={"input_ids": 0, "labels": -100}, **loading,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.compiled.parameters(), lr=1e-2)

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint has."""
        return {"optimizer": self.optimizer, "loader": self.loader}

    def run(
        self,
        found: Trained,
        done: int = 0,
        folder: str | None = None,
        hit: Callable[[str, int], None] = lambda place, n: None,
    ) -> None:
        """Trains to the end of the epoch; fills in loss and samples of each step."""
        for n, step in enumerate(self.loader, done + 1):
            hit("step", n)
            loss = float(self.compiled.train_step(step).loss)
            hit("between", n)
            self.optimizer.step()
            self.optimizer.zero_grad()
            ids = {i for mb in step.plan.micro_batches for i in mb.sample_ids}
            found[n] = loss, sorted(ids)
            if folder is not None:
                self.compiled.save(folder, n, keep=99, **self.parts)


# --------------------------------------------------------------------------------- what strikes


class Trap:
    """Strikes once, at a random point of a random step."""

    def __init__(self, injection: Injection, folder: Path) -> None:
        numbers = injection.random()
        self.injection, self.file = injection, folder / "struck"
        self.step = numbers.randint(2, STEPS - 1)
        self.countdown = numbers.randint(1, 6)
        self.delay_s = numbers.uniform(0.0, 0.08)
        self.armed = self.done = False

    def strike(self) -> None:
        """Does it; the time is written down before."""
        if self.done:
            return
        self.done = True
        self.file.write_text(repr(time.monotonic()))
        how = self.injection.how
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            ctypes.string_at(0)
        elif how == "interrupt":
            # A shell starts what runs in the background with Ctrl-C ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "late":
            time.sleep(4.0)
        else:
            raise ValueError("injected")

    def count(self) -> None:
        """Strikes at the last of some calls, once the step has begun."""
        if self.armed:
            self.countdown -= 1
            if self.countdown == 0:
                self.strike()

    def hit(self, place: str, n: int) -> None:
        """Is told where training is."""
        if n != self.step:
            return
        if place == "step":
            self.armed = True
            if self.injection.where == "instant":
                threading.Timer(self.delay_s, self.strike).start()
        elif self.injection.where == place:
            self.strike()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, whose calls count."""

        def run(*arguments: Any, **named: Any) -> Any:
            self.count()
            return function(*arguments, **named)

        return run

    def lay(self, made: Training) -> None:
        """Puts itself where it is to strike."""
        where = self.injection.where
        if where == "collective":
            for name in SEND:
                setattr(dist, name, self.before(getattr(dist, name)))
        elif where == "dataset":
            self.armed = True
            Samples.__getitem__ = self.before(Samples.__getitem__)  # type: ignore[method-assign]
        elif where == "model":
            dispatch: Any = made.compiled._core.dispatch
            self.countdown = 1 + self.countdown % 2
            dispatch.run_micro_batch = self.before(dispatch.run_micro_batch)
        elif where == "save":
            tensors.fingerprint = self.before(tensors.fingerprint)
            for name in ("fingerprint", "write_bytes", "publish"):  # rank 0's
                setattr(checkpoints, name, self.before(getattr(checkpoints, name)))
            self.countdown = 1 + self.countdown % 2
        elif where == "plan":
            self.armed, self.countdown = True, self.step
            cuts.plan_step = self.before(cuts.plan_step)
        elif where == "message":
            self._damage_messages()

    def _damage_messages(self) -> None:
        def damaging(*arguments: Any) -> Any:
            return DamagingStore(PrefixStore(*arguments), self)

        relay.PrefixStore = damaging  # type: ignore[assignment,misc]


class DamagingStore:
    """A store on whose way one message loses a bit."""

    def __init__(self, store: Any, trap: Trap) -> None:
        self._store, self._trap, self._sent = store, trap, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, text: str) -> None:
        """Sends a message."""
        content, trap = bytearray(text.encode()), self._trap
        self._sent += 1
        if self._sent == trap.step:
            trap.file.write_text(repr(time.monotonic()))
            content[trap.injection.random().randrange(len(content))] ^= 4
        self._store.set(key, bytes(content))


# ------------------------------------------------------------------------------ what ranks run


def hit(rank: int, injection: Injection, folder: str) -> tuple[Trained, str, str, float]:
    """Trains until the fault; returns what was trained, the error's class and text, and when."""
    late = {"plan_timeout_s": 1.0} if injection.how == "late" else {}
    made, found = Training(injection.mode, **late), Trained()
    made.compiled.save(folder, 0, **made.parts, wait=True)
    trap = Trap(injection, Path(folder))
    mine = injection.victim in (rank, None)
    if mine:
        trap.lay(made)
    try:
        made.run(found, folder=folder, hit=trap.hit if mine else lambda place, n: None)
        made.compiled.save(folder, STEPS + 1, **made.parts, wait=True)
    except (DcpcError, ValueError, KeyboardInterrupt) as e:
        raised_s = time.monotonic()
        if mine:
            tell_as_it_ends(e)
        return found, type(e).__name__, str(e), raised_s
    return found, "", "", 0.0


def tell_as_it_ends(error: BaseException) -> None:
    """Does what Python does with an error that nobody catches, but the end."""
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w")  # noqa: SIM115
    sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr = stderr


def straight(rank: int, mode: str, folder: str | None) -> Trained:
    """Trains to the end, without a fault."""
    made, found = Training(mode), Trained()
    made.run(found, folder=folder)
    if folder is not None:
        made.compiled.save(folder, STEPS + 1, keep=99, wait=True, **made.parts)
    return found


def resumed(rank: int, mode: str, folders: Sequence[str]) -> list[tuple[int, Trained]]:
    """Goes on from the newest checkpoint of each folder; returns its step and what followed."""
    made = Training(mode)
    every = []
    for folder in folders:
        found = Trained()
        done = made.compiled.load(folder, **made.parts, missing="start").step
        if done < STEPS:
            made.run(found, done)
        every.append((done, found))
    return every


def cannot_write(rank: int, seeds: Sequence[int], folder: str) -> list[tuple[str, int, Trained]]:
    """Rank 1's files end at a random byte, once for each seed, while training goes on."""
    made = Training("whole")
    made.compiled.save(folder, 0, **made.parts, wait=True)
    every = []
    for seed in seeds:
        found, error = Trained(), ""
        made.compiled.load(folder, **made.parts)
        numbers = random.Random(seed)
        step, limit = numbers.randint(1, STEPS - 1), numbers.randint(0, 6000)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for n, each in enumerate(made.loader, 1):
            found[n] = float(made.compiled.train_step(each).loss), sorted(
                {i for mb in each.plan.micro_batches for i in mb.sample_ids})  # fmt: skip
            made.optimizer.step()
            made.optimizer.zero_grad()
            if n != step:
                continue
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                made.compiled.save(folder, n, wait=True, **made.parts)
            except CheckpointError as e:
                error = str(e)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        newest = made.compiled.load(folder, **made.parts).step
        every.append((error, newest, found))
        for left in Path(folder).glob("step-0000000[1-9]"):
            if rank == 0:
                for file in left.iterdir():
                    file.unlink()
                left.rmdir()
        made.compiled.load(folder, **made.parts)
    return every
