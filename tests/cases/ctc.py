"""Speech encoders with a CTC loss, and batches of unequal lengths."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS = {
    "x": "float64[batch, n, 6]",
    "targets": "int64[batch, s]",
    "steps": "int64[batch]",
    "counts": "int64[batch]",
}
CLASSES = 5


class Encoder(nn.Module):
    """A convolution and a layer of attention, and a loss of their log-probabilities [t, n, c]."""

    def __init__(self, loss: Callable[..., Tensor], stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(6, 8, 3, stride=stride, padding=1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)
        self.loss, self.stride = loss, stride
        self.double()

    def forward(self, x: Tensor, targets: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
        """Returns the loss. `steps` are lengths of x, a sample."""
        y = self.conv(x.transpose(1, 2)).transpose(1, 2)
        steps = (steps - 1) // self.stride + 1
        hidden = torch.arange(y.shape[1], device=y.device) >= steps.unsqueeze(1)
        y = self.head(self.layer(y, src_key_padding_mask=hidden))
        return self.loss(y.log_softmax(-1).transpose(0, 1), targets, steps, counts)


def batch(sizes: Mapping[str, int], blank: int = 0, fits: bool = True) -> dict[str, Tensor]:
    """Returns samples of unequal lengths, of which the last of several may fit no alignment."""
    g = torch.Generator().manual_seed(sizes["n"])
    b, n, s = (sizes[d] for d in ("batch", "n", "s"))
    steps = torch.randint(max(1, n - 3), n + 1, (b,), generator=g)
    counts = torch.randint(1, s + 1, (b,), generator=g)
    if b > 1 and not fits:
        steps[-1], counts[-1] = 2, s
    targets = torch.randint(0, CLASSES - 1, (b, s), generator=g)
    targets += (targets >= blank).long()
    targets[torch.arange(s) >= counts.unsqueeze(1)] = -100
    x = torch.randn(b, n, 6, dtype=torch.float64, generator=g)
    return {"x": x, "targets": targets, "steps": steps, "counts": counts}


def selected(p: Tensor, targets: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    """As transformers has it: concatenated targets, chosen by a mask."""
    mask = targets >= 0
    chosen = targets.masked_select(mask)
    return F.ctc_loss(p, chosen, steps, mask.sum(-1), reduction="sum", zero_infinity=True)


def indexed(p: Tensor, targets: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    return F.ctc_loss(p, targets[targets != -100], steps, counts, blank=2)


def each(p: Tensor, targets: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    found: Tensor = nn.CTCLoss(reduction="none", zero_infinity=True)(p, targets, steps, counts)
    return (found * torch.arange(1, p.shape[1] + 1, device=p.device)).sum()


def by_enum(p: Tensor, targets: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    return torch.ctc_loss(p, targets, steps.int(), counts.int(), 4, 2, False)


def whole_lengths(p: Tensor, targets: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    """All steps of all samples; targets of one class where they are padded."""
    all_steps = torch.full((p.shape[1],), p.shape[0])
    return F.ctc_loss(p, targets.clamp_min(1), all_steps, torch.full_like(counts, 2))


# Loss -> its blank.
LOSSES: Mapping[str, tuple[Any, int]] = {
    "module": (nn.CTCLoss(), 0),
    "module zero_infinity": (nn.CTCLoss(zero_infinity=True), 0),
    "selected": (selected, 0),
    "indexed": (indexed, 2),
    "each": (each, 0),
    "by_enum": (by_enum, 4),
    "whole_lengths": (whole_lengths, 0),
}
