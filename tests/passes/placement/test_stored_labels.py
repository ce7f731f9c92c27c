"""What moves, weights or activations, where a rank keeps a piece of each weight: by length.

Nothing in dcpc/ stores weights split yet (issue 45). Here a weight's alternatives are its splits,
in place of "replicated", which is all that the placement needs to be told: that short sequences
go tensor parallel, and long ones gather weights and split the sequence, follows from the costs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch

from dcpc.buckets import Buckets
from dcpc.ir import REPLICATED, Label, Placement, Program, tensor_operands
from dcpc.passes.placement.objective import Objective
from dcpc.passes.placement.placement import place
from dcpc.passes.sharding.sharding import Alternative, Sharding, analyse
from dcpc.symbolic_profile import find
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig
from tests.cases.analysed import BUCKETS
from tests.cases.video_placement import sent_bytes

WIDTH = 1024
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("out", "down")


def stored_split(program: Program, sharding: Sharding) -> Sharding:
    """Returns the sharding of a program whose ranks have a piece of each weight and no more."""
    kept = dict(sharding.alternatives)
    for name in program.parameters:
        dims = sharding.factors[name]
        if len(dims) > 1:  # norms and biases stay whole
            kept[name] = tuple(
                Alternative((), Label(d, i), factor.key)
                for d, factors in enumerate(dims)
                for i, factor in enumerate(factors)
            )
    return replace(sharding, alternatives=kept)


@cache
def gpt(layers: int) -> tuple[Program, Sharding]:
    with torch.device("meta"):
        config = GPTConfig(vocab_size=8192, dim=WIDTH, n_layers=layers, n_heads=16)
        model = GPT(config).to(torch.bfloat16)
    program = trace(model, Buckets(**BUCKETS))
    return program, stored_split(program, analyse(program))


def placed(layers: int, seq: int, sp: int) -> tuple[Program, Placement, float]:
    """Returns the program, its placement on H200s and the bytes that all ranks send in forward."""
    (program, sharding), sizes = gpt(layers), {"batch": 1, "seq": seq}
    found = place(program, sharding, sizes, sp, Objective.of_group(find("h200"), sp))
    return program, found, sent_bytes(program, found, sizes)


def of_blocks(program: Program, names: Sequence[str]) -> list[str]:
    """Returns the weights of all blocks with such names."""
    ends = tuple(f"_{name}_weight" for name in names)
    found = [n for n in program.parameters if "_blocks_" in n and n.endswith(ends)]
    assert found, "no weight has such a name"
    return found


def gathered(program: Program, placement: Placement) -> set[str]:
    """Returns the weights that some reader wants whole."""
    return {
        source.name
        for node in program.gm.graph.nodes
        if node.name in placement.nodes
        for source, want in zip(
            tensor_operands(node, program.info), placement.nodes[node.name].operands, strict=False
        )
        if source.name in program.parameters
        and (want, placement.nodes[source.name].output.sharded) == (REPLICATED, True)
    }


@pytest.mark.parametrize("sp", [4, 8])
def test_activations_move_where_a_sequence_is_short(sp):
    """Columns, then rows: two gathers and two reduce-scatters a layer, as Megatron's sequence
    parallelism has, and no weight moves."""
    program, found, three = placed(3, 256, sp)
    assert not gathered(program, found)
    outputs = {n: p.output for n, p in found.nodes.items()}
    assert {outputs[n] for n in of_blocks(program, COLUMNS)} == {Label(0, 0)}
    assert {outputs[n] for n in of_blocks(program, ROWS)} == {Label(1, 0)}
    megatron = 4 * 256 * WIDTH * torch.bfloat16.itemsize * (sp - 1)
    assert three - placed(2, 256, sp)[2] == megatron


@pytest.mark.parametrize("sp", [2, 4])
def test_weights_move_where_a_sequence_is_long(sp):
    program, found, three = placed(3, 16384, sp)
    weights = of_blocks(program, COLUMNS + ROWS)
    assert gathered(program, found) >= {*weights}
    keys_and_values = 2 * 16384 * WIDTH * torch.bfloat16.itemsize * (sp - 1)
    layer = [program.info[n] for n in weights if "_blocks_1_" in n]
    gathers = sum(prod(map(int, i.shape)) * i.dtype.itemsize for i in layer) * (sp - 1)
    assert three - placed(2, 16384, sp)[2] == gathers + keys_and_values
