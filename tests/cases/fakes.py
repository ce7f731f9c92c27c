"""A model, a dataset and a compiled model that are small, exact and need no compiler."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from dcpc.buckets import Bucket, Buckets
from dcpc.ir import BucketPlan, PlanRow, ValueRange
from dcpc.runtime.data.steps import MicroBatch
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.planner.own_lengths import OwnLengths
from dcpc.runtime.step.on_group import OnGroup

VOCABULARY = 11
LONG = 8


@dataclass
class FakeCompiled:
    """Its tables have the plan of each bucket alone, unless others are given."""

    buckets: Buckets
    plans: dict[Bucket, BucketPlan]
    groups: Groups
    node_ranks: int = 8
    block: int = 0
    speeds: tuple[float, ...] = ()
    replans: int = 0
    batch_planner: None = None
    other_tables: Mapping[Bucket, Sequence[PlanRow]] | None = None
    least: int = 0  # length from which its graphs are right at any; 0: at the buckets' alone

    @property
    def value_ranges(self) -> Mapping[Bucket, Mapping[str, tuple[ValueRange, ...]]]:
        return {}

    def division_problems(self, weigh: object, pad: object) -> Mapping[str, str]:
        return {}

    def packing_problem(self, cases: object, weigh: object) -> str:
        return ""

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        """Seconds are shared out by samples; of graphs right at any length, a row's."""

        def seconds_at(bucket, row, sizes, count):
            return row.seconds_s * (1 if self.least else count / row.micro_batch)

        def least(bucket):
            return {"seq": self.least} if self.least else bucket.sizes

        return OwnLengths(lambda bucket, sizes: self.least > 0, seconds_at, least, multiple or 1)

    @property
    def tables(self) -> Mapping[Bucket, Sequence[PlanRow]]:
        return self.other_tables or {b: [p] for b, p in self.plans.items()}


def token_buckets(*lengths: int) -> Buckets:
    inputs = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
    return Buckets(inputs=inputs, sizes=[{"seq": n} for n in lengths])


def plan_for(bucket: Bucket, sp: int, micro_batch: int, seconds_s: float = 0.0) -> BucketPlan:
    seconds_s = seconds_s or micro_batch * bucket["seq"] / sp
    return BucketPlan(
        sp, micro_batch, 0, seconds_s, bucket=bucket, steps=1, peak_bytes=0, reason="a test"
    )


def compiled_for(groups: Groups, settings: Mapping[int, tuple[int, int]]) -> FakeCompiled:
    """`settings`: seq -> (sp, micro-batch)."""
    buckets = token_buckets(*settings)
    plans = {b: plan_for(b, *settings[b["seq"]]) for b in buckets}
    return FakeCompiled(buckets, plans, groups)


class Ragged:
    """Samples of the given lengths; sample i is made from i alone, some labels are ignored."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = list(lengths)
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self.loaded.append(i)
        generator = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(VOCABULARY, (2, self.lengths[i]), generator=generator)
        labels[torch.rand(self.lengths[i], generator=generator) < 0.3] = -100
        return {"input_ids": ids, "labels": labels}


class RaggedWithDims(Ragged):
    def dims(self, i: int) -> dict[str, int]:
        return {"seq": self.lengths[i]}


class Tiny(torch.nn.Module):
    """Tied embedding and head, a parameter that only long inputs use, one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.mix = torch.nn.Linear(6, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.long = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def total(self, input_ids: torch.Tensor, labels: torch.Tensor, long: bool) -> torch.Tensor:
        """Sum (not mean) of the loss over the labels that count."""
        x = torch.tanh(self.mix(self.embed(input_ids)))
        logits = self.head(x * self.long if long else x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def on(self, groups: Groups) -> OnGroup:
        """Runs its steps."""
        return OnGroup(functools.partial(self.call, groups), WholeStore(self.parameters(), groups))

    def call(
        self, groups: Groups, mb: MicroBatch, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Mean loss; a rank of a group differentiates its piece of the sequence."""
        ids, labels = inputs["input_ids"], inputs["labels"]
        sp, k = mb.sp, mb.ranks.index(groups.rank)
        mine = [x.tensor_split(sp, dim=1)[k] for x in (ids, labels)]
        share = self.total(*mine, long=ids.shape[1] > LONG) / (labels != -100).sum()
        if sp == 1:
            return share
        whole = share.detach().clone()
        dist.all_reduce(whole, group=groups.over(mb.ranks))
        return share + (whole - share.detach())
