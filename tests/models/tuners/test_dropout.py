"""LoRA's dropout: peft's own in training mode, drawn from the run's seed, absent wherever nothing is trained."""

from __future__ import annotations

import peft
import pytest
import torch

from silotune.core.tensors import digest, flatten
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state
from silotune.evaluation.predict import logits
from silotune.models.tuners import TUNERS
from silotune.training.local_trainer import LocalTrainer
from tests.support.tuner_families import batch, make_backbone, make_model, random_part, run, trainable

RATE = 0.4


def lora(rate: float = RATE):
    return TUNERS["lora"](TUNERS["lora"].Options(r=3, alpha=6.0, dropout=rate))


def in_peft(family: str, backbone, parts, weights):
    """peft's model in training mode with one adapter a part, all active; a weight is put into the scale."""
    model = None
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        modules = sorted({name.split(".lora_")[0] for name in part})
        config = peft.LoraConfig(
            r=3, lora_alpha=6.0 * weight, lora_dropout=RATE, target_modules=modules, fan_in_fan_out=family == "gpt2"
        )
        name = f"part{number}"
        if model is None:
            model = peft.get_peft_model(make_model(family), config, name)
        else:
            model.add_adapter(name, config)
        named = {f"base_model.model.{key}": tensor for key, tensor in part.items()}
        peft.set_peft_model_state_dict(model, named, name)
    names = [f"part{number}" for number in range(len(parts))]
    model.base_model.set_adapter(names)
    return model.to(backbone.device).train()


@pytest.mark.parametrize("weights", [(1.0,), (0.3, 0.7)])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_states_and_gradients_are_those_of_peft_in_training(family, weights):
    """With the same draws: the same places of A's input are left out, an own choice for each adapter."""
    backbone, inputs, tuner = make_backbone(family), batch(family), lora()
    parts = [random_part(tuner, backbone, seed, spread=0.1) for seed in range(len(weights))]
    model = in_peft(family, backbone, parts, weights)
    leaves = [trainable(part) for part in parts]
    torch.manual_seed(4)
    states = run(backbone, inputs, (tuner, list(zip(leaves, weights, strict=True))))
    torch.manual_seed(4)
    expected = model(**{name: tensor.to(backbone.device) for name, tensor in inputs.items()}).last_hidden_state
    real = inputs["attention_mask"] == 1
    torch.testing.assert_close(states[real], expected[real], rtol=0, atol=1e-5)
    still = run(backbone, inputs, (lora(0.0), list(zip(leaves, weights, strict=True))))
    assert (states[real] - still[real]).abs().max() > 1e-2
    states[real].square().sum().backward()
    expected[real].square().sum().backward()
    for number, part in enumerate(leaves):
        for name, tensor in part.items():
            there = model.get_parameter(f"base_model.model.{name.removesuffix('.weight')}.part{number}.weight")
            torch.testing.assert_close(tensor.grad, there.grad, rtol=1e-4, atol=1e-4)


def test_rows_with_weights_of_their_own_have_dropout_too():
    """Rows of weight 1 and 0 for one part, the reverse for the other: each as if its part alone had drawn so."""
    backbone, inputs, tuner = make_backbone("bert"), batch("bert"), lora()
    parts = [trainable(random_part(tuner, backbone, seed, spread=0.1)) for seed in range(2)]
    near = torch.tensor([1.0, 0.0, 0.5, 0.25])
    torch.manual_seed(4)
    actual = run(backbone, inputs, (tuner, [(parts[0], near), (parts[1], 1 - near)]))
    for row, weight in enumerate(near.tolist()):
        torch.manual_seed(4)
        alone = run(backbone, inputs, (tuner, [(parts[0], weight), (parts[1], 1 - weight)]))
        torch.testing.assert_close(actual[row], alone[row], rtol=0, atol=1e-5)


def test_nothing_is_left_out_where_nothing_is_trained():
    backbone, inputs, tuner = make_backbone("bert"), batch("bert"), lora()
    part = random_part(tuner, backbone, spread=0.1)
    plain = run(backbone, inputs, (lora(0.0), [(part, 1.0)]))
    torch.testing.assert_close(run(backbone, inputs, (tuner, [(part, 1.0)])), plain, rtol=0, atol=0)


def test_draws_follow_from_seed_silo_round_and_phase_alone(tiny_federation):
    """Not from the process's generator, nor from who trained before; another rate is another result."""
    words = ("tuner=lora", "train.steps=3")
    actual = set()
    for process_seed in (1, 2):
        federation = tiny_federation("feddpa-t", *words, f"tuner.dropout={RATE}")
        shared = federation.coordinator.shared
        if process_seed == 2:
            federation.trainer.rounds([federation.silos["alpha"]], shared, 1)[0]
        torch.manual_seed(process_seed)
        actual.add(digest(flatten(federation.trainer.rounds([federation.silos["gamma"]], shared, 1)[0].state)))
    assert len(actual) == 1
    without = tiny_federation("feddpa-t", *words)
    actual.add(digest(flatten(without.trainer.rounds([without.silos["gamma"]], shared, 1)[0].state)))
    assert len(actual) == 2


def test_a_phases_draws_do_not_depend_on_the_phases_before_it(tiny_federation):
    """The local part beside the received global one is the same whether or not the global one was trained before."""
    states = []
    for alone in (False, True):
        federation = tiny_federation(
            "feddpa-t", "method.sees=received", "tuner=lora", f"tuner.dropout={RATE}", "train.steps=3"
        )
        training = federation.context
        if alone:
            training.phases = [phase for phase in training.phases if phase.name == "local"]
        states.append(
            LocalTrainer(training)
            .rounds([federation.silos["gamma"]], federation.coordinator.shared, 1)[0]
            .state["private"]
        )
    assert digest(states[0]) == digest(states[1])


def test_predictions_know_no_dropout(tiny_federation):
    actual = []
    for rate in (0.0, RATE):
        federation = tiny_federation("feddpa-t", "tuner=lora", f"tuner.dropout={rate}")
        draws = torch.Generator().manual_seed(3)
        silo = federation.silos["alpha"]
        silo.state = federation.context.state_of(silo)
        for part in (federation.coordinator.shared["global"], silo.state.private["private"]):
            for name, tensor in part.items():
                part[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=draws)
        test = silo.evaluations["alpha"].test
        actual += [logits(federation.context, current_model_state(federation, silo), test) for _ in range(2)]
    assert all(torch.equal(actual[0], other) for other in actual[1:])


@pytest.mark.parametrize("rate", ["1", "-0.1", "nan", "much"])
def test_rates_that_cannot_be_are_refused(tiny_config, rate):
    with pytest.raises(InputError, match=r"tuner\.dropout"):
        tiny_config("fedit", "tuner=lora", f"tuner.dropout={rate}")
