"""Run with the stub: trains tiny models with each option, and prints as JSON what went wrong.

A model on a GPU and what dcpc makes on the CPU meet in many places: packing looks into a graph,
padding is made, checkpoints are read, ranks exchange. Each must end on the model's device. Each
tensor of the card is zeros, so ranks agree and verification finds no difference.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import dcpc
import dcpc.hf
from dcpc.commands.calibrate import calibrate
from examples.launch import launch
from models.gpt import GPT, GPTConfig
from tests.cases.packed_models import FAMILIES, POSITIONS

TEXT = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
MASKED = {"attention_mask": "int64[batch, seq]", **TEXT}
PAD = {"input_ids": 0, "labels": -100}
SIZES = [{"seq": 16}, {"seq": 48}]
VOCABULARY = 64


def _placed(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda", 0):
        return make().to(dtype)


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, dim=128, n_layers=2, n_heads=2))


def _library(name: str, **more: Any) -> nn.Module:
    config, kind = FAMILIES[name]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return kind(config(**sizes, use_cache=False, **more))


def _bert() -> nn.Module:
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2}
    return BertForMaskedLM(
        BertConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes, **none)
    )


def _gpt2() -> nn.Module:
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **ends))


def _sample(i: int, names: Iterable[str]) -> dict[str, Tensor]:
    length = 5 + 7 * i % 41
    made = {n: torch.randint(VOCABULARY, (length,)) for n in names if n != "position_ids"}
    if "attention_mask" in made:
        made["attention_mask"] = torch.ones(length, dtype=torch.int64)
    return made


def _compiled(model: nn.Module, names: Mapping[str, str], **more: Any) -> dcpc.CompiledModel:
    options = {"backend": "eager", "memory": 10**9, "verify": "off", **more}
    return dcpc.compile(model, dcpc.Buckets(dict(names), SIZES), **options)


def _stepped(
    compiled: dcpc.CompiledModel, names: Mapping[str, str], device: str = "cuda", **more: Any
) -> tuple[torch.optim.Optimizer, dcpc.DataLoader]:
    """Trains two steps; every gradient lies where its parameter does."""
    optimizer = torch.optim.AdamW(compiled.parameters())
    pad = PAD | ({"attention_mask": 0} if "attention_mask" in names else {})
    data = [_sample(i, names) for i in range(12)]
    options = {"tokens_per_step": 96, "weight": "labels", "pad": pad, **more}
    loader = dcpc.DataLoader(data, compiled, **options)
    for step, _ in zip(loader, range(2), strict=False):
        compiled.train_step(step, clip=1.0)
        for name, p in compiled.named_parameters():
            assert p.device.type == device, name
            facts = [(x.device, x.dtype, x.shape) for x in (p, p.grad) if x is not None]
            assert facts[0] == facts[-1], name
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, loader


def _train(
    make: Callable[[], nn.Module],
    names: Mapping[str, str] = TEXT,
    dtype: torch.dtype = torch.bfloat16,
    loader: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    _stepped(_compiled(_placed(make, dtype), names, **options), names, **(loader or {}))


def _outputs() -> None:
    compiled = _compiled(_placed(partial(_library, "llama")), TEXT)
    data = [_sample(i, TEXT) for i in range(12)]
    loader = dcpc.DataLoader(data, compiled, samples_per_step=12, weight="labels", pad=PAD)
    for one in compiled.train_step(next(iter(loader)), outputs=True).outputs:
        assert one.outputs.logits.device.type == "cuda"


def _checkpoint() -> None:
    compiled = _compiled(_placed(_gpt), TEXT)
    optimizer, loader = _stepped(compiled, TEXT)
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(folder, 2, optimizer=optimizer, loader=loader)
        assert compiled.load(folder, optimizer=optimizer, loader=loader).step == 2
    assert all(p.device.type == "cuda" for _, p in compiled.named_parameters())


def _materialized() -> None:
    with torch.device("meta"):
        model = _gpt().to(torch.bfloat16)
    compiled = _compiled(model, TEXT)
    dcpc.materialize(compiled)
    _stepped(compiled, TEXT)


def _calibrated() -> None:
    model = _placed(_gpt)
    found = calibrate(model, dcpc.Buckets(dict(TEXT), SIZES), backend="eager", budget_s=1.0)
    _stepped(_compiled(model, TEXT, calibration=found), TEXT)


def _in_the_trainer() -> None:
    class StubTrainer(dcpc.hf.TrainerMixin, Trainer):
        buckets = dcpc.Buckets(dict(TEXT), SIZES)
        compile_options: ClassVar = {"backend": "eager", "memory": 10**9, "verify": "off"}

    rows = [dict.fromkeys(TEXT, torch.randint(VOCABULARY, (16,))) for _ in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"report_to": [], "save_strategy": "no", "bf16": False, "disable_tqdm": True}
        arguments = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=2, **options)
        model = _placed(partial(_library, "llama"))
        StubTrainer(model, arguments, default_data_collator, rows).train()


_LLAMA, _QWEN = partial(_library, "llama"), partial(_library, "qwen2")
_WINDOWED = partial(_library, "mistral", sliding_window=7)
ALONE: dict[str, Callable[[], None]] = {
    "verified": partial(_train, _gpt, verify="auto"),
    "float32, verified": partial(_train, _gpt, dtype=torch.float32, verify="auto"),
    "recompute": partial(_train, _gpt, recompute="all"),
    "dropout": partial(_train, _gpt2, recompute="all"),
    "autocast": partial(_train, _gpt, dtype=torch.float32, autocast=torch.bfloat16),
    "own lengths": partial(_train, _gpt, loader={"pad_to": "longest"}),
    "packing, verified": partial(
        _train, _LLAMA, POSITIONS, loader={"packing": True}, verify="auto"
    ),
    "packing, own lengths": partial(
        _train, _QWEN, POSITIONS, loader={"packing": True, "pad_to": "longest"}
    ),
    "packing, windows": partial(_train, _WINDOWED, POSITIONS, loader={"packing": True}),
    "unpad": partial(_train, _bert, MASKED, unpad=True),
    "saved values away": partial(_train, _gpt, host="1GB", away="all"),
    "saved values away, on a disk, Inductor": partial(
        _train, _gpt, disk="/tmp:1GB", away="all", backend="inductor"
    ),
    "a state away": partial(_train, _gpt, host="1GB", away="optimizer"),
    "parameters away": partial(
        _train, _gpt, host="1GB", away="parameters", loader={"device": "cpu"}
    ),
    "parameters away, Inductor": partial(
        _train,
        _gpt,
        disk="/tmp:1GB",
        away="activations,parameters",
        backend="inductor",
        recompute="all",
        loader={"device": "cpu"},
    ),
    "outputs": _outputs,
    "checkpoint": _checkpoint,
    "materialize": _materialized,
    "calibration": _calibrated,
    "transformers' Trainer": _in_the_trainer,
}
TOGETHER: dict[str, Callable[[], None]] = {
    "sp 2": partial(_train, _gpt, sp=2),
    "sp 2, packing": partial(_train, _LLAMA, POSITIONS, loader={"packing": True}, sp=2),
    "sp 2, own lengths": partial(_train, _gpt, loader={"pad_to": "longest"}, sp=2),
    "any degree": partial(_train, _gpt),
    "parameters by step": partial(_train, _gpt, parameters="step"),
    "rounds": partial(_train, _gpt, parameters="rounds"),
    "parameters away": partial(
        _train, _gpt, host="1GB", away="parameters", loader={"device": "cpu"}
    ),
    "pipeline": partial(_train, _gpt, pipeline=2),
}


def _tried(cases: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Returns case -> "" or its error."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.enabled = False  # the stub has none
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Blocks that are used again hold other bytes; read at the first allocation.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    found = {}
    for name, run in cases.items():
        try:
            run()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()[-2000:]
    return found


def _on_rank() -> dict[str, str]:
    os.environ["LOCAL_RANK"] = "0"  # both ranks take the one card
    return _tried(TOGETHER)


if __name__ == "__main__":
    found = _tried(ALONE)
    for rank, more in launch(_on_rank, 2).items():
        found |= {f"2 ranks, {name}, rank {rank}": error for name, error in more.items()}
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch's autograd thread frees a GPU's graph while Python ends, which may abort
