"""What train_text.py trains, by DistributedDataParallel: the loop that one writes without dcpc."""

import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from examples.train_text import Paragraphs, model

STEP_TOKENS = 8192  # of a global batch
MICRO_BATCH_TOKENS = 2048  # that a rank's memory has room for, padding included


def epoch_steps(lengths: list[int], epoch: int) -> list[list[int]]:
    """Returns the samples of each step: the epoch's own order, cut where the tokens are enough."""
    order = list(range(len(lengths)))
    random.Random(epoch).shuffle(order)
    steps: list[list[int]] = []
    room = 0
    for i in order:
        if not steps or lengths[i] > room:
            steps.append([])
            room = STEP_TOKENS
        steps[-1].append(i)
        room -= lengths[i]
    return steps


def micro_batches(samples: list[int], lengths: list[int]) -> list[list[int]]:
    """Returns a step's samples by like length, as many at a time as fit when they are padded."""
    batches: list[list[int]] = []
    for i in sorted(samples, key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > MICRO_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(i)
    return batches


def dealt(batches: list[list[int]], lengths: list[int], ranks: int) -> list[list[list[int]]]:
    """Returns each rank's micro-batches: the largest first, to the rank with the fewest tokens."""
    ranked: list[list[list[int]]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for batch in sorted(batches, key=lambda b: -len(b) * lengths[b[-1]]):
        to = tokens.index(min(tokens))
        ranked[to].append(batch)
        tokens[to] += len(batch) * lengths[batch[-1]]
    return [mine or [batches[0]] for mine in ranked]  # DDP waits for a backward of every rank


def collated(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pads = {"input_ids": 0, "labels": -100}
    return {
        name: pad_sequence([s[name] for s in samples], batch_first=True, padding_value=pads[name])
        for name in pads
    }


def main(steps: int = 20, folder: str | None = None) -> list[float]:
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    plain = model()
    trained = DistributedDataParallel(plain) if ranks > 1 else plain
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)
    dataset = Paragraphs()
    lengths = [len(s) - 1 for s in dataset.samples]
    epoch = done = first = 0
    file = Path(folder) / "last.pt" if folder else None
    if file and file.exists():
        saved = torch.load(file)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, first, done = saved["epoch"], saved["place"], saved["done"]
    losses = []
    while done < steps:
        plans = epoch_steps(lengths, epoch)
        for place, samples in list(enumerate(plans))[first:]:
            batches = micro_batches(samples, lengths)
            mine = dealt(batches, lengths, ranks)[rank]
            idle = rank >= len(batches)  # it runs another rank's micro-batch for nothing
            labels = torch.tensor(float(sum(lengths[i] for i in samples)))
            total = torch.zeros(())
            for n, batch in enumerate(mine):
                inputs = collated([dataset[i] for i in batch])
                share = 0.0 if idle else float((inputs["labels"] != -100).sum() / labels)
                last = n == len(mine) - 1
                with nullcontext() if ranks == 1 or last else trained.no_sync():
                    loss = trained(**inputs) * share
                    (loss * ranks).backward()  # DDP takes the mean over ranks
                total += loss.detach()
            if ranks > 1:
                dist.all_reduce(total)
            losses.append(float(total))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if file and rank == 0 and done % 5 == 0:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save({**state, "epoch": epoch, "place": place + 1, "done": done}, file)
            if rank == 0:
                print(f"step {place}: {len(samples)} samples, loss {losses[-1]:.4f}")
            if done == steps:
                break
        epoch, first = epoch + 1, 0
    return losses


if __name__ == "__main__":
    main(folder=sys.argv[1] if sys.argv[1:] else None)
