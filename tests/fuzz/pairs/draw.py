"""Pairs of options of `dcpc.compile`, `DataLoader` and `train_step`, and a run that has both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.runs.draw import Options, Run
from tests.fuzz.runs.models import IGNORED, Setup

WORLD = 2
PER_SETUP = 2  # seeds that share a pair and a compile
Change = Callable[[random.Random, Run], Run]


def _setup(**fields: object) -> Change:
    return lambda rng, run: replace(run, setup=replace(run.setup, **fields))  # type: ignore[arg-type]


def _chosen(name: str, *values: object) -> Change:
    return lambda rng, run: _setup(**{name: rng.choice(values)})(rng, run)


def _outputs(rng: random.Random, run: Run) -> Run:
    return replace(_setup(output="logits")(rng, run), outputs=rng.choice(("gathered", "sharded")))


def _packing(rng: random.Random, run: Run) -> Run:
    body = rng.choice(("documents", "restarts"))
    setup = replace(run.setup, body=body, loss=rng.choice(("labels", "shifted", "minus")))
    return replace(run, setup=setup, options=replace(run.options, packing=setup.packing))


def _unpad(rng: random.Random, run: Run) -> Run:
    body = run.setup.body if run.options.packing else "masked"
    return _setup(unpad=rng.choice((True, True, "auto")), body=body)(rng, run)


def _by_hand(rng: random.Random, run: Run) -> Run:
    options = replace(run.options, mode=rng.choice(("inter", "intra")))
    return replace(run, by_hand=True, options=options, every=1)


# Option -> what it changes of a run, in this order.
OPTIONS: dict[str, Change] = {
    "packing": _packing,
    "pipeline": _setup(pipeline=2),
    "rounds": _setup(parameters="rounds"),
    "step": _setup(parameters="step"),
    "pull": _setup(parameters="pull"),
    "unpad": _unpad,
    "tile": lambda rng, run: _setup(tile=rng.choice((1, 3, 7, 16)), classes=96)(rng, run),
    "outputs": _outputs,
    "autocast": _setup(autocast=True),
    "inductor": _setup(backend="inductor"),
    "sp": _setup(sp=2),
    "recompute": _setup(recompute="all"),
    "attention": _chosen("attention", "ring", "heads"),
    "by hand": _by_hand,
    "mode": lambda rng, run: replace(
        run, options=replace(run.options, mode=rng.choice(("inter", "intra")))
    ),
}
_SAME = ({"rounds", "step", "pull"}, {"by hand", "mode"})  # of which a run has one
PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if not any(set(pair) <= same for same in _SAME)
]
_STAGES = r"pipeline=2.*: got "
# Pair -> what a refusal of it says; a pair that is not here has to run.
REFUSED: dict[tuple[str, str], str] = {
    ("pipeline", "rounds"): _STAGES + "parameters='rounds'",
    ("pipeline", "step"): _STAGES + "parameters='step'",
    ("pipeline", "pull"): _STAGES + "parameters='pull'",
    ("pipeline", "unpad"): _STAGES + "unpad=",
    ("pipeline", "outputs"): "outputs=.*pipeline=|pipeline=.*outputs",
    ("pipeline", "sp"): "pipeline=2, sp=2: got 2 ranks",
    ("pipeline", "attention"): _STAGES + "attention=",
    ("pipeline", "by hand"): "pipeline=",
    ("pipeline", "mode"): "pipeline=",
    ("rounds", "by hand"): "parameters=",
    ("step", "by hand"): "parameters=",
    ("pull", "by hand"): "parameters=",
    ("pull", "inductor"): "pull.*eager|eager.*pull",
    ("outputs", "by hand"): "",  # never: a run by hand asks for none
}


def pair_of(number: int) -> tuple[str, str]:
    """Returns the pair of a number of a setup: refused ones and Inductor's seldom."""
    rng = random.Random(f"pair {number}")
    weights = [0.1 if p in REFUSED else 0.15 if "inductor" in p else 1.0 for p in PAIRS]
    return rng.choices(PAIRS, weights)[0]


def generate(seed: int) -> tuple[tuple[str, str], Run]:
    """Returns the pair and the run of a seed; `PER_SETUP` neighbouring seeds share a setup."""
    number = seed // PER_SETUP
    pair = pair_of(number)
    run = run_of(pair, random.Random(f"setup {number}"))
    rng = random.Random(f"run {seed}")
    longest = max(size for (size,), _ in run.setup.sizes)
    lengths = [(rng.randint(1, longest),) for _ in range(rng.choice((3, 5, 8)))]
    mode = run.options.mode
    return pair, replace(
        run, lengths=tuple(lengths), shuffle=rng.random() < 0.5, seed=rng.randint(0, 99),
        empty=rng.choice((0.0, 0.0, 0.4)), strided=rng.random() < 0.3,
        clip=rng.choice((None, 0.1)), evaluate=rng.random() < 0.3,
        options=replace(
            run.options, tokens_per_step=rng.choice((16, 30, 60)), lookahead=rng.choice((0, 2)),
            pad_to_longer=mode == "auto" and not run.setup.pipeline and rng.random() < 0.3,
        ),
    )  # fmt: skip


def run_of(pair: tuple[str, str], rng: random.Random) -> Run:
    """Returns a run with a model and both options of a pair, and nothing else of `OPTIONS`."""
    body = rng.choice(("linear", "causal", "causal", "masked", "looped"))
    low = "autocast" in pair
    loss = rng.choice([n for n in IGNORED if not (low and n in ("weights", "target"))])
    sizes = rng.sample([5, 6, 8, 11, 16], 1 if "inductor" in pair else 2)
    fields = [n for n in ("types", "x", "position_ids") if rng.random() < 0.2]
    if low or "packing" in pair:
        fields = [n for n in fields if n == "types"]
    setup = Setup(
        seed=rng.randint(0, 99), body=body, loss=loss, unused=rng.random() < 0.3,
        sizes=tuple(((n,), rng.choice((0, 1, 2))) for n in sorted(sizes)), fields=tuple(fields),
        head=rng.choice(("own", "own", "tied", "frozen")), splitting=rng.random() < 0.7,
        comm=rng.choice((300, 25_000_000)), output=rng.choice(("tensor", "mapping")),
    )  # fmt: skip
    run = Run(setup=setup, world=WORLD, options=Options())
    for name, change in OPTIONS.items():
        if name in pair:
            run = change(rng, run)
    return run
