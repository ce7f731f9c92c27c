"""One train step beside the plain model's, on the same parameters and the same samples."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dcpc import CompiledModel
from dcpc.runtime.data.loader import Dataset
from dcpc.runtime.data.steps import Step
from models.gpt import GPT


def compared(
    compiled: CompiledModel,
    step: Step,
    data: Dataset,
    samples: Sequence[int] = (),
    plain: GPT | None = None,
) -> float:
    """Runs a step and returns how far loss and gradients are from the plain model's, relative.

    Args:
        compiled: of a `models.gpt.GPT`, all of whose labels that are not -100 count alike.
        step: of `data`, its samples in no rows.
        data: samples of ids and labels.
        samples: that the step must have; none: those of its plan.
        plain: the plain model, where the compiled one keeps its parameters elsewhere.
    """
    model = plain or compiled.model
    assert isinstance(model, GPT)
    alone = copy.deepcopy(model)
    compiled.zero_grad()
    result = compiled.train_step(step)
    alone.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in samples or sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids):
        x = data[i]
        logits = alone.logits(x["input_ids"][None])[0]
        total = total + F.cross_entropy(logits, x["labels"], reduction="sum")
        count += int((x["labels"] != -100).sum())
    (total / count).backward()
    errors = [abs(float(result.loss) * count / float(total.detach()) - 1)]
    for (name, p), (_, own) in zip(
        alone.named_parameters(), compiled.named_parameters(), strict=True
    ):
        assert p.grad is not None, name
        grad: Any = own.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        errors.append(float((whole - p.grad).norm() / p.grad.norm()))
    return max(errors)
