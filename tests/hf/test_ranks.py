"""The mixin on several gloo ranks: as alone, and as the Trainer on as many."""

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from tests.cases.hf_trainers import (
    STEP,
    Ours,
    Samples,
    furthest,
    llama,
    logged,
    made,
    values,
)
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank
LIMIT_S = 300.0


def training(rank, world, folder, kind, settings):
    """Returns what a rank has after training: parameters, logs, and the loss of an evaluation."""
    trainer = made(kind, folder, world, options={"eval_dataset": Samples(8)}, **settings)
    trainer.train()
    found = [logged(trainer, name) for name in ("loss", "grad_norm", "epoch")]
    return values(trainer), found, trainer.evaluate()["eval_loss"], trainer.state


SETTINGS = {
    "include_num_input_tokens_seen": "non_padding", "train_sampling_strategy": "random",
}  # fmt: skip


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The results of the mixin on two ranks."""
    return run_ranks(training, 2, 2, tmp_path_factory.mktemp("ours"), Ours, SETTINGS)


def agree(ours, parameters, logs) -> None:
    for own, found, *_ in ours:
        assert furthest(parameters, own) < 1e-10
        for both, theirs in zip(found, logs, strict=True):
            assert both == pytest.approx(theirs, rel=1e-6)


def test_two_ranks_train_as_the_trainer(tmp_path, ours):
    (parameters, logs, expected, _), _ = run_ranks(training, 2, 2, tmp_path, Trainer, SETTINGS)
    agree(ours, parameters, logs)
    for _, _, evaluated, _ in ours:
        assert evaluated == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path, ours):
    ((parameters, logs, _, state),) = run_ranks(training, 1, 1, tmp_path, Ours, SETTINGS)
    agree(ours, parameters, logs)
    for *_, counted in ours:
        assert counted.num_input_tokens_seen == state.num_input_tokens_seen
        assert counted.total_flos == pytest.approx(state.total_flos, rel=0.5)


def resuming(rank, world, folder, rate, resumed):
    """Returns parameters and losses of two epochs, resumed from their third step or not."""
    settings = {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 3}
    trainer = made(Ours, folder, world, model=llama(attention_dropout=rate), **settings)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resumed else None)
    return values(trainer), logged(trainer)


@pytest.mark.slow
def test_resumed_on_two_ranks_it_is_as_if_it_had_never_stopped(tmp_path):
    whole = run_ranks(resuming, 2, 2, tmp_path, 0.1, False)
    again = run_ranks(resuming, 2, 2, tmp_path, 0.1, True)
    for (parameters, losses), (others, found) in zip(whole, again, strict=True):
        assert furthest(parameters, others) == 0
        assert losses == found


@pytest.mark.slow
def test_resumed_on_another_number_of_ranks(tmp_path):
    ((whole, losses),) = run_ranks(resuming, 1, 1, tmp_path, 0.0, False)
    assert len(losses) == 2 * len(Samples()) // STEP
    for parameters, found in run_ranks(resuming, 2, 2, tmp_path, 0.0, True):
        assert furthest(whole, parameters) < 1e-10
        assert found == pytest.approx(losses, rel=1e-6)


def sharing(rank, world, folder, kind, resumed, options):
    """Returns what a rank has after training and evaluation, and what `save_model` wrote."""
    kept = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 4}
    model = llama(tie_word_embeddings=True, num_hidden_layers=2)
    told = {"eval_dataset": Samples(7)}
    if kind is Ours:
        told["compile_options"] = {"backend": "eager", "verify": "off", **options}
    trainer = made(kind, folder, world, model=model, options=told, **kept)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resumed else None)
    found = [logged(trainer, name) for name in ("loss", "grad_norm", "learning_rate", "eval_loss")]
    predicted = trainer.predict(Samples(4)).predictions
    trainer.save_model(f"{folder}/saved")
    torch.distributed.barrier()
    saved = LlamaForCausalLM.from_pretrained(f"{folder}/saved", dtype=torch.float64)
    return [p.detach() for p in saved.parameters()], found, predicted


@pytest.fixture(scope="module")
def trainers_own(tmp_path_factory):
    """The results of the Trainer alone on two ranks."""
    folder = tmp_path_factory.mktemp("plain")
    return run_ranks(sharing, 2, 2, folder, Trainer, False, {}, timeout_s=LIMIT_S)


def compare(found, expected) -> None:
    for (parameters, logs, predicted), (others, theirs, told) in zip(found, expected, strict=True):
        assert furthest(parameters, others) < 1e-10
        for some, alike in zip(logs, theirs, strict=True):
            assert some == pytest.approx(alike, rel=1e-6)
        assert predicted == pytest.approx(told, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["step", "pull"])
def test_ranks_that_share_the_optimizers_rows_train_as_the_trainer(tmp_path, trainers_own, mode):
    options = {"parameters": mode}
    found = run_ranks(sharing, 2, 2, tmp_path, Ours, False, options, timeout_s=LIMIT_S)
    compare(found, trainers_own)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [{"parameters": "rounds"}, {"pipeline": 2}, {"away": "parameters", "host": "64MB"}],
    ids=str,
)
def test_without_the_model_on_any_rank_it_trains_and_resumes(tmp_path, trainers_own, options):
    for resumed, told in ((False, options), (True, options), (True, {"parameters": "step"})):
        found = run_ranks(sharing, 2, 2, tmp_path, Ours, resumed, told, timeout_s=LIMIT_S)
        compare(found, trainers_own)


def best(rank, world, folder, kind, options):
    """Returns the parameters after a training that takes its best model back at the end."""
    told = {"eval_dataset": Samples(7)}
    if kind is Ours:
        told["compile_options"] = {"backend": "eager", "verify": "off", **options}
    own = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = made(
        kind, folder, world, options=told, load_best_model_at_end=True, learning_rate=1.0, **own
    )
    trainer.train()
    assert trainer.state.best_global_step < trainer.state.global_step
    trainer.save_model(f"{folder}/saved")
    torch.distributed.barrier()
    saved = LlamaForCausalLM.from_pretrained(f"{folder}/saved", dtype=torch.float64)
    return [p.detach() for p in saved.parameters()], trainer.state.best_global_step


@pytest.mark.slow
def test_the_best_model_comes_back_where_ranks_share_the_parameters(tmp_path):
    plain = run_ranks(best, 2, 2, tmp_path / "plain", Trainer, {}, timeout_s=LIMIT_S)
    for mode in ("step", "rounds"):
        ours = run_ranks(best, 2, 2, tmp_path / mode, Ours, {"parameters": mode}, timeout_s=LIMIT_S)
        for (parameters, step), (others, theirs) in zip(ours, plain, strict=True):
            assert step == theirs
            assert furthest(parameters, others) < 1e-10
