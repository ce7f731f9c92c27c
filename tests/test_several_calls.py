"""Steps of several compiled calls: teacher and student, two losses of one model, a GAN; and LoRA.

Each on one rank and on two that share every sequence, against the plain modules in float64.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcpc
from tests.cases.language_models import in_float64
from tests.cases.launch import run_ranks

WIDTH = 4
BUCKETS = dcpc.Buckets({"x": f"float64[batch, n, {WIDTH}]"}, [{"n": 3}, {"n": 6}])


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Student(nn.Module):
    """A student and the teacher that it is to be like."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x), wanted)


class Critic(nn.Module):
    """How well a net tells samples from made ones."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, made):
        return F.softplus(self.net(made)).mean() + F.softplus(-self.net(x)).mean()


class Maker(nn.Module):
    """How well what a net makes passes the critic's."""

    def __init__(self, net, critic):
        super().__init__()
        self.net, self.critic = net, critic

    def forward(self, x):
        return F.softplus(-self.critic(self.net(x))).mean()


def data(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, WIDTH, dtype=torch.float64, generator=generator)


def compiled_of(model, buckets=BUCKETS, **options):
    return dcpc.compile(model, buckets, backend="eager", verify="off", **options)


def gradients(*modules):
    found = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    copies = [g.clone() for g in found]
    for m in modules:
        m.zero_grad()
    return copies


def error(found, wanted):
    assert len(found) == len(wanted) > 0
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def teacher_and_student(world):
    net, teacher = Net(0), Net(1)
    logits = compiled_of(teacher, loss=lambda out: out.square().mean(), sp=world)
    both = Student(net, teacher)
    compiled = compiled_of(both, sp=world)
    with torch.no_grad():  # a call of another compiled model within the step
        assert abs(float(logits(x=data(3)) / teacher(data(3)).square().mean()) - 1) < 1e-10
    compiled(x=data(3)).backward()
    compiled.reduce_gradients()
    found = gradients(both)
    both(data(3)).backward()
    return error(found, gradients(both))


def two_losses(world):
    net = Net(0)
    first = compiled_of(net, loss=lambda out, x: F.mse_loss(out, x), sp=world)
    second = compiled_of(net, loss=lambda out: out.abs().mean(), sp=world)
    (first(x=data(3)) + 2 * second(x=data(6))).backward()
    first(x=data(6, 1)).backward()  # a third call of the step
    first.reduce_gradients()
    found = gradients(net)
    loss = F.mse_loss(net(data(3)), data(3)) + 2 * net(data(6)).abs().mean()
    (loss + F.mse_loss(net(data(6, 1)), data(6, 1))).backward()
    return error(found, gradients(net))


def adversaries(world):
    """Three steps of both; parameters of the critic are frozen while the maker learns."""
    makers = []
    for runs in (True, False):
        make, judge = Net(0), Net(1)
        critic, maker = Critic(judge), Maker(make, judge)
        inputs = {n: f"float64[batch, n, {WIDTH}]" for n in ("x", "made")}
        of_critic, of_maker = critic, maker
        if runs:
            of_critic = compiled_of(critic, dcpc.Buckets(inputs, [{"n": 3}]), sp=world)
            of_maker = compiled_of(maker, sp=world)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (judge, make)]
        for step in range(3):
            with torch.no_grad():
                made = make(data(3, step))
            of_critic(x=data(3, step + 10), made=made).backward()
            if runs:
                of_critic.reduce_gradients()
            optimizers[0].step()
            judge.zero_grad()
            judge.requires_grad_(False)
            of_maker(x=data(3, step)).backward()
            if runs:
                of_maker.reduce_gradients()
            optimizers[1].step()
            make.zero_grad()
            judge.requires_grad_(True)
        makers.append([p.detach() for m in (make, judge) for p in m.parameters()])
    return error(*makers)


def hooked(world):
    """Hooks of parameters: one before backward sums a gradient, one once it is there."""
    net = Net(0)
    compiled = compiled_of(net, loss=lambda out: out.square().mean(), sp=world)
    seen = []
    net.first.weight.register_hook(lambda g: 2 * g)
    net.last.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    compiled(x=data(6)).backward()
    compiled.reduce_gradients()
    found = gradients(net)
    net(data(6)).square().mean().backward()
    assert seen == [True, True]
    return error(found, gradients(net))


CALLS = [teacher_and_student, two_losses, adversaries, hooked]


@pytest.mark.parametrize("calls", CALLS, ids=[f.__name__ for f in CALLS])
def test_step_of_several_calls_is_exact(calls):
    assert calls(1) < 1e-10


def all_calls(rank):
    return [calls(2) for calls in CALLS]


def test_steps_of_several_calls_are_exact_on_two_ranks():
    for found in run_ranks(all_calls, 2):
        assert max(found) < 1e-10


# ----------------------------------------------------------------------------- parameters later


def squares(out):
    return out.square().mean()


def test_parameter_unfrozen_later_is_refused_and_one_frozen_later_is_not():
    net = Net(0)
    net.first.requires_grad_(False)
    compiled = compiled_of(net, loss=squares)
    compiled(x=data(3)).backward()
    net.first.requires_grad_(True)
    with pytest.raises(dcpc.DispatchError, match=r"first.weight: .*frozen .*trains.*compile"):
        compiled(x=data(3))
    again = compiled_of(net, loss=squares)
    net.zero_grad()
    net.last.requires_grad_(False)
    again(x=data(3)).backward()
    assert net.last.weight.grad is None
    found = gradients(net)
    squares(net(data(3))).backward()
    assert error(found, gradients(net)) < 1e-10


def test_parameter_added_later_is_refused_by_name():
    net = Net(0)
    compiled = compiled_of(net, loss=squares)
    net.last.bias = None
    net.first.scale = nn.Parameter(torch.ones(()))  # that forward does not read
    with pytest.raises(dcpc.DispatchError, match=r"last.bias: .*first.scale: .* is new"):
        compiled(x=data(3))


def test_parameter_added_later_that_nobody_reads_is_refused_too():
    net = Net(0)
    compiled = compiled_of(net, loss=squares)
    net.extra = nn.Parameter(torch.ones((), dtype=torch.float64))
    with pytest.raises(dcpc.DispatchError, match=r"extra: float64\[\] trains on cpu is new"):
        compiled(x=data(3))


# ---------------------------------------------------------------------------------------- LoRA


def llama():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    base = transformers.LlamaForCausalLM(config)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(base, lora).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(std=0.1)
    return model


def lora_errors(rank, world, sp, where):
    warnings.simplefilter("ignore")
    in_float64()
    model = llama()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
    compiled = compiled_of(model, dcpc.Buckets(inputs, [{"seq": 6}, {"seq": 12}]), sp=sp)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    found = []
    ids = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(1))
    samples = [
        {"input_ids": x[:n], "labels": x[:n]} for x, n in zip(ids, (6, 12, 12, 6), strict=True)
    ]
    weight = dcpc.CountLabels("labels", shift=1)
    (step,) = dcpc.DataLoader(samples, compiled, tokens_per_step=1000, weight=weight, shuffle=False)
    got = compiled.train_step(step)
    mine = gradients(model)
    counts = [len(s["labels"]) - 1 for s in samples]
    loss = sum(
        c / sum(counts) * model(**{n: x[None] for n, x in s.items()}).loss
        for s, c in zip(samples, counts, strict=True)
    )
    loss.backward()
    found += [abs(got.loss / float(loss.detach()) - 1), error(mine, gradients(model))]
    batch = {n: torch.stack([s[n] for s in samples[1:3]]) for n in inputs}
    with torch.no_grad():
        wanted = float(model.eval()(**batch).loss)
    model.train()
    found.append(abs(float(compiled.evaluate(batch)) / wanted - 1))
    if rank == 0:
        compiled.save_pretrained(where)  # the adapter alone, by PEFT itself
        assert compiled.module.generate(ids[:1, :3], max_new_tokens=2).shape == (1, 5)
    assert {n for n, p in model.named_parameters() if p.grad is not None} <= trained
    return found


def test_lora_with_a_frozen_base_is_exact(tmp_path):
    (found,) = run_ranks(lora_errors, 1, 1, 1, tmp_path)
    assert max(found) < 1e-9
    assert (tmp_path / "adapter_config.json").exists()


@pytest.mark.parametrize("sp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_lora_with_a_frozen_base_is_exact_on_two_ranks(tmp_path, sp):
    for found in run_ranks(lora_errors, 2, 2, sp, tmp_path):
        assert max(found) < 1e-9


def test_adapter_added_later_is_refused():
    peft = pytest.importorskip("peft")
    model = llama()
    inputs = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
    compiled = compiled_of(model, dcpc.Buckets(inputs, [{"seq": 6}]))
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    ids = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(dcpc.DispatchError, match=r"the model changed since it was compiled"):
        compiled(input_ids=ids, labels=ids)


def test_copy_of_a_model_is_compiled_beside_it():
    net = Net(0)
    compiled, twin = compiled_of(net, loss=squares), copy.deepcopy(net)
    other = compiled_of(twin, loss=squares)
    with torch.no_grad():
        twin.last.weight.mul_(2)
    assert float(compiled(x=data(3))) == pytest.approx(float(squares(net(data(3)))), rel=1e-12)
    assert float(other(x=data(3))) == pytest.approx(float(squares(twin(data(3)))), rel=1e-12)
