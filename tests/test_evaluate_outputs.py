"""`evaluate(outputs=True)`: what forward returns besides the loss, on one rank and on several."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dcpc
from tests.cases.launch import run_prepared
from tests.cases.ready import Ready

TEXT = dict.fromkeys(("ids", "labels"), "int64[batch, seq]")


@dataclass
class Found:
    """What forward returns."""

    loss: Tensor | None
    logits: Tensor
    more: dict[str, object]


pytree.register_dataclass(Found)


class Model(nn.Module):
    """Attention over tokens with a dropout; a loss where it is asked for."""

    def __init__(self, own_loss: bool = True) -> None:
        super().__init__()
        self.own_loss = own_loss
        self.embed, self.out = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Found:
        x = self.drop(self.embed(ids))[:, None]
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]
        logits = self.out(x)
        loss = cross_entropy(logits, labels) if self.own_loss else None
        more = {"best": logits.argmax(-1), "length": x.mean((0, 2)), "name": "tokens", "ids": ids}
        more |= {"tokens": ids.numel(), "half": ids.shape[1] / 2, "heads": 1}
        return Found(loss, logits, more)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def outside(found: Found, labels: Tensor) -> Tensor:
    return cross_entropy(found.logits, labels)


def batch_of(seq, batch=2):
    torch.manual_seed(seq)
    ids, labels = torch.randint(0, 13, (2, batch, seq))
    return {"ids": ids, "labels": labels}


def ready(modes, sp=1, own_loss=True):
    """A model to be compiled by some ranks, with its parameters in each of some modes."""
    torch.manual_seed(0)
    buckets = dcpc.Buckets(TEXT, [{"seq": 8}, {"seq": 12}])
    options = {"backend": "eager", "verify": "off", "loss": None if own_loss else outside}
    return [
        Ready(Model(own_loss).double(), buckets, sp, sp=sp, parameters=mode, **options)
        for mode in modes
    ]


def all_errors(rank, every):
    return [max(errors(made)) for made in every]


def errors(made):
    """Differences from the plain model's evaluation, of every tensor that it returns."""
    own_loss = made.model.own_loss
    plain = Model(own_loss).double().eval()
    plain.load_state_dict(made.model.state_dict())
    compiled = made.compile()
    found = []
    for seq, between in ((8, None), (12, None), (9, "compile"), (8, None)):
        batch = batch_of(seq)
        loss, got = compiled.evaluate(batch, between=between, outputs=True)
        with torch.no_grad():
            want = plain(**batch)
        assert type(got) is Found
        for name in ("name", "tokens", "half", "heads"):  # of sizes, at those of the call
            assert got.more[name] == want.more[name]
            assert type(got.more[name]) is type(want.more[name])
        pairs = [(got.logits, want.logits), (loss, cross_entropy(want.logits, batch["labels"]))]
        pairs += [(got.more[n], want.more[n]) for n in ("best", "length", "ids")]
        assert (got.loss is None) == (not own_loss)
        assert not any(a.requires_grad for a, _ in pairs)
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
        found += [float((a - b).abs().max()) for a, b in pairs]
        found.append(abs(float(compiled.evaluate(batch, between=between) - loss)))
    assert compiled.training
    return found


@pytest.mark.parametrize("own_loss", [True, False])
def test_outputs_are_the_plain_models(own_loss):
    assert max(errors(*ready(["whole"], own_loss=own_loss))) < 1e-12


@pytest.mark.multirank
def test_outputs_are_whole_on_every_rank_of_a_group():
    for found in run_prepared(ready, all_errors, 2, ["whole", "rounds"], 2):
        assert max(found) < 1e-12


def test_what_is_no_tensor_is_refused():
    class Odd(Model):
        def forward(self, ids, labels):
            found = super().forward(ids, labels)
            return {"loss": found.loss, "made by": self}

    compiled = dcpc.compile(Odd(), dcpc.Buckets(TEXT, [{"seq": 8}]), backend="eager", verify="off")
    with pytest.raises(dcpc.TraceError, match="a Odd in its outputs; expected tensors"):
        compiled.evaluate(batch_of(8), outputs=True)
    with pytest.raises(dcpc.DispatchError, match="between='pad'; expected outputs of the batch"):
        compiled.evaluate(batch_of(7), outputs=True, between="pad", pad={"ids": 0, "labels": 0})
