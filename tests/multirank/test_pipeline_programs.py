"""A model in stages beside the plain one in all its programs: eval(), outputs, without padding."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import dcpc
from tests.cases import language_models
from tests.cases.asks import Texts, far, labels_that_count, trained
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank

INPUTS = dict.fromkeys(("input_ids", "attention_mask", "labels"), "int64[batch, seq]")
PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100}


class Masked(Texts):
    """Texts with a mask of their tokens; the last three of each are padding of its own."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        sample = super().__getitem__(i)
        sample["labels"][-3:] = PAD["labels"]
        mask = torch.ones_like(sample["input_ids"])
        mask[-3:] = PAD["attention_mask"]
        return {**sample, "attention_mask": mask}


DATA = Masked([48, 10, 16, 37, 24, 16])


def bert(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **drops)).double()


def made(dropout: float, **options: Any) -> dcpc.CompiledModel:
    buckets = dcpc.Buckets(INPUTS, sizes=[{"seq": n, "batch": 2} for n in (16, 48)])
    return dcpc.compile(bert(dropout), buckets, pipeline=2, backend="eager", device=SPLITTING,
                        **options)  # fmt: skip


def errors(found: Any, plain: Any) -> list[float]:
    """Returns how far a loss and all outputs are from those of the plain model."""
    loss, outputs = found
    pairs = [(loss, plain.loss), (outputs.loss, plain.loss), (outputs.logits, plain.logits)]
    return [far(got, expected.detach()) for got, expected in pairs]


def programs(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    language_models.in_float64()
    momentum = partial(torch.optim.SGD, momentum=0.9)
    compiled, alone = made(0.0, unpad=True, optimizer=momentum, attention="heads"), bert(0.0)
    loader = dcpc.DataLoader(DATA, compiled, tokens_per_step=150, pad=PAD, weight="labels")
    found = trained(compiled, loader, alone, DATA, labels_that_count)
    said = {"steps": found.worst, "unpadded": compiled.stats().unpadded}
    worst = []
    for step in loader:
        result = compiled.train_step(step, outputs=True)
        for each in result.outputs:
            plain = alone(**each.micro_batch.inputs)
            worst += errors((each.loss, each.outputs), plain)
    said["outputs"], said["runs"] = max(worst), len(result.outputs)
    with pytest.raises(dcpc.GroupError, match="outputs of graphs"):  # one rank asks for them
        compiled.train_step(step, outputs=not rank)
    compiled, alone = made(0.1, verify="auto"), bert(0.1).eval()
    batch = {n: torch.stack([DATA[i][n][:16] for i in (0, 3)]) for n in INPUTS}
    between = {n: torch.stack([DATA[i][n][:20] for i in (0, 3)]) for n in INPUTS}
    said["evaluate"] = far(compiled.evaluate(batch), alone(**batch).loss.detach())
    said["both"] = max(errors(compiled.evaluate(batch, outputs=True), alone(**batch)))
    plain = alone(**between)
    said["pad"] = far(compiled.evaluate(between, between="pad", pad=PAD), plain.loss.detach())
    own = compiled.evaluate(between, between="compile", outputs=True)
    said["compile"] = max(errors(own, plain))
    with torch.no_grad():
        compiled.eval()
        said["call"] = max(errors(compiled(**batch, outputs="gathered"), alone(**batch)))
    return said


@pytest.mark.slow
def test_all_programs_of_a_model_in_stages_have_the_plain_models_numbers():
    for said in run_ranks(programs, 2, timeout_s=240.0):
        assert said.pop("unpadded") > 0, "micro-batches ran without padding"
        assert said.pop("runs") > 0, "every rank has outputs"
        assert max(said.values()) < 1e-10, said
