"""Every tuner on every backbone family: the same demands on each pair."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from silotune.errors import InputError
from silotune.models.forward.mixing import MixEntry
from tests.support.tuner_families import (
    PAIRS,
    UNSUPPORTED,
    as_parameters,
    batch,
    first_part,
    make_tuner,
    random_part,
    real_states,
    row_of,
    run,
    shared_backbone,
    trainable,
)
from tests.support.views import encoded_views

pairs = pytest.mark.parametrize(("kind", "family"), as_parameters(PAIRS))
each_alone = pytest.mark.parametrize(("kind", "family"), as_parameters(PAIRS, together=False))


@pairs
def test_the_part_matters_and_learns_and_is_the_same_when_loaded(kind, family, tmp_path):
    """The forward is finite, gradients reach the part and nothing else, and a saved part gives the same states."""
    backbone, tuner, inputs = shared_backbone(family), make_tuner(kind), batch(family)
    part = trainable(random_part(tuner, backbone))
    bare = run(backbone, inputs)
    states = run(backbone, inputs, (tuner, [(part, 1.0)]))
    assert states.shape == bare.shape
    assert torch.isfinite(states).all()
    found, without = (torch.cat(real_states(each, inputs)) for each in (states, bare))
    assert (found - without).abs().max() > 1e-3

    sum(row.square().sum() for row in real_states(states, inputs)).backward()
    assert [name for name, parameter in backbone.base.named_parameters() if parameter.grad is not None] == []
    for name, tensor in part.items():
        assert tensor.grad is not None, name
        assert torch.isfinite(tensor.grad).all(), name
        # a bias of all keys moves a row's attention scores by one constant: no effect, so no gradient but noise
        if "key.bias" not in name and "k_lin.bias" not in name and "attn.k.bias" not in name:
            assert tensor.grad.abs().max() > 1e-6, name

    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in part.items()}, tmp_path / "part.safetensors"
    )
    loaded = {name: tensor.to(backbone.device) for name, tensor in load_file(tmp_path / "part.safetensors").items()}
    assert torch.equal(run(backbone, inputs, (tuner, [(loaded, 1.0)])), states)


@pytest.mark.parametrize(
    ("kind", "family"), as_parameters(pair for pair in PAIRS if "prefix" not in pair[0] and pair[0][0] != "p")
)
def test_an_untrained_part_changes_nothing(kind, family):
    backbone, tuner, inputs = shared_backbone(family), make_tuner(kind), batch(family)
    states = run(backbone, inputs, (tuner, [(first_part(tuner, backbone), 1.0)]))
    torch.testing.assert_close(states, run(backbone, inputs), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "family"), sorted(UNSUPPORTED))
def test_a_pair_that_cannot_work_is_refused_in_one_line(kind, family):
    backbone, tuner = shared_backbone(family), make_tuner(kind)
    with pytest.raises(InputError) as raised:
        first_part(tuner, backbone)
    message = str(raised.value)
    assert "\n" not in message
    assert family in message
    assert tuner.name in message
    assert "works on" in message
    assert "bert" in message.split("works on")[1]


@pairs
def test_folded_or_in_halves_or_padded_on_the_left_it_gives_the_same_states(kind, family):
    """In float64."""
    backbone, tuner, inputs = shared_backbone(family, double=True), make_tuner(kind), batch(family)
    part = random_part(tuner, backbone)
    whole = run(backbone, inputs, (tuner, [(part, 1.0)]))

    folded = tuner.effective(backbone, part)
    assert torch.equal(run(backbone, inputs, (tuner, [(folded, 1.0)])), whole)
    assert tuner.effective(backbone, folded) == folded

    halves = run(backbone, inputs, (tuner, [(part, 0.5), (part, 0.5)]))
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-12)

    left = batch(family, "left")
    on_the_left = real_states(run(backbone, left, (tuner, [(part, 1.0)])), left)
    for states, expected in zip(on_the_left, real_states(whole, inputs), strict=True):
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)


@pairs
def test_rows_of_different_mixes_are_as_each_row_alone(kind, family):
    """In float64; what differs is padding, and with it the order of sums. Tolerance 1e-10."""
    backbone, tuner, inputs = shared_backbone(family, double=True), make_tuner(kind), batch(family)
    one, other = random_part(tuner, backbone, 1), random_part(tuner, backbone, 2)
    weights = [(1.0, 0.0), (0.0, 0.0), (0.5, 0.5), (0.3, 0.7)]
    columns = [
        torch.tensor(column, dtype=torch.float64, device=backbone.device) for column in zip(*weights, strict=True)
    ]
    mix = (tuner, [(one, columns[0]), (other, columns[1])])
    if not tuner.mixes_rows(backbone):
        assert kind == "full" or family == "deberta-v2"  # where views run every mix of a batch on its own
        if kind in ("lora", "bitfit", "ia3", "full"):
            with pytest.raises(InputError, match=r"own forward|per row"):
                run(backbone, inputs, mix)
    ingredients = [MixEntry(tuner, part, column) for part, column in mix[1]]
    moved = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
    together = real_states(encoded_views(backbone, moved, {"": ingredients})[""], inputs)
    for row, (first, second) in enumerate(weights):
        present = [(part, weight) for part, weight in ((one, first), (other, second)) if weight]
        single = row_of(inputs, row)
        alone = run(backbone, single, *([(tuner, present)] if present else []))
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-10)


@each_alone
def test_bfloat16_is_near_float32(kind, family):
    tuner, inputs = make_tuner(kind), batch(family)
    exact = shared_backbone(family)
    rough = shared_backbone(family, precision="bf16", keep_master=tuner.trains_backbone)
    part = trainable(random_part(tuner, exact, spread=0.05))
    states = run(rough, inputs, (tuner, [(part, 1.0)]))
    assert torch.isfinite(states).all()
    reference = torch.cat(real_states(run(exact, inputs, (tuner, [(part, 1.0)])), inputs))
    actual = torch.cat(real_states(states, inputs)).float()
    assert (actual - reference).norm() / reference.norm() < 0.04  # 8 bits of mantissa through two layers
    actual.square().sum().backward()
    assert all(tensor.grad.dtype is torch.float32 and torch.isfinite(tensor.grad).all() for tensor in part.values())


@each_alone
def test_checkpointing_changes_neither_states_nor_gradients(kind, family):
    tuner, inputs = make_tuner(kind), batch(family)
    results = []
    for backbone in (shared_backbone(family), shared_backbone(family, checkpointing=True)):
        part = trainable(random_part(tuner, backbone))
        states = run(backbone, inputs, (tuner, [(part, 0.5)] if kind != "full" else [(part, 1.0)]))
        sum(row.square().sum() for row in real_states(states, inputs)).backward()
        results.append((states.detach(), {name: tensor.grad for name, tensor in part.items()}))
    (states, gradients), (again, gradients_again) = results
    assert torch.equal(states, again)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_again[name], gradient, rtol=1e-5, atol=1e-6)
