"""Runs by seed: a setup, a dataset, options of the loader, and what happens on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tests.fuzz.runs.models import IGNORED, OF_SAMPLES, Setup

MODES = ("auto", "auto", "inter", "intra")
CHANGES = ("reload", "gain", "eval", "freeze", "hook", "replace")
PER_SETUP = 8  # seeds that share a setup, as compiling takes ten times as long as a run
PLAIN = Setup()


@dataclass(frozen=True)
class Options:
    """Options of `dcpc.DataLoader` by its names; what a resumed loader may have otherwise."""

    tokens_per_step: int = 16
    mode: str = "auto"
    min_grad_accumulation_steps: int = 1
    max_grad_accumulation_steps: int | None = None
    window: int = 256
    pad_to_longer: bool = False
    packing: bool | str = False
    lookahead: int = 0


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        setup: model and compile.
        world: ranks.
        lengths: of each sample.
        same: samples so many places apart are equal; 0: none are.
        empty: share of samples all of whose labels do not count.
        declared: the dataset has `dims`.
        strided: samples are views with strides.
        options: of the loader.
        shuffle, seed: of the loader.
        epochs: that are trained.
        stop: steps after which the loader is made anew, with `then`, and given the state; 0: never.
        stray: steps yielded, before all else, by an iteration that is left: it starts afresh.
        optimizer: "sgd" or "adamw".
        every: train steps an optimizer step.
        clip: largest norm; None: no limit.
        outputs: "gathered" or "sharded": steps return logits, which are compared; "": they do not.
        by_hand: calls and `reduce_gradients` instead of `train_step`.
        evaluate: a call without gradients between steps.
        change: what is done to the model on the way: "reload" (`load_state_dict`), "gain" (another
            value of a buffer), "eval", "freeze", "hook" (on a parameter), "replace" (a parameter).
        at: steps before that.
    """

    setup: Setup = PLAIN
    world: int = 1
    lengths: tuple[tuple[int, ...], ...] = ((8,), (3,))
    same: int = 0
    empty: float = 0.0
    declared: bool = False
    strided: bool = False
    options: Options = Options()
    shuffle: bool = False
    seed: int = 0
    epochs: int = 1
    stop: int = 0
    then: Options = Options()
    stray: int = 0
    optimizer: str = "sgd"
    every: int = 1
    clip: float | None = None
    outputs: str = ""
    by_hand: bool = False
    evaluate: bool = False
    change: str = ""
    at: int = 1

    def fits(self, i: int) -> bool:
        """Whether a bucket holds a sample."""
        every = (size for size, _ in self.setup.sizes)
        return any(all(a <= b for a, b in zip(self.lengths[i], s, strict=True)) for s in every)

    def text(self) -> str:
        """Returns Python that makes it: what differs from the plainest run."""
        return _text(self)


def _text(x: object) -> str:
    if not isinstance(x, Run | Setup | Options):
        return repr(x)
    plain = type(x)()
    told = ((f.name, getattr(x, f.name), getattr(plain, f.name)) for f in fields(x))
    given = ", ".join(f"{n}={_text(value)}" for n, value, default in told if value != default)
    return f"{type(x).__name__}({given})"


class Data:
    """The dataset of a run; a sample is made from its number alone."""

    def __init__(self, run: Run) -> None:
        self.run, self.setup = run, run.setup
        made = run.setup.made if run.options.packing else set()
        self.names = [n for n in run.setup.inputs if n not in made]

    def __len__(self) -> int:
        return len(self.run.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        whole = self.whole(i)
        found = {n: whole[n] for n in self.names}
        if self.run.strided:
            found = {n: torch.stack([x, x], -1)[..., 0] for n, x in found.items()}
        return found

    def whole(self, i: int) -> dict[str, Tensor]:
        """Returns a sample with all that the model takes, alone."""
        like = i % self.run.same if self.run.same else i
        empty = random.Random(like).random() < self.run.empty
        return sample(self.setup, self.run.lengths[i], like, empty)


class Declared(Data):
    """The same with the lengths known beforehand."""

    def dims(self, i: int) -> dict[str, int]:
        return dict(zip(self.setup.names, self.run.lengths[i], strict=True))


def sample(setup: Setup, size: Sequence[int], seed: int, empty: bool = False) -> dict[str, Tensor]:
    """Returns a sample of a size; `empty`: none of its labels counts."""
    g = torch.Generator().manual_seed(seed)
    labels, ids = torch.randint(setup.classes - 1, (2, *size), generator=g)
    skipped = torch.rand(size, generator=g) < (1.1 if empty else 0.3)
    labels[skipped] = IGNORED[setup.loss]
    weights = torch.rand(size, generator=g, dtype=torch.float64)
    weights[skipped] = 0.0
    if setup.loss in ("weights", "target"):
        labels = ids.clone()
    mask = torch.rand(size, generator=g) < 0.8
    mask.view(-1)[0] = True
    every = {
        "input_ids": ids, "labels": labels.to(torch.uint8) if setup.loss == "bytes" else labels,
        "types": torch.randint(3, tuple(size), generator=g).int(), "mask": mask,
        "x": torch.randn((size[0] * 2, 2), generator=g, dtype=torch.float64),
        "scale": torch.linspace(0.5, 2.0, 6, dtype=torch.float64), "weights": weights,
        "position_ids": torch.arange(size[-1]).expand(tuple(size)).clone(),
        "segment_ids": torch.ones(tuple(size), dtype=torch.int64),
        "target": torch.randn((), generator=g, dtype=torch.float64),
    }  # fmt: skip
    return {n: every[n] for n in setup.inputs}


def setup_of(seed: int, world: int = 1) -> Setup:
    """Returns the setup of a seed."""
    rng = random.Random(f"setup {seed}")
    pick, flag = rng.choice, lambda share: rng.random() < share
    body = pick(("linear", "linear", "causal", "masked", "documents", "restarts"))
    grid = body in ("linear", "masked") and flag(0.2)
    losses = [n for n in IGNORED if not (grid and n == "shifted")]
    loss = pick(losses)
    # What is left of few tokens that are shifted is one, which torch.export has another graph for.
    least = 4 * (loss == "shifted")
    sizes = rng.sample([n for n in (1, 2, 3, 4, 5, 6, 8, 11, 16) if n > least], rng.randint(1, 3))
    wide = [(n, pick((2, 3, 5))) if grid else (n,) for n in sizes]
    limit = pick((0, 0, 1, 2, 3))
    packs = body in ("documents", "restarts")
    optional = ["types", *([] if packs else ["scale"]), *([] if packs or grid else ["x"])]
    picked = [n for n in optional if flag(0.25)]
    if body == "linear" and not grid and flag(0.4):
        picked.append("position_ids")
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return Setup(
        seed=seed, body=body, loss=loss, sizes=tuple((w, limit) for w in wide),
        fields=tuple(picked), head=pick(("own", "own", "tied", "tied", "frozen", "late")),
        unused=flag(0.3), output=pick(("tensor", "mapping", "tuple")),
        sp=pick(("auto", "auto", "auto", *divisors)), recompute=pick(("auto", "none", "all")),
        attention=pick(("auto", "auto", "ring", "heads")), splitting=flag(0.6),
        comm=pick((1, 300, 2000, 25_000_000)),
        parameters=pick(("whole", "whole", "step", "pull", "rounds", "rounds")),
    )  # fmt: skip


def options(rng: random.Random, packing: bool | str, modes: Sequence[str] = MODES) -> Options:
    """Returns options of a loader."""
    pick, flag = rng.choice, lambda share: rng.random() < share
    mode = pick(modes)
    bounded = mode != "intra" and flag(0.4)
    least = pick((1, 2, 3)) if bounded else 1
    return Options(
        tokens_per_step=pick((1, 8, 16, 30, 60, 500)), mode=mode, packing=packing,
        min_grad_accumulation_steps=least, lookahead=pick((0, 0, 1, 3)),
        max_grad_accumulation_steps=least + pick((0, 1, 3)) if bounded and flag(0.5) else None,
        window=pick((0, 1, 2, 5, 256)), pad_to_longer=mode == "auto" and flag(0.3),
    )  # fmt: skip


def generate(seed: int, world: int = 1) -> Run:
    """Returns the run of a seed; neighbouring seeds share a setup."""
    rng = random.Random(f"run {seed}")
    pick, flag = rng.choice, lambda share: rng.random() < share
    setup = setup_of(seed // PER_SETUP, world)
    count = pick((1, 2, 5, 9, 14, 20))
    exact, long = flag(0.15), flag(0.15)
    known = [size for size, _ in setup.sizes]
    lengths = []
    for _ in range(count):
        size = pick(known)
        own = size if exact or flag(0.2) else tuple(rng.randint(1, n) for n in size)
        lengths.append(tuple(n + 9 for n in own) if long and flag(0.2) else own)
    packing = setup.packing if setup.loss not in OF_SAMPLES and flag(0.7) else False
    first = options(rng, packing)
    by_hand = first.mode != "auto" and flag(0.3)
    by_hand = by_hand and (world == 1 or setup.parameters == "whole")
    # By hand a bucket is called with its own setting, which "auto" does not keep to.
    then = options(rng, packing, (first.mode,) if by_hand else MODES)
    return Run(
        setup=setup, world=world, lengths=tuple(lengths), same=pick((0, 0, 3)),
        empty=pick((0.0, 0.0, 0.3, 0.6)), declared=flag(0.3), strided=flag(0.2), options=first,
        shuffle=flag(0.5), seed=rng.randint(0, 99), epochs=pick((1, 1, 2)),
        stop=pick((0, 1, 2, 3)), then=then, stray=pick((0, 0, 1)),
        optimizer=pick(("sgd", "sgd", "adamw")), every=1 if by_hand else pick((1, 1, 2)),
        clip=pick((None, None, 0.1, 1.0)), by_hand=by_hand, evaluate=flag(0.4),
        change=pick(CHANGES) if flag(0.25) else "",
        at=rng.randint(1, 4),
    )  # fmt: skip
