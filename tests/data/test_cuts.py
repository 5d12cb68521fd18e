"""Prompts that do not fit: counted with their template, cut in the middle, and refused where most are cut."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import yaml

from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.tokenized import ANY_LENGTH, count_cuts
from silotune.distributed.protocol.handshake import wire_config
from silotune.distributed.silo.setup import SiloSetup
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.generation import GenerationOptions
from silotune.models.heads import LanguageModelHead
from silotune.models.heads.lm import prompt_rows
from silotune.runs.build.resolve import read_config, resolve
from silotune.runs.run import run
from tests.support.chats import chat_tokenizer
from tests.support.language_models import backbone_of, folder_of, made
from tests.support.session_rig import local_configs

WRITE = Task("w", (), "rouge1", "generation")
LONG = f"Read this: {'the garden was warm ' * 20}\nOPTIONS:\n- warm\n- cold"


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_a_question_keeps_both_ends(family):
    tokenizer = made(family)[1]
    head = LanguageModelHead("{instruction} Answer:", GenerationOptions(max_new_tokens=8))
    rows = head.row_tokenizer(backbone_of(family), 56)(WRITE, [Row((LONG, ""), 0, "warm")])
    asked = tokenizer.decode(prompt_rows(rows).ids[0], skip_special_tokens=True)
    assert "ead this" in asked  # T5's tiny vocabulary has no capitals
    assert asked.split() != f"{LONG} Answer:".split()
    assert asked.replace(" ", "").endswith(("-coldAnswer:", "coldnswer:"))
    assert len(prompt_rows(rows).ids[0]) <= head.prompt_room(56) or family == "t5"


@pytest.mark.parametrize(
    ("texts", "answer", "cut", "prompt"),
    [("say a", "b", False, False), (LONG, "b", True, True), ("say a", "very " * 60, True, False)],
)
def test_what_is_cut_is_counted(texts, answer, cut, prompt):
    head = LanguageModelHead(generation=GenerationOptions(max_new_tokens=20))
    tokenize, whole = (head.row_tokenizer(backbone_of("llama"), length) for length in (80, ANY_LENGTH))
    rows = [Row(("say a", ""), 0, "b"), Row((texts, ""), 0, answer)]
    cuts = count_cuts(WRITE, rows, tokenize, whole)
    assert (cuts.cut, cuts.prompts) == ([1] * cut, [1] * prompt)
    assert cuts.lengths[1] == len(whole(WRITE, rows).ids[1])
    assert cuts.fraction == 0.5 * cut


@pytest.fixture
def federation(tmp_path, tmp_path_factory, monkeypatch):
    rows = [{"instruction": LONG if n % 4 else "say warm", "output": "warm"} for n in range(24)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "method": "fedit",
        "backbone": str(folder_of("llama", tmp_path_factory.getbasetemp())),
        "tuner": {"name": "lora", "r": 2},
        "head": {"name": "lm", "max_new_tokens": 8},
        "rounds": 1,
        "train": {"steps": 1, "batch_size": 4, "max_length": 80},
        "silos": [{"name": "east", "path": "long.jsonl"}, {"name": "west", "path": "long.jsonl"}],
    }
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_in_which_most_prompts_are_cut_is_refused(federation, silotune):
    with pytest.raises(
        InputError, match=r"of 14 training rows are cut, such as row \d+ of \d+ tokens .*allow_cut=true"
    ):
        run("long.yaml", out="out")
    outcome = silotune("run", "long.yaml", "data.allow_cut=true", "--out", "out")
    assert outcome.code == 0, outcome.err
    assert "of which a prompt has 72 and its answer the rest" in outcome.out


@pytest.mark.parametrize(
    ("words", "fits"), [([], False), (["data.allow_cut=true"], True), (["privacy.unit=row", "privacy.epsilon=8"], True)]
)
def test_a_silo_on_a_machine_of_its_own_refuses_it_too_but_never_under_noise(federation, words, fits):
    """Under noise on rows a refusal would tell something about rows for which no ε is paid."""
    config = resolve(read_config("long.yaml", words)).config
    setup = SiloSetup(local_configs(config, federation)["east"])
    with nullcontext() if fits else pytest.raises(InputError, match=r"^silo 'east': its rows cannot be used"):
        setup.prepare(wire_config(config, ["east"]), None)


def test_the_table_counts_the_template(federation, silotune):
    """The tokens of the rows' texts alone would fit."""
    found = json.loads(silotune("data", "long.yaml", "train.max_length=200", "--json").out)
    assert found["silos"]["east"]["tokens"] | {"cut": 0, "room": 192} == found["silos"]["east"]["tokens"]
    template = "head.template=Answer the following question as well as you can: {instruction} Now answer:"
    longer = json.loads(silotune("data", "long.yaml", "train.max_length=200", template, "--json").out)
    assert longer["silos"]["east"]["tokens"]["median"] > found["silos"]["east"]["tokens"]["median"]
    shown = silotune("data", "long.yaml")
    assert "their prompts at 72" in " ".join(shown.out.split())
    assert "lose the middle of their prompt" in shown.out


def test_a_conversation_keeps_its_questions_end():
    head, tokenizer = LanguageModelHead("chat", GenerationOptions(max_new_tokens=8)), chat_tokenizer()
    backbone = Backbone(made("llama")[0], tokenizer)
    row = Row((LONG, ""), 0, "warm", turns=(("user", LONG),))
    rows = head.row_tokenizer(backbone, 80)(WRITE, [row])
    asked = tokenizer.decode(prompt_rows(rows).ids[0])
    assert asked.startswith("<|im_start|>user\nRead")
    assert "- cold<|im_end|>" in asked
