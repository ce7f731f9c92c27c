"""One compiled model in train() and eval(), and its evaluation at buckets and between them."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dcpc
from dcpc.plan import following
from tests.cases.exactness import compiled_error
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.ready import Ready
from tests.cases.small_models import DIM, VOCABULARY, Heads, Tokens, token_loss

BUCKETS = dcpc.Buckets(
    inputs={"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
    sizes=[{"seq": 4}, {"seq": 12}],
)
PAD = {"ids": 0, "labels": -100}


class Dropping(Tokens):
    """Causal attention and a dropout."""

    def setup(self):
        self.block, self.drop = Heads(2), nn.Dropout(0.5)

    def mix(self, x):
        return self.drop(self.block(x))


class Plain(Tokens):
    pass


class Normed(Tokens):
    def setup(self):
        self.norm = nn.BatchNorm1d(DIM)

    def mix(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def model_of(kind=Dropping):
    torch.manual_seed(0)
    return kind().double()


def data(seq, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCABULARY, (2, batch, seq), generator=generator)
    return {"ids": ids, "labels": labels}


def compiled_of(model, buckets=BUCKETS, **options):
    return dcpc.compile(model, buckets, **{"backend": "eager", "verify": "off"} | options)


def evaluation_error(compiled, model, batch, **options):
    """Relative error of an evaluation; the plain model is left in its mode."""
    got = compiled.evaluate(batch, **options)
    assert not got.requires_grad
    modes = [m.training for m in model.modules()]
    model.eval()
    with torch.no_grad():
        want = model(**batch)
    for m, training in zip(model.modules(), modes, strict=True):
        m.training = training
    return abs(float(got - want) / float(want))


@pytest.fixture
def traces(monkeypatch):
    """Names of the modes in which something was traced after compile."""
    found = []
    for module in (following, dcpc.compiled.editions):
        trace = module.trace
        monkeypatch.setattr(
            module, "trace", lambda m, *a, t=trace: found.append(m.training) or t(m, *a)
        )
    return found


def test_eval_is_compiled_once_and_train_is_as_it_was(traces):
    model = model_of()
    compiled = compiled_of(model)
    torch.manual_seed(1)
    trained = [float(compiled(**data(4)).detach()) for _ in range(2)]
    assert trained[0] != trained[1], "dropout draws"
    for _ in range(2):
        compiled.eval()
        assert compiled_error(compiled, model, data(12)) < 1e-10
        compiled.train()
        assert float(compiled(**data(4)).detach()) not in trained
    assert traces == [False]
    assert "in eval()" in compiled.report()


def test_model_that_is_the_same_in_both_modes_is_planned_once(traces):
    model = model_of(Plain)
    compiled = compiled_of(model)
    for training in (True, False, True, False):
        compiled.train(training)
        assert compiled_error(compiled, model, data(4)) < 1e-10
    assert traces == [False]
    assert compiled.stats().variants == 1


def test_some_modules_in_eval_are_a_mode_of_their_own(traces):
    model = model_of()
    compiled = compiled_of(model)
    model.drop.eval()
    assert compiled_error(compiled, model, data(4)) < 1e-10
    model.drop.train()
    model.block.eval()
    first, second = (float(compiled(**data(4)).detach()) for _ in range(2))
    assert first != second
    assert traces == [True, True]


def test_model_compiled_in_eval_is_called_in_train():
    model = model_of().eval()
    compiled = compiled_of(model)
    assert compiled_error(compiled, model, data(4)) < 1e-10
    compiled.train()
    assert float(compiled(**data(4))) != float(compiled(**data(4)))


def test_change_of_the_model_is_followed_in_both_modes():
    model = model_of()
    compiled = compiled_of(model)
    assert evaluation_error(compiled, model, data(4)) < 1e-10
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
    assert evaluation_error(compiled, model, data(4)) < 1e-10
    head = model.head
    model.head = copy.deepcopy(head)
    model.head.weight.data.mul_(3)
    compiled(**data(4))
    model.head = head
    assert evaluation_error(compiled, model, data(4)) < 1e-10
    model.drop.p = 0.25
    with pytest.raises(dcpc.DispatchError, match=r"drop.p: 0.5 -> 0.25"):
        compiled(**data(4))
    assert evaluation_error(compiled, model, data(4)) < 1e-10, "no dropout is in eval's graphs"


def test_change_while_a_mode_is_new_is_refused_with_its_name():
    model = model_of()
    compiled = compiled_of(model)
    model.drop.p = 0.25
    with pytest.raises(dcpc.DispatchError, match=r"drop.p: 0.5 -> 0.25"):
        compiled.evaluate(data(4))


def test_step_in_the_other_mode_says_which_it_was_planned_for():
    model = model_of()
    compiled = compiled_of(model)
    samples = [{n: x[0] for n, x in data(4, 1, i).items()} for i in range(2)]
    (step,) = dcpc.DataLoader(samples, compiled, tokens_per_step=100)
    compiled.eval()
    with pytest.raises(
        dcpc.DispatchError, match=r"in eval\(\); expected train\(\).*compiled.train"
    ):
        compiled.train_step(step)
    compiled.train()
    compiled.train_step(step)
    assert model.head.weight.grad is not None


def test_evaluation_restores_modes_and_leaves_the_random_numbers_of_training():
    losses = []
    for evaluates in (False, True):
        torch.manual_seed(3)
        model = model_of()
        model.block.eval()
        compiled = compiled_of(model)
        losses.append([])
        for _ in range(3):
            losses[-1].append(float(compiled(**data(12)).detach()))
            if evaluates:
                assert evaluation_error(compiled, model, data(12)) < 1e-10
        assert model.training
        assert model.drop.training
        assert not model.block.out.training
    assert losses[0] == losses[1]


def test_running_statistics_are_read_in_eval():
    model = model_of(Normed)
    model.norm.running_mean.uniform_(), model.norm.running_var.uniform_(1, 2)
    with pytest.raises(dcpc.TraceError, match=r"norm.running_mean.*eval\(\).*GroupNorm"):
        compiled_of(model)
    compiled = compiled_of(model.eval())
    assert evaluation_error(compiled, model, data(12)) < 1e-10
    model.norm.running_mean.uniform_()
    assert compiled_error(compiled, model, data(4)) < 1e-10
    compiled.train()
    with pytest.raises(dcpc.TraceError, match=r"norm.running_mean"):
        compiled(**data(4))
    model.norm.eval()
    assert compiled_error(compiled, model, data(4)) < 1e-10


# ------------------------------------------------------------------------- between the buckets


def test_length_between_buckets_is_run_as_it_is_padded_or_compiled(traces):
    model = model_of()
    compiled = compiled_of(model)
    for seq in (7, 3, 11):
        assert evaluation_error(compiled, model, data(seq)) < 1e-10
    assert traces == [False], "eval() alone"
    with pytest.raises(dcpc.DispatchError, match=r"call of {seq: 4}: got {seq: 1}; expected"):
        compiled.evaluate(data(1))
    for seq in (4, 7, 11, 7):
        assert evaluation_error(compiled, model, data(seq), between="pad", pad=PAD) < 1e-10
    for seq in (7, 11, 12, 7, 3):
        assert evaluation_error(compiled, model, data(seq), between="compile") < 1e-10
    assert traces == [False] * 4, "eval(), 7, 11 and 3"
    assert evaluation_error(compiled, model, data(1), between="compile") < 1e-10
    for between in (None, "pad", "compile"):
        with pytest.raises(dcpc.DispatchError, match=r"seq: 13}; expected lengths that some"):
            compiled.evaluate(data(13), between=between)


class Mixing(Tokens):
    """Each position sees all others, padding too."""

    def mix(self, x):
        return x + x.mean(1, keepdim=True)


class Branching(Tokens):
    """Another function at one length between the buckets."""

    def mix(self, x):
        return x * 2 if x.shape[1] == 7 else x


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Mixing, {"between": "pad", "pad": PAD}, r"changes the loss at .*take others"),
        (Plain, {"between": "pad", "pad": {"ids": 0, "labels": 0}}, r"changes the loss at .*seq"),
        (Plain, {"between": "pad", "pad": {"ids": 0}}, r"got 'labels' of shape \(2, 7\) and no"),
        (Plain, {"between": "cut"}, r"between='cut'; expected one of None, pad, compile"),
        (Plain, {"pad": PAD}, r"with between=None; expected what fills up"),
        (Plain, {"between": "pad", "pad": {"is": 0}}, r"pad={'is': 0}.*correct the names"),
    ],
    ids=["mixing", "label 0", "no value", "cut", "pad alone", "unknown"],
)
def test_evaluation_that_would_be_wrong_is_refused(kind, options, message):
    compiled = compiled_of(model_of(kind), verify="auto")
    with pytest.raises(dcpc.DispatchError, match=message):
        compiled.evaluate(data(7), **options)


def test_length_at_which_forward_does_something_else_is_refused():
    model = model_of(Branching)
    compiled = compiled_of(model)
    with pytest.raises(dcpc.TraceError, match="at seq 7"):
        compiled.evaluate(data(7), between="compile")
    with pytest.raises(dcpc.DispatchError, match=r"got {seq: 7}; expected .* takes none for gran"):
        compiled(**data(7))
    for seq in (6, 8):
        assert compiled_error(compiled, model, data(seq)) < 1e-10
        assert evaluation_error(compiled, model, data(seq), between="compile") < 1e-10


def random_numbers(compiled, rank=0):
    """Returns 0 for what calls by hand draw of torch's seed: again the same, then other numbers."""
    first, second, again = (
        float(compiled(**data(12)).detach())
        for seed in (5, None, 5)
        if seed is None or torch.manual_seed(seed)
    )
    found = [abs(first - again), float(first == second)]
    if dist.is_initialized():  # ranks of a group that were seeded apart draw alike
        torch.manual_seed(rank)
        loss = compiled(**data(12)).detach()
        mean = loss.clone()
        dist.all_reduce(mean)
        found.append(abs(float(mean) / dist.get_world_size() - float(loss)))
    return found


def test_a_seed_of_torch_repeats_a_call_and_leaves_train_steps_alone():
    steps = []
    for seed in (0, 1):
        compiled = compiled_of(model_of())
        assert random_numbers(compiled) == [0, 0]
        samples = [{n: x[0] for n, x in data(4, 1, i).items()} for i in range(2)]
        (step,) = dcpc.DataLoader(samples, compiled, tokens_per_step=100)
        torch.manual_seed(seed)
        steps.append(compiled.train_step(step).loss)
    assert steps[0] == steps[1]


SETTINGS = ((1, "whole"), (2, "whole"), (2, "step"))


def ready(settings, kind=Dropping):
    """A model to be compiled by two ranks in each of some settings."""
    given = {"backend": "eager", "verify": "off"}
    return [Ready(model_of(kind), BUCKETS, 2, sp=sp, parameters=p, **given) for sp, p in settings]


def evaluate_apart(rank, every):
    return [evaluated_apart(rank, made) for made in every]


def evaluated_apart(rank, made):
    model, compiled = made.model, made.compile()
    sp, parameters = made.options["sp"], made.options["parameters"]
    seed = 0 if sp == 2 else rank
    found = [
        evaluation_error(compiled, model, data(seq, 2, seed), **options)
        for seq, options in [
            (12, {}),
            (7, {"between": "compile"}),
            (7, {"between": "pad", "pad": PAD}),
        ]
    ]
    if parameters == "whole":  # and with gradients
        compiled.eval()
        found.append(compiled_error(compiled, model, data(4), sp / 2))
        compiled.train()
    if parameters == "whole" and sp == 2:
        found += random_numbers(compiled, rank)
    if sp == 1 and rank == 0:  # by itself
        found.append(evaluation_error(compiled, model, data(9), between="compile"))
    return found


def test_evaluation_is_exact_on_two_ranks():
    for every in run_prepared(ready, evaluate_apart, 2, SETTINGS):
        for found, setting in zip(every, SETTINGS, strict=True):
            assert max(found) < 1e-10, setting


def in_rounds():
    return [made for kind in (Dropping, Plain) for made in ready([("auto", "rounds")], kind)]


def evaluate_in_rounds(rank, every):
    return [evaluated_in_rounds(rank, made) for made in every]


def evaluated_in_rounds(rank, made):
    whole = model_of(type(made.model))
    compiled = made.compile()
    found = [compiled.evaluate(data(n, 2, rank)) for n in (4, 12)]
    last = 7 if rank else 12  # ranks gather together, whatever lengths each has
    found.append(compiled.evaluate(data(last, 2, rank), between="compile"))
    whole.eval()
    with torch.no_grad():
        wanted = [whole(**data(n, 2, rank)) for n in (4, 12, last)]
    return [abs(float(a / b) - 1) for a, b in zip(found, wanted, strict=True)]


def test_evaluation_is_exact_in_rounds():
    for every in run_prepared(in_rounds, evaluate_in_rounds, 2):
        assert max(map(max, every)) < 1e-10


def call_in_two_modes(rank):
    compiled = compiled_of(model_of(), sp=2)
    compiled.train(rank == 0)
    try:
        with torch.no_grad():
            compiled(**data(4))
    except dcpc.GroupError as e:
        return str(e)


def test_ranks_in_different_modes_are_told():
    for said in run_ranks(call_in_two_modes, 2):
        assert "of train()" in said
        assert "of eval()" in said


# ----------------------------------------------------------------------------- the module itself


def test_module_is_the_users_own_and_is_copied_and_pickled(tmp_path):
    model = model_of()
    model.config = {"dim": DIM}
    model.generate = lambda: "text"
    compiled = compiled_of(model)
    compiled(**data(4)).backward()
    assert compiled.module is model
    assert compiled.config is model.config
    assert compiled.generate() == "text"
    del model.generate
    copied = copy.deepcopy(compiled.module)
    torch.save(compiled.module, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copied, loaded, pickle.loads(pickle.dumps(compiled.module))):
        with torch.no_grad():
            assert torch.equal(other.eval()(**data(4)), model.eval()(**data(4)))
        assert {id(p) for p in other.parameters()}.isdisjoint(map(id, model.parameters()))


def test_averaged_model_follows_training():
    model, twin = model_of(Plain), model_of(Plain)
    compiled = compiled_of(model)
    averages = []
    for net, run in ((model, compiled), (twin, twin)):
        averaged = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for n in (4, 12, 4):
            run(**data(n)).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(net)
        averages.append(averaged)
    for a, b in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert float((a - b).abs().max()) < 1e-12
    average = compiled_of(averages[0].module.eval())
    with torch.no_grad():
        assert torch.allclose(average(**data(4)), averages[1](**data(4)), rtol=1e-12)


def test_loss_function_is_evaluated_too():
    class Logits(Dropping):
        def forward(self, ids):
            return self.head(self.mix(self.embed(ids)))

    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = model_of(Logits)
    compiled = compiled_of(model, loss=loss)
    got = compiled.evaluate(data(7), between="pad", pad=PAD)
    with torch.no_grad():
        want = token_loss(model.eval()(data(7)["ids"]), data(7)["labels"])
    assert abs(float(got / want) - 1) < 1e-10
