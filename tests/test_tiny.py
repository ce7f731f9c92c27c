"""The smallest complete use: two layers, two buckets, one rank, the numbers of the plain model."""

import copy

import torch

import dcpc
from models.gpt import GPT, GPTConfig


def test_loss_and_gradients_are_the_plain_models():
    plain = GPT(GPTConfig(dim=16, n_layers=2, n_heads=2)).double()
    buckets = dcpc.Buckets(
        inputs={"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
        sizes=[{"seq": 8}, {"seq": 32}],
    )
    compiled = dcpc.compile(copy.deepcopy(plain), buckets, backend="eager")
    for seq in (8, 32):
        ids = torch.randint(0, 100, (2, seq))
        ours, theirs = (model(input_ids=ids, labels=ids) for model in (compiled, plain))
        ours.backward(), theirs.backward()
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
