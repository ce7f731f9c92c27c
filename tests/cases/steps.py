"""One train step beside the plain model's, on the same parameters and the same samples."""

import copy
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from dcpc import CompiledModel
from dcpc.runtime.data.loader import Dataset
from dcpc.runtime.data.steps import Step
from models.gpt import GPT
from tests.cases.exactness import gradient_error


def compared(
    compiled: CompiledModel, step: Step, data: Dataset, samples: Sequence[int] = ()
) -> float:
    """Runs a step and returns how far loss and gradients are from the plain model's, relative.

    Args:
        compiled: of a `models.gpt.GPT`, all of whose labels that are not -100 count alike.
        step: of `data`, its samples in no rows.
        data: samples of ids and labels.
        samples: that the step must have; none: those of its plan.
    """
    model = compiled.model
    assert isinstance(model, GPT)
    alone = copy.deepcopy(model)
    model.zero_grad()
    result = compiled.train_step(step)
    alone.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in samples or sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids):
        x = data[i]
        logits = alone.logits(x["input_ids"][None])[0]
        total = total + F.cross_entropy(logits, x["labels"], reduction="sum")
        count += int((x["labels"] != -100).sum())
    (total / count).backward()
    gradients = {n: p.grad for n, p in alone.named_parameters()}
    loss = float(total.detach()) / count
    return max(abs(float(result.loss) - loss) / loss, gradient_error(model, gradients))
