"""`train.dropout`: the backbone's dropout is transformers' in training mode, and nowhere but in trained views."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModel

from silotune.core.tensors import digest, flatten
from silotune.errors import InputError
from silotune.evaluation.predict import Predictor
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.block_devices import BlockDevices
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.training.at_once import choose_cohort
from silotune.training.phase_batches import phase_batches
from tests.support.tiny import FAMILIES as TOKENIZERS
from tests.support.tuner_families import batch, make_backbone, make_model


def trained(federation, number=1):
    """The digest of a silo's parts after a round."""
    (result,) = federation.trainer.rounds([federation.silos["alpha"]], federation.coordinator.shared, number)
    return digest(flatten(result.state))


RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "resid_pdrop", "embd_pdrop")
RATES += ("attn_pdrop", "dropout", "dropout_rate")


def with_rates(family, rate):
    """A copy of the tiny model that is configured with one rate everywhere."""
    model = make_model(family)
    config = copy.deepcopy(model.config)
    for key in RATES:
        if hasattr(config, key):
            setattr(config, key, rate)
    again = AutoModel.from_config(config, attn_implementation=config._attn_implementation)
    again.load_state_dict(model.state_dict(), strict=False)
    return again


@pytest.mark.parametrize("dropout", ["own", 0.4])
@pytest.mark.parametrize("family", ["bert", "distilbert", "llama", "gpt2", "t5"])
def test_states_are_those_of_transformers_in_training_mode(family, dropout):
    """By the same draws; one rate for all places is a configuration with that rate everywhere."""
    rate = 0.3 if dropout == "own" else dropout
    model = with_rates(family, rate if dropout == "own" else 0.0)
    backbone = Backbone(model, TOKENIZERS["bert"].tokenizer(), devices=BlockDevices(torch.device("cpu")))
    inputs, expected = batch(family), with_rates(family, rate).train()
    plain = ForwardPlan()
    torch.manual_seed(4)
    found = backbone.encode(inputs, plain.with_dropout(dropout))
    torch.manual_seed(4)
    theirs = expected(**inputs).last_hidden_state
    decoder = torch.ones(theirs.shape[:2], dtype=torch.int64)
    real = (decoder if family == "t5" else inputs["attention_mask"]) == 1
    torch.testing.assert_close(found[real], theirs[real], rtol=0, atol=1e-5)
    assert not any(module.training for module in backbone.base.modules())
    assert (found[real] - backbone.encode(inputs, plain)[real]).abs().max() > 1e-2


def test_rates_are_back_after_a_forward_that_failed():
    backbone = make_backbone("bert")
    before = [module.p for module in backbone.base.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(before) == 7  # embeddings; attention's scores, its output and the feed-forward's in two blocks

    def fails():
        assert {m.p for m in backbone.base.modules() if isinstance(m, torch.nn.Dropout)} == {0.9}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        backbone.applied(ForwardPlan().with_dropout(0.9), fails)
    assert [module.p for module in backbone.base.modules() if isinstance(module, torch.nn.Dropout)] == before
    assert not any(module.training for module in backbone.base.modules())


def test_it_is_drawn_from_seed_silo_round_phase_and_step(tiny_federation):
    words = ("train.steps=2", "train.dropout=own")
    federation = tiny_federation("fedmcp", *words)
    first = trained(federation)
    torch.manual_seed(99)
    assert trained(federation) == first
    assert trained(tiny_federation("fedmcp", "train.steps=2")) != first
    assert trained(tiny_federation("fedmcp", "train.steps=2", "train.dropout=0.3")) != first


@pytest.mark.long
def test_full_fine_tuning_has_it_unless_it_is_switched_off(tiny_federation):
    words = ("tuner=full", "train.steps=1", "train.optimizer=sgd")
    default, own, none = (trained(tiny_federation("fedavg", *words, *more))
                          for more in ((), ("train.dropout=own",), ("train.dropout=0",)))  # fmt: skip
    assert default == own != none


def test_predictions_and_constant_views_have_none(tiny_federation, monkeypatch):
    """Of FedMCP's views the received adapter's alone is constant; scores are of the model without dropout."""
    federation = tiny_federation("fedmcp", "train.steps=1", "train.dropout=0.5")
    backbone = federation.backbone
    modes, applied = [], type(backbone).applied

    def recorded(self, plan, run):
        modes.append((plan.dropout, plan.dropout_rate))
        return applied(self, plan, run)

    monkeypatch.setattr(type(backbone), "applied", recorded)
    trained(federation)
    assert set(modes) == {(True, 0.5), (False, 0.0)}
    assert modes.count((True, 0.5)) == 3 * modes.count((False, 0.0))
    modes.clear()
    silo = federation.silos["alpha"]
    context = federation.context
    state = federation.coordinator.shared | context.state_of(silo).private
    own = next(phase_batches(context, silo, context.phases[0], 1))
    Predictor(context, state).logits(own)
    assert set(modes) == {(False, None)}


def test_silos_train_one_by_one(tiny_federation):
    with pytest.raises(InputError, match=r"^cohort=2: silos cannot share a forward with train.dropout"):
        tiny_federation("fedavg", "train.dropout=own", "cohort=2")
    federation = tiny_federation("fedavg", "train.dropout=own")
    chosen = choose_cohort("auto", federation.context, federation.silos.values())
    assert chosen.size == 1
    assert "train.dropout" in chosen.reason
    tiny_federation("fedavg", "train.dropout=0", "cohort=2")
