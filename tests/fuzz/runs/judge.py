"""Trains a run by dcpc and by the plain model, sample by sample; any difference is a fault.

The promises are those of docs/train.md and of the loader's docstring.
"""

from __future__ import annotations

import functools
import json
import math
import random
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dcpc
from dcpc.commands.check import SPLITTING
from dcpc.errors import DataError, DcpcError, DefectError
from dcpc.trace.loss import find_loss
from tests.fuzz.judge import Outcome
from tests.fuzz.runs.draw import Data, Declared, Options, Run, sample
from tests.fuzz.runs.models import OF_SAMPLES, Model, Setup, alone

LIMIT = 1e-10
LOW_LIMIT = 0.1  # of bfloat16, beside the largest of all gradients
SHORTEST = 3  # length of a call between buckets
STAYS = ("freeze", "hook", "replace")  # changes after which a model is not as it was compiled


class WrongError(Exception):
    """What dcpc does is not what is promised."""


@functools.lru_cache(maxsize=1)
def compiled_of(setup: Setup) -> tuple[dcpc.CompiledModel, dict[str, Tensor]]:
    """Returns a compiled model, which neighbouring runs share, and what it holds at first."""
    model = Model(setup)
    begin = {n: x.clone() for n, x in model.state_dict().items()}
    sizes = [
        {**dict(zip(setup.names, size, strict=True)), **({"batch": limit} if limit else {})}
        for size, limit in setup.sizes
    ]
    compiled = dcpc.compile(
        model, dcpc.Buckets(setup.inputs, sizes), sp=setup.sp, recompute=setup.recompute,
        attention=setup.attention, device=SPLITTING if setup.splitting else "cpu",
        backend=setup.backend, verify="off", parameters=setup.parameters, unpad=setup.unpad,
        tile=setup.tile,
        pipeline=setup.pipeline or None, autocast=torch.bfloat16 if setup.autocast else None,
    )  # fmt: skip
    compiled.comm_bucket_bytes = setup.comm
    if setup.head == "late":
        model.freeze()
    return compiled, begin


def judge(run: Run) -> Outcome:
    """Returns what becomes of a run on this rank; collective over its ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled, begin = compiled_of(run.setup)
            compiled.load_state_dict(begin)
            compiled.train().zero_grad()
            training = Training(run, compiled, begin)
            try:
                training.train()
            finally:
                if run.change in STAYS:
                    compiled_of.cache_clear()
        except WrongError as error:
            return Outcome("wrong", str(error), str(error).split(":")[0])
        except DefectError as error:
            return Outcome("crash", traceback.format_exc(limit=-5), repr(error)[:40])
        except DcpcError as error:
            text = f"{type(error).__name__}: {error}"
            return Outcome("refused", text, text[:60])
        except Exception as error:
            return Outcome("crash", traceback.format_exc(limit=-5), repr(error)[:40])
    return Outcome("right")


class Training:
    """One run, by both."""

    def __init__(self, run: Run, compiled: dcpc.CompiledModel, begin: Mapping[str, Tensor]) -> None:
        self.run, self.compiled, self.model = run, compiled, compiled.model
        self.plain = Model(run.setup)
        if run.setup.head == "late":
            self.plain.freeze()
        self.plain.load_state_dict(begin)
        self.data = (Declared if run.declared else Data)(run)
        self.loader = self.made(run.options)
        self.options = run.options
        self.count = 0
        kind = torch.optim.SGD if run.optimizer == "sgd" else torch.optim.AdamW
        # A large eps: the quotient of two gradients that are nothing but rounding is no number.
        told: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if kind is torch.optim.SGD else {
            "lr": 0.05, "eps": 1e-2}  # fmt: skip
        params = [p for p in self.plain.parameters() if p.requires_grad]
        self.optimizers = [kind(params, **told)]
        own = [p for p in compiled.parameters() if p.requires_grad]
        self.optimizers.append(kind(own, **told))

    def made(self, options: Options, seed: int | None = None) -> dcpc.DataLoader:
        run, setup = self.run, self.run.setup
        pad = {n: fill for n, fill in setup.pad.items() if n in self.data.names}
        return dcpc.DataLoader(
            self.data, self.compiled, pad=pad, weight=setup.weight, on_too_long="skip",
            shuffle=run.shuffle, seed=run.seed if seed is None else seed, **asdict(options),
        )  # fmt: skip

    def train(self) -> None:
        """Trains all epochs; raises at the first difference."""
        for _ in zip(range(self.run.stray), self.loader, strict=False):
            pass
        kept = [i for i in range(len(self.data)) if self.run.fits(i)]
        if not kept:
            return self.nothing_fits()
        for epoch in range(self.run.epochs):
            seen: list[int] = []
            for step in self.steps(epoch):
                ids = self.ids(step)
                self.check_step(step, ids, [i for i in kept if i not in seen])
                seen += ids
                self.one(step, ids)
            same(f"samples of epoch {epoch}", sorted(seen), kept)
            same("the next epoch", self.loader.epoch, epoch + 1)

    def nothing_fits(self) -> None:
        try:
            list(self.loader)
        except DataError:
            return
        raise WrongError("no sample fits: there was no error")

    def steps(self, epoch: int) -> Iterator[Any]:
        """Yields the steps of an epoch, on the way by another loader that goes on from a state."""
        steps = iter(self.loader)
        for number, step in enumerate(steps):
            yield step
            if self.run.stop and epoch == 0 and number + 1 == self.run.stop:
                state = json.loads(json.dumps(self.loader.state_dict()))
                steps.close()
                over = state["epoch"] > epoch
                self.loader = self.made(self.run.then, seed=12345)  # the state has the order's
                self.options = self.run.then
                self.loader.load_state_dict(state)
                if over:
                    same("samples done of a state of a whole epoch", state["consumed"], 0)
                else:
                    yield from self.loader
                return

    def ids(self, step: Any) -> list[int]:
        """Returns the samples of all ranks."""
        return [i for mb in step.plan.micro_batches for i in mb.sample_ids]

    def check_step(self, step: Any, ids: list[int], left: list[int]) -> None:
        """Holds a step to what the loader says of steps."""
        told, lengths = self.options, self.run.lengths
        tokens = sum(math.prod(lengths[i]) for i in ids)
        same("tokens", step.tokens, tokens)
        same("number of samples", step.samples, len(ids))
        if tokens > told.tokens_per_step and told.min_grad_accumulation_steps == 1:
            same("samples of a step of too many tokens", len(ids), 1)
        if told.max_grad_accumulation_steps and len(ids) > 1 and not told.packing:
            most = told.max_grad_accumulation_steps
            if step.plan.accumulation > most:
                raise WrongError(f"max_grad_accumulation_steps: {step.plan.accumulation} > {most}")
        if not self.run.shuffle:
            same("the first sample that waits", left[0] in ids, True)
            waits = [i for i in left if i not in ids]
            far = [i for i in ids if waits and told.window and i >= waits[0] + told.window]
            same("samples beyond the window", far, [])
        if told.mode == "intra":
            same("buckets of an intra step", len({mb.bucket for mb in step.plan.micro_batches}), 1)

    def one(self, step: Any, ids: list[int]) -> None:
        """Runs a step by both and compares loss, gradients and, after an update, parameters."""
        total = sum(alone(self.run.setup, self.data[i]) for i in ids)
        if total == 0:
            return self.all_ignored(step)
        expected, norm = self.expected(ids, total)
        got, got_norm = (self.by_hand if self.run.by_hand else self.by_step)(step, total)
        if got is not None:
            self.close("loss", got, expected)
        same("there is a norm", got_norm is None, norm is None)
        if norm is not None:
            self.close("norm", got_norm, norm)
        self.compare_gradients()
        self.count += 1
        if self.count % self.run.every == 0:
            self.update()
        if self.run.at == self.count:
            self.change()
        if self.run.evaluate:
            self.evaluate()

    def update(self) -> None:
        """Steps both optimizers and compares the parameters."""
        for optimizer, model in zip(self.optimizers, (self.plain, self.compiled), strict=True):
            optimizer.step()
            model.zero_grad(set_to_none=self.run.seed % 2 == 0)
        own = dict(self.model.named_parameters())
        kept = dict(self.compiled.named_parameters())
        for name, p in self.plain.named_parameters():
            if self.run.setup.pipeline and name not in kept:  # another stage's
                continue
            if own[name].is_meta:  # ranks have their rows of it alone
                own[name] = kept[name].full_tensor()
            self.close(f"parameter {name}", own[name], p)

    def change(self) -> None:
        """Does something to both models that dcpc promises to follow."""
        what = self.run.change
        if what == "reload":
            self.compiled.load_state_dict(self.plain.state_dict())
        for model in (self.plain, self.model):
            if what == "gain":
                model.gain.mul_(1.5)
            elif what == "eval":
                model.eval()
            elif what == "freeze":
                model.freeze()
            elif what == "hook" and model.head.weight.requires_grad:
                model.head.weight.register_hook(lambda g: g * 2)
            elif what == "replace":
                old = model.norm.bias
                model.norm.bias = nn.Parameter(old.detach() + 0.1, old.requires_grad)

    def expected(self, ids: list[int], total: float) -> tuple[Tensor, float | None]:
        """Adds the plain model's gradients, sample by sample unpadded; returns loss and norm."""
        loss = torch.zeros((), dtype=torch.float64)
        for i in ids:
            own = self.data.whole(i)
            weight = alone(self.run.setup, own)
            if weight == 0:
                continue
            batch = {n: x if n == "scale" else x[None] for n, x in own.items()}
            part = find_loss(self.called(batch)) * (weight / total)
            part.backward()
            loss += part.detach()
        if self.run.clip is None:
            return loss, None
        return loss, float(nn.utils.clip_grad_norm_(self.plain.parameters(), self.run.clip))

    def called(self, batch: Mapping[str, Tensor]) -> Any:
        """Returns what the plain model makes of a batch."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.run.setup.autocast):
            return self.plain(**batch)

    def by_step(self, step: Any, total: float) -> tuple[Any, float | None]:
        """Returns the loss and the norm of `train_step`, whose outputs are compared."""
        told = {"outputs": self.run.outputs} if self.run.outputs else {}
        result = self.compiled.train_step(step, clip=self.run.clip, **told)
        for one in result.outputs if told else ():
            if one.outputs is not None:
                self.compare_outputs(one.outputs["logits"], one.micro_batch.inputs)
        self.close("total weight", result.total_weight, total)
        return result.loss, result.grad_norm

    def by_hand(self, step: Any, total: float) -> tuple[Tensor | None, float | None]:
        """Calls the model for each micro-batch; returns the norm, and the loss if it is alone."""
        found = torch.zeros((), dtype=torch.float64)
        for mb in step.micro_batches:
            if mb.weight:
                part = self.compiled(**mb.inputs) * (mb.weight / total)
                part.backward()
                found += part.detach()
        self.compiled.reduce_gradients()
        clip = self.run.clip
        norm = None if clip is None else self.compiled.clip_grad_norm_(clip)
        return found if self.run.world == 1 else None, norm

    def compare_outputs(self, got: Any, batch: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            expected = self.called(batch)["logits"]
        if isinstance(got, dcpc.OutputPiece):
            got, expected = got.tensor, got.of(expected)
        self.close("logits", got, expected)

    def all_ignored(self, step: Any) -> None:
        """A step of which nothing counts is refused and leaves gradients as they were."""
        if self.run.by_hand:
            return
        before = [None if p.grad is None else p.grad.clone() for p in self.compiled.parameters()]
        try:
            self.compiled.train_step(step)
        except DataError:
            after = [p.grad for p in self.compiled.parameters()]
            for old, new in zip(before, after, strict=True):
                same("gradients after a refused step", *(x is None for x in (old, new)))
                if old is not None:
                    self.close("gradients after a refused step", new, old)
            return
        raise WrongError("a step of which no label counts: there was no error")

    def compare_gradients(self) -> None:
        own, alone = dict(self.compiled.named_parameters()), dict(self.plain.named_parameters())
        if self.run.setup.pipeline:  # of this stage; one that trains nothing has an empty one
            same(
                "other parameters", [n for n, p in own.items() if n not in alone and p.numel()], []
            )
        else:
            same("names of parameters", list(own), list(alone))
        every = [(n, alone[n].grad, q.grad) for n, q in own.items() if n in alone]
        gradients = [p.grad for p in alone.values() if p.grad is not None]
        most = max((float(g.abs().max()) for g in gradients), default=0.0)
        for name, expected, got in every:
            same(f"gradient of {name}: there is none", got is None, expected is None)
            if expected is not None:
                # What is zero but for rounding is compared with the largest of all gradients.
                least = most * (1.0 if self.run.setup.autocast else 1e-4)
                self.close(f"gradient of {name}", got, expected, least)

    def evaluate(self) -> None:
        """Calls both with one batch of lengths that a bucket holds."""
        setup, rng = self.run.setup, random.Random(self.count)
        size, _ = rng.choice(setup.sizes)
        size = tuple(rng.randint(min(SHORTEST, n), n) for n in size)
        limits = [limit for most, limit in setup.sizes if all(map(int.__le__, size, most))]
        limit = min(filter(None, limits), default=0)
        some = [sample(setup, size, 1000 + k) for k in range(rng.randint(1, limit or 3))]
        if setup.loss not in OF_SAMPLES and not any(alone(setup, x) for x in some):
            return
        batch = {n: torch.stack([s[n] for s in some]) for n in some[0]}
        batch |= {"scale": some[0]["scale"]} if "scale" in batch else {}
        if self.run.strided:
            batch = {n: torch.stack([x, x], -1)[..., 0] for n, x in batch.items()}
        with torch.no_grad():
            self.close("loss of a call", self.compiled(**batch), find_loss(self.called(batch)))

    def close(self, what: str, got: Any, expected: Any, least: float = 1e-8) -> None:
        """Compares two numbers or tensors, as closely as the dtype of the model lets them."""
        close(what, got, expected, least, LOW_LIMIT if self.run.setup.autocast else LIMIT)


def same(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise WrongError(f"{what}: got {got}; expected {expected}")


def close(what: str, got: Any, expected: Any, least: float, limit: float) -> None:
    whole = (x.full_tensor() if isinstance(x, DTensor) else x for x in (got, expected))
    got, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in whole)
    scale = max(float(expected.abs().max()), least, 1e-300)
    error = float((got - expected).abs().max()) / scale
    if got.shape != expected.shape or not error <= limit:
        raise WrongError(f"{what}: differs by {error:.1e} of itself")
