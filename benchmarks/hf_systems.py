"""The systems of `benchmarks.hf_race`: each trains epochs of the same samples on a rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_pt_utils import get_length_grouped_indices

import dcpc.hf
from dcpc.hf.step_batches import STEP
from examples.stdlib_source import StdlibSource

RATE, WARMUP, CLIP = 1e-3, 2, 1.0
BUCKETS = 8  # of dcpc
MEGABATCH = 50  # batches within which transformers sorts by length, of a long data set
TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Race:
    """What is run.

    Attributes:
        width: of the model.
        layers: of it.
        longest: length to which samples are cut.
        samples: of an epoch.
        batch: samples of a rank's batch.
        repeats: at most.
        limit_s: no repeat but the first begins later than this.
        root: of the sources; None: the whole standard library.
    """

    width: int
    layers: int
    longest: int
    samples: int
    batch: int
    repeats: int
    limit_s: float
    root: Path | None = None


class Texts:
    """Samples in an order drawn once: each token's label is itself, as Llama shifts them."""

    def __init__(self, race: Race) -> None:
        source = StdlibSource(race.longest, race.root)
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist()
        # Lists: tensors are sent to other processes by a file descriptor each.
        self.texts = [source[i]["input_ids"].tolist() for i in order[: race.samples]]
        self.lengths = [*map(len, self.texts)]
        self.tokens = sum(self.lengths)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Sample:
        ids = torch.tensor(self.texts[i])
        return {"input_ids": ids, "labels": ids}


@dataclass(slots=True)
class Counted:
    """What a system ran on this rank in its last epoch."""

    seconds_s: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    padding: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)


class Collator:
    """Pads a batch to its longest sample, and counts."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        ids = [s["input_ids"] for s in samples]
        padded = pad_sequence(ids, True)
        tokens = sum(map(len, ids))
        self.counted.tokens += tokens
        self.counted.padding += padded.numel() - tokens
        return {"input_ids": padded, "labels": pad_sequence(ids, True, -100)}


class EpochClock(TrainerCallback):
    """Times an epoch between barriers."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()
        self.counted.seconds_s = -time.perf_counter()
        self.counted.cpu_s = -time.process_time()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.counted.cpu_s += time.process_time()
        dist.barrier()
        self.counted.seconds_s += time.perf_counter()


class DcpcTrainer(dcpc.hf.TrainerMixin, Trainer):
    """The mixin as it is; what it trains is noted."""

    trained = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.trained += inputs[STEP].samples
        return super().training_step(model, inputs, num_items_in_batch)


class LongSorted(Trainer):
    """group_by_length as over a long data set.

    transformers sorts within 50 batches, but in an epoch of few samples within a quarter of it at
    most: that would pad more than in a real training.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        lengths = [len(s["input_ids"]) for s in self.train_dataset]
        generator = torch.Generator().manual_seed(0)  # the same order on every rank
        batch = self.args.train_batch_size
        return get_length_grouped_indices(lengths, batch, MEGABATCH, generator=generator)


def llama(race: Race) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258, hidden_size=race.width, intermediate_size=3 * race.width,
            num_hidden_layers=race.layers, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=race.longest, use_cache=False,
        )
    )  # fmt: skip


class WithTrainer:
    """A Trainer of either kind."""

    def __init__(
        self, race: Race, data: Texts, folder: str, strategy: str, packing: bool | None = None
    ) -> None:
        """Makes it.

        Args:
            race: sizes.
            data: samples.
            folder: for what the Trainer writes.
            strategy: of the order of samples.
            packing: of dcpc's loader; None: the Trainer as it is.
        """
        self.counted = Counted()
        args = TrainingArguments(
            folder, per_device_train_batch_size=race.batch, num_train_epochs=1, learning_rate=RATE,
            warmup_steps=WARMUP, max_grad_norm=CLIP, train_sampling_strategy=strategy,
            logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            weight_decay=0.0,
        )  # fmt: skip
        given: dict[str, Any] = {}
        if packing is not None:
            inputs = {**TEXT, "position_ids": "int64[batch, seq]"} if packing else TEXT
            given = {
                "buckets": dcpc.Buckets.from_lengths(inputs, data.lengths, count=BUCKETS),
                "compile_options": {"backend": "eager", "verify": "off"},
                "loader_options": {"packing": packing},
            }
        kind = LongSorted if strategy == "group_by_length" else Trainer
        kind = kind if packing is None else DcpcTrainer
        self.trainer = kind(llama(race), args, Collator(self.counted), data, **given)
        self.trainer.pop_callback(PrinterCallback)
        self.trainer.add_callback(EpochClock(self.counted))

    def epoch(self) -> Counted:
        """Trains an epoch."""
        counted, trainer = self.counted, self.trainer
        counted.tokens = counted.padding = 0
        if isinstance(trainer, DcpcTrainer):
            trainer.trained = 0
        trainer.train()
        if isinstance(trainer, DcpcTrainer):
            stats = trainer.callback_handler.train_dataloader.stream.loader.stats()
            own = dist.get_rank() == 0  # what the others count, too, is the same
            counted.tokens, counted.padding = stats.tokens * own, stats.padding * own
            counted.samples = trainer.trained
        counted.losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        return counted


def first_fit(samples: Sequence[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Returns rows of at most `size` tokens, the longest samples first."""
    rows: list[list[torch.Tensor]] = []
    for sample in sorted(samples, key=len, reverse=True):
        room = (r for r in rows if sum(map(len, r)) + len(sample) <= size)
        row = next(room, None)
        if row is None:
            rows.append([sample])
        else:
            row.append(sample)
    return rows


class Packed:
    """accelerate's own loop: each step's samples packed into rows, dealt to the ranks."""

    def __init__(self, race: Race, data: Texts) -> None:
        self.race, self.data = race, data
        self.steps = -(-len(data) // (race.batch * dist.get_world_size()))
        self.accelerator = Accelerator(cpu=True)
        model = llama(race)
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)

    def epoch(self) -> Counted:
        """Trains an epoch."""
        counted = Counted()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = RATE
        self.optimizer.state.clear()  # as the Trainer, which makes its optimizer anew
        schedule = get_linear_schedule_with_warmup(self.optimizer, WARMUP, self.steps)
        clock = EpochClock(counted)
        clock.on_train_begin()
        size = self.race.batch * dist.get_world_size()
        for begin in range(0, len(self.data), size):
            ids = range(begin, min(begin + size, len(self.data)))
            counted.losses.append(self._step([self.data[i]["input_ids"] for i in ids], counted))
            schedule.step()
        clock.on_train_end()
        return counted

    def _step(self, samples: Sequence[torch.Tensor], counted: Counted) -> float:
        world = dist.get_world_size()
        count = sum(len(x) - 1 for x in samples)
        rows = first_fit(samples, self.race.longest)
        own = dealt(rows, world)[dist.get_rank()]
        loss = torch.zeros(())
        for i, row in enumerate(own or [samples[:1]]):  # a rank without rows joins the sum
            last = i + 1 >= len(own)
            # In forward, too: it sends the buffers otherwise, and ranks have other numbers of rows.
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                part = self._loss(row) * (world / count if own else 0.0)
                self.accelerator.backward(part)
            loss += part.detach()
            counted.tokens += sum(map(len, row)) if own else 0
        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        return float(loss) / world

    def _loss(self, row: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the sum of a row's losses; no sample predicts the next one's first token."""
        ids = torch.cat(list(row))[None]
        positions = torch.cat([torch.arange(len(x)) for x in row])[None]
        labels = ids.masked_fill(positions == 0, -100)
        logits = self.model(input_ids=ids, position_ids=positions).logits
        return F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")


def dealt(rows: Sequence[list[torch.Tensor]], world: int) -> list[list[list[torch.Tensor]]]:
    """Returns the rows of each rank: the longest left to the rank that has least."""
    found: list[list[list[torch.Tensor]]] = [[] for _ in range(world)]
    loads = [0] * world
    for row in sorted(rows, key=lambda r: sum(map(len, r)), reverse=True):
        rank = loads.index(min(loads))
        found[rank].append(row)
        loads[rank] += sum(map(len, row))
    return found
