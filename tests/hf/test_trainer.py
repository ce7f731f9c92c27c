"""The mixin in one process: the same parameters as the Trainer alone, and all that is around it."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import dcpc
from dcpc.api import compiling
from dcpc.errors import DataError, PlanError
from dcpc.runtime.data.steps import Step
from tests.cases.hf_trainers import (
    EAGER,
    LENGTHS,
    STEP,
    TEXT,
    Ours,
    Samples,
    furthest,
    llama,
    llama_again,
    logged,
    made,
    values,
)
from tests.cases.ready import Keeper


class Seen(TrainerCallback):
    """Notes which samples were trained in each epoch."""

    def __init__(self, trainer) -> None:
        self.epochs: dict[int, list[int]] = {}
        step_of = trainer.training_step

        def noted(model, inputs, *args, **kwargs):
            step: Step = inputs["dcpc_step"]
            samples = [i for mb in step.micro_batches for i in mb.samples]
            self.epochs.setdefault(step.epoch, []).extend(samples)
            return step_of(model, inputs, *args, **kwargs)

        trainer.training_step = noted


@pytest.fixture(scope="module", autouse=True)
def _plans_are_made_once():
    """Tests compile one module: the first one's plans and graphs are all others', too."""
    with Keeper().around(compiling):
        yield


def trained(kind, folder, **settings) -> Trainer:
    trainer = made(kind, folder, **settings)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Trainer:
    """The Trainer alone, after training as usual."""
    return trained(Trainer, tmp_path_factory.mktemp("plain"))


def test_parameters_losses_and_norms_are_those_of_the_trainer(tmp_path, plain):
    ours = trained(Ours, tmp_path)
    assert furthest(values(plain), values(ours)) < 1e-10
    for name in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert logged(ours, name) == pytest.approx(logged(plain, name), rel=1e-6)
    assert len(logged(ours)) == 2 * len(LENGTHS) // STEP
    assert ours.get_total_train_batch_size(ours.args) == STEP


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [{}, {"seed": 7, "data_seed": 3}])
def test_shuffled_steps_are_those_of_the_trainer(tmp_path, seeds):
    kinds = {"train_sampling_strategy": "random", **seeds}
    plain, ours = (trained(kind, tmp_path, **kinds) for kind in (Trainer, Ours))
    assert furthest(values(plain), values(ours)) < 1e-10
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-6)


@pytest.mark.slow
def test_accumulated_batches_are_one_step(tmp_path, plain):
    kinds = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": STEP}
    ours = trained(Ours, tmp_path, **kinds)
    assert furthest(values(plain), values(ours)) < 1e-10
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-6)


@pytest.mark.slow
def test_tokens_are_counted(tmp_path):
    real, to_buckets = sum(LENGTHS), sum(8 if n <= 8 else 24 for n in LENGTHS)

    def counted(seen, **options):
        own = {"options": {"loader_options": options}, "num_train_epochs": 1}
        state = trained(Ours, tmp_path, include_num_input_tokens_seen=seen, **own).state
        assert state.total_flos > 0
        return state.num_input_tokens_seen

    assert counted("non_padding") == real
    assert counted("all", pad_to="bucket") == to_buckets
    assert real <= counted("all") < to_buckets


def test_epochs_by_tokens_have_every_sample_once(tmp_path):
    options = {"loader_options": {"tokens_per_step": 50}}
    kinds = {"train_sampling_strategy": "random", "num_train_epochs": 3}
    ours = made(Ours, tmp_path, options=options, **kinds)
    seen = Seen(ours)
    ours.train()
    assert {e: sorted(s) for e, s in seen.epochs.items()} == {
        e: list(range(len(LENGTHS))) for e in range(3)
    }
    assert ours.state.max_steps == ours.state.global_step == len(logged(ours))
    assert ours.state.epoch == 3


@pytest.mark.slow
def test_the_last_step_of_an_epoch_may_be_smaller(tmp_path):
    ours = made(Ours, tmp_path, data=Samples(10), train_sampling_strategy="random")
    seen = Seen(ours)
    ours.train()
    assert {e: sorted(s) for e, s in seen.epochs.items()} == {e: list(range(10)) for e in range(2)}
    assert ours.state.global_step == 6


@pytest.mark.slow
def test_a_part_of_an_epoch_has_its_part_of_the_steps(tmp_path):
    ours = made(Ours, tmp_path, num_train_epochs=1.5)
    seen = Seen(ours)
    ours.train()
    assert {e: len(s) for e, s in seen.epochs.items()} == {0: len(LENGTHS), 1: len(LENGTHS) // 2}
    assert ours.state.epoch == 1.5


def test_max_steps_ends_within_an_epoch_and_trains_again(tmp_path):
    ours = trained(Ours, tmp_path, max_steps=5)
    assert ours.state.global_step == 5
    assert ours.state.epoch == 1.25
    compiled = ours.compiled
    ours.train()
    assert ours.compiled is compiled


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Parameters and trainer of runs that were not interrupted, by the loader's options."""
    found = {}

    def run(options) -> tuple[list[torch.Tensor], Trainer]:
        if str(options) not in found:
            folder = tmp_path_factory.mktemp("whole")
            ours = trained(Ours, folder, model=dropping(), **random_order(options))
            found[str(options)] = values(ours), ours
        return found[str(options)]

    return run


def dropping():
    return llama_again(0.1)


def random_order(options):
    return {"train_sampling_strategy": "random", "options": {"loader_options": options}}


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(4, {}, marks=pytest.mark.slow),
        (3, {"tokens_per_step": 40}),
        pytest.param(6, {"tokens_per_step": 40}, marks=pytest.mark.slow),
    ],
)
def test_resumed_it_is_as_if_it_had_never_stopped(tmp_path, whole, stop, options):
    kinds = random_order(options)
    parameters, alone = whole(options)
    first = made(Ours, tmp_path, model=dropping(), save_strategy="steps", save_steps=stop, **kinds)
    first.add_callback(Stop(stop))
    first.train()
    saved = json.loads((tmp_path / f"checkpoint-{stop}/trainer_state.json").read_text())
    assert "position" in saved["stateful_callbacks"]["LoaderState"]["attributes"]["saved"]
    again = made(Ours, tmp_path, model=dropping(), **kinds)
    again.train(resume_from_checkpoint=True)
    assert furthest(parameters, values(again)) == 0
    for name in ("loss", "grad_norm", "epoch"):
        assert logged(again, name) == logged(alone, name)


@pytest.fixture(scope="module")
def third_step(tmp_path_factory) -> str:
    """The folder of a checkpoint after three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    first = made(Ours, folder, save_strategy="steps", save_steps=3)
    first.add_callback(Stop(3))
    first.train()
    return str(folder / "checkpoint-3")


def test_an_epoch_begins_anew_where_asked(tmp_path, third_step):
    again = made(Ours, tmp_path, ignore_data_skip=True)
    seen = Seen(again)
    again.train(resume_from_checkpoint=third_step)
    assert sorted(seen.epochs[0]) == list(range(len(LENGTHS)))
    assert again.state.global_step == again.state.max_steps == 8


class Stop(TrainerCallback):
    """Ends training after some steps, as an interrupted job does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.after


@pytest.mark.slow
def test_a_checkpoint_of_the_trainer_alone_is_gone_on_from(tmp_path):
    kinds = {"save_strategy": "steps", "save_steps": 3}
    plain = made(Trainer, tmp_path, **kinds)
    plain.train()
    ours = made(Ours, tmp_path, **kinds)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert furthest(values(plain), values(ours)) < 1e-10
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-6)


def test_a_checkpoint_of_other_steps_is_refused(tmp_path, third_step):
    ours = made(Ours, tmp_path, per_device_train_batch_size=2)
    with pytest.raises(DataError, match="steps of 4 samples; expected 2 samples"):
        ours.train(resume_from_checkpoint=third_step)


def test_evaluation_between_steps_is_the_trainers(tmp_path):
    kinds = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    options = {"eval_dataset": Samples(7)}
    plain, ours = (trained(kind, tmp_path, options=options, **kinds) for kind in (Trainer, Ours))
    assert logged(ours, "eval_loss") == pytest.approx(logged(plain, "eval_loss"), rel=1e-6)
    assert len(logged(ours, "eval_loss")) == 5
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    assert not ours.model.training
    told, expected = (t.predict(Samples(4)).predictions for t in (ours, plain))
    assert told == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_dropout_is_off_in_evaluation_and_on_after_it(tmp_path):
    kinds = {"eval_strategy": "steps", "eval_steps": 2, "options": {"eval_dataset": Samples(7)}}
    evaluated = trained(Ours, tmp_path, model=dropping(), num_train_epochs=1, **kinds)
    parameters = values(evaluated)
    alone = trained(Ours, tmp_path, model=dropping(), num_train_epochs=1)
    assert furthest(parameters, values(alone)) == 0


def test_the_model_generates_and_is_saved_and_loaded(tmp_path):
    ours = trained(Ours, tmp_path, max_steps=2)
    prompt = torch.tensor([[3, 1, 4]])
    said = ours.model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    ours.save_model(str(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").double()
    again = loaded.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert said.shape == (1, 8)
    assert torch.equal(said, again)
    assert furthest(values(ours), [p.detach() for p in loaded.parameters()]) < 1e-7


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    kinds = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "learning_rate": 0.2, "num_train_epochs": 1,
    }  # fmt: skip
    ours = trained(Ours, tmp_path, options={"eval_dataset": Samples(7)}, **kinds)
    assert ours.evaluate()["eval_loss"] == pytest.approx(min(logged(ours, "eval_loss")), rel=1e-5)


def test_packed_rows_have_the_same_loss(tmp_path, plain):
    inputs = {**TEXT, "position_ids": "int64[batch, seq]"}
    options = {
        "buckets": dcpc.Buckets(inputs, [{"seq": 24}, {"seq": 48}]),
        "loader_options": {"packing": True},
    }
    ours = trained(Ours, tmp_path, options=options)
    assert furthest(values(plain), values(ours)) < 1e-10


def test_bf16_trains_and_evaluates_in_bf16(tmp_path):
    model = llama().float()
    options = {"eval_dataset": Samples(7)}
    ours = trained(Ours, tmp_path, model=model, options=options, bf16=True, max_steps=3)
    plain = trained(
        Trainer, tmp_path, model=llama().float(), options=options, bf16=True, max_steps=3
    )
    assert ours.compiled is not None
    assert ours.compiled.planned.autocast == torch.bfloat16
    assert "_original_forward" not in vars(ours.model)
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-2)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-2)


def shared(options, **own):
    return {"options": {"compile_options": options, **own}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"neftune_noise_alpha": 5.0}, "neftune"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"optim": "lomo"}, "optim"),
        ({"options": {"compute_loss_func": print}}, "compute_loss_func"),
        ({"bf16_full_eval": True, **shared({"parameters": "rounds"})}, "bf16_full_eval"),
        (
            shared({"pipeline": 2}, optimizers=(torch.optim.SGD([torch.ones(1)]), None)),
            "optimizers",
        ),
        *(
            (
                {
                    "load_best_model_at_end": True,
                    "save_only_model": True,
                    "eval_strategy": "steps",
                    "save_strategy": "steps",
                    **shared(told, eval_dataset=Samples(2)),
                },
                "save_only_model",
            )
            for told in ({"parameters": "step"}, {"host": "1MB", "away": "parameters"})
        ),
    ],
)
def test_what_does_not_go_with_dcpc_is_refused(tmp_path, settings, named):
    with pytest.raises(PlanError, match=f"got .*{named}.*expected"):
        made(Ours, tmp_path, **settings)


def test_a_loss_of_ones_own_is_refused(tmp_path):
    class OwnLoss(Ours):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, inputs, *args, **kwargs) * 2

    with pytest.raises(PlanError, match="got OwnLoss"):
        made(OwnLoss, tmp_path)


def test_compute_loss_of_the_compiled_model_returns_outputs(tmp_path):
    ours = made(Ours, tmp_path)
    ours.model.config.use_cache = False
    compiled = ours._wrap_model(ours.model)
    ids = torch.arange(8)[None] % 5
    loss, outputs = ours.compute_loss(compiled, {"input_ids": ids, "labels": ids}, True)
    with torch.no_grad():
        plain = ours.model(input_ids=ids, labels=ids)
    assert type(outputs) is type(plain)
    assert outputs.loss is loss
    assert (outputs.logits - plain.logits).abs().max() < 1e-10
    assert ours.compute_loss(ours.model, {"input_ids": ids, "labels": ids}, True)[0].isfinite()


def test_without_buckets_it_says_where_they_go(tmp_path):
    class NoBuckets(Ours):
        buckets = None

    with pytest.raises(PlanError, match="set `buckets"):
        made(NoBuckets, tmp_path)


class Stream(torch.utils.data.IterableDataset):
    """The samples in their order, as a stream that keeps no state."""

    def __iter__(self):
        return map(Samples().__getitem__, range(len(LENGTHS)))


class Kept(Stream):
    """One that goes on from its state."""

    at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        for i in range(self.at, len(LENGTHS)):
            self.at += 1
            yield Samples()[i]


def rows():
    return (dict(Samples()[i]) for i in range(len(LENGTHS)))


def huggingfaces():
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(rows).with_format("torch")


@pytest.mark.parametrize(
    ("stream", "stop"),
    [
        (Kept, 3),
        pytest.param(Stream, 5, marks=pytest.mark.slow),
        pytest.param(huggingfaces, 6, marks=pytest.mark.slow),
    ],
)
def test_a_stream_has_the_steps_of_its_samples_and_goes_on(tmp_path, plain, stream, stop):
    first = made(Ours, tmp_path, data=stream(), max_steps=8, save_strategy="steps", save_steps=stop)
    first.add_callback(Stop(stop))
    first.train()
    again = made(Ours, tmp_path, data=stream(), max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert furthest(values(plain), values(again)) < 1e-10
    assert logged(again) == pytest.approx(logged(plain), rel=1e-6)


def test_what_is_no_data_set_is_refused(tmp_path):
    ours = made(Ours, tmp_path, data=iter([Samples()[0]]), max_steps=2)
    with pytest.raises(DataError, match="got list_iterator; expected samples by number"):
        ours.train()


def with_mask(samples):
    from_plain = [s["input_ids"] for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence(from_plain, True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in from_plain], True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.slow
def test_a_mask_of_ones_is_left_out_or_declared(tmp_path):
    inputs = {**TEXT, "attention_mask": "int64[batch, seq]"}
    declared = dcpc.Buckets(inputs, [{"seq": 8}, {"seq": 24}])
    trainers = [
        made(kind, tmp_path, options=options, num_train_epochs=1, model=llama())
        for kind, options in ((Trainer, {}), (Ours, {}), (Ours, {"buckets": declared}))
    ]
    for trainer in trainers:
        trainer.data_collator = with_mask
        trainer.train()
    plain, left_out, given = map(values, trainers)
    assert furthest(plain, left_out) < 1e-10
    assert furthest(plain, given) < 1e-10


def test_an_input_that_the_buckets_lack_is_an_error(tmp_path):
    ours = made(Ours, tmp_path)
    ours.data_collator = lambda rows: {
        **with_mask(rows), "position_ids": torch.arange(len(rows[0]["input_ids"]))[None]
    }  # fmt: skip
    with pytest.raises(DataError, match="input 'position_ids'"):
        ours.train()


def test_compile_options_reach_the_compiler(tmp_path):
    ours = made(Ours, tmp_path, options={"compile_options": {**EAGER, "recompute": "all"}})
    ours.get_train_dataloader()
    assert ours.compiled is not None
    assert ours.compiled.planned.request.recompute_mode == "all"
