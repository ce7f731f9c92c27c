"""A model that iterates a set of strings in forward: prints what is found of it."""

import logging
import warnings

import torch
from torch import nn

import dcpc
from benchmarks.zoo_seeds import fingerprint

WINDOWS = {"local": 4, "wide": 9, "global": 1000}


class Alternating(nn.Module):
    """Layers of local and global attention; masks and rotations are made for a set of kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = ["global", "local", "wide", "local"]
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in self.kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        masks, turns = {}, {}
        for kind in set(self.kinds):
            masks[kind] = (at[:, None] - at[None, :]).abs() < WINDOWS[kind]
            turns[kind] = (at[:, None] / WINDOWS[kind]).cos()
            if kind != "global":
                turns[kind] = turns[kind] * 2
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            q = layer(x)[:, None] * turns[kind]
            mask = masks[kind]
            x = x + nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]
        return x.square().mean()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sizes = [{"batch": 2, "seq": 32}, {"batch": 1, "seq": 512}]
    print(
        "alternating:",
        fingerprint(Alternating(), dcpc.Buckets({"x": "float32[batch, seq, 8]"}, sizes)),
    )


if __name__ == "__main__":
    main()
