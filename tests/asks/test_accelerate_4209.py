"""accelerate #4209: sequence parallelism in the Trainer, without DeepSpeed."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import dcpc
from tests.cases.asks import PAD, TEXT, entry, far
from tests.cases.exactness import SPLITTING
from tests.cases.language_models import in_float64
from tests.cases.launch import run_ranks
from tests.cases.packed_models import Sequences

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("dcpc.hf")

pytestmark = pytest.mark.multirank

DATA = Sequences([13, 5, 37, 9, 24, 16, 2, 30])
SIZES = [{"seq": 16}, {"seq": 37}]  # 2 ranks do not divide the latter
SIZES_OF_MODEL = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 48,
                  "num_hidden_layers": 1, "use_cache": False}  # fmt: skip
# What #4209 refuses: heads that ranks do not divide (here one group of them), eager attention.
MODELS = {
    "heads": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "eager": {"num_attention_heads": 2, "attn_implementation": "eager"},
}
LIMITS = {"heads": 1e-10, "eager": 1e-6}  # transformers' eager attention has a softmax in float32


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {n: pad_sequence([s[n] for s in samples], True, PAD[n]) for n in TEXT}


def parameters(name: str, folder: str, world: int, sp: int) -> list[Tensor]:
    """Trains two epochs by a Trainer, dcpc's if `sp`, and returns what came of the parameters."""
    warnings.simplefilter("ignore")
    in_float64()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES_OF_MODEL, **MODELS[name])
    model = transformers.LlamaForCausalLM(config).double()
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4 // world, num_train_epochs=2, learning_rate=1e-1,
        train_sampling_strategy="sequential", save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, optim="sgd",  # Adam's steps have the size of a gradient's rounding, too
    )  # fmt: skip
    kind: Any = transformers.Trainer
    if sp:
        kind = type("Ours", (hf.TrainerMixin, transformers.Trainer), {
            "buckets": dcpc.Buckets(TEXT, SIZES),
            "compile_options": {
                "backend": "eager", "sp": sp, "device": SPLITTING, "verify": "off",
            },
        })  # fmt: skip
    trainer = kind(model, args, collate, DATA)
    trainer.train()
    assert "deepspeed" not in sys.modules
    if sp:
        assert {plan.sp for plan in trainer.compiled.plans.values()} == {sp}
    return [p.detach() for p in model.parameters()]


def results(
    rank: int, world: int, sp: int, folder: str, names: list[str]
) -> dict[str, list[Tensor]]:
    return {name: parameters(name, folder, world, sp) for name in names}


@pytest.mark.slow
def test_the_trainer_shares_sequences_out_over_ranks(tmp_path: Path):
    (plain,) = run_ranks(results, 1, 1, 0, str(tmp_path), list(MODELS), timeout_s=120)
    for found in run_ranks(results, 2, 2, 2, str(tmp_path), list(MODELS), timeout_s=240):
        for name, expected in plain.items():
            assert max(map(far, found[name], expected)) < LIMITS[name], name
    assert "within 1e-10; with eager attention 1e-6" in entry(__file__)
