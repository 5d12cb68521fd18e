"""A local round with the recipe of transformers' Trainer ends where the Trainer with peft ends.

The same rows in the same order, the same initial weights, float32: linear decay after a warmup, weight decay, clipping
and label smoothing, over tiny random models without dropout.
"""

from __future__ import annotations

import peft
import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from silotune.core.tensors import flatten
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.phase_batches import phase_batches
from tests.support.chats import write_lines

LR, WARMUP, DECAY, CLIP, SMOOTHING, BATCH, EPOCHS, ROWS = 2e-3, 2, 0.1, 0.5, 0.1, 8, 2, 24
RECIPE = (
    *("train.optimizer=adamw", f"train.lr={LR}", "train.schedule=linear", f"train.warmup={WARMUP}"),
    *(f"train.weight_decay={DECAY}", f"train.clip_norm={CLIP}", f"train.label_smoothing={SMOOTHING}"),
    *(f"train.batch_size={BATCH}", f"train.epochs={EPOCHS}", f"data.train_rows={ROWS}"),
    *("tuner=lora", "tuner.r=4", "tuner.alpha=8", "precision=fp32"),
)
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}


class InOrder(Trainer):
    """The Trainer over rows as they come."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def train_with_transformers(model, rows, pad, folder):
    """Train a peft model on rows (dictionaries of lists) in their order; labels of tokens are padded by -100."""

    def collate(batch):
        width = max(len(row["input_ids"]) for row in batch)

        def padded(name, filler):
            return torch.tensor([[*row[name], *[filler] * (width - len(row[name]))] for row in batch])

        inputs = {"input_ids": padded("input_ids", pad), "attention_mask": padded("attention_mask", 0)}
        if "token_type_ids" in batch[0]:
            inputs["token_type_ids"] = padded("token_type_ids", 0)
        tokens = isinstance(batch[0]["labels"], list)
        inputs["labels"] = padded("labels", -100) if tokens else torch.tensor([row["labels"] for row in batch])
        return inputs

    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,  # the rows of all epochs lie behind one another
        learning_rate=LR,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        label_smoothing_factor=SMOOTHING,
        optim="adamw_torch",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = InOrder(model=model, args=settings, train_dataset=rows, data_collator=collate)
    assert trainer.train().global_step == EPOCHS * ROWS // BATCH


def rows_in_order(federation, silo):
    """The rows of the first round's batches, with their set, in the order in which silotune draws them."""
    (phase,) = federation.context.phases
    batches = list(phase_batches(federation.context, silo, phase, 1))
    assert [len(batch) for batch in batches] == [BATCH] * (EPOCHS * ROWS // BATCH)
    return [(batch.source, row) for batch in batches for row in batch.rows.tolist()]


def assert_same_end(found, expected, initial):
    """Compare trained tensors by name, and check that training did not leave them where they were."""
    assert found.keys() == expected.keys() == initial.keys()
    worst = max(float((found[name] - expected[name]).abs().max()) for name in found)
    moved = max(float((found[name] - initial[name]).abs().max()) for name in found)
    assert moved > 1e-3
    assert worst <= 1e-5, worst


@pytest.mark.long
def test_bert_with_lora_and_a_classifier(tiny_federation, backbone_folder, tmp_path):
    federation = tiny_federation("fedavg", *RECIPE, "method.adapters=1", "head=mlp", "head.pooling=first")
    silo, shared = federation.silos["alpha"], federation.coordinator.shared
    start = flatten(shared | federation.context.state_of(silo).private)
    state = flatten(federation.trainer.rounds([silo], shared, 1)[0].state)

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForSequenceClassification.from_pretrained(backbone_folder("bert"), num_labels=2, **none)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["query", "value"], modules_to_save=["pooler", "classifier"], **LORA
    )
    model = peft.get_peft_model(model, config)
    head = {"dense": "bert.pooler.dense", "out": "classifier"}

    def theirs(name):
        part, rest = name.split("/", 1)
        if part == "global":
            return f"base_model.model.bert.{rest}"
        _, layer, kind = rest.split(".")
        return f"base_model.model.{head[layer]}.{kind}"

    peft.set_peft_model_state_dict(model, {theirs(name): tensor for name, tensor in start.items()})
    rows = [
        {
            "input_ids": source.ids[row],
            "attention_mask": [1] * len(source.ids[row]),
            "token_type_ids": source.types[row],
            "labels": int(source.labels[row]),
        }
        for source, row in rows_in_order(federation, silo)
    ]
    train_with_transformers(model, rows, federation.backbone.pad_id, tmp_path)
    trained = peft.get_peft_model_state_dict(model)
    assert trained.keys() == {theirs(name) for name in start}
    assert_same_end(state, {name: trained[theirs(name)] for name in start}, start)


@pytest.mark.long
def test_llama_with_lora(model_folder, tmp_path):
    """Over one task of instructions."""
    folder = tmp_path / "data" / "echo"
    folder.mkdir(parents=True)
    for split, count in {"train": ROWS, "validation": 2, "test": 2}.items():
        lines = [{"instruction": f"say {'now ' * (n % 5)}{n}", "output": "sweet " * (n % 4 + 1)} for n in range(count)]
        write_lines(folder / f"{split}.jsonl", lines)
    words = [f"backbone={model_folder('llama')}", f"data.path={folder.parent}", "data.tasks=[echo]", "head=lm"]
    words += ["method=fedit", "data.merge=false", "threads=1", "train.max_length=96", "rounds=1", "per_method={}"]
    federation = build(read_config("demo", [*words, *RECIPE]))
    silo, shared = federation.silos["echo"], federation.coordinator.shared
    start = flatten(shared)
    state = flatten(federation.trainer.rounds([silo], shared, 1)[0].state)

    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **LORA)
    model = peft.get_peft_model(model, config)

    def theirs(name):
        return f"base_model.model.model.{name.removeprefix('global/')}"

    peft.set_peft_model_state_dict(model, {theirs(name): tensor for name, tensor in start.items()})
    rows = []
    for source, row in rows_in_order(federation, silo):
        ids, targets = source.ids[row], source.targets[row]
        labels = [-100] * (len(ids) - len(targets)) + targets
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    train_with_transformers(model, rows, federation.backbone.pad_id, tmp_path)
    trained = peft.get_peft_model_state_dict(model)
    assert_same_end(state, {name: trained[theirs(name)] for name in start}, start)
