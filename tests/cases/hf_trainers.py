"""A small Llama in float64, samples of many lengths, and Trainers of both kinds for them."""

from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dcpc.hf

LENGTHS = [5, 16, 9, 3, 24, 16, 2, 9, 5, 24, 7, 2, 24, 16, 9, 11]
TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
SIZES = [{"seq": 8}, {"seq": 24}]
EAGER = {"backend": "eager", "verify": "off"}
STEP = 4  # samples


class Samples:
    """Some prompts are not trained on, as their labels are ignored."""

    def __init__(self, count: int = len(LENGTHS)) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(64, (LENGTHS[i],), generator=generator)
        labels = ids.clone()
        labels[: i % 3] = -100 if LENGTHS[i] > 4 else labels[: i % 3]
        return {"input_ids": ids, "labels": labels}


class Ours(dcpc.hf.TrainerMixin, Trainer):
    buckets = dcpc.Buckets(TEXT, SIZES)
    compile_options = EAGER


def loss_in_float64(logits, labels, vocab_size, num_items_in_batch=None, **ignored):
    """The loss of causal models, which transformers computes in float32 of any model."""
    found = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(*found)
    return F.cross_entropy(*found, reduction="sum") / num_items_in_batch


def llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **settings})).double()
    model.loss_function = loss_in_float64
    return model


@cache
def _planned_once(dropout: float) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    model = llama(attention_dropout=dropout)
    return model, {n: x.clone() for n, x in model.state_dict().items()}


def llama_again(dropout: float = 0.0) -> LlamaForCausalLM:
    """The same module each time, as it was first: a `Keeper` then knows its plans.

    What an earlier test wants of it after training it has read by then.
    """
    model, first = _planned_once(dropout)
    model.load_state_dict(first)
    model.zero_grad()
    return model.train()


def collate(samples) -> dict[str, torch.Tensor]:
    ids, labels = ([s[name] for s in samples] for name in ("input_ids", "labels"))
    return {"input_ids": pad_sequence(ids, True), "labels": pad_sequence(labels, True, -100)}


def arguments(folder, world: int = 1, **settings) -> TrainingArguments:
    """Steps of `STEP` samples in the data set's order, clipped, with a schedule, on the CPU."""
    usual = {
        "per_device_train_batch_size": STEP // world, "per_device_eval_batch_size": 2,
        "num_train_epochs": 2, "learning_rate": 1e-2, "warmup_steps": 2, "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**usual, **settings})


def made(kind, folder, world: int = 1, data=None, options=None, model=None, **settings) -> Trainer:
    """Returns a Trainer of a kind; `options` are of the Trainer itself."""
    data = Samples() if data is None else data
    if model is None:
        model = llama_again() if issubclass(kind, Ours) else llama()
    args = arguments(folder, world, **settings)
    return kind(model, args, collate, data, **(options or {}))


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def values(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def furthest(some, others) -> float:
    """Returns the largest difference between two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))
