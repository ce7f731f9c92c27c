"""The mixin with adapters (peft), with TRL's SFTTrainer, and with a model that is not causal."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
)
from trl import SFTConfig, SFTTrainer

import dcpc.hf
from dcpc.errors import DataError, PlanError
from tests.cases.hf_trainers import (
    EAGER,
    SIZES,
    STEP,
    TEXT,
    Ours,
    arguments,
    furthest,
    llama,
    logged,
    made,
    values,
)

WORDS = [f"w{i}" for i in range(60)]


def adapted():
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config).double()


def test_adapters_train_and_the_rest_stays(tmp_path):
    plain, ours = (made(kind, tmp_path, model=adapted()) for kind in (Trainer, Ours))
    before = {n: p.detach().clone() for n, p in ours.model.named_parameters()}
    plain.train()
    ours.train()
    assert furthest(values(plain), values(ours)) < 1e-10
    for name, p in ours.model.named_parameters():
        assert torch.equal(before[name], p) == ("lora" not in name), name
    ours.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


class OurSFT(dcpc.hf.TrainerMixin, SFTTrainer):
    buckets = dcpc.Buckets(TEXT, SIZES)
    compile_options = EAGER


def tokenizer() -> PreTrainedTokenizerFast:
    words = {w: i for i, w in enumerate([*WORDS, "<pad>", "<eos>", "<unk>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def conversations() -> Dataset:
    def said(i, n):
        return " ".join(WORDS[(7 * i + 3 * k) % 60] for k in range(n))

    rows = [{"prompt": said(i, 2 + i % 5), "completion": " " + said(i, 3 + 4 * (i % 4))}
            for i in range(12)]  # fmt: skip
    return Dataset.from_list(rows)


def tuned(kind, folder, **settings):
    usual = {"per_device_train_batch_size": STEP, "num_train_epochs": 1, "logging_steps": 1,
             "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
             "train_sampling_strategy": "sequential", "learning_rate": 1e-2,
             "bf16": False}  # fmt: skip
    args = SFTConfig(str(folder), **{**usual, **settings})
    data = conversations()
    return kind(llama().float(), args, None, data, data, tokenizer())


def test_fine_tuning_by_trl_has_the_same_losses(tmp_path):
    plain, ours = (tuned(kind, tmp_path) for kind in (SFTTrainer, OurSFT))
    plain.train()
    ours.train()
    assert len(logged(ours)) == 3
    assert ours.compiled is not None
    assert not ours.model.is_activation_checkpointing, "what TRL asks for by default"
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-4)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)


def test_another_loss_of_trl_is_refused(tmp_path):
    with pytest.raises(PlanError, match="got loss_type='dft'"):
        tuned(OurSFT, tmp_path, loss_type="dft")


class Reviews:
    """Sequences with one label each."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        ids = torch.randint(64, (3 + i,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": i % 3}


def masked(samples):
    ids = [s["input_ids"] for s in samples]
    return {
        "input_ids": pad_sequence(ids, True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], True),
        "labels": torch.tensor([s["labels"] for s in samples]),
    }


def classifier(kind, folder, **options):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config).double()
    return kind(model, arguments(folder), masked, Reviews(), **options)


def test_a_classifier_with_a_mask_of_its_padding(tmp_path):
    inputs = {"input_ids": "int64[batch, seq]", "attention_mask": "int64[batch, seq]",
              "labels": "int64[batch]"}  # fmt: skip
    plain = classifier(Trainer, tmp_path)
    ours = classifier(Ours, tmp_path, buckets=dcpc.Buckets(inputs, SIZES))
    plain.train()
    ours.train()
    assert furthest(values(plain), values(ours)) < 1e-10


def test_a_mask_that_is_needed_must_be_declared(tmp_path):
    inputs = {"input_ids": "int64[batch, seq]", "labels": "int64[batch]"}
    ours = classifier(Ours, tmp_path, buckets=dcpc.Buckets(inputs, SIZES))
    with pytest.raises(DataError, match="attention_mask: int64"):
        ours.train()
