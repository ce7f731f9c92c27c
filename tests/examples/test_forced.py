"""What the demos' baselines hand a loader has all that a loader asks of a compiled model."""

import torch

import dcpc
from examples.forced import OwnPlans
from models.gpt import GPT, GPTConfig

BUCKETS = dcpc.Buckets(
    inputs={"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
    sizes=[{"seq": 8}, {"seq": 16}],
)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("input_ids", "labels"), torch.arange(8 + 8 * (i % 2)) % 11)


def test_a_loader_deals_samples_by_the_plans_it_is_given():
    model = GPT(GPTConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2))
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    own = OwnPlans(compiled, compiled.plans)
    loader = dcpc.DataLoader(Texts(), own, tokens_per_step=32, mode="inter")
    steps = list(loader)
    assert sorted(i for s in steps for mb in s.micro_batches for i in mb.samples) == [*range(6)]
    found = {mb.bucket for step in steps for mb in step.micro_batches}
    assert found == {*BUCKETS}
