"""What a user calls, and what it says when that was wrong."""

import copy
import functools
import inspect
import pickle
import pydoc
import re

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import dcpc
from dcpc.compiled.model.model_state import ModelSaving
from dcpc.compiled.pipeline import PipelinedModel
from dcpc.runtime.step.stats import Stats
from models.gpt import GPT, GPTConfig
from tests.cases.ready import traced_once

INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")


def gpt(**options):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, dim=32, n_layers=1, n_heads=4, **options))


def buckets(*lengths):
    return dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": n} for n in lengths])


def data(batch, seq):
    ids, labels = torch.randint(0, 64, (2, batch, seq), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": labels}


@pytest.fixture(scope="module")
def compiled():
    return dcpc.compile(gpt(), buckets(7, 32), backend="eager")


class Samples:
    def __init__(self, *lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return {k: v[0] for k, v in data(1, self.lengths[i]).items()}


def refused(kind, pattern):
    return pytest.raises(kind, match=re.compile(pattern, re.DOTALL))


@pytest.mark.parametrize("function", [dcpc.compile, dcpc.api.plan])
def test_what_is_no_model_or_no_buckets_is_refused(function):
    with refused(dcpc.TraceError, "model: got function; expected a torch.nn.Module; .*forward"):
        function(lambda ids: ids.sum(), buckets(7))
    with refused(dcpc.TraceError, "model: got the class GPT; expected .*; call the class"):
        function(GPT, buckets(7))
    with refused(dcpc.BucketError, r"buckets: got dict; expected dcpc.Buckets; .*from_yaml"):
        function(gpt(), {"seq": 5})


@pytest.mark.parametrize("function", [dcpc.compile, dcpc.api.plan])
def test_a_model_that_is_compiled_already_is_refused(compiled, function):
    with pytest.raises(dcpc.TraceError, match=r"got a CompiledModel.* made of; pass that"):
        function(compiled, compiled.buckets, backend="eager")


@pytest.mark.parametrize("kind", [dcpc.CompiledModel, PipelinedModel])
def test_help_shows_what_parts_have_as_the_models_own(kind):
    text = pydoc.plain(pydoc.render_doc(kind))
    for shown in ("train_step(", "report(self, full", "predict(self, bucket", "load(", "speeds"):
        assert shown in text
    assert "step: step of a `dcpc.DataLoader`." in text
    assert "Speeds of the ranks beside the fastest one" in text
    parameters = inspect.signature(kind.train_step).parameters
    assert [*parameters] == ["self", "step", "clip", "nonfinite", "outputs"]


def test_the_attributes_of_parts_are_the_compiled_models(compiled):
    assert compiled.module is compiled.model
    assert compiled.speeds == ()
    assert compiled.replans == compiled.block == 0
    assert compiled.program is compiled.runnable.traced.program
    compiled.comm_bucket_bytes = 7
    assert compiled.comm_bucket_bytes == compiled._core.comm_bucket_bytes == 7
    assert inspect.signature(compiled.save) == inspect.signature(ModelSaving.save.__get__(object()))


@pytest.mark.parametrize("logger", [3, None, "runs"])
def test_a_logger_that_cannot_be_called_is_refused(compiled, logger):
    with pytest.raises(dcpc.DataError, match=r"log_to: got .*; expected a function of a step"):
        compiled.log_to(logger)


def test_a_step_or_a_bucket_of_another_kind_is_refused(compiled):
    with refused(dcpc.DataError, r"step: got dict; expected a step that dcpc.DataLoader yields"):
        compiled.train_step(data(1, 7))
    for function in (compiled.predict, compiled.profile, compiled.source):
        with refused(dcpc.BucketError, r"got bucket 7; expected a dim -> its length"):
            function(7)


def test_parameters_and_state_are_the_models_own(compiled):
    model = compiled.model
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert dict(compiled.named_parameters()).keys() == dict(model.named_parameters()).keys()
    other = gpt()
    other.load_state_dict(compiled.state_dict())


def test_an_optimizer_step_changes_what_runs_next(compiled):
    first = compiled(**data(2, 7))
    first.backward()
    compiled.reduce_gradients()
    torch.optim.SGD(compiled.parameters(), lr=0.5).step()
    compiled.zero_grad()
    inputs = data(2, 7)
    torch.testing.assert_close(compiled(**inputs), compiled.model(**inputs))
    assert compiled(**inputs) < first


def test_inputs_by_position_and_without_gradient(compiled):
    inputs = data(2, 7)
    expected = compiled.model(**inputs)
    torch.testing.assert_close(compiled(*inputs.values()), expected)
    with torch.no_grad():
        loss = compiled(**inputs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)


def test_inputs_by_position_are_refused_where_forward_has_another_order():
    turned = dcpc.Buckets(
        inputs=dict.fromkeys(reversed(INPUTS), INPUTS["labels"]), sizes=[{"seq": 7}]
    )
    compiled = dcpc.compile(gpt(), turned, backend="eager", verify="off")
    inputs = data(2, 7)
    torch.testing.assert_close(compiled(**inputs), compiled.model(**inputs))
    with refused(dcpc.DispatchError, r"buckets' order \(labels.*forward's order \(input_ids"):
        compiled(*inputs.values())


def test_second_backward_is_an_error(compiled):
    loss = compiled(**data(2, 7))
    loss.backward()
    with refused(dcpc.CodegenError, r"a second one.*expected retain_graph=True.*call compiled"):
        loss.backward()
    compiled.zero_grad()


def test_prediction_is_of_the_batch_that_was_named(compiled):
    one, three = (compiled.predict({"seq": 32}, batch=n) for n in (1, 3))
    assert compiled.predict({"seq": 32, "batch": 3}) == three
    assert compiled.predict({"seq": 32, "batch": 3}, batch=1) == one
    assert one.flops * 3 == three.flops


def test_report_and_source_say_what_runs(compiled):
    report = compiled.report()
    assert "besides each peak: parameters" in report
    for word in ("seq", "micro", "sp", "recompute", "peak"):
        assert word in report.lower(), word
    source = compiled.source({"seq": 32})
    assert "def forward(" in source
    assert "def backward(" in source
    compile(source, "source.py", "exec")
    with refused(dcpc.BucketError, r"\{seq: 9\}.*seq: 7.*seq: 32"):
        compiled.source({"seq": 9})


@pytest.mark.parametrize(
    ("inputs", "pattern"),
    [
        ({"seq": 33}, r"got .*seq: 33.*expected lengths that some bucket holds.*seq: 7.*seq: 32"),
        ({"seq": 1}, r"call of {seq: 7}: got {seq: 1}; expected .* right: from {seq: 2} on.*; pad"),
        ({"labels": None}, r"missing: labels.*expected exactly input_ids, labels"),
        ({"extra": torch.ones(1)}, r"unknown: extra"),
        ({"labels": torch.ones(2, 7)}, r"'labels'.*torch.float32.*expected torch.int64"),
        ({"labels": torch.ones(2, 6).long()}, r"'labels'.*\(2, 6\).*expected"),
        ({"labels": torch.ones(3, 7).long()}, r"'labels'.*\(3, 7\).*expected"),
        ({"labels": torch.ones(7).long()}, r"'labels'.*1 dims.*expected 2"),
        ({"labels": [1, 2]}, r"labels.*got list.*expected tensors named"),
    ],
)
def test_call_that_fits_no_bucket_is_refused(compiled, inputs, pattern):
    call = data(2, inputs.pop("seq", 7))
    call = {k: v for k, v in {**call, **inputs}.items() if v is not None}
    with refused(dcpc.DispatchError, pattern):
        compiled(**call)


@pytest.mark.parametrize(
    ("options", "kind", "pattern"),
    [
        ({"backend": "tpu"}, dcpc.DcpcError, r"backend='tpu'.*expected one of eager, inductor"),
        (
            {"recompute": "some"},
            dcpc.PlanError,
            r"'some'.*expected one of auto, pyramid, none, all",
        ),
        ({"sp": 3}, dcpc.PlanError, r"sp=3 with 1 ranks.*expected 'auto' or a divisor"),
        ({"sp": True}, dcpc.PlanError, r"sp=True.*expected"),
        ({"memory": -1}, dcpc.PlanError, r"memory=-1.*expected a positive number of bytes"),
        ({"memory": float("nan")}, dcpc.PlanError, r"memory=nan.*expected a positive number"),
        ({"memory": 1e5}, dcpc.PlanError, r"bucket \{seq: 7\} needs .*B on a rank.*too little"),
        ({"device": "abacus"}, dcpc.DcpcError, r"abacus.*expected"),
    ],
)
def test_option_that_is_not_possible_is_refused(options, kind, pattern):
    with refused(kind, pattern):
        dcpc.compile(gpt(), buckets(7, 32), **{"backend": "eager", **options})


def test_spec_of_an_argument_that_forward_has_not_is_refused():
    wrong = dcpc.Buckets(inputs={**INPUTS, "mask": "bool[batch, seq]"}, sizes=[{"seq": 7}])
    with refused(dcpc.TraceError, r"GPT.forward .*: mask, which it does not take; expected its"):
        dcpc.compile(gpt(), wrong, backend="eager")


def test_spec_that_lacks_an_argument_of_forward_is_refused():
    wrong = dcpc.Buckets(inputs={"input_ids": INPUTS["input_ids"]}, sizes=[{"seq": 7}])
    with refused(dcpc.TraceError, r"GPT.forward .*: no labels; expected its arguments"):
        dcpc.compile(gpt(), wrong, backend="eager")


def test_bucket_without_a_length_is_refused():
    with refused(dcpc.BucketError, r"expected a length for seq"):
        dcpc.Buckets(inputs=INPUTS, sizes=[{}])
    with refused(dcpc.BucketError, r"got nan; expected an integer"):
        dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": float("nan")}])


def test_datasets_that_cannot_be_dealt_out_are_refused(compiled):
    with refused(dcpc.DataError, r"got 0 samples; expected at least 1"):
        dcpc.DataLoader(Samples(), compiled, tokens_per_step=64)
    with refused(dcpc.DataError, r"sample 1.*40.*expected.*32"):
        list(dcpc.DataLoader(Samples(7, 40), compiled, tokens_per_step=64, shuffle=False))


def test_train_step_runs_every_sample_once(compiled):
    loader = dcpc.DataLoader(Samples(7, 32, 7, 7), compiled, tokens_per_step=60, weight="labels")
    before = compiled.stats().steps
    steps = [(step, compiled.train_step(step)) for step in loader]
    seen = [i for step, _ in steps for mb in step.micro_batches for i in mb.samples]
    assert sorted(seen) == [0, 1, 2, 3]
    assert compiled.stats().steps == before + len(steps)
    assert all(result.loss.isfinite() for _, result in steps)
    compiled.zero_grad()
    step, result = steps[0]
    shown = f"{step}"
    assert re.fullmatch(r"Step 0 of epoch 0: \d samples, \d+ tokens, (\d) of \1 micro.*", shown)
    assert repr(step) == shown
    assert re.match(r"loss [\d.]+, [\d.]+ s, imbalance 0.0%$", f"{result}")


def test_the_table_of_stats_goes_by_length():
    told = str(Stats(calls={dcpc.Bucket.of({"seq": n}): 1 for n in (1024, 96, 200)}))
    assert re.findall(r"^\{seq: (\d+)\}", told, re.M) == ["96", "200", "1024"]


def needs(compiled, bucket, recompute):
    """Bytes of a bucket's plan with another number of steps of recompute."""
    plan, sizes = (
        compiled.plans[bucket],
        {**bucket.sizes, "batch": compiled.plans[bucket].micro_batch},
    )
    placement = compiled.runnable.priced.placement(sizes, plan.sp)
    cost = compiled.runnable.priced.at(placement).predict(recompute, sizes)
    return cost.peak_bytes + cost.input_bytes


def test_recompute_is_just_enough():
    size = dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": 256, "batch": 4}])
    options = {"backend": "eager", "optimizer_bytes": 0, "verify": "off"}
    roomy = dcpc.compile(gpt(), size, **options)
    (bucket,) = size
    resident = 2 * sum(p.nbytes for p in roomy.parameters())
    resident += sum(b.nbytes for b in roomy.model.buffers())
    most, least = needs(roomy, bucket, 0), needs(roomy, bucket, roomy.plans[bucket].steps - 1)
    memory = resident + (most + least) // 2
    tight = dcpc.compile(gpt(), size, memory=memory, **options)
    k = tight.plans[bucket].menu_step
    assert roomy.plans[bucket].menu_step == 0 < k
    assert resident + needs(tight, bucket, k) <= memory < resident + needs(tight, bucket, k - 1)
    inputs = data(4, 256)
    torch.testing.assert_close(tight(**inputs), roomy(**inputs))


def test_optimizer_has_its_place_in_the_plan():
    shapes, model = buckets(32), gpt()
    size_bytes = sum(p.nbytes for p in model.parameters())
    counts = len(list(model.parameters()))

    def needed(**options) -> int:
        planned = dcpc.api.plan(model, shapes, world=2, backend="eager", sp=1, **options)
        (table,) = planned.tables.values()
        return table[0].needed_bytes

    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    made = torch.optim.AdamW(model.parameters())
    with traced_once():
        none = needed(optimizer_bytes=0)
        assert needed() - none == 2 * size_bytes
        assert needed(optimizer=torch.optim.SGD) == none
        assert needed(optimizer=momentum) - none == size_bytes
        assert needed(optimizer=torch.optim.AdamW) - none == 2 * size_bytes + 4 * counts
        share = needed(optimizer=made, parameters="step") - none
    # Half of Adam's two tensors, and a comm bucket twice, which is as large as so small a model.
    assert 3 * size_bytes <= share < 3.1 * size_bytes
    with pytest.raises(dcpc.PlanError, match="expected one of them"):
        needed(optimizer=momentum, optimizer_bytes=3)


def test_a_model_without_memory_is_planned_as_one_with():
    config = GPTConfig(dim=32, n_layers=1, n_heads=4)
    with torch.device("meta"):
        hollow = GPT(config)
    shapes = buckets(32, 512)
    options = {"world": 4, "device": "h200", "memory": 40e6, "backend": "eager"}
    expected = dcpc.api.plan(GPT(config), shapes, **options)
    found = dcpc.api.plan(hollow, shapes, **options)
    assert found.report() == expected.report()
    # Of all ranks, of the sum of gradients, of pairs.
    assert "3 communicators of a rank take 1.23 GB of the device" in found.report()
    assert all(p.is_meta for p in hollow.parameters())
    with pytest.raises(dcpc.DispatchError, match=r"call dcpc\.materialize\(compiled\)"):
        list(dcpc.compile(hollow, shapes, backend="eager").parameters())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_compiled_model_is_not_copied(compiled, copied):
    with pytest.raises(dcpc.errors.DispatchError, match=r"deepcopy\(compiled\.model\)"):
        copied(compiled)


def test_clip_counts_the_gradient_of_a_parameter_frozen_since(compiled):
    (step,) = dcpc.DataLoader(Samples(7), compiled, tokens_per_step=64)
    compiled.train_step(step)
    frozen = compiled.model.head.weight.requires_grad_(False)
    try:
        found = compiled.train_step(step, clip=1e9)
        every = [p.grad for p in compiled.parameters() if p.grad is not None]
        assert any(g is frozen.grad for g in every)
        assert found.grad_norm == pytest.approx(float(torch.nn.utils.get_total_norm(every)))
    finally:
        frozen.requires_grad_(True)
        compiled.zero_grad()


def test_torchs_checkpoints_find_modules_named_as_what_a_compiled_model_has():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("model", "module", "block", "groups"):
                setattr(self, name, nn.Linear(4, 4))
            self.plans = nn.Parameter(torch.ones(4))
            self.register_buffer("tables", torch.ones(4))

        def forward(self, x):
            x = self.groups(self.block(self.module(self.model(x))))
            return (x * self.plans * self.tables).square().mean()

    model = Named()
    buckets = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 4}])
    compiled = dcpc.compile(model, buckets, backend="eager", verify="off")
    found = get_model_state_dict(compiled)
    assert sorted(found) == sorted(model.state_dict())
    changed = {name: torch.full_like(x, 2.0) for name, x in found.items()}
    set_model_state_dict(compiled, changed)
    assert all(bool((x == 2).all()) for x in model.state_dict().values())
