"""pytorch #159942: pipelines of variable shapes."""

import random
import warnings

import pytest

import dcpc
from tests.cases.asks import PAD, TEXT, Texts, entry, far, trained
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_ranks
from tests.cases.stages import CASES

pytestmark = pytest.mark.multirank

LENGTHS = sorted(random.Random(0).sample(range(5, 60), 6))
DATA = Texts([n for i, n in enumerate(LENGTHS) for _ in range(1 + 2 * i)], silent=[4])


def errors(rank: int) -> tuple[float, float, list[tuple[int, ...]], int]:
    """Returns the worst errors of steps and of the state after them, and what was run."""
    warnings.simplefilter("ignore")
    buckets = dcpc.Buckets(TEXT, sizes=[{"seq": n, "batch": 2} for n in LENGTHS])
    tied = CASES["gpt_tied"].make
    compiled = dcpc.compile(
        tied(), buckets, pipeline=2, backend="eager", device=SPLITTING, verify="off"
    )
    tied_text = "embedding.weight is on stages 0 and 1; its gradient is the sum of theirs"
    assert tied_text in compiled.report()
    loader = dcpc.DataLoader(DATA, compiled, tokens_per_step=300, pad=PAD, weight="labels")
    steps, alone, shapes = list(loader), tied(), set()
    for step in steps:
        shapes |= {tuple(mb.inputs["labels"].shape) for mb in step.micro_batches}
    found = trained(compiled, steps, alone, DATA)
    assert sorted(found.samples) == list(range(len(DATA)))
    state, plain = compiled.state_dict(), alone.state_dict()
    assert list(state) == list(plain)
    worst = max(far(state[n], plain[n]) for n in plain)
    return found.worst, worst, found.counts, len(shapes)


@pytest.mark.slow
def test_a_pipeline_takes_micro_batches_of_any_lengths():
    for worst, state, counts, shapes in run_ranks(errors, 2, timeout_s=120):
        assert worst < 1e-10
        assert state < 1e-10
        assert len({*counts}) > 1, "another number of micro-batches from step to step"
        said = f"{len(counts)} steps, {sum(n for n, _ in counts)} micro-batches of {shapes} shapes"
        assert said in entry(__file__), said
