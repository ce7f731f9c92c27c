"""Language models traced and analysed, ready to be placed, and rates to place them at."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch

from dcpc.buckets import Buckets
from dcpc.ir import NodePlacement, Program
from dcpc.passes.placement.node_options import PlacementModel
from dcpc.passes.placement.objective import Objective
from dcpc.passes.sharding.sharding import Sharding, analyse
from dcpc.symbolic_profile import Device, Link
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig


def on_machine(
    flops_per_s: float, bytes_per_s: float, sent_per_s: float, start_s: float, launch_s: float
) -> Objective:
    """Seconds on a machine of these rates whose ranks share one link, starts of collectives too."""
    link = Link(start_s, sent_per_s)
    device = Device(
        name="any", flops_per_s=((torch.float32, flops_per_s),), vector_flops_per_s=flops_per_s,
        memory_bytes_per_s=bytes_per_s, memory_bytes=1 << 40, launch_s=launch_s,
        node_ranks=1 << 20, inside=link, across=link, overlaps=False,
    )  # fmt: skip
    return Objective(device, tie_s=start_s)


CPU = on_machine(5e10, 1e10, 1e9, 5e-5, 5e-6)
GPU = on_machine(4e14, 3e12, 2e11, 1e-5, 5e-6)
# Memory is what counts.
TIGHT = replace(on_machine(4e14, 3e12, 2e11, 1e-9, 5e-6), held_s_per_byte=5e-12)
LONG = {"batch": 1, "seq": 8192}
BUCKETS = {
    "inputs": {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
    "sizes": [{"seq": 16}, {"seq": 8192}],
}


@cache
def gpt(kv_heads: int = 8) -> tuple[Program, Sharding]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=64, n_layers=2, n_heads=8, n_kv_heads=kv_heads))
    program = trace(model, Buckets(**BUCKETS))
    return program, analyse(program)


@cache
def deep_gpt(layers: int) -> tuple[Program, Sharding]:
    model = GPT(GPTConfig(vocab_size=64, dim=32, n_layers=layers, n_heads=2))
    program = trace(model, Buckets(**BUCKETS))
    return program, analyse(program)


@cache
def llama() -> tuple[Program, Sharding]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = trace(transformers.LlamaForCausalLM(config), Buckets(**BUCKETS))
        return program, analyse(program)


def options_of(model: PlacementModel, chosen: Mapping[str, NodePlacement]) -> tuple[int, ...]:
    """Returns the position of each node's chosen alternative, 0 where it has none."""
    alternatives = model.sharding.alternatives
    made = [[a.placed for a in alternatives.get(name, ())] for name in model.names]
    pairs = zip(model.names, made, strict=True)
    return tuple(of.index(chosen[name]) if of else 0 for name, of in pairs)
