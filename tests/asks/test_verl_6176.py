"""verl #6176, EasyR1 #11012: ranks with unequal numbers of micro-batches, parameters sharded."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.errors import GroupError
from tests.cases.asks import PAD, TEXT, VOCABULARY, Texts, entry, gpt, ran, trained, whole
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank

MODES = ("whole", "step", "pull", "rounds")
# One long sequence beside five short ones; one each; one for both ranks. Of sample 2 no label
# counts. A sample is a micro-batch.
DATA = Texts([95, 20, 20, 20, 20, 19, 11, 95, 95], silent=[2])
COUNTS = [(1, 5), (1, 1), (1, 0)]
BUCKETS = dcpc.Buckets(TEXT, sizes=[{"seq": n, "batch": 1} for n in (20, 95)])


def compiled(model: nn.Module, mode: str) -> tuple[dcpc.CompiledModel, dcpc.DataLoader]:
    warnings.simplefilter("ignore")
    made = dcpc.compile(
        model, BUCKETS, parameters=mode, backend="eager", sp=1, device=SPLITTING, verify="off"
    )
    loader = dcpc.DataLoader(
        DATA, made, tokens_per_step=195, pad=PAD, weight="labels", shuffle=False, window=0
    )
    return made, loader


def errors(rank: int) -> dict[str, tuple[float, list[tuple[int, ...]], int]]:
    """Of each mode the largest error, the micro-batches of each rank, and forwards run here."""
    found = {}
    for mode in MODES:
        model, loader = compiled(gpt(), mode)
        steps = trained(model, loader, gpt(), DATA)
        assert sorted(steps.samples) == list(range(len(DATA)))
        found[mode] = (steps.worst, steps.counts, sum(model.stats().calls.values()))
    return found


@pytest.mark.slow
def test_ranks_run_unequal_numbers_of_micro_batches():
    ranks = run_ranks(errors, 2, timeout_s=120)
    for mode in MODES:
        for worst, counts, _ in (found[mode] for found in ranks):
            assert worst < 1e-10
            assert counts == COUNTS
        forwards = sum(found[mode][2] for found in ranks)
        filled_up = 2 * sum(map(max, COUNTS))
        assert forwards == len(DATA) - len(DATA.silent), "no dummy is run, nor what does not count"
        said = f"{forwards} forwards, {filled_up} if each rank ran as many as the other"
        assert said in entry(__file__)


class Dropping(nn.Module):
    """A GPT with dropout before its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.dropout = gpt(), nn.Dropout(0.3)
        self.last = nn.Linear(VOCABULARY, VOCABULARY).double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.last(self.dropout(self.gpt.logits(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def with_dropout(rank: int) -> dict[str, list[tuple[float, ...]]]:
    """Of each mode the loss and the gradients' norm of each step, its micro-batches too."""
    found = {}
    for mode in MODES:
        torch.manual_seed(0)
        model, loader = compiled(Dropping(), mode)
        found[mode] = []
        for step in loader:
            loss = float(model.train_step(step).loss)
            gradients = [whole(p.grad) for p in model.parameters()]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            found[mode].append((loss, norm, *ran(step)))
            for p in model.parameters():
                p.grad = None
    return found


@pytest.mark.slow
def test_with_dropout_sharded_parameters_train_as_whole_ones():
    for found in run_ranks(with_dropout, 2, timeout_s=120):
        assert [step[2:] for step in found["whole"]] == COUNTS
        for mode in MODES:
            for got, expected in zip(found[mode], found["whole"], strict=True):
                assert got == pytest.approx(expected, rel=1e-12), mode


def unequal_calls(rank: int) -> str:
    """Rank 0 evaluates two batches, rank 1 one; then both would train."""
    model, loader = compiled(gpt(), "rounds")
    step, ids = next(iter(loader)), torch.arange(20)[None]
    try:
        with torch.no_grad():
            for _ in range(2 - rank):
                model(input_ids=ids, labels=ids)
        model.train_step(step)
    except GroupError as error:
        return str(error)
    return "no error"


def test_unequal_calls_by_hand_are_an_error_on_both_ranks():
    for text in run_ranks(unequal_calls, 2, timeout_s=60):
        assert "rank 0: call of every rank number 2" in text
        assert "rank 1: step 0 of epoch 0" in text
