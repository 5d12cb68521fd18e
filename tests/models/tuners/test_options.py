"""What a user may ask of each tuner: sites, starting vectors, and what is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import OPTConfig, OPTModel

from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import TUNERS
from tests.support.tuner_families import batch, make_backbone, make_tuner, random_part, run, shared_backbone


def part_of(tuner: str, backbone: Backbone, seed: int = 0, **options):
    made = TUNERS[tuner](TUNERS[tuner].Options(**options))
    return made.init(backbone, [], torch.Generator().manual_seed(seed))


def modules(part):
    return sorted({name.split(".lora_")[0] for name in part})


# -- sites ------------------------------------------------------------------------------------------------------------


def test_fields_patterns_and_names_of_sites():
    backbone = shared_backbone("bert")
    attention = "encoder.layer.{}.attention.self.{}"
    both = [attention.format(layer, name) for layer in (0, 1) for name in ("query", "value")]
    assert modules(part_of("lora", backbone)) == sorted(both)
    assert modules(part_of("lora", backbone, sites="query, value")) == sorted(both)
    assert modules(part_of("lora", backbone, sites=["*self.query", "value"])) == sorted(both)
    assert modules(part_of("lora", backbone, sites="encoder.layer.1.*query")) == [attention.format(1, "query")]
    assert modules(part_of("lora", backbone, sites="self.key")) == [attention.format(layer, "key") for layer in (0, 1)]
    last = attention.format(1, "key")
    assert modules(part_of("lora", backbone, sites=f"{last},{last}")) == [last]


@pytest.mark.parametrize("tuner", [name for name, tuner in TUNERS.items() if "blocks" in tuner.Options.model_fields])
def test_the_last_blocks_alone(tuner: str):
    """What a part has there is what a part over all blocks has there; in T5 of both stacks."""
    for family, last in (("bert", "encoder.layer.1."), ("t5", ("encoder.block.1.", "decoder.block.1."))):
        if (tuner, family) == ("bitfit", "t5"):  # which has no biases
            continue
        backbone, example = shared_backbone(family), TUNERS[tuner].example
        whole, part = part_of(tuner, backbone, **example), part_of(tuner, backbone, blocks="last:1", **example)
        assert part.keys() == {name for name in whole if name.startswith(last)}
        assert part_of(tuner, backbone, blocks="last:2", **example).keys() == {
            name for name in whole if ".0." in name or name.startswith(last)
        }
    with pytest.raises(InputError, match=r"tuner\.blocks: last:3, and encoder\.layer has 2; allowed: last:1 to 2"):
        part_of(tuner, shared_backbone("bert"), blocks="last:3", **example)


def test_blocks_without_a_site_or_a_known_family():
    with pytest.raises(
        InputError, match=r"no module of tuner\.sites lies in last:1; e\.g\. encoder\.layer\.0\.\S+ does not"
    ):
        part_of("lora", shared_backbone("bert"), sites="encoder.layer.0.*query", blocks="last:1")
    with pytest.raises(ValidationError, match=r"blocks\n"):
        part_of("lora", shared_backbone("bert"), blocks="first:1")


def test_a_fused_layer_is_one_site():
    assert modules(part_of("lora", shared_backbone("gpt2"), sites="query,key,value")) == [
        "h.0.attn.c_attn",
        "h.1.attn.c_attn",
    ]
    shapes = {
        name.split(".")[-2]: tensor.shape for name, tensor in part_of("lora", shared_backbone("gpt2"), r=2).items()
    }
    assert shapes == {"lora_A": (2, 24), "lora_B": (72, 2)}


def test_t5_has_sites_in_both_stacks_and_between_them():
    actual = modules(part_of("lora", shared_backbone("t5"), sites="query"))
    assert actual == sorted(
        [f"encoder.block.{block}.layer.0.SelfAttention.q" for block in (0, 1)]
        + [f"decoder.block.{block}.layer.0.SelfAttention.q" for block in (0, 1)]
        + [f"decoder.block.{block}.layer.1.EncDecAttention.q" for block in (0, 1)]
    )


@pytest.mark.parametrize("word", ["nothing", "encoder.layer.7.*", "feedforward_gate", "embeddings.LayerNorm"])
def test_a_site_that_is_not_there_is_refused(word):
    with pytest.raises(InputError, match=r"tuner\.sites") as raised:
        part_of("lora", shared_backbone("bert"), sites=f"query,{word}")
    assert repr(word) in str(raised.value)
    assert "attention_output" in str(raised.value)


@pytest.mark.parametrize("sites", ["", "query,,value", [], ["query", 3]])
def test_mistyped_sites_are_refused_before_a_backbone_is_there(sites):
    with pytest.raises(ValidationError, match="query"):
        TUNERS["lora"].Options(sites=sites)


def test_bitfit_takes_patterns_of_modules():
    backbone = shared_backbone("bert")
    everything = part_of("bitfit", backbone)
    assert "embeddings.LayerNorm.bias" in everything
    assert {name.removesuffix(".bias") for name in everything} == {
        name for name, module in backbone.base.named_modules() if getattr(module, "bias", None) is not None
    }
    first = part_of("bitfit", backbone, sites="encoder.layer.0.*")
    assert set(first) == {name for name in everything if name.startswith("encoder.layer.0.")}
    with pytest.raises(InputError, match="nowhere"):
        part_of("bitfit", backbone, sites="nowhere.*")


def test_a_reduction_that_leaves_nothing_is_refused():
    with pytest.raises(InputError, match=r"tuner\.reduction"):
        part_of("bottleneck", shared_backbone("bert"), reduction=25)


# -- families without an entry ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unknown():
    config = OPTConfig(
        vocab_size=150, hidden_size=24, ffn_dim=40, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=24
    )
    torch.manual_seed(1)
    return Backbone(OPTModel(config), shared_backbone("bert").tokenizer)


def test_an_unknown_family_wants_its_sites_named(unknown):
    with pytest.raises(InputError, match="opt") as raised:
        part_of("lora", unknown)
    assert "llama" in str(raised.value)
    assert "tuner.sites=" in str(raised.value)
    actual = modules(part_of("lora", unknown, sites="q_proj,v_proj"))
    assert actual == sorted(f"decoder.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv")


@pytest.mark.parametrize(
    ("tuner", "options"), [("lora", {"sites": "q_proj"}), ("prompt", {"tokens": 2}), ("bitfit", {})]
)
def test_an_unknown_family_can_be_tuned(unknown, tuner, options):
    made, inputs = TUNERS[tuner](TUNERS[tuner].Options(**options)), batch("llama")
    part = random_part(made, unknown)
    states = run(unknown, inputs, (made, [(part, 1.0)]))
    assert states.shape == run(unknown, inputs).shape
    assert (states - run(unknown, inputs)).abs().max() > 1e-3


def test_an_unknown_familys_rows_all_have_virtual_tokens(unknown):
    tuner, inputs = make_tuner("prompt"), batch("llama")
    part = random_part(tuner, unknown)
    with pytest.raises(InputError, match="own forward"):
        run(unknown, inputs, (tuner, [(part, torch.tensor([1.0, 0.0, 1.0, 1.0], device=unknown.device))]))


# -- virtual tokens ---------------------------------------------------------------------------------------------------


def test_prompts_start_from_vocabulary_words_or_noise():
    backbone = make_backbone("bert")
    table = backbone.word_embeddings.cpu()
    drawn = part_of("prompt", backbone, tokens=9)["prompt_embeddings"]
    rows = [int((table == vector).all(1).nonzero()[0]) for vector in drawn]
    assert len(set(rows)) > 4
    again = part_of("prompt", backbone, tokens=9)["prompt_embeddings"]
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, part_of("prompt", backbone, seed=1, tokens=9)["prompt_embeddings"])

    ids = backbone.tokenizer("the garden was", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    spoken = part_of("prompt", backbone, tokens=5, init="words", words="the garden was")["prompt_embeddings"]
    assert torch.equal(spoken, table[[*ids, *ids][:5]])
    with pytest.raises(InputError, match=r"tuner\.words"):
        part_of("prompt", backbone, init="words")

    noise = part_of("prompt", backbone, tokens=400, init="random")["prompt_embeddings"]
    assert noise.std().item() == pytest.approx(table.std().item(), rel=0.05)


def test_text_and_virtual_tokens_must_fit_the_positions():
    for family in ("bert", "roberta", "gpt2"):
        backbone = shared_backbone(family)
        for kind in ("prompt", "prefix"):
            tuner = make_tuner(kind)
            part = random_part(tuner, backbone)
            run(backbone, batch(family, lengths=(61, 5)), (tuner, [(part, 1.0)]))
            with pytest.raises(InputError, match=r"3 virtual and 62 text tokens .* 64 positions; lower tuner\.tokens"):
                run(backbone, batch(family, lengths=(62, 5)), (tuner, [(part, 1.0)]))


def test_two_prompts_stand_one_behind_the_other_beside_a_prefix_and_a_low_rank_update():
    backbone, inputs = shared_backbone("gpt2", double=True), batch("gpt2")
    one, other, prefix, lora = (make_tuner(kind) for kind in ("prompt", "prompt", "prefix", "lora"))
    first, second = random_part(one, backbone, 1), random_part(other, backbone, 2)
    both = {"prompt_embeddings": torch.cat([first["prompt_embeddings"], second["prompt_embeddings"]])}
    rest = [(tuner, [(random_part(tuner, backbone, 3), 1.0)]) for tuner in (prefix, lora)]
    apart = run(backbone, inputs, (one, [(first, 1.0)]), (other, [(second, 1.0)]), *rest)
    torch.testing.assert_close(apart, run(backbone, inputs, (one, [(both, 1.0)]), *rest), rtol=0, atol=1e-12)


def test_prefixes_of_two_tuners_stand_side_by_side():
    for family in ("bert", "t5"):
        backbone, inputs = shared_backbone(family, double=True), batch(family)
        one, other = make_tuner("prefix"), make_tuner("prefix")
        first, second = (one.reparametrize(random_part(one, backbone, seed)) for seed in (1, 2))
        both = {"prompt_embeddings": torch.cat([first["prompt_embeddings"], second["prompt_embeddings"]])}
        apart = run(backbone, inputs, (one, [(first, 1.0)]), (other, [(second, 1.0)]))
        torch.testing.assert_close(apart, run(backbone, inputs, (one, [(both, 1.0)])), rtol=0, atol=1e-12)


def test_a_prompt_of_total_weight_zero_is_no_prompt():
    """Zero vectors would still draw attention."""
    backbone, tuner, inputs = shared_backbone("bert"), make_tuner("prompt"), batch("bert")
    part = random_part(tuner, backbone)
    bare = run(backbone, inputs)
    nothing = {"prompt_embeddings": torch.zeros_like(part["prompt_embeddings"])}
    assert (run(backbone, inputs, (tuner, [(nothing, 1.0)])) - bare).abs().max() > 1e-2
    zeros = torch.zeros(4, device=backbone.device)
    assert torch.equal(run(backbone, inputs, (tuner, [(part, zeros)])), bare)


# -- what replaces weights --------------------------------------------------------------------------------------------


def test_bitfit_is_a_change_of_biases():
    for family in ("bert", "gpt2", "deberta-v2"):
        backbone, inputs, tuner = make_backbone(family, double=True), batch(family), make_tuner("bitfit")
        part = random_part(tuner, backbone)
        actual = run(backbone, inputs, (tuner, [(part, 0.7)]))
        with torch.no_grad():
            for name, offset in part.items():
                backbone.base.get_parameter(name).add_(0.7 * offset)
        torch.testing.assert_close(actual, run(backbone, inputs), rtol=0, atol=1e-12)


# -- the networks that prompts and prefixes come from -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("p-tuning", {"width": 7, "layers": 2}),
        ("p-tuning", {"width": 7, "layers": 1, "offset": False}),
        ("p-tuning", {"width": 7, "encoder": "mlp"}),
        ("prefix", {"width": 6, "reparametrise": 9}),
    ],
)
def test_virtual_tokens_come_from_pytorchs_own_networks(kind, options):
    tuner = TUNERS[kind](TUNERS[kind].Options(tokens=5, **options))
    part = random_part(tuner, shared_backbone("bert"))
    x = part["embedding.weight"]
    width, dtype, head = x.shape[1], x.dtype, "mlp_head."
    if kind == "prefix":
        mlp, head = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, len(part["transform.2.bias"]))), "transform."
    elif "layers" in options:
        lstm = nn.LSTM(width, 7, num_layers=options["layers"], bidirectional=True, batch_first=True, dtype=dtype)
        lstm.load_state_dict(applied(part, "lstm_head."))
        x = lstm(x.unsqueeze(0))[0][0]
        mlp = nn.Sequential(nn.Linear(14, width), nn.ReLU(), nn.Linear(width, width))
    else:
        mlp = nn.Sequential(nn.Linear(width, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, width))
    mlp = mlp.to(dtype)
    mlp.load_state_dict(applied(part, head))
    with torch.no_grad():
        expected = mlp(x) + part.get("offset.weight", torch.zeros(()))
        actual = tuner.reparametrize(part)["prompt_embeddings"]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def applied(part, prefix):
    """The tensors of one module, under its own names."""
    return {name.removeprefix(prefix): tensor for name, tensor in part.items() if name.startswith(prefix)}
