"""Traced models in stages on gloo ranks against the plain model: loss and gradients, float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dcpc.buckets import Buckets
from dcpc.compiled.pipeline import chain_of, stages_of
from dcpc.plan.traced import traced
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.pipeline.executor import PipelineBatch
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.step import pipeline_step
from dcpc.symbolic_profile import find
from models.gpt import GPT, GPTConfig
from tests.fuzz.pipelines import drawn_schedule

VOCABULARY, TIMEOUT_S = 64, 300.0
# (stages, ranks)
WORLDS, QUICK_WORLDS = ((2, 2), (4, 4), (2, 4)), ((2, 2),)
QUICK = ("gpt, tied", "t5")

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ExactModel:
    """A model, lengths of its trace, and lengths to run.

    Attributes:
        make: the module; float64 is set outside.
        source: name of the dim of input_ids.
        target: name of the dim of labels.
    """

    make: Callable[[], nn.Module]
    source: str = "seq"
    target: str = "seq"

    @property
    def inputs(self) -> dict[str, str]:
        return {
            "input_ids": f"int64[batch, {self.source}]",
            "labels": f"int64[batch, {self.target}]",
        }

    def sizes(self, step: int, number: int) -> dict[str, int]:
        """Of a micro-batch: other shapes in each step."""
        long = (9, 16, 31, 48)[(step + number) % 4]
        found = {"batch": 1 + (step + 2 * number) % 3, self.source: long}
        return found | ({} if self.target == self.source else {self.target: 1 + long // 2})

    def data(self, sizes: Sizes, seed: int) -> dict[str, Tensor]:
        """Random tokens; some labels are ignored."""
        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (sizes["batch"], sizes[self.source]), generator=drawn)
        shape = (sizes["batch"], sizes[self.target])
        labels = torch.randint(VOCABULARY, shape, generator=drawn)
        labels[torch.rand(shape, generator=drawn) < 0.3] = -100
        labels[:, -1] = 1
        return {"input_ids": ids, "labels": labels}


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, dim=32, n_layers=4, n_heads=4, tie_embeddings=True))


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
                    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0,
                   embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                 dropout_rate=0.0, relative_attention_num_buckets=8, decoder_start_token_id=0,
                 relative_attention_max_distance=16)
    )  # fmt: skip


MODELS = {
    "gpt, tied": ExactModel(_gpt),
    "t5": ExactModel(_t5, "source", "target"),
    "llama": ExactModel(_llama),
    "gpt2": ExactModel(_gpt2),
}


def run_exact(quick: bool) -> list[tuple[str, int, int, int, float]]:
    """Returns (model, stages, ranks, steps run, worst relative error) of each case."""
    found = []
    for name in QUICK if quick else MODELS:
        model, stages_by = _cut(MODELS[name], quick)
        for stages, ranks in QUICK_WORLDS if quick else WORLDS:
            errors = run_ranks(
                _on_rank, ranks, model, stages_by[stages], MODELS[name], stages,
                3 if quick else 6, timeout_s=TIMEOUT_S, fork=True,
            )  # fmt: skip
            worst = max(error for each in errors for step in each for error in step)
            found.append((name, stages, ranks, len(errors[0]), worst))
    return found


def _cut(case: ExactModel, quick: bool) -> tuple[nn.Module, dict[int, tuple[Any, ...]]]:
    """Returns the model, and its stages for each number of them."""
    torch.manual_seed(0)
    Tensor.float = Tensor.double  # type: ignore[method-assign,assignment]  # losses cast to float32
    model = case.make().double()
    sizes = [{n: v for n, v in case.sizes(s, 0).items() if n != "batch"} for s in (1, 3)]
    whole = traced(model, Buckets(inputs=case.inputs, sizes=sizes), find("cpu"), "eager")
    chain = chain_of(whole.program, whole.program.dims({"batch": 2, **sizes[-1]}))
    found = {}
    for stages in dict.fromkeys(s for s, _ in (QUICK_WORLDS if quick else WORLDS)):
        blocks = len(chain.borders) - 1
        ends = [round(j * blocks / stages) for j in range(stages + 1)]
        found[stages] = stages_of(whole, model, chain, ends)
    return model, found


def _on_rank(
    rank: int, model: nn.Module, stages: Sequence[Any], case: ExactModel, count: int, steps: int
) -> list[list[float]]:
    """Returns the relative errors of each step: of the loss, and of this stage's gradients."""
    groups = Groups.default()
    stage = stages[rank % count]
    grid = PipelineGrid.make(groups, count, stage.parameters)
    found = []
    for step in range(steps):
        each = 1 + (step + 1) % 4
        sizes = [case.sizes(step, n) for n in range(each * grid.replicas)]
        data = [case.data(s, 100 * step + n) for n, s in enumerate(sizes)]
        weights = [float((x["labels"] != -100).sum()) for x in data]
        batches = [PipelineBatch(*row) for row in zip(data, sizes, weights, strict=True)]
        own = batches[grid.replica * each :][:each]
        schedule = drawn_schedule(step, count, each, split=False)
        model.zero_grad()
        result = pipeline_step([stage], own, schedule, grid, model.named_parameters())
        mine = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        loss, wanted = _plain(model, data, weights)
        errors = [abs(result.loss - loss) / abs(loss)]
        errors += [float((g - wanted[n]).norm() / wanted[n].norm()) for n, g in mine.items()]
        found.append(errors)
    return found


def _plain(
    model: nn.Module, data: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    total = 0.0
    for inputs, weight in zip(data, weights, strict=True):
        found = model(**inputs)
        loss = (found if isinstance(found, Tensor) else found.loss) * (weight / sum(weights))
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
