"""accelerate #3817, Megatron-LM #7186: the exact scale of the loss, without code of the user's."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import dcpc
from dcpc.errors import DataError
from tests.cases.asks import PAD, TEXT, Texts, entry, far, gpt, trained
from tests.cases.exactness import SPLITTING, compiled_error
from tests.cases.launch import run_ranks
from tests.cases.packed_models import Sequences, transformers_model

pytestmark = pytest.mark.multirank

BUCKETS = dcpc.Buckets(TEXT, sizes=[{"seq": n} for n in (9, 22)])


def compiled(model: nn.Module, sp: int | str = "auto") -> dcpc.CompiledModel:
    warnings.simplefilter("ignore")
    return dcpc.compile(model, BUCKETS, backend="eager", sp=sp, device=SPLITTING, verify="off")


def answers(rank: int) -> dict[str, float]:
    """Two ranks share sequences, and one of them has no label, or one alone, or all."""
    found = {}
    for name, make in (("gpt", gpt), ("llama", lambda: transformers_model("llama"))):
        model = make()
        shared = compiled(model, sp=2)
        ids = Texts([22])[0]["input_ids"][None]
        for where in (slice(1, 2), slice(21, 22), slice(8, 14), slice(1, 22)):
            labels = torch.full_like(ids, -100)
            labels[:, where] = ids[:, where]
            inputs = {"input_ids": ids, "labels": labels}
            model.zero_grad()
            found[f"{name}, labels {where}"] = compiled_error(shared, model, inputs)
    return found


@pytest.mark.slow
def test_labels_on_one_ranks_part_of_a_sequence_alone():
    for found in run_ranks(answers, 2, timeout_s=120):
        assert not {k: e for k, e in found.items() if not e < 1e-10}


class Prompts(Sequences):
    """The first labels of each sequence do not count: of some all but the last, of one all."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        sample = super().__getitem__(i)
        n = self.lengths[i]
        sample["labels"][: (0, n - 1, n // 2)[i % 3]] = -100
        if i == 3:
            sample["labels"][:] = -100
        return sample


def shifted(sample: dict[str, Tensor]) -> int:
    return int((sample["labels"][1:] != -100).sum())


def steps(rank: int) -> dict[str, tuple[float, list[tuple[int, ...]]]]:
    """A step mixes degrees, ranks and micro-batches with unequal numbers of labels."""
    data, found = Prompts([22, 9, 5, 7, 22, 3, 9, 16, 8, 22, 4, 6]), {}
    for name, weight, count in (
        ("gpt", "labels", lambda s: int((s["labels"] != -100).sum())),
        ("llama", dcpc.CountLabels("labels", shift=1), shifted),
    ):
        model = gpt() if name == "gpt" else transformers_model("llama")
        plain = copy.deepcopy(model)
        shared = compiled(model)
        loader = dcpc.DataLoader(  # no thread: the plain llama changes torch's default dtype
            data, shared, tokens_per_step=70, pad=PAD, weight=weight, lookahead=0
        )
        got = trained(shared, loader, plain, data, count)
        found[name] = (got.worst, got.counts)
    return found


@pytest.mark.slow
def test_a_step_is_the_mean_over_all_its_labels():
    for found in run_ranks(steps, 2, timeout_s=120):
        for name, (worst, counts) in found.items():
            assert worst < 1e-10, name
            assert max(map(max, counts)) > 1, "micro-batches are accumulated"


def means_of_means(rank: int) -> float:
    """What the mean of the ranks' own means is off by, for two samples that both ranks have."""
    data = Prompts([22, 22])
    whole, halves = gpt(), gpt()
    every = [data[i] for i in range(2)]
    counts = [int((x["labels"] != -100).sum()) for x in every]
    for model, shares in ((whole, [n / sum(counts) for n in counts]), (halves, [0.5, 0.5])):
        for x, share in zip(every, shares, strict=True):
            (model(x["input_ids"][None], x["labels"][None]) * share).backward()
    pairs = zip(halves.parameters(), whole.parameters(), strict=True)
    return max(far(p.grad, q.grad) for p, q in pairs)


def test_what_the_mean_of_means_would_be_off_by():
    assert f"off by {means_of_means(0):.0%}" in entry(__file__)


def silent(rank: int) -> str:
    data = Texts([9, 9], silent=[0, 1])
    shared = compiled(gpt())
    loader = dcpc.DataLoader(data, shared, tokens_per_step=18, pad=PAD, weight="labels")
    with pytest.raises(DataError) as raised:
        shared.train_step(next(iter(loader)))
    return str(raised.value)


def test_a_step_without_any_label_is_an_error_on_every_rank():
    for text in run_ranks(silent, 2, timeout_s=60):
        assert "total weight of 0.0" in text
