"""Options beside options: which pairs run, which are refused and why; and the page made of it.

.venv/bin/python -m tests.cases.combinations     # writes docs/combinations.md
"""

from __future__ import annotations

import itertools
import random
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.errors import DcpcError
from tests.cases.asks import far, whole
from tests.cases.exactness import SPLITTING
from tests.cases.packed_models import NUMBERS, Documents

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
VOCABULARY = 96  # wide enough for tiles
INPUTS = dict.fromkeys(("input_ids", "attention_mask", "labels"), "int64[batch, seq]")
PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100}
LENGTHS = (5, 8, 16, 3, 11, 8)
LIMIT = 1e-10
# Under autocast both sides round to bfloat16, each its own products.
AUTOCAST_LIMIT = 0.1


@dataclass(frozen=True)
class Choice:
    """An option with a value.

    Attributes:
        name: as the page says it.
        compile: options of `dcpc.compile`.
        loader: options of `dcpc.DataLoader`.
        more: what else a run does: "stream", "outputs", "evaluate", "checkpoint".
    """

    name: str
    compile: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    more: str = ""


def cross_entropy(outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Returns the mean over labels that are not -100."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


CHOICES = (
    Choice("pipeline", {"pipeline": 2}),
    Choice("rounds", {"parameters": "rounds"}),
    Choice("step", {"parameters": "step"}),
    Choice("pull", {"parameters": "pull"}),
    Choice("sp", {"sp": 2}),
    Choice("attention", {"attention": "ring"}),
    Choice("recompute", {"recompute": "all"}),
    Choice("tile", {"tile": 4}),
    Choice("away", {"host": "1GB", "away": "all"}),
    Choice("state", {"host": "1GB", "away": "optimizer"}),
    Choice("tiers", {"host": "1GB", "away": "parameters"}),
    Choice("unpad", {"unpad": True}),
    Choice("packing", loader={"packing": "segment_ids"}),
    Choice("stream", more="stream"),
    Choice("outputs", more="outputs"),
    Choice("evaluate", more="evaluate"),
    Choice("loss", {"loss": cross_entropy}),
    Choice("autocast", {"autocast": torch.bfloat16}),
    Choice("speeds", {"speeds": [1.0, 0.5]}),
    Choice("optimizer", {"optimizer": partial(torch.optim.SGD, momentum=0.9)}),
    Choice("checkpoints", more="checkpoint"),
    Choice("Inductor", {"backend": "inductor"}),
)
NAMES = tuple(c.name for c in CHOICES)

_ONE = "Two values of one option."
_STAGE = (
    "A rank has the parameters of its stage, whole: {} is a way to hold those of a whole model."
)
_WHOLE = "Each rank has all parameters on its device: what lies elsewhere is gathered in rounds."
# Pair -> why it does not run.
REFUSED: Mapping[frozenset[str], str] = {
    frozenset({"pipeline", "rounds"}): _STAGE.format("gathering them"),
    frozenset({"pipeline", "pull"}): _STAGE.format("a memory that all ranks map"),
    frozenset({"pipeline", "tiers"}): _STAGE.format("fetching them from elsewhere"),
    frozenset({"pipeline", "state"}): "A stage's optimizer keeps its state on the device.",
    frozenset({"tiers", "step"}): _WHOLE,
    frozenset({"tiers", "pull"}): _WHOLE,
    frozenset({"pipeline", "sp"}): "Two ranks are two stages of one rank each; with four it runs.",
}
# Two values of one option are no pair.
SAME = {
    frozenset({a.name, b.name}): _ONE
    for a, b in itertools.combinations(CHOICES, 2)
    if {*a.compile} & {*b.compile}
}
# Runs, and what of it is not there.
NOTES: Mapping[frozenset[str], str] = {
    frozenset({"pipeline", "away"}): "Stages keep what they save on the device: how many "
    "micro-batches are in flight follows from the device's memory, and the search for a schedule "
    "has no bound for the host's beside it.",
    frozenset({"tiers", "Inductor"}): "Each use copies a unit: none stays from one to the next.",
    frozenset({"packing", "unpad"}): "Rows have sequences in place of padding.",
}


class Tagged(nn.Module):
    """Two layers of attention over tokens that are not hidden; returns logits, or a loss, or both.

    Args:
        own_loss: whether forward makes the loss.
        outputs: whether it returns logits beside it: their padded rows are computed then.
    """

    def __init__(self, own_loss: bool, outputs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own_loss, self.outputs = own_loss, outputs
        self.embed, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.double()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x, seen = self.embed(input_ids), (attention_mask > 0)[:, None, None]
        for layer in self.qkv:
            q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(
                2
            )
        found = {"logits": self.out(x)}
        if self.own_loss:
            assert labels is not None, "its inputs have them"
            loss = cross_entropy(found, labels)
            return {**found, "loss": loss} if self.outputs else {"loss": loss}
        return found


class Packed(Documents):
    """Documents whose forward may return logits alone."""

    def __init__(self, own_loss: bool, outputs: bool) -> None:
        super().__init__()
        self.own_loss = own_loss

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        found = {"logits": self.logits(input_ids, segment_ids, position_ids)}
        if self.own_loss:
            assert labels is not None, "its inputs have them"
            found["loss"] = cross_entropy(found, labels)
        return found


class Samples:
    """Texts of several lengths, with what a model takes besides."""

    def __init__(self, packing: bool) -> None:
        self.packing = packing

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(1, VOCABULARY, (2, LENGTHS[i]), generator=draw)
        sample = {"input_ids": ids, "labels": labels}
        return sample if self.packing else {**sample, "attention_mask": torch.ones_like(ids)}

    def alone(self, i: int) -> dict[str, Tensor]:
        """Returns a sample as a batch of one for the plain model."""
        sample = self[i]
        if self.packing:
            n = LENGTHS[i]
            sample |= {"position_ids": torch.arange(n), "segment_ids": torch.ones(n).long()}
        return {name: x[None] for name, x in sample.items()}


class Streamed:
    """The texts as a stream."""

    def __init__(self, texts: Samples) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.texts.__getitem__, range(len(self.texts)))


class Together:
    """Several choices together, on this rank.

    Args:
        names: of the choices.
        folder: for checkpoints.
        told: more options of `dcpc.compile`.
    """

    def __init__(self, names: Iterable[str], folder: str, **told: Any) -> None:
        own = [c for c in CHOICES if c.name in {*names}]
        self.folder, self.more = folder, {c.more for c in own}
        self.options: dict[str, Any] = {"backend": "eager", "device": SPLITTING, "verify": "off"}
        loader: dict[str, Any] = {}
        for c in own:
            self.options |= c.compile
            loader |= c.loader
        self.options |= told
        if "attention" in names and "pipeline" not in names:
            self.options.setdefault("sp", 2)
        self.packing = "packing" in loader
        kind = Packed if self.packing else Tagged
        self.autocast = self.options.get("autocast")
        dtype = torch.float64 if self.autocast is None else torch.float32
        returns = "loss" not in self.options, "outputs" in self.more
        self.alone, self.model = (kind(*returns).to(dtype) for _ in range(2))
        self.data = Samples(self.packing)
        buckets = dcpc.Buckets(NUMBERS if self.packing else INPUTS, [{"seq": 8}, {"seq": 16}])
        self.compiled = dcpc.compile(self.model, buckets, **self.options)
        if not self.packing:
            loader["pad"] = PAD
            if "unpad" in names:  # without padding there is none to leave out
                loader["pad_to_multiple_of"] = 8
        data = Streamed(self.data) if "stream" in self.more else self.data
        self.loader = dcpc.DataLoader(
            data, self.compiled, tokens_per_step=48, weight="labels", **loader
        )

    def plain(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what the plain model returns, its loss among it."""
        given = {n: x for n, x in inputs.items() if n != "labels" or self.alone.own_loss}
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            found = self.alone(**given)
            if "loss" in found:
                return found
            return {**found, "loss": cross_entropy(found, inputs["labels"])}

    def errors(self) -> Iterable[float]:
        """Yields how far each number is from the plain model's."""
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer, plain = make(self.compiled.parameters()), make(self.alone.parameters())
        for step in self.loader:
            outputs = "outputs" in self.more
            result = self.compiled.train_step(step, outputs=outputs)
            for each in result.outputs if outputs else ():
                expected = self.plain(each.micro_batch.inputs)["logits"].detach()
                yield far(each.outputs["logits"], expected)
            yield from self._step(step, result.loss)
            for each in (optimizer, plain):
                each.step()
                each.zero_grad()
        if "evaluate" in self.more:
            yield self._evaluated()
        if "checkpoint" in self.more:
            kept = {n: x.clone() for n, x in self._state().items()}
            self.compiled.save(self.folder, step=1, optimizer=optimizer, wait=True)
            self.compiled.load_state_dict({n: x * 0 for n, x in kept.items()})
            assert self.compiled.load(self.folder, optimizer=optimizer).step == 1
            yield max(far(x, kept[n]) for n, x in self._state().items())

    def _state(self) -> dict[str, Tensor]:
        return {n: whole(x) for n, x in self.compiled.state_dict().items()}

    def _step(self, step: Any, loss: Tensor) -> Iterable[float]:
        planned = step.plan.micro_batches
        ids = [i for mb in planned for i in mb.sample_ids]
        ids = [i for row in step.rows for i in row] or ids
        total, expected = sum(LENGTHS[i] for i in ids), torch.zeros((), dtype=torch.float64)
        for i in ids:
            part = self.plain(self.data.alone(i))["loss"] * (LENGTHS[i] / total)
            part.backward()
            expected += part.detach()
        yield far(loss, expected)
        own = dict(self.alone.named_parameters())
        for name, p in self.compiled.named_parameters():
            gradient = whole(p.grad).to(own[name].dtype)
            yield far(gradient, own[name].grad)

    def _evaluated(self) -> float:
        if self.packing:
            batch = {n: torch.cat([self.data.alone(1)[n]] * 2) for n in NUMBERS}
            found = self.compiled.evaluate(batch)
        else:
            batch = {n: x[:, :6] for n, x in self.data.alone(2).items()}
            batch = {n: x.repeat(2, 1) for n, x in batch.items()}
            found = self.compiled.evaluate(batch, between="pad", pad=PAD)
        return far(found, self.plain(batch)["loss"].detach())


def pairs() -> list[tuple[str, ...]]:
    """Returns all pairs of two options, in the order of the choices."""
    return [each for each in itertools.combinations(NAMES, 2) if frozenset(each) not in SAME]


def rows(times: int = 2, most: int = 6) -> list[tuple[str, ...]]:
    """Returns sets of options that run together and have every pair that runs in `times` of them.

    One run of six options compares fifteen pairs. A pair beside autocast counts only if autocast is
    one of the two, as the numbers of all others are compared in float64.

    Args:
        times: sets that each pair is in, at least.
        most: options of a set.
    """
    left = {frozenset(p): times for p in pairs() if frozenset(p) not in REFUSED}
    never = {*SAME, *REFUSED}
    draw, found = random.Random(0), list[tuple[str, ...]]()

    def compared(row: Iterable[str]) -> list[frozenset[str]]:
        every = [frozenset(p) for p in itertools.combinations(row, 2)]
        return [p for p in every if "autocast" not in row or "autocast" in p]

    def gain(row: list[str], name: str) -> int:
        if any(frozenset({name, other}) in never for other in row):
            return 0
        return sum(left[p] > 0 for p in compared([*row, name]) if name in p)

    while max(left.values()) > 0:
        row = sorted(max(sorted(map(sorted, left)), key=lambda p: left[frozenset(p)]))
        while len(row) < most:
            *_, (gained, _, name) = sorted(
                (gain(row, name), draw.random(), name) for name in NAMES if name not in row
            )
            if not gained:
                break
            row.append(name)
        for p in compared(row):
            left[p] -= 1
        found.append(tuple(name for name in NAMES if name in row))
    return found


def met(names: tuple[str, ...]) -> str:
    """Returns what is wrong with options together on this rank, or the refusal; "": nothing."""
    warnings.simplefilter("ignore")
    shared = Path(tempfile.gettempdir()) / ("dcpc-pair-" + "-".join(names))
    try:
        pair = Together(names, str(shared))
        worst = max(pair.errors())
    except DcpcError as error:
        return f"refused: {error}"
    limit = LIMIT if pair.autocast is None else AUTOCAST_LIMIT
    return "" if worst <= limit else f"{worst:.1e} from the plain model"


def page() -> str:
    """Returns the page."""
    lines = [
        "# Options beside options",
        "",
        "Made by `python -m tests.cases.combinations`; `tests/test_combinations.py` runs every "
        "pair on two ranks, twice,",
        "each time beside up to four other options: loss, every gradient, and what an option adds",
        "(outputs, a loss in `evaluate`, the state of a checkpoint), within 1e-10 of the plain "
        "model in float64. Under autocast",
        "both sides round to bfloat16.",
        "",
        "`x` runs. A number says why a pair does not, or what of it is not there.",
        "",
        "| | " + " | ".join(NAMES) + " |",
        "|---" * (len(NAMES) + 1) + "|",
    ]
    refused = {**REFUSED, **SAME}
    said = [*dict.fromkeys((*refused.values(), *NOTES.values()))]
    for row in NAMES:
        cells = []
        for column in NAMES:
            key = frozenset({row, column})
            why = refused.get(key)
            note = NOTES.get(key)
            text = f"**{said.index(why) + 1}**" if why else "x"
            cells.append(" " if row == column else f"{text} ({said.index(note) + 1})" if note
                         else text)  # fmt: skip
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    lines += ["", *(f"{n}. {why}" for n, why in enumerate(said, 1)), ""]
    lines += ["| choice | asked for as |", "|---|---|"]
    lines += [f"| {c.name} | {_asked(c)} |" for c in CHOICES]
    lines += [
        "",
        "Hugging Face's Trainer takes these through `compile_options` and `loader_options`; of the "
        "ways to share parameters out `rounds`",
        'and `pipeline` (`tests/hf/test_ranks.py`). `torch.compile(backend="dcpc")` is of one '
        "rank: `group=`, `sp=`, `parameters=` and `pipeline=` share",
        "work out and are refused there by name.",
        "",
        '`batch_norm="micro"` runs beside all but `pipeline=`: a stage begins its next '
        "micro-batches before the statistics of one have",
        "come back from the last stage (`tests/test_batch_norm.py`).",
        "",
    ]
    return "\n".join(lines)


def _asked(choice: Choice) -> str:
    told = {**choice.compile, **choice.loader}
    if choice.more:
        return {
            "stream": "`DataLoader(stream, ...)`",
            "outputs": "`train_step(step, outputs=True)`",
            "evaluate": '`evaluate(batch, between="pad", pad=...)`',
            "checkpoint": "`save(...)`, `load(...)`",
        }[choice.more]
    texts = {n: repr(v) if isinstance(v, str | int | list) else "..." for n, v in told.items()}
    return "`" + ", ".join(f"{name}={text}" for name, text in texts.items()) + "`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
