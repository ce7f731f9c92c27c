"""`dcpc.compile(model, buckets, loss=fn)`: the model returns outputs, a function makes the loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcpc
from dcpc.api import plan
from tests.cases.exactness import compiled_error
from tests.cases.launch import run_ranks
from tests.cases.small_models import DIM, VOCABULARY, Tokens, token_loss

BUCKETS = dcpc.Buckets(
    inputs={
        "ids": "int64[batch, seq]",
        "labels": "int64[batch, seq]",
        "weight": "float64[batch]",
    },
    sizes=[{"seq": 4}, {"seq": 9}],
)


class Logits(Tokens):
    def forward(self, ids):
        return self.head(self.mix(self.embed(ids)))


class Named(Logits):
    """Returns a mapping, and takes whatever there is."""

    def forward(self, ids, **others):
        hidden = self.mix(self.embed(ids))
        return {"logits": self.head(hidden), "hidden": hidden, "others": sorted(others)}


def weighted(logits, labels, weight):
    rows = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (rows.view(labels.shape).mean(-1) * weight).mean()


def of_mapping(outputs, **inputs):
    assert outputs["others"] == ["labels", "weight"]
    return {"loss": weighted(outputs["logits"], inputs["labels"], inputs["weight"])}


class Balanced(nn.Module):
    """A loss with a buffer: how much each class counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("classes", torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64))

    def forward(self, logits, labels, weight):
        rows = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), self.classes, reduction="none"
        )
        return (rows.view(labels.shape).sum(-1) * weight).mean()


def model_of(kind=Logits):
    torch.manual_seed(0)
    return kind().double()


def data(seq, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCABULARY, (2, batch, seq), generator=generator)
    weight = torch.rand(batch, generator=generator, dtype=torch.float64)
    return {"ids": ids, "labels": labels, "weight": weight}


def errors(rank, world, kind, loss, sp):
    model = model_of(kind)
    compiled = dcpc.compile(model, BUCKETS, backend="eager", loss=loss, sp=sp, verify="full")
    assert "verified against the model itself" in compiled.report()
    return [compiled_error(compiled, model, data(n), sp / world, loss) for n in (4, 9)]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [(Logits, weighted), (Named, of_mapping), (Logits, Balanced())],
    ids=["function", "mapping", "module"],
)
def test_loss_of_outputs_is_exact(kind, loss):
    assert max(errors(0, 1, kind, loss, 1)) < 1e-10


def at_both_degrees(rank):
    return [max(errors(rank, 2, Logits, weighted, sp)) for sp in (1, 2)]


def test_loss_of_outputs_is_exact_on_two_ranks():
    for found in run_ranks(at_both_degrees, 2):
        assert max(found) < 1e-10


def test_steps_train_on_the_loss_of_outputs():
    model = model_of()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", loss=weighted, verify="off")
    samples = [{n: x[0] for n, x in data(3 + i % 6, 1, i).items()} for i in range(6)]
    loader = dcpc.DataLoader(
        samples, compiled, tokens_per_step=1000, pad={"ids": 0, "labels": -100}, shuffle=False,
        loss_depends_on="padding", pad_to="bucket",
    )  # fmt: skip
    (step,) = loader
    got = float(compiled.train_step(step).loss)
    plain = model_of()
    padded = [
        {"ids": F.pad(s["ids"], (0, n)), "labels": F.pad(s["labels"], (0, n), value=-100)}
        for s in samples
        for n in [(4 if len(s["ids"]) <= 4 else 9) - len(s["ids"])]
    ]
    losses = [
        weighted(plain(p["ids"][None]), p["labels"][None], s["weight"][None])
        for p, s in zip(padded, samples, strict=True)
    ]
    assert abs(got - float(torch.stack(losses).detach().mean())) < 1e-10


def test_plan_takes_the_loss_too():
    with torch.device("meta"):
        model = Logits()
    assert len(plan(model, BUCKETS, loss=weighted, backend="eager").plans) == 2


class WithParameters(Balanced):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (F.cross_entropy, r"loss=cross_entropy takes target; got inputs ids, labels, weight"),
        (
            lambda logits, labels: token_loss(logits, labels),
            r"got inputs weight, which neither Logits.forward nor loss=<lambda> takes",
        ),
        (lambda logits, **_: logits, r"loss=<lambda> \(.*\): got a tensor of shape \(batch, "),
        (lambda logits, **_: {"out": logits.mean()}, r": got a dict without the key 'loss'"),
        (WithParameters(), r"loss=WithParameters: got a module with 1 parameters \(scale\)"),
        (Balanced, r"loss=: got the class Balanced; expected a function"),
        ("mean", r"loss=: got str; expected a function"),
    ],
    ids=["unknown", "left", "no scalar", "no key", "parameters", "class", "text"],
)
def test_what_is_no_loss_is_refused_by_name(loss, message):
    with pytest.raises(dcpc.TraceError, match=message):
        dcpc.compile(model_of(), BUCKETS, backend="eager", loss=loss)


class PassedOn(Logits):
    """Passes on whatever there is to what does not take it."""

    def forward(self, **inputs):
        return super().forward(**inputs)


def test_an_input_that_a_forward_of_kwargs_passes_on_is_explained():
    message = (
        r"PassedOn.forward takes \*\*kwargs.*'labels' too.*a loss=fn that names 'labels' still"
    )
    with pytest.raises(dcpc.TraceError, match=message):
        dcpc.compile(model_of(PassedOn), BUCKETS, backend="eager", loss=weighted)


def test_model_without_a_loss_is_told_of_the_option():
    with pytest.raises(dcpc.TraceError, match="or compile with loss="):
        dcpc.compile(nn.Linear(DIM, 2), dcpc.Buckets({"input": "float32[n, 12]"}, [{"n": 3}]))


def test_changed_model_is_followed_with_its_loss():
    model = model_of()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", loss=weighted, verify="off")
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
    assert compiled_error(compiled, model, data(4), 1.0, weighted) < 1e-10


def test_teacher_in_the_loss_is_a_constant():
    teacher = model_of().requires_grad_(False)

    def distilled(logits, ids, labels, weight):
        with torch.no_grad():
            wanted = teacher(ids).softmax(-1)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1)) + weighted(
            logits, labels, weight
        )

    student = model_of()
    with torch.no_grad():
        for p in student.parameters():
            p.mul_(0.5)
    compiled = dcpc.compile(student, BUCKETS, backend="eager", loss=distilled, verify="off")
    assert compiled_error(compiled, student, data(9), 1.0, distilled) < 1e-10


def test_parameter_outside_of_the_model_is_refused():
    other = model_of()

    def pulled(logits, ids, labels, weight):
        return weighted(logits + other(ids), labels, weight)

    with pytest.raises(dcpc.TraceError, match=r"tensor outside of the model.*call it under"):
        dcpc.compile(model_of(), BUCKETS, backend="eager", loss=pulled)
    other.requires_grad_(False)
    model = model_of()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", loss=pulled, verify="off")
    assert compiled_error(compiled, model, data(4), 1.0, pulled) < 1e-10


def in_place(teacher):
    teacher.head.weight.mul_(3)


def replaced(teacher):
    teacher.head.weight = nn.Parameter(teacher.head.weight * 2, requires_grad=False)


def loaded(teacher):
    teacher.load_state_dict({n: t + 1 for n, t in teacher.state_dict().items()}, assign=True)


class Distilling:
    """A loss that is an object, with a teacher in it."""

    def __init__(self, teacher):
        self.teacher = teacher

    def __call__(self, logits, ids, labels, weight):
        return F.mse_loss(logits, self.teacher(ids)) + weighted(logits, labels, weight)


def by_function(teacher):
    def distance(logits, ids):
        return F.mse_loss(logits, teacher(ids))

    return lambda logits, ids, labels, weight: (
        distance(logits, ids) + weighted(logits, labels, weight)
    )


@pytest.mark.parametrize(
    ("change", "seen"),
    [(in_place, True), (replaced, False), (loaded, False), (nn.Module.eval, False)],
)
@pytest.mark.parametrize("make", [by_function, Distilling, lambda t: Distilling(t).__call__])
def test_teacher_that_changes_is_followed_or_refused(change, seen, make):
    teacher, model = model_of().requires_grad_(False), model_of()
    loss = make(teacher)
    compiled = dcpc.compile(model, BUCKETS, backend="eager", loss=loss, verify="off")
    with torch.no_grad():
        change(teacher)
    if seen:
        assert compiled_error(compiled, model, data(4), 1.0, loss) < 1e-10
        return
    with pytest.raises(dcpc.DispatchError, match="loss= changed since the model was compiled"):
        compiled(**data(4))
