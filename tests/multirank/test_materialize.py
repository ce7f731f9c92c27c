"""A model made on the meta device: values, training, checkpoints, what a rank holds meanwhile."""

import gc
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn import functional as F

import dcpc
from dcpc.compiled.materialize import made_real
from dcpc.errors import DispatchError, GroupError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.modes import shares
from examples.allocator import measured_peak_bytes
from tests.cases.launch import run_ranks

DIM, VOCABULARY = 6, 10


class Layers(nn.Module):
    """Layers that initialise themselves in the order in which they are registered."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        kind = {"dtype": dtype}
        self.embed = nn.Embedding(VOCABULARY, DIM, **kind)
        self.frozen = nn.Linear(DIM, DIM, **kind).requires_grad_(False)
        self.block = nn.Sequential(nn.LayerNorm(DIM, **kind), nn.Linear(DIM, 7, **kind))
        self.down = nn.Linear(7, DIM, bias=False, **kind)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False, **kind)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(DIM, **kind).eval()
        self.embed.weight.of_the_user = True

    def train(self, mode: bool = True) -> "Layers":
        return super().train(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids))
        x = x + self.down(F.gelu(self.block(x)))
        x = self.norm(x.flatten(0, 1))
        return F.cross_entropy(self.head(x).float() if x.dtype == torch.bfloat16 else self.head(x),
                               labels.flatten())  # fmt: skip


class Samples:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(i)
        ids = torch.randint(VOCABULARY, (1 + i * 5 % 8,), generator=made)
        return {"ids": ids, "labels": (ids + 1) % VOCABULARY}


def compiled_on_meta(
    mode: str, dtype: torch.dtype = torch.float64, model: Any = None, **options: Any
) -> dcpc.CompiledModel:
    warnings.simplefilter("ignore")
    if model is None:
        with torch.device("meta"):
            model = Layers(dtype)
    buckets = dcpc.Buckets(dict.fromkeys(("ids", "labels"), "int64[batch, seq]"),
                           sizes=[{"seq": 3}, {"seq": 8}])  # fmt: skip
    return dcpc.compile(model, buckets, backend="eager", parameters=mode, **options)


def loader_of(compiled: dcpc.CompiledModel) -> dcpc.DataLoader:
    pad = {"ids": 0, "labels": -100}
    return dcpc.DataLoader(
        Samples(), compiled, tokens_per_step=20, pad=pad, weight="labels", seed=3
    )


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def drawn(m: nn.Module) -> None:
    """As a user's init: of a module's own tensors; `nn.Module.apply` takes it as well."""
    for p in m.parameters(recurse=False):
        p.data.uniform_(-0.5, 0.5)
    if isinstance(m, nn.BatchNorm1d):
        m.reset_running_stats()


Case = tuple[str, torch.dtype, bool]


def values(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [values_in(rank, *case) for case in cases]


def values_in(rank: int, mode: str, dtype: torch.dtype, own: bool) -> dict[str, Any]:
    """What is not the plain model's after each of the ranks was seeded, rank 0 as it was."""
    compiled = compiled_on_meta(mode, dtype)
    torch.manual_seed(7 + rank)
    dcpc.materialize(compiled, drawn if own else None)
    after = torch.rand(())
    torch.manual_seed(7)
    plain = Layers(dtype)
    if own:
        torch.manual_seed(7)
        plain.apply(drawn)
    expected = torch.rand(()) if rank == 0 else torch.rand((), generator=seeded(7 + rank))
    found = dict(compiled.named_parameters())
    pairs = [(whole(found[n]), p.detach()) for n, p in plain.named_parameters()]
    if mode != "rounds":  # there the model's own have no memory
        pairs += [(whole(compiled.model.get_parameter(n)), p) for n, p in plain.named_parameters()]
    pairs += [(dict(compiled.named_buffers())[n], b) for n, b in plain.named_buffers()]
    return {
        "equal": [torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs],
        "tied": compiled.model.head.weight is compiled.model.embed.weight,
        "kept": compiled.model.embed.weight.of_the_user,
        "frozen": [p.requires_grad for p in found.values()]
        == [p.requires_grad for p in plain.parameters()],
        "random": bool(after == expected),
        "report": compiled.report(),
        "loss": float(run(compiled) - run(plain)),
    }


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(model: nn.Module) -> Tensor:
    x = torch.arange(8)[None]
    with torch.no_grad():
        return model(ids=x, labels=x)


OF_TWO: list[Case] = [
    ("pull", torch.float32, False),
    ("step", torch.bfloat16, True),
    ("whole", torch.float32, False),
    ("rounds", torch.float32, False),
]
OF_THREE: list[Case] = [("rounds", torch.bfloat16, True), ("pull", torch.bfloat16, True)]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world", "cases"),
    [(1, [("pull", torch.float64, False)]), (2, OF_TWO),
     pytest.param(3, OF_THREE, marks=pytest.mark.slow)],
)  # fmt: skip
def test_values_are_bit_for_bit_those_of_the_plain_model(world, cases):
    for rank in run_ranks(values, world, cases, timeout_s=100):
        for (_, dtype, _), found in zip(cases, rank, strict=True):
            assert all(found["equal"])
            assert found["tied"]
            assert found["kept"]
            assert found["frozen"]
            assert found["random"]  # each rank goes on with its own random numbers
            assert "verified against the model itself" in found["report"]
            assert "the trace: loss and every gradient" in found["report"]
            assert abs(found["loss"]) < (1e-2 if dtype == torch.bfloat16 else 1e-6)


def trained(rank: int, modes: list[str]) -> list[dict[str, float]]:
    return [trained_in(mode) for mode in modes]


def trained_in(mode: str) -> dict[str, float]:
    """An epoch with AdamW; what is off the plain model's."""
    compiled = compiled_on_meta(mode, verify="off")
    loader = loader_of(compiled)
    torch.manual_seed(1)
    dcpc.materialize(compiled)
    torch.manual_seed(1)
    alone = Layers(torch.float64)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2, eps=1e-6)
    other = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-6)
    errors = {}
    for n, step in enumerate(loader):
        ids = sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids})
        every = [Samples()[i] for i in ids]
        total = sum(len(x["ids"]) for x in every)
        loss = sum(alone(x["ids"][None], x["labels"][None]) * len(x["ids"]) / total for x in every)
        loss.backward()
        errors[f"loss {n}"] = abs(float(compiled.train_step(step).loss) - float(loss))
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        for name, p in compiled.named_parameters():
            errors[name] = float((whole(p) - alone.get_parameter(name).detach()).abs().max())
    return errors


@pytest.mark.multirank
def test_training_after_it_is_the_plain_models():
    for modes in run_ranks(trained, 2, ["pull", "step", "rounds"], timeout_s=100):
        for errors in modes:
            assert len(errors) > 6
            assert max(errors.values()) < 1e-10


def saved(rank: int, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    compiled = compiled_on_meta("step", model=Layers(torch.float64))
    dcp.save({"model": get_model_state_dict(compiled)}, checkpoint_id=folder)
    return {n: whole(t) for n, t in compiled.state_dict().items()}


def loaded(rank: int, folder: str) -> dict[str, Any]:
    compiled = compiled_on_meta("pull")
    dcpc.materialize(compiled, "empty")
    assert all(whole(p).isnan().all() for p in compiled.parameters())
    before = compiled.report()
    state = {"model": get_model_state_dict(compiled)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(compiled, state["model"])
    found = {n: whole(t) for n, t in compiled.state_dict().items()}
    step = next(iter(loader_of(compiled)))
    loss = float(compiled.train_step(step).loss)
    return {"found": found, "loss": loss, "reports": (before, compiled.report())}


@pytest.mark.multirank
def test_a_checkpoint_of_four_ranks_fills_a_model_of_two(tmp_path):
    (expected, *_) = run_ranks(saved, 4, str(tmp_path / "c"), timeout_s=100)
    for rank in run_ranks(loaded, 2, str(tmp_path / "c"), timeout_s=100):
        assert rank["found"].keys() == expected.keys()
        assert all(torch.equal(rank["found"][n], t) for n, t in expected.items())
        assert rank["loss"] > 0
        before, after = rank["reports"]
        assert "not verified yet" in before  # it waits for values
        assert "the trace: loss and every gradient" in after


class Rotary(nn.Module):
    """A buffer that no checkpoint has, and a module that initialises what another one holds."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0) + 1, persistent=persistent)
        self.layer = nn.Linear(8, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return (self.layer(self.table) * ids.sum()).mean() + labels.sum() * 0.0


class Reaching(Rotary):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8.0) + 1)
        self.layer.weight.data.zero_()


class Forgetting(Rotary):
    def reset_parameters(self) -> None:
        self.layer.weight.shape  # noqa: B018


def no_init(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        m.reset_parameters()


def filled(m: nn.Module) -> None:
    no_init(m)
    if isinstance(m, Rotary):
        m.table = torch.arange(1.0, 17.0).view(8, 2)[:, 0].fill_(1.0)  # of strides of its own


def other_numbers(m: nn.Module) -> None:
    filled(m)
    m.register_parameter  # noqa: B018
    if isinstance(m, nn.Linear):
        m.weight.fill_(random.random())


def broken(m: nn.Module) -> None:
    raise ValueError("mine" if dist.get_rank() else "")


def refused(rank: int) -> list[str]:
    texts = []

    def fails(call: Any, *args: Any, kind: type[Exception] = DispatchError) -> None:
        with pytest.raises(kind) as told:
            call(*args)
        texts.append(str(told.value))

    def on_meta(kind: type[nn.Module], **options: Any) -> dcpc.CompiledModel:
        with torch.device("meta"):
            model = kind()
        return compiled_on_meta("pull", model=model, **options)

    x = {"ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    compiled = on_meta(Rotary)
    step = next(iter(loader_of(compiled)))
    with torch.no_grad():
        fails(lambda: compiled(**x))
    for call in (lambda: compiled.train_step(step), compiled.state_dict, compiled.reduce_gradients):
        fails(call)
    fails(lambda: torch.optim.AdamW(compiled.parameters()))
    fails(lambda: compiled.load_state_dict({}))
    for init in (None, "empty", "zeros", no_init):
        fails(dcpc.materialize, compiled, init)
    random.seed(rank)
    fails(dcpc.materialize, compiled, other_numbers, kind=GroupError)
    fails(dcpc.materialize, compiled, broken, kind=GroupError)
    dcpc.materialize(compiled, filled)  # what went wrong before has left nothing
    assert compiled.model.table.is_contiguous()
    compiled.train_step(step)
    fails(dcpc.materialize, compiled)
    fails(dcpc.materialize, on_meta(Reaching))
    fails(dcpc.materialize, on_meta(Forgetting))
    hooked = on_meta(Rotary)
    hooked.model.layer.weight.register_hook(lambda g: g)
    fails(dcpc.materialize, hooked, filled)
    sharing = on_meta(Rotary)
    with torch.no_grad():
        sharing.model.layer.bias = nn.Parameter(sharing.model.layer.weight[0])
    fails(dcpc.materialize, sharing, filled)
    return texts


@pytest.mark.multirank
def test_what_cannot_be_is_refused_with_what_to_do():
    wanted = [
        *["call dcpc.materialize(compiled)"] * 6,
        "module '' (Rotary), which has 'table' on the meta device and no reset_parameters()",
        "'table' on the meta device that no checkpoint has (persistent=False)",
        "got init='zeros'; expected None, 'empty' or a function",
        "'table' (1 of 1 tensors) got no value",
        "values that dcpc.materialize gives",
        "ValueError while a module was initialised",
        "got a compiled model that has its memory",
        "wrote to a tensor of another module, of shape (8, 8)",
        "'table' (1 of 1 tensors) got no value",
        "got a hook on the parameter 'layer.weight'",
        "parameters 'layer.weight' and 'layer.bias' share memory",
    ]
    for texts in run_ranks(refused, 2, timeout_s=150):
        assert len(texts) == len(wanted)
        for text, part in zip(texts, wanted, strict=True):
            assert part in text


class Stack(nn.Module):
    """Six layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = ids[..., None] * torch.ones(1024)
        return self.layers(x).mean() + labels.sum() * 0.0


def peaks(rank: int, cases: list[tuple[str, str | None]]) -> list[dict[str, int]]:
    found = []
    for case in cases:
        gc.collect()  # nothing of before is freed while memory is measured
        found.append(peak_in(*case))
    return found


def peak_in(mode: str, init: str | None) -> dict[str, int]:
    """Bytes that a rank needs while a model is materialised."""
    with torch.device("meta"):
        model = Stack()
    compiled = compiled_on_meta(mode, model=model, verify="off")
    peak = measured_peak_bytes(lambda: dcpc.materialize(compiled, init))
    own = [sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules()]
    mapped = sum(p.nbytes for p in shares(model.parameters(), dist.get_world_size()))
    every = sum(p.nbytes for p in model.parameters())
    return {"needs": peak + mapped * (mode == "pull"), "rows": mapped, "largest": max(own),
            "every": every}  # fmt: skip


@pytest.mark.multirank
def test_a_rank_needs_its_rows_and_one_module():
    slack = 1_600_000  # of the checksum of what init gives, whatever the model's size
    cases = [
        ("pull", None), ("pull", "empty"), ("rounds", None), ("step", None), ("whole", None)
    ]  # fmt: skip
    for rank in run_ranks(peaks, 2, cases, timeout_s=100):
        for (mode, init), found in zip(cases, rank, strict=True):
            if mode in ("pull", "rounds"):
                most = found["rows"] + found["largest"] + slack
                assert found["rows"] <= found["needs"] <= most < found["every"], (mode, init)
            else:  # every rank has all by nature
                most = found["every"] + found["largest"] + slack
                assert found["every"] <= found["needs"] <= most, mode


def saves_stack(rank: int, folder: str) -> None:
    torch.manual_seed(2)
    compiled = compiled_on_meta("step", model=Stack(), verify="off")
    dcp.save({"model": get_model_state_dict(compiled)}, checkpoint_id=folder)


def loads_stack(rank: int, folder: str) -> dict[str, int]:
    with torch.device("meta"):
        model = Stack()
    compiled = compiled_on_meta("pull", model=model, verify="off")

    def load() -> None:
        dcpc.materialize(compiled, "empty")
        state = {"model": get_model_state_dict(compiled)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(compiled, state["model"])

    peak = measured_peak_bytes(load)
    assert not any(whole(p).isnan().any() for p in compiled.parameters())
    rows = sum(p.nbytes for p in shares(model.parameters(), dist.get_world_size()))
    return {"peak": peak, "rows": rows, "every": sum(p.nbytes for p in model.parameters())}


@pytest.mark.multirank
def test_no_rank_holds_all_of_a_checkpoint_that_it_loads(tmp_path):
    run_ranks(saves_stack, 4, str(tmp_path / "c"), timeout_s=100)
    for found in run_ranks(loads_stack, 2, str(tmp_path / "c"), timeout_s=100):
        assert found["peak"] + found["rows"] < 0.75 * found["every"]


def test_values_for_another_device_are_drawn_on_the_cpu():
    at = torch.device("meta")  # any device beside the CPU
    with at:
        model = Layers(torch.float64)
    drawn: dict[str, Tensor] = {}

    def init(module: nn.Module) -> None:
        assert {t.device.type for t in module.parameters(recurse=False)} == {"cpu"}
        module.reset_parameters()
        drawn.update({f"{type(module).__name__} {n}": p.detach().clone()
                      for n, p in module.named_parameters(recurse=False)})  # fmt: skip

    made_real(model, "whole", Groups(device=at), init)
    assert drawn
    assert not any(value.isnan().any() for value in drawn.values())
    assert {p.device for p in model.parameters()} == {at}


def test_a_tensor_on_another_device_than_those_of_meta_get_is_refused():
    with torch.device("meta"):
        model = Layers(torch.float64)
    model.register_buffer("table", torch.ones(2))
    with pytest.raises(DispatchError, match=r"got 'table' on cpu beside .* expected it on cuda:1"):
        made_real(model, "whole", Groups(device=torch.device("cuda", 1)), None)
