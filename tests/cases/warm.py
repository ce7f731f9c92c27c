"""Imported by the server of ranks alone: plans a small model once, so that no rank does so first.

What a process does at its first plan and never again (tables that are read, code that torch imports
late, caches of sympy's and torch's) is half a second. Ranks are forks of the server and share it.
"""

import torch
from torch import Tensor, nn
from tqdm import tqdm

import dcpc
from dcpc.codegen.variant import inductor  # noqa: F401  (late, in most ranks)


class Warm(nn.Module):
    """An attention of two heads between linear layers, a norm and a loss over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8)
        self.inner, self.head = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        logits = self.head(nn.functional.gelu(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def warm() -> None:
    """Plans it for two ranks and runs it on one; leaves no thread and no random number behind."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # or the first run of a graph starts a thread
    with torch.random.fork_rng():
        model = Warm().double()
        inputs = dict.fromkeys(("ids", "labels"), "int64[batch, seq]")
        buckets = dcpc.Buckets(inputs, [{"seq": 8}, {"seq": 17}])
        dcpc.api.plan(model, buckets, world=2, backend="eager")
        compiled = dcpc.compile(model, buckets, backend="eager", verify="off")
        ids = torch.arange(17)[None] % 8
        compiled(ids=ids, labels=ids).backward()


warm()
