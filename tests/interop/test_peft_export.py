"""Exports open in plain `peft.PeftModel.from_pretrained` and give the states and logits that silotune gives."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
)

from silotune.errors import InputError
from silotune.interop.adapters import peft_layout
from silotune.interop.export import export
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import TUNERS
from silotune.models.tuners.base import MergedAdapter
from tests.support.method_cases import of_kinds
from tests.support.small_runs import (
    PAIRS,
    SINGLE,
    close,
    encoded,
    head_logits,
    own_logits,
    own_states,
    rows_of,
    states_of,
    tokenised,
)

FAMILIES = ("bert", "gpt2", "llama", "t5")
"""RoBERTa is compared with parts of its own, below."""
VIRTUAL = ("prompt", "p-tuning", "prefix")
PAIRS_OF = [
    (family, tuner)
    for family in FAMILIES
    for tuner in ("lora", "ia3", *VIRTUAL)
    if (family, tuner) != ("t5", "prefix")  # peft has no prefix in an encoder; tested to be refused
] + [*((family, tuner) for family in ("bert", "gpt2") for tuner in ("dora", "vera")), ("bert", "loha"), ("t5", "loha")]
REPEATED = [(family, tuner) for family in ("gpt2", "llama") for tuner in ("ia3", "prompt", "p-tuning", "vera")]
"""In `make test` BERT and T5 have these, and the decoders LoRA, DoRA and prefixes."""


def plain_peft(auto, base, folder):
    return peft.PeftModel.from_pretrained(auto.from_pretrained(base), folder).eval()


@torch.no_grad()
def peft_states(model, family, folder, texts):
    if family != "t5":
        return states_of(model, folder, texts)
    inputs = encoded(folder, texts)
    inputs["decoder_input_ids"] = torch.ones(len(texts), 2, dtype=torch.int64)
    return rows_of(model(**inputs).encoder_last_hidden_state, inputs["attention_mask"])


@pytest.mark.parametrize(
    ("family", "tuner"),
    [pytest.param(*pair, marks=pytest.mark.long if pair in REPEATED else ()) for pair in PAIRS_OF],
)
def test_the_same_states_and_logits(runs, family, tuner, tmp_path):
    run = runs.run(family, tuner)
    base = runs.model(family)
    # peft drops the segments of a pair under virtual tokens (the card says so): single texts have none
    silo, texts = ("alpha", SINGLE) if family == "bert" and tuner in VIRTUAL else ("beta", PAIRS)
    export(run.model(silo), "global", tmp_path / "out")
    model = plain_peft(AutoModel, base, tmp_path / "out")
    actual = peft_states(model, family, tmp_path / "out", texts)
    close(actual, own_states(run, silo, {"global": 1}, texts))
    close([head_logits(tmp_path / "out", actual)], [own_logits(run, silo, texts)])
    without = own_states(run, silo, {}, texts)
    assert max((one - other).abs().max() for one, other in zip(actual, without, strict=True)) > 0.01


@pytest.mark.parametrize(
    ("tuner", "words"),
    [
        *((tuner, ()) for tuner in ("lora", "ia3", "prefix")),
        *(pytest.param(tuner, (), marks=pytest.mark.long) for tuner in ("prompt", "p-tuning", "dora", "vera")),
        pytest.param("lora", ("tuner.scaling=rslora", "tuner.init=pissa"), marks=pytest.mark.long),
        ("dora", ("tuner.scaling=rslora", "tuner.init=pissa", "tuner.lr_ratio=2")),
    ],
)
def test_either_part_and_the_mix_of_both(runs, tuner, words, tmp_path):
    """The silo's own adapter alone; and both in one adapter, which predicts as the silo does."""
    run = runs.run("roberta", tuner, "method=fedmatch", *words)
    without = own_states(run, "beta", {}, PAIRS)
    for part, mix in {
        "global": {"global": 1},
        "private": {"private": 1},
        "mixed": {"global": 0.5, "private": 0.5},
    }.items():
        export(run.model("beta"), part, tmp_path / part)
        model = plain_peft(AutoModel, runs.model("roberta"), tmp_path / part)
        actual = states_of(model, tmp_path / part)
        close(actual, own_states(run, "beta", mix, PAIRS))
        assert max((one - other).abs().max() for one, other in zip(actual, without, strict=True)) > 0.01
    close([head_logits(tmp_path / "mixed", actual)], [own_logits(run, "beta", PAIRS)])


@pytest.mark.parametrize("tuner", ["lora", "prompt", "prefix"])
def test_a_causal_language_model(runs, tuner, tmp_path):
    run = runs.generation("llama", "causal", tuner)
    export(run.model("east"), "global", tmp_path / "out")
    model = plain_peft(AutoModelForCausalLM, runs.model("llama", "causal"), tmp_path / "out")
    rows = tokenised(run, "east", SINGLE)
    states = own_states(run, "east", {"global": 1}, SINGLE)
    for row, ids in enumerate(rows.ids):
        with torch.no_grad():
            actual = model(input_ids=torch.tensor([ids])).logits[0]
            expected = run.federation.backbone.lm_head(states[row])
        close([actual[-len(ids) :]], [expected])


@pytest.mark.parametrize("tuner", of_kinds(["lora", "prefix", "prompt", "p-tuning"], ["lora", "prefix"]))
def test_an_encoder_decoder_with_its_language_model_head(runs, tuner, tmp_path):
    more = ["tuner.stack=decoder"] if tuner == "prefix" else []
    run = runs.generation("t5", "seq2seq", tuner, *more)
    export(run.model("east"), "global", tmp_path / "out")
    model = plain_peft(AutoModelForSeq2SeqLM, runs.model("t5", "seq2seq"), tmp_path / "out")
    rows = tokenised(run, "east", SINGLE)
    states = own_states(run, "east", {"global": 1}, SINGLE)
    for row, ids in enumerate(rows.ids):
        with torch.no_grad():
            inputs = {"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([rows.decoder[row]])}
            actual = model(**inputs, attention_mask=torch.ones(1, len(ids), dtype=torch.int64)).logits[0]
            expected = run.federation.backbone.lm_head(states[row])
        close([actual], [expected])


@pytest.mark.parametrize("tuner", ["lora", "prompt"])
def test_a_masked_language_model_with_a_verbalizer(runs, tuner, tmp_path):
    words = [
        "head=verbalizer",
        "head.words={bad: awful, good: lovely}",
        "head.multi_token=average",
        "data.tasks=[alpha]",
    ]
    run = runs.run("bert", tuner, *words, kind="masked")
    export(run.model("alpha"), "global", tmp_path / "out")
    model = plain_peft(AutoModelForMaskedLM, runs.model("bert", "masked"), tmp_path / "out")
    inputs = encoded(tmp_path / "out", [f"{text} is [MASK]." for text in SINGLE])
    tokenizer = run.federation.backbone.tokenizer
    mask_position = (inputs["input_ids"] == tokenizer.mask_token_id).nonzero()[:, 1]
    with torch.no_grad():
        scores = model(**inputs).logits[:, -inputs["input_ids"].shape[1] :]
    actual = scores[torch.arange(len(SINGLE)), mask_position][:, tokenizer.convert_tokens_to_ids(["awful", "lovely"])]
    close([actual], [own_logits(run, "alpha", SINGLE)])
    head = json.loads((tmp_path / "out" / "head.json").read_text())
    assert (head["kind"], head["options"]["words"]) == ("verbalizer", {"bad": ["awful"], "good": ["lovely"]})
    assert not (tmp_path / "out" / "head.safetensors").exists()


def test_peft_reads_the_configurations_as_its_own(runs, tmp_path):
    """Every key is known to peft's classes, and what the card names is what was trained."""
    kinds = {"lora": peft.LoraConfig, "ia3": peft.IA3Config, "prompt": peft.PromptTuningConfig}
    kinds |= {"dora": peft.LoraConfig, "vera": peft.VeraConfig, "loha": peft.LoHaConfig}
    kinds |= {"p-tuning": peft.PromptEncoderConfig, "prefix": peft.PrefixTuningConfig}
    for tuner, kind in kinds.items():
        export(runs.run("bert", tuner).model("beta"), "global", tmp_path / tuner)
        written = json.loads((tmp_path / tuner / "adapter_config.json").read_text())
        assert not written.keys() - kind().to_dict().keys()
        assert isinstance(peft.PeftConfig.from_pretrained(tmp_path / tuner), kind)
    lora = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (lora["r"], lora["lora_alpha"], lora["target_modules"]) == (3, 5, ["query", "value"])


def test_module_names_mean_what_was_tuned_alone(runs, tmp_path):
    """BERT's `dense` names several layers: only those that were tuned may get an adapter, the pooler not."""
    run = runs.run("bert", "lora", "tuner.sites=attention_output,feedforward_output")
    export(run.model("beta"), "global", tmp_path / "out")
    model = plain_peft(AutoModel, runs.model("bert"), tmp_path / "out")
    tuned = {
        name.removesuffix(".lora_A.default") for name, _ in model.named_modules() if name.endswith("lora_A.default")
    }
    ends = ("attention.output.dense", "output.dense")
    assert tuned == {f"base_model.model.encoder.layer.{layer}.{end}" for layer in range(2) for end in ends}
    close(states_of(model, tmp_path / "out"), own_states(run, "beta", {"global": 1}, PAIRS))


def test_what_peft_cannot_express_is_refused(runs, tmp_path):
    with pytest.raises(InputError, match="peft has no prefix in an encoder's attention"):
        export(runs.run("t5", "prefix").model("beta"), "global", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_decoders_prefix_is_refused_where_peft_has_too_few_of_them(runs):
    """With an even number of layers, peft gives layers i and i + n/2 of the decoder the same prefix."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    model = T5ForConditionalGeneration(T5Config(**shape, pad_token_id=1, decoder_start_token_id=1))
    backbone = Backbone(model, runs.backbone("roberta", "plain").tokenizer)
    layer = torch.randn(3, 64)
    same, different = torch.cat([layer, layer], 1), torch.cat([layer, 2 * layer], 1)

    def layout(vectors):
        adapter = MergedAdapter({"prompt_embeddings": vectors}, {"stack": "decoder"})
        return peft_layout(backbone, TUNERS["prefix"](), adapter, "t5", "AutoModelForSeq2SeqLM")

    assert layout(same)[0]["num_virtual_tokens"] == 3
    with pytest.raises(InputError, match=r"2 layers \(an even number\) only 1 different prefixes"):
        layout(different)
