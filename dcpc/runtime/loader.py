"""The data-aware loader: from a dataset of ragged samples to planned optimizer steps.

    order of the epoch -> global batch of `tokens_per_step` -> StepPlan -> this rank's tensors

Everything up to the plan depends on the dataset, the seed and the epoch alone, so every rank
derives the same plan and loads only the samples it runs. Steps are prepared ahead in a thread.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from dcpc.buckets import Bucket
from dcpc.errors import DataError
from dcpc.runtime.deal import StepPlan, deal
from dcpc.runtime.protocol import Compiled
from dcpc.runtime.samples import Dataset, Samples
from dcpc.runtime.weights import SAMPLES, Weight, checked, weight_function


@dataclass(frozen=True)
class MicroBatch:
    """What this rank runs at once.

    Attributes:
        bucket: shape of the samples.
        sp: number of ranks that get this same micro-batch.
        inputs: the model's arguments, on the CPU.
        weight: how much it counts in the step's loss.
        samples: indices in the dataset.
    """

    bucket: Bucket
    sp: int
    inputs: dict[str, torch.Tensor]
    weight: float
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One optimizer step, as one rank sees it.

    Attributes:
        epoch: number of the epoch, from 0.
        index: number of the step in its epoch, from 0.
        plan: what every rank does.
        micro_batches: what this rank does, in order.
        total_weight: sum of all ranks' weights; None: `train_step` sums them up.
        tokens: tokens of all ranks' samples, padding left out.
        samples: number of all ranks' samples.
    """

    epoch: int
    index: int
    plan: StepPlan
    micro_batches: tuple[MicroBatch, ...]
    total_weight: float | None
    tokens: int
    samples: int


class _Cut(NamedTuple):
    """A step, and how far the epoch is once it is done."""

    step: Step | None
    consumed: int
    skipped: tuple[int, ...]


class DataLoader:
    """Yields the planned steps of one epoch at a time; every sample exactly once in each.

    An iteration that ends normally moves on to the next epoch. After `load_state_dict` the next
    iteration continues where the state was taken, at any world size; otherwise it starts its epoch
    afresh.
    """

    def __init__(
        self,
        dataset: Dataset,
        compiled: Compiled,
        *,
        tokens_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        pad: Mapping[str, int | float] | None = None,
        weight: Weight = SAMPLES,
        on_too_long: Literal["error", "skip"] = "error",
        lookahead: int = 1,
    ) -> None:
        """Checks the arguments; loads nothing yet.

        Args:
            dataset: `len()` and `[i]` -> one tensor for each input, without the `batch` dim. If it
                has `dims(i)` -> length of each named dim, samples are not loaded for their lengths.
            compiled: the compiled model.
            tokens_per_step: most tokens of a global batch (a longer single sample is a step of its
                own); the tokens of a sample are the product of its named dims.
            seed: of the order of samples.
            shuffle: a new order each epoch; else the dataset's.
            pad: input name -> what fills up the end of a sample shorter than its bucket.
            weight: what the model's loss is a mean over: "samples", the name of the input with the
                labels (those not -100 count), `CountLabels`, or a function of a micro-batch's
                inputs.
            on_too_long: a sample longer than every bucket is an error, or is left out, counted in
                `skipped` and warned of.
            lookahead: steps prepared ahead in a thread; 0: none, no thread.

        Raises:
            DataError: an argument is wrong, or the dataset is empty.
        """
        _check_count("tokens_per_step", tokens_per_step, 1)
        _check_count("lookahead", lookahead, 0)
        _check_count("seed", seed, 0)
        if on_too_long not in ("error", "skip"):
            raise DataError(
                f"on_too_long=: got {on_too_long!r}; expected 'error' or 'skip'; choose one"
            )
        self.compiled = compiled
        self.tokens_per_step = tokens_per_step
        self.shuffle = shuffle
        self.on_too_long = on_too_long
        self.lookahead = lookahead
        self._samples = Samples(dataset, compiled.buckets, pad)
        self._weigh = weight_function(weight, compiled.buckets.inputs)
        self._seed = seed
        self._epoch = self._consumed = self._index = 0
        self._resumed = False
        self._skipped: tuple[int, ...] = ()

    @property
    def epoch(self) -> int:
        """Number of the epoch that runs, or that comes next."""
        return self._epoch

    @property
    def skipped(self) -> tuple[int, ...]:
        """Samples left out in this iteration (or the last) as longer than every bucket."""
        return self._skipped

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`; the epoch it is in already goes on as it is."""
        _check_count("epoch", epoch, 0)
        if epoch != self._epoch:
            self._epoch, self._consumed, self._index = epoch, 0, 0
            self._resumed = False

    def state_dict(self) -> dict[str, int | bool]:
        """Returns where training is, the step yielded last counted as done; plain numbers."""
        done = self._consumed >= len(self._samples)
        return {
            "epoch": self._epoch + done,
            "consumed": 0 if done else self._consumed,
            "step": 0 if done else self._index,
            "seed": self._seed,
            "shuffle": self.shuffle,
            "samples": len(self._samples),
        }

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Makes the next iteration continue from a state, on any number of ranks.

        Raises:
            DataError: the state lacks a field or is of another dataset or order.
        """
        fields = self.state_dict()
        if state.keys() != fields.keys():
            raise DataError(
                f"loader state: got fields {', '.join(map(str, state))}; expected "
                f"{', '.join(fields)}; pass what state_dict() returned"
            )
        for name in ("epoch", "consumed", "step", "seed"):
            _check_count(f"loader state '{name}'", state[name], 0)
        for name in ("samples", "shuffle"):
            if state[name] != fields[name]:
                raise DataError(
                    f"loader state: got {name}={state[name]}; expected {fields[name]}, as this "
                    "loader has; resume with the same dataset and shuffle="
                )
        self._epoch, self._consumed = int(state["epoch"]), int(state["consumed"])
        self._index, self._seed = int(state["step"]), int(state["seed"])
        self._resumed = True

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps of the epoch.

        Raises:
            DataError: a sample contradicts the specs or is longer than every bucket.
        """
        if not self._resumed:
            self._consumed = self._index = 0
        self._resumed = False
        self._skipped = ()
        fresh = self._consumed == 0
        cuts = self._cuts(self._epoch, self._consumed, self._index)
        for cut in _ahead(cuts, self.lookahead) if self.lookahead else cuts:
            self._consumed = cut.consumed
            self._skipped += cut.skipped
            if cut.step is not None:
                self._index = cut.step.index + 1
                yield cut.step
        self._report_skipped(nothing_left=fresh and self._index == 0)
        self._epoch, self._consumed, self._index = self._epoch + 1, 0, 0

    def _report_skipped(self, nothing_left: bool) -> None:
        if not self._skipped:
            return
        n, some = len(self._skipped), ", ".join(map(str, self._skipped[:8]))
        text = (
            f"epoch {self._epoch}: got {n} of {len(self._samples)} samples longer than every "
            f"bucket ({some}{', ...' if n > 8 else ''}); expected at most "
            f"{self._samples.describe_largest()}; add a larger bucket or cut them"
        )
        if nothing_left:
            raise DataError(text)
        warnings.warn(f"{text}: left out", stacklevel=3)

    def _cuts(self, epoch: int, consumed: int, index: int) -> Iterator[_Cut]:
        order = self._order(epoch)
        while consumed < len(order):
            batch: list[tuple[int, Bucket]] = []
            skipped: list[int] = []
            tokens = 0
            while consumed < len(order):
                i = order[consumed]
                fit = self._samples.fit(i)
                if fit.bucket is None:
                    skipped.append(self._too_long(i))
                elif batch and tokens + fit.tokens > self.tokens_per_step:
                    break
                else:
                    batch.append((i, fit.bucket))
                    tokens += fit.tokens
                consumed += 1
            step = self._step(epoch, index, batch, tokens) if batch else None
            self._samples.forget()
            yield _Cut(step, consumed, tuple(skipped))
            index += 1

    def _step(self, epoch: int, index: int, batch: list[tuple[int, Bucket]], tokens: int) -> Step:
        groups = self.compiled.groups
        plan = deal(batch, self.compiled.plans, groups.world)
        micro_batches = []
        for mb in plan.of(groups.rank):
            inputs = self._samples.collate(mb.sample_ids, mb.bucket)
            weight = float(len(mb.sample_ids))
            if self._weigh is not None:
                weight = checked(self._weigh(inputs), mb.sample_ids)
            micro_batches.append(MicroBatch(mb.bucket, mb.sp, inputs, weight, mb.sample_ids))
        total = float(len(batch)) if self._weigh is None else None
        return Step(epoch, index, plan, tuple(micro_batches), total, tokens, len(batch))

    def _order(self, epoch: int) -> list[int]:
        n = len(self._samples)
        if not self.shuffle:
            return list(range(n))
        digest = hashlib.blake2b(f"{self._seed} {epoch}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        order: list[int] = torch.randperm(n, generator=generator).tolist()
        return order

    def _too_long(self, index: int) -> int:
        if self.on_too_long == "error":
            dims = ", ".join(f"{name}: {n}" for name, n in self._samples.fit(index).dims)
            raise DataError(
                f"sample {index}: got {{{dims}}}, longer than every bucket; expected at most "
                f"{self._samples.describe_largest()}; add a larger bucket, cut the sample, or pass "
                "on_too_long='skip'"
            )
        return index


def _ahead(cuts: Iterator[_Cut], count: int) -> Iterator[_Cut]:
    """Yields from an iterator that a thread keeps `count` items ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="dcpc-loader") as pool:
        coming = deque(pool.submit(next, cuts, None) for _ in range(count))
        try:
            while (cut := coming.popleft().result()) is not None:
                coming.append(pool.submit(next, cuts, None))
                yield cut
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(
            f"{name}: got {value!r}; expected an integer >= {least}; pass one that is at least "
            f"{least}"
        )
