"""Calls without padding: the numbers are those of the plain model, which computes on it."""

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

import dcpc
from dcpc.compiled.unpadding.sides import CallSetting
from dcpc.compiled.unpadding.valid_rows import ValidRows
from dcpc.errors import PlanError, VerifyError
from examples.allocator import measured_peak_bytes
from tests.cases.exactness import compiled_error
from tests.cases.padded_models import (
    SIZES,
    T5_INPUTS,
    T5_SIZES,
    TOKENS,
    VOCABULARY,
    PaddedEncoder,
    batch,
    bert,
    misplaced,
    small,
    t5,
    t5_batch,
    unpadding_of,
)

EXACT = 1e-10
SCALARS_BYTES = 8192  # masks that say which rows are valid, scalars


def compiled(model: nn.Module, inputs=PaddedEncoder.INPUTS, unpad=True, **options):
    buckets = dcpc.Buckets(inputs, SIZES)
    options = {"backend": "eager", "verify": "off"} | options
    return dcpc.compile(model, buckets, unpad=unpad, **options)


def encoder(dropout: float = 0.0) -> PaddedEncoder:
    torch.manual_seed(0)
    return PaddedEncoder(dropout=dropout).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "bert": (
        bert,
        TOKENS,
    ),
    "bert, first token": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**small())),
        TOKENS | {"labels": "int64[batch]"},
    ),
    "roberta": (
        lambda: transformers.RobertaForMaskedLM(
            transformers.RobertaConfig(**small(pad_token_id=1))
        ),
        TOKENS,
    ),
    "distilbert": (
        lambda: transformers.DistilBertForTokenClassification(
            transformers.DistilBertConfig(
                vocab_size=VOCABULARY, max_position_embeddings=32, dim=32, n_layers=2, n_heads=2,
                hidden_dim=48, dropout=0.0, attention_dropout=0.0, num_labels=VOCABULARY,
            )
        ),
        TOKENS,
    ),
}  # fmt: skip


# A model and what is compiled of it, which several tests call. Each counts its own calls.


@cache
def encoder_of(recompute: str) -> tuple[PaddedEncoder, dcpc.CompiledModel]:
    model = encoder()
    return model, compiled(model, recompute=recompute)


@cache
def transformer_of(name: str) -> tuple[nn.Module, dcpc.CompiledModel]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double()
    return model, compiled(model, inputs)


@cache
def t5_of(encoders: int, decoders: int, recompute: str) -> tuple[nn.Module, dcpc.CompiledModel]:
    model = t5(encoders, decoders)
    return model, compiled_t5(model, recompute=recompute)


def assert_exact(made: dcpc.CompiledModel, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    model.zero_grad()
    assert compiled_error(made, model, inputs) < EXACT


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_every_length_is_exact(recompute):
    model, made = encoder_of(recompute)
    before = made.stats().unpadded
    for lengths in [[1, 12, 5], [1, 1], [9, 3, 2, 11], [12]]:
        assert_exact(made, model, batch(model.INPUTS, lengths, SIZES[0]))
    # of one whole sample there is nothing to leave out
    assert made.stats().unpadded == before + 3
    for more in ({"left": True}, {"holes": True}):
        inputs = batch(model.INPUTS, [4, 16, 7], SIZES[1], **more)
        assert_exact(made, model, inputs)
        with torch.no_grad():
            expected = model(**inputs)
        assert abs(made.evaluate(inputs) - expected) < EXACT * abs(expected)
    assert made.stats().unpadded == before + 7


@pytest.mark.parametrize(
    "name",
    ["bert", "roberta", *(pytest.param(n, marks=pytest.mark.slow) for n in [*MODELS][1::2])],
)
def test_models_of_transformers_are_exact(name):
    model, made = transformer_of(name)
    before = made.stats().unpadded
    for lengths in [[1, 16, 7, 2], [15, 4]]:
        assert_exact(made, model, batch(MODELS[name][1], lengths, SIZES[1]))
    assert made.stats().unpadded == before + 2


def compiled_t5(model: nn.Module, **options) -> dcpc.CompiledModel:
    buckets = dcpc.Buckets(T5_INPUTS, [T5_SIZES])
    options = {"unpad": True, "backend": "eager", "verify": "off"} | options
    return dcpc.compile(model, buckets, **options)


def sides(made: dcpc.CompiledModel, given: dict[str, Tensor]) -> list[str]:
    """Of which lengths the padded rows are left out in a call."""
    (bucket,) = made.buckets
    names = made.planned.by_bucket[bucket].traced.program.inputs
    inputs = {p: given[n] for p, n in names.items()}
    sizes = {**T5_SIZES, "batch": len(given["labels"])}
    rows = unpadding_of(made).rows(sizes, inputs, CallSetting(1, 0, 0, sizes))
    every = unpadding_of(made).sides[: len(rows.sides) if rows else 0]
    return [str(side.plan.row_sizes[1]) for side in every]


@pytest.mark.parametrize(
    ("layers", "first", "second"),
    [((2, 1), "seq", "tgt"), pytest.param((1, 2), "tgt", "seq", marks=pytest.mark.slow)],
)
def test_a_bias_that_learns_is_exact_beside_a_mask_of_padded_keys(layers, first, second):
    """Rows of the encoder and of the decoder are packed, those of more layers first."""
    model, made = t5_of(*layers, "none")
    before = made.stats().unpadded
    both, one = [first, second], [first]
    for lengths, targets, left, found in [
        ([1, 16, 7, 2], [12, 1, 5, 3], False, both),
        ([4, 9], [2, 7], True, both),
        ([16, 16], [2, 7], False, ["tgt"] if first == "tgt" else both),
        ([3, 9, 1], [12, 12, 12], False, ["seq"] if first == "seq" else both),
        ([16, 16], [12, 12], False, []),
        # its queries read all keys alike, all of them padding
        ([6, 0, 3], [3, 12, 2], False, one if first == "tgt" else []),
    ]:
        given = t5_batch(lengths, targets, left)
        assert sides(made, given) == found
        assert_exact(made, model, given)
    assert made.stats().unpadded == before + (4 if first == "seq" else 5)


@pytest.mark.slow
def test_both_sides_are_exact_at_every_length():
    model, made = t5_of(2, 2, "all")
    before = made.stats().unpadded
    for n in range(1, 13):
        given = t5_batch([n, 16, 17 - n], [13 - n, n, 12])
        assert len(sides(made, given)) == 2
        assert_exact(made, model, given)
    assert made.stats().unpadded == before + 12


def test_rows_of_both_sides_alone_are_made():
    """Of 3 samples of 4 and 3 rows no product has more rows than these; padded it has 48 and 36."""
    _, made = t5_of(2, 1, "none")
    given = t5_batch([4, 4, 4], [3, 3, 3])
    made(**given)
    side = unpadding_of(made).sides[-1]
    program = side.runnable.traced.program
    at = program.dims({**T5_SIZES, "batch": 3, "valid_rows": 12, "valid_rows_1": 9})
    rows = {
        int((program.info[n.name].numel / program.info[n.name].shape[-1]).subs(at))
        for n in program.gm.graph.nodes
        if n.target is torch.ops.aten.linear.default
    }
    assert rows == {12, 9}


@pytest.mark.parametrize("left", [False, True])
def test_attention_with_a_bias_is_that_of_valid_rows(left):
    """Each side's own attentions; a cross attention has keys of the other length."""
    model, made = t5_of(2, 1, "none")
    before = made.stats().unpadded
    first, second = unpadding_of(made).sides
    assert (len(first.plan.biased), len(second.plan.biased)) == (2, 1)
    graph = second.runnable.traced.program.gm.graph
    names = [str(n.target) for n in graph.nodes if "attention" in str(n.target)]
    assert names.count("dcpc.attention_of_rows.default") == 3
    assert names.count("dcpc.attention.default") == 1
    for lengths, targets in [
        ([16, 3, 1], [1, 12, 1]),
        ([2, 2], [3, 3]),
        ([15, 16, 9, 1], [2, 9, 4, 12]),
    ]:
        assert_exact(made, model, t5_batch(lengths, targets, left))
    assert made.stats().unpadded == before + 3


@pytest.mark.slow
def test_a_decoder_sample_of_padding_alone_is_exact_with_a_bias():
    model, made = t5_of(1, 2, "none")
    given = t5_batch([5, 16, 9], [4, 0, 7])
    assert sides(made, given) == ["tgt", "seq"]
    assert_exact(made, model, given)


@pytest.mark.parametrize(
    ("layers", "recompute"),
    [((2, 1), "none"), pytest.param((2, 2), "all", marks=pytest.mark.slow)],
)
def test_memory_of_both_sides_is_within_the_prediction(layers, recompute):
    _, made = t5_of(*layers, recompute)
    before = made.stats().unpadded
    given = t5_batch([16, 3, 9, 7], [12, 2, 5, 8])
    (bucket,) = made.buckets
    sizes, unpadding = {**T5_SIZES, "batch": 4}, unpadding_of(made)
    names = made.planned.by_bucket[bucket].traced.program.inputs
    how = CallSetting(1, made.plans[bucket].menu_step, 0, sizes)
    rows = unpadding.rows(sizes, {p: given[n] for p, n in names.items()}, how)
    limit = made.predict(sizes).peak_bytes
    side = unpadding.sides[-1]
    own = unpadding.step_within(sizes, rows, how, limit)
    assert own is not None
    predicted = side.study(how).predict(own, side.sizes(sizes, rows.sides)).peak_bytes
    assert predicted <= limit
    made(**given).backward()
    measured = measured_peak_bytes(lambda: made(**given).backward())
    indices = sum(x.nbytes for found in rows.sides for x in found.indices.values())
    assert made.stats().unpadded == before + 2
    assert measured <= predicted + indices + SCALARS_BYTES


@pytest.mark.slow
def test_first_calls_of_one_side_and_of_both_are_held_against_the_plain_model():
    made = compiled_t5(t5(2, 1), verify="auto")
    for lengths, targets in [([3, 16, 9], [12, 12, 12]), ([3, 16, 9], [5, 12, 2])]:
        made(**t5_batch(lengths, targets)).backward()
    assert made.stats().unpadded == 2
    assert made.report().count("without padding: loss and every gradient") == 2


def with_norms_of_float64(model: nn.Module) -> nn.Module:
    """T5's own norms add up in float32, in an order that Inductor changes."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child).__name__ == "T5LayerNorm":
                setattr(module, name, nn.RMSNorm(len(child.weight), child.variance_epsilon))
    return model.double()


@pytest.mark.slow
def test_inductor_runs_both_sides():
    model = with_norms_of_float64(t5(1, 1))
    made = compiled_t5(model, backend="inductor")
    for lengths, targets in [([1, 16, 7], [12, 1, 5]), ([2, 3, 11], [4, 7, 8])]:
        assert compiled_error(made, model, t5_batch(lengths, targets)) < EXACT
        model.zero_grad()
    assert made.stats().unpadded == 2
    assert unpadding_of(made).sides[-1].runnable.compiled_count == 1


def test_a_sample_of_padding_alone_is_as_in_the_plain_model():
    model, made = transformer_of("bert")
    before = made.stats().unpadded
    assert_exact(made, model, batch(TOKENS, [6, 0, 3], SIZES[0]))
    assert made.stats().unpadded == before + 1


def test_dropout_drops_what_it_drops_with_padding():
    inputs = batch(PaddedEncoder.INPUTS, [2, 12, 6], SIZES[0])
    found = []
    for unpad in (True, False):
        model = encoder(dropout=0.3)
        torch.manual_seed(1)
        made = compiled(model, unpad=unpad)
        loss = made(**inputs)
        loss.backward()
        assert made.stats().unpadded == unpad
        found.append((loss, *(p.grad for p in model.parameters())))
    torch.testing.assert_close(found[0], found[1], rtol=EXACT, atol=EXACT)


def spoiled(name: str, value: float) -> dict[str, Tensor]:
    inputs = batch(PaddedEncoder.INPUTS, [2, 12, 6], SIZES[0])
    inputs[name][0, -1] = value
    return inputs


def test_a_loss_of_padding_runs_with_padding():
    model, made = encoder_of("none")
    before = made.stats().unpadded
    assert_exact(made, model, spoiled("labels", 3))
    assert made.stats().unpadded == before


class FirstToken(PaddedEncoder):
    def forward(self, **inputs: Tensor) -> Tensor:
        kept = inputs["attention_mask"]
        x = self.tokens(inputs["input_ids"])
        x = x + self.attention(x, 0, (kept > 0)[:, None, None])
        return self.number(x[:, 0]).square().mean()


class MeanOfAll(PaddedEncoder):
    def forward(self, **inputs: Tensor) -> Tensor:
        kept = inputs["attention_mask"]
        x = self.tokens(inputs["input_ids"])
        return (x + self.attention(x, 0, (kept > 0)[:, None, None])).square().mean()


def test_a_first_token_that_is_padding_is_read_with_padding():
    torch.manual_seed(0)
    model = FirstToken().double()
    made = compiled(model)
    for left, unpadded in ((False, 1), (True, 1)):
        inputs = batch(model.INPUTS, [2, 12, 6], SIZES[0], left=left)
        assert compiled_error(made, model, inputs) < EXACT
        assert made.stats().unpadded == unpadded
        model.zero_grad()


def test_what_reads_padding_is_named():
    torch.manual_seed(0)
    model = MeanOfAll().double()
    made = compiled(model)
    assert "reads padded rows" in unpadding_of(made).reason
    assert "reads padded rows" in made.report()
    inputs = batch(model.INPUTS, [2, 12, 6], SIZES[0])
    assert compiled_error(made, model, inputs) < EXACT
    assert made.stats().unpadded == 0


def test_outputs_are_zero_at_padding_only_where_it_is_asked_for():
    model, unpadded = transformer_of("bert")  # has no dropout: eval() changes no number
    inputs = batch(TOKENS, [2, 16, 6], SIZES[1])
    with torch.no_grad():
        plain = model(**inputs).logits
    valid = inputs["attention_mask"].bool()
    for unpad, made in (("auto", compiled(model, TOKENS, unpad="auto")), (True, unpadded)):
        _, outputs = made.evaluate(inputs, outputs=True)
        torch.testing.assert_close(outputs["logits"][valid], plain[valid], rtol=EXACT, atol=EXACT)
        assert bool((outputs["logits"][~valid] == 0).all()) is (unpad is True)


def test_memory_with_padding_is_an_upper_bound():
    _, made = encoder_of("all")
    unpadding = unpadding_of(made)
    (bucket, *_) = made.buckets
    sizes = {**bucket.sizes, "batch": 3}
    how = CallSetting(1, made.plans[bucket].menu_step, 0, sizes)
    inputs = batch(PaddedEncoder.INPUTS, [3, 12, 5], bucket.sizes)
    names = made.planned.by_bucket[bucket].traced.program.inputs
    rows = unpadding.rows(sizes, {p: inputs[n] for p, n in names.items()}, how)
    (found,) = rows.sides
    assert (found.count, found.squares, found.samples) == (20, 9 + 144 + 25, 3)
    limit = made.predict(bucket, 3).peak_bytes
    assert unpadding.step_within(sizes, rows, how, limit) is not None
    assert unpadding.step_within(sizes, rows, how, 1) is None


def test_auto_asks_what_it_saves():
    made = compiled(encoder(), unpad="auto")
    made(**batch(PaddedEncoder.INPUTS, [1, 12, 1], SIZES[0]))
    assert made.stats().unpadded == 0, "so little that looking for padding takes longer"


def test_refuses_what_is_no_mode():
    with pytest.raises(PlanError, match="unpad='always'; expected one of auto, True, False"):
        compiled(encoder(), unpad="always")


@pytest.mark.slow
def test_inductor_compiles_one_graph_for_every_number_of_rows():
    model = encoder()
    made = compiled(model, backend="inductor")
    for lengths in [[1, 12, 5], [9, 3, 2], [12, 1, 1]]:
        assert compiled_error(made, model, batch(model.INPUTS, lengths, SIZES[0])) < EXACT
        model.zero_grad()
    assert made.stats().unpadded == 3
    assert unpadding_of(made).runnable.compiled_count == 1


def trains(made: dcpc.CompiledModel, inputs: dict[str, Tensor]) -> None:
    made(**inputs).backward()


def evaluates(made: dcpc.CompiledModel, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        made.evaluate(inputs)


@pytest.mark.parametrize(
    ("dropout", "run"),
    [pytest.param(0.0, trains, marks=pytest.mark.slow), (0.2, trains), (0.0, evaluates)],
)
def test_the_first_call_is_held_against_the_plain_model(dropout, run, monkeypatch):
    model = encoder(dropout)
    inputs = batch(model.INPUTS, [3, 16, 9, 5], SIZES[1])
    made = compiled(model, verify="auto")
    run(made, inputs)
    assert made.stats().unpadded == 1
    assert "without padding: loss and every gradient at {batch: 2, seq: 16}" in made.report()
    model.zero_grad()
    monkeypatch.setattr(ValidRows, "__init__", misplaced(ValidRows.__init__))
    with pytest.raises(VerifyError, match="without padding does not give what the model gives"):
        run(compiled(model, verify="auto"), inputs)
