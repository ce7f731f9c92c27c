"""Models for pipelines, a driver that runs their stages in turn, and the plain model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from dcpc.buckets import Buckets
from dcpc.compiled.pipeline import CallChain, ModelStage, ProgramStage, chain_of, stages_of
from dcpc.plan.traced import Traced, traced
from dcpc.symbolic_profile import find
from models.gpt import GPT, GPTConfig
from tests.cases import language_models, video_models


@dataclass(frozen=True)
class PipelineCase:
    """A model, what it takes, and lengths: those of the trace, and micro-batches to run."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, object]
    sizes: Sequence[Mapping[str, int]]
    runs: Sequence[Mapping[str, int]]
    data: Callable[[Mapping[str, int], int], dict[str, Tensor]]

    @property
    def buckets(self) -> Buckets:
        return Buckets(inputs=self.inputs, sizes=self.sizes)


TOKENS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
LENGTHS = ({"seq": 16}, {"seq": 48})
RUNS = ({"batch": 2, "seq": 16}, {"batch": 3, "seq": 37}, {"batch": 1, "seq": 48})


def _tokens(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    return language_models.data("gpt", sizes, seed)


def _gpt(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, dim=32, n_layers=4, n_heads=4, tie_embeddings=tied)
    return GPT(config).double()


def _t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).double()


def _sequences(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    source = _tokens({"batch": sizes["batch"], "seq": sizes["source"]}, seed)["input_ids"]
    target = _tokens({"batch": sizes["batch"], "seq": sizes["target"]}, seed + 1)["labels"]
    mask = torch.ones_like(source)
    mask[0, -(source.shape[1] // 3) :] = 0
    return {"input_ids": source, "attention_mask": mask, "labels": target}


def _stdit() -> nn.Module:
    return video_models.model(replace(video_models.TINY, depth=2))


CASES = {
    "gpt": PipelineCase(lambda: _gpt(False), TOKENS, LENGTHS, RUNS, _tokens),
    "gpt_tied": PipelineCase(lambda: _gpt(True), TOKENS, LENGTHS, RUNS, _tokens),
    "llama": PipelineCase(
        lambda: language_models.model("llama", 2), TOKENS, LENGTHS, RUNS, _tokens
    ),
    "gpt2": PipelineCase(lambda: language_models.model("gpt2", 2), TOKENS, LENGTHS, RUNS, _tokens),
    "t5": PipelineCase(
        _t5,
        {
            "input_ids": "int64[batch, source]",
            "attention_mask": "int64[batch, source]",
            "labels": "int64[batch, target]",
        },
        ({"source": 16, "target": 8}, {"source": 48, "target": 24}),
        (
            {"batch": 2, "source": 16, "target": 8},
            {"batch": 3, "source": 31, "target": 24},
            {"batch": 1, "source": 48, "target": 11},
        ),
        _sequences,
    ),
    "stdit": PipelineCase(
        _stdit,
        video_models.INPUTS,
        (
            {"frames": 2, "height": 4, "width": 4},
            {"frames": 4, "height": 8, "width": 6},
        ),
        (
            {"batch": 2, "frames": 2, "height": 4, "width": 4},
            {"batch": 1, "frames": 4, "height": 8, "width": 6},
        ),
        video_models.data,
    ),
}


def captured(case: PipelineCase) -> tuple[nn.Module, Traced, CallChain | None]:
    model = case.make()
    buckets = case.buckets
    found = traced(model, buckets, find("cpu"), "eager")
    dims = found.program.dims({"batch": 2, **case.sizes[-1]})
    learns = any(found.program.info[n].requires_grad for n in found.program.inputs)
    return model, found, None if learns else chain_of(found.program, dims)


def evenly(chain: CallChain, stages: int) -> list[int]:
    """Returns borders of stages that have about as many of the chain's blocks each."""
    blocks = len(chain.borders) - 1
    return [round(j * blocks / stages) for j in range(stages + 1)]


def cut_model(case: PipelineCase, stages: int) -> tuple[nn.Module, tuple[ProgramStage, ...]]:
    model, found, chain = captured(case)
    return model, stages_of(found, model, chain, evenly(chain, stages))


def of_one_trace(program: ProgramStage) -> ModelStage:
    """Returns the stage of a model with one trace."""
    return ModelStage({program.part.program.fixed: program})


def plain_gradients(
    model: nn.Module, data: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the plain model's losses and the gradients of their weighted sum."""
    model.zero_grad()
    losses = []
    for inputs, weight in zip(data, weights, strict=True):
        found = model(**inputs)
        loss = found if isinstance(found, Tensor) else found.loss
        (weight * loss).backward()
        losses.append(loss.detach())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return losses, grads
