"""Trains a small Evoformer on chains folded by a random walk, in crops of two shapes.

A chain is a walk in space whose turns follow from its residues, so that sequences say something
about distances. An alignment is the sequence and copies of it with mutations; a part is hidden.
"""

import torch
from torch import Tensor

import dcpc
from models.evoformer import MASKED, Evoformer, EvoformerConfig, input_specs

CROPS = [{"sequences": 8, "residues": 12}, {"sequences": 4, "residues": 20}]
CONFIG = EvoformerConfig(
    blocks=2, msa_dim=32, pair_dim=16, msa_heads=4, pair_heads=2, head_dim=8, outer_dim=8,
    triangle_dim=16, distances=16,
)  # fmt: skip
AMINO_ACIDS = 20
PAD = {"msa": MASKED, "true_msa": 0, "hidden": False, "target": 0, "distance": 0}


def chain(sequences: int, residues: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns one sample: an alignment, what is hidden of it, and distances in bins."""
    target = torch.randint(0, AMINO_ACIDS, (residues,), generator=generator)
    angle = (target * 0.7).cumsum(0)
    steps = torch.stack((angle.cos(), angle.sin(), torch.full_like(angle, 0.3)), dim=-1)
    place = steps.cumsum(0)
    distance = torch.cdist(place, place).mul(2).long().clamp(max=CONFIG.distances - 1)
    mutated = torch.rand(sequences, residues, generator=generator) < 0.1
    mutated[0] = False
    other = torch.randint(0, AMINO_ACIDS, mutated.shape, generator=generator)
    msa = torch.where(mutated, other, target)
    hidden = torch.rand(msa.shape, generator=generator) < 0.15
    return {
        "msa": torch.where(hidden, MASKED, msa),
        "true_msa": msa,
        "hidden": hidden,
        "target": target,
        "distance": distance,
    }


class Chains:
    """Half of the samples have each shape of crop."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = [chain(**CROPS[i % 2], generator=generator) for i in range(count)]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """One sample."""
        return self.samples[i]


def main(steps: int = 30) -> list[float]:
    """Returns the loss of each step, the same on every rank."""
    torch.manual_seed(0)  # every rank starts from the same parameters
    buckets = dcpc.Buckets(inputs=input_specs(), sizes=CROPS)
    compiled = dcpc.compile(Evoformer(CONFIG), buckets, backend="eager")
    loader = dcpc.DataLoader(Chains(256), compiled, tokens_per_step=1024, pad=PAD)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    losses = []
    for _, step in zip(range(steps), loader, strict=False):
        losses.append(float(compiled.train_step(step).loss))
        optimizer.step()
        optimizer.zero_grad()
        if compiled.groups.rank == 0:
            print(f"step {step.index}: {step.samples} samples, loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
