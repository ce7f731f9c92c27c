"""A small GPT and samples of many lengths, for a step of mixed degrees."""

import torch

from models.gpt import GPT, GPTConfig

LENGTHS = [5, 16, 9, 3, 24, 16, 1, 9, 5, 24, 7, 2, 24, 16, 9]


class Ragged:
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(64, (2, LENGTHS[i]), generator=generator)
        labels[torch.rand(LENGTHS[i], generator=generator) < 0.3] = -100
        labels[-1] = 1
        return {"input_ids": ids, "labels": labels}


def gpt(layers: int = 1) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, dim=32, n_layers=layers, n_heads=4, tie_embeddings=True)
    return GPT(config).double()
