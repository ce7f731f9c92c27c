"""`dcpc.compile(pipeline=)` of images beside clips, a trace each, beside the plain model."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dcpc
from tests.cases.asks import far, next_after_checkpoint, plain_step, trained
from tests.cases.clips import CLIPS, ClipBatches
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.ready import Ready

pytestmark = pytest.mark.multirank


@dataclass
class Epoch:
    """What came of an epoch on a rank.

    Attributes:
        worst: largest relative error of a loss, a gradient or the state after all steps.
        evaluated: largest relative error of an image's and a clip's loss in `evaluate`.
        traces: of each step, how many traces its micro-batches need.
        apart: backwards in two parts.
        counts: of each step the micro-batches that each rank ran.
        without: of each step the parameters of this rank that have no gradient, as in the plain
            model.
        report: of the compiled model.
    """

    worst: float
    evaluated: float
    traces: list[int]
    apart: int
    counts: list[tuple[int, ...]]
    without: list[int]
    report: str


def ready(name: str, ranks: int, stages: int, options: dict[str, Any]) -> tuple[str, Ready]:
    warnings.simplefilter("ignore")
    case = CLIPS[name]
    options = {"backend": "eager", "device": SPLITTING, **options}
    return name, Ready(case.make(), case.buckets, ranks, pipeline=stages, **options)


def epoch(rank: int, prepared: tuple[str, Ready]) -> Epoch:
    warnings.simplefilter("ignore")
    name, made = prepared
    case, compiled = CLIPS[name], made.compile()
    alone, data = case.make(), case.batches()
    loader = dcpc.DataLoader(data, compiled, samples_per_step=4, shuffle=False, window=0)
    traces, apart, counts, without, worst = [], 0, [], [], 0.0
    for step in loader:
        planned = step.plan.micro_batches
        traces.append(len({mb.bucket.sizes["frames"] == 1 for mb in planned}))
        apart += sum(text.count("I") for text in step.plan.pipelines)
        found = trained(compiled, [step], alone, data, lambda sample: 1)
        worst = max(worst, found.worst)
        counts += found.counts
        unread = {n for n, p in alone.named_parameters() if not _reads(case, step, n)}
        without.append(sum(n in unread for n, _ in compiled.named_parameters()))
    state, plain = compiled.state_dict(), alone.state_dict()
    worst = max(worst, *(far(state[n], x) for n, x in plain.items() if x.abs().max() > 0))
    evaluated = 0.0
    for sizes in (*case.images, *case.clips):
        batch = case.data({**sizes, "batch": 2}, 9)
        evaluated = max(evaluated, far(compiled.evaluate(batch), alone(**batch).detach()))
    return Epoch(worst, evaluated, traces, apart, counts, without, compiled.report())


def _reads(case: Any, step: Any, name: str) -> bool:
    """Whether some micro-batch of a step reads a parameter, as the class of the model says."""
    if case.name != "branching":
        return True
    clips = {mb.bucket["frames"] > 1 for mb in step.plan.micro_batches}
    return {"time": True in clips, "gain": False in clips}.get(name.split(".")[0], True)


def check(found: list[Epoch], name: str, verified: bool = True) -> None:
    for own in found:
        assert own.worst < 1e-10
        assert own.evaluated < 1e-10
        assert own.traces == [2, 1, 2, 1, 2], "images and clips in one step, and each alone"
        assert not verified or "NOT compared" not in own.report
        assert not verified or "trace 2: loss and every gradient" in own.report
    if name == "branching":
        every = [sum(own.without[step] for own in found) for step in range(5)]
        assert every[1] > every[3] > every[0] == 0, "one trace's parameters have no gradient"


def epochs_of(name: str, ranks: int, stages: int, options: dict[str, Any]) -> list[Epoch]:
    given = name, ranks, stages, options
    found: list[Epoch] = run_prepared(ready, epoch, ranks, *given, timeout_s=500.0)
    return found


@pytest.mark.slow
def test_two_stages_of_two_traces_have_the_plain_models_numbers():
    check(epochs_of("branching", 2, 2, {}), "branching")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "stages", "options"),
    [
        ("branching", 4, 4, {}),
        ("branching", 4, 2, {"verify": "off"}),
        ("stdit", 4, 2, {"sp": 2, "verify": "off"}),
    ],
)
def test_stages_of_two_traces_have_the_plain_models_numbers(name, ranks, stages, options):
    found = epochs_of(name, ranks, stages, options)
    check(found, name, "verify" not in options)
    assert all(own.apart > 0 for own in found), "some backwards are run in two parts"
    if ranks > stages * options.get("sp", 1):
        counts = {counts for own in found for counts in own.counts}
        assert any(len({*each}) > 1 for each in counts), "pipelines with other micro-batches"


@pytest.mark.slow
def test_stages_of_two_traces_that_inductor_compiles_have_the_plain_models_numbers():
    found = epochs_of("branching", 2, 2, {"backend": "inductor"})
    check(found, "branching")
    for rank, own in enumerate(found):
        for trace in (1, 2):
            told = f"stage {rank} as inductor compiled it, trace {trace}: loss and every gradient"
            assert told in own.report


def resumed(rank: int, folder: str) -> list[float]:
    """Returns how far from the plain model's losses and state are after each of three steps.

    The first has images alone: the optimizer has no state yet of what clips alone read.
    """
    warnings.simplefilter("ignore")
    case, found = CLIPS["branching"], []
    alone, data = case.make(), ClipBatches(case, "iiiiccccicic")
    plain = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for number, options in enumerate([{"pipeline": 2}, {}, {"pipeline": 2}]):
        compiled = dcpc.compile(case.make(), case.buckets, backend="eager", verify="off",
                                device=SPLITTING, **options)  # fmt: skip
        loader = dcpc.DataLoader(data, compiled, samples_per_step=4, shuffle=False, window=0)
        _, errors = next_after_checkpoint(
            folder, number, compiled, loader, alone, plain,
            lambda ids: plain_step(alone, data, ids, lambda sample: 1),
        )  # fmt: skip
        found += errors
    return found


@pytest.mark.slow
def test_checkpoints_go_on_where_a_trace_has_not_run_yet(tmp_path):
    for errors in run_ranks(resumed, 2, str(tmp_path), timeout_s=400.0):
        assert max(errors) < 1e-10
