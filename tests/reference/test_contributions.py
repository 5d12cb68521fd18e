"""The effect of tuners on a forward, against a hand-written forward and against replaced modules."""

from __future__ import annotations

import copy
import re
from functools import cache

import pytest
import torch
from torch import nn

from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.tokenized import RowTokenizer
from silotune.errors import InputError
from silotune.models.backbone.loading import load_backbone
from silotune.models.forward.mixing import MixEntry
from silotune.models.tuners import TUNERS, WeightedTensors
from silotune.models.tuners.full import interpolate
from tests.support import by_hand
from tests.support.numeric_rig import cut_batch, padded
from tests.support.tiny import FAMILIES
from tests.support.tuner_families import first_part, random_part
from tests.support.views import view_of_batch

TEXTS = [
    ("the garden was bright", "and the soup looked cold again"),
    ("a letter", "never"),
    ("the teacher seemed kind today and the winter became grim in the end", "a the song felt dull"),
    ("surely the river", "perhaps"),
]
TASK = Task("pairs", ("no", "yes"))


def everything(states, inputs):
    """A pooling that keeps all positions, padded to a common length."""
    states = states * inputs["attention_mask"].unsqueeze(-1)
    return nn.functional.pad(states, (0, 0, 0, 40 - states.shape[1]))


@cache
def double_backbone(folder):
    """The backbone in float64; shared, and no test changes it."""
    backbone = load_backbone(str(folder), precision="fp32")
    backbone.model.double()
    return backbone


def tokenised(backbone):
    rows = [Row(texts, number % 2) for number, texts in enumerate(TEXTS)]
    return RowTokenizer(backbone.tokenizer, 32)(TASK, rows)


def view_of(backbone, tuner, weighted, readings, micro_batch=2):
    rows = tokenised(backbone)
    batch = cut_batch(backbone, rows, range(len(rows)), micro_batch)
    mix = [MixEntry(tuner, tensors, weight) for tensors, weight in weighted]
    return batch, {name: found.cpu() for name, found in view_of_batch(backbone, batch, mix, readings).items()}


def inputs_of(backbone):
    """Pad all texts to one rectangle."""
    rows = tokenised(backbone)
    inputs = padded(rows, range(len(rows)), backbone.tokenizer.pad_token_id)
    return {key: tensor.to(backbone.device) for key, tensor in inputs.items()}


def make_tuner(name, **options):
    kind = TUNERS[name]
    return kind(kind.Options(**options))


# -- against the hand-written BERT ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bottleneck", {"r": 5}),
        ("bottleneck", {"r": 3, "sites": "pfeiffer"}),
        ("lora", {"r": 2, "alpha": 7.0}),
        (
            "lora",
            {"r": 4, "alpha": 1.0, "sites": "query,key,value,attention_output,feedforward_input,feedforward_output"},
        ),
    ],
)
def test_mix_of_two_parts_by_hand(name, options, backbone_folder):
    backbone = double_backbone(backbone_folder("bert"))
    state = {key: tensor.cpu() for key, tensor in backbone.base.state_dict().items()}
    tuner, rows = make_tuner(name, **options), tokenised(backbone)
    assert len({len(ids) for ids in rows.ids}) > 2  # padding is there, and changes nothing
    parts = [random_part(tuner, backbone, seed) for seed in (1, 2)]
    present = parts
    if options.get("sites") == "pfeiffer":  # at the other sites nothing is added
        shape = {"down.weight": (3, 32), "down.bias": (3,), "up.weight": (32, 3), "up.bias": (32,)}
        absent = {
            f"encoder.layer.{block}.attention.output.dense.{end}": torch.zeros(size, dtype=torch.float64)
            for block in range(2)
            for end, size in shape.items()
        }
        assert not any(".attention." in key for key in parts[0])
        present = [part | absent for part in parts]
    factor = options["alpha"] / options["r"] if name == "lora" else 1
    config = backbone.base.config
    for weights in [(1.0, 0.0), (0.5, 0.5), (0.3, -1.2)]:
        batch, view = view_of(backbone, tuner, list(zip(parts, weights, strict=True)), {"all": everything})
        mixed = [
            (weight * factor, {key: t.cpu() for key, t in part.items()})
            for part, weight in zip(present, weights, strict=True)
        ]
        for position, row in enumerate(batch.rows.tolist()):
            expected = by_hand.bert(
                state,
                rows.ids[row],
                rows.types[row],
                heads=config.num_attention_heads,
                eps=config.layer_norm_eps,
                bottlenecks=mixed if name == "bottleneck" else (),
                loras=mixed if name == "lora" else (),
            )
            found = view["all"][position, : len(rows.ids[row])]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


# -- against modules exchanged in a copy of the model, for every family ----------------------------------------------


class Adapted(nn.Module):
    """A linear layer with bottleneck adapters behind it, or low-rank updates beside it."""

    def __init__(self, linear, site, parts, factor):
        super().__init__()
        self.linear, self.site, self.parts, self.factor = linear, site, parts, factor

    def forward(self, x):
        y = self.linear(x)
        added = torch.zeros_like(y)
        for tensors, weight in self.parts:
            at = {key.removeprefix(f"{self.site}."): t for key, t in tensors.items() if key.startswith(f"{self.site}.")}
            weight = torch.as_tensor(weight, dtype=y.dtype, device=y.device).reshape(-1, 1, 1)
            if "lora_A.weight" in at:
                added = added + weight * self.factor * (x @ at["lora_A.weight"].T @ at["lora_B.weight"].T)
            else:
                hidden = nn.functional.gelu(y @ at["down.weight"].T + at["down.bias"])
                added = added + weight * (hidden @ at["up.weight"].T + at["up.bias"])
        return y + added


def exchanged(model, parts, factor):
    """Return a copy of the model in which the linear layers named by the parts are adapted."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module._forward_hooks.clear()
    names = {re.sub(r"\.(down|up|lora_A|lora_B)\..*", "", key) for key in parts[0][0]}
    for site in names:
        holder, _, attribute = site.rpartition(".")
        linear = model.get_submodule(site)
        assert isinstance(linear, nn.Linear)
        setattr(model.get_submodule(holder), attribute, Adapted(linear, site, parts, factor))
    return model, names


SITES = {  # where the adapters belong, by family: the two linear layers before a block's residual sums
    "bert": ("attention.output.dense", "output.dense"),
    "roberta": ("attention.output.dense", "output.dense"),
    "distilbert": ("attention.out_lin", "ffn.lin2"),
    "mpnet": ("attention.attn.o", "output.dense"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["bottleneck", "lora"])
@pytest.mark.parametrize("per_row", [False, True])
def test_mix_equals_exchanged_modules(name, family, per_row, backbone_folder):
    backbone = double_backbone(backbone_folder(family))
    tuner = make_tuner(name, r=3)
    first, second = (random_part(tuner, backbone, seed) for seed in (3, 4))
    weights = (0.4, 0.6)
    if per_row:
        weights = tuple(
            torch.tensor(w, dtype=torch.float64, device=backbone.device) for w in ([0, 1, 0.25, 2], [1, 0, 0.75, 3])
        )
    _, view = view_of(backbone, tuner, [(first, weights[0]), (second, weights[1])], {"all": everything})
    factor = 16 / 3 if name == "lora" else None
    model, names = exchanged(backbone.base, [(first, weights[0]), (second, weights[1])], factor)
    if name == "bottleneck" and family in SITES:
        assert {site.split(".layer.")[1][2:] for site in names} == set(SITES[family])
    inputs = inputs_of(backbone)
    with torch.no_grad():
        expected = everything(model(**inputs).last_hidden_state, inputs).cpu()
        plain = everything(backbone.base(**inputs).last_hidden_state, inputs).cpu()
    torch.testing.assert_close(view["all"], expected, rtol=0, atol=1e-11)
    assert (view["all"] - plain).abs().max() > 0.1


@pytest.mark.parametrize("name", ["bottleneck", "lora"])
def test_untrained_part_and_weight_zero_change_nothing(name, backbone_folder):
    backbone = double_backbone(backbone_folder("bert"))
    tuner = make_tuner(name)
    _, plain = view_of(backbone, tuner, [], {"all": everything})
    for weighted in ([(first_part(tuner, backbone), 1.0)], [(random_part(tuner, backbone, 1), 0.0)]):
        assert torch.equal(view_of(backbone, tuner, weighted, {"all": everything})[1]["all"], plain["all"])


# -- full fine-tuning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_full_parts_are_interpolated(family, backbone_folder):
    backbone = double_backbone(backbone_folder(family))
    tuner = make_tuner("full")
    first, second = (random_part(tuner, backbone, seed) for seed in (1, 2))
    before = {name: tensor.clone() for name, tensor in backbone.base.state_dict().items()}
    _, view = view_of(backbone, tuner, [(first, 0.25), (second, 0.75)], {"all": everything}, micro_batch=4)
    model = copy.deepcopy(backbone.base)
    assert {name for name, _ in model.named_parameters()} == first.keys()
    inputs = inputs_of(backbone)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(first[name] / 4 + 3 * second[name] / 4)
        expected = everything(model(**inputs).last_hidden_state, inputs).cpu()
    torch.testing.assert_close(view["all"], expected, rtol=0, atol=1e-11)
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.base.state_dict().items())


@pytest.mark.parametrize("weights", [(0.5, 0.4), (1.0, 1.0), (0.5, torch.full((4,), 0.4))])
def test_full_refuses_weights_that_are_no_interpolation(weights, backbone_folder):
    backbone = double_backbone(backbone_folder("bert"))
    tuner = make_tuner("full")
    part = random_part(tuner, backbone, 1)
    with pytest.raises(InputError, match="tuner"):
        view_of(backbone, tuner, [(part, weight) for weight in weights], {"all": everything})


def test_full_gradient_flows_into_each_part_by_its_weight_and_into_a_weight_that_is_learned():
    a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    alpha, slopes = torch.tensor(0.25, requires_grad=True), torch.tensor([1.0, 2.0, 4.0])
    mixed = interpolate([WeightedTensors({"w": a}, alpha), WeightedTensors({"w": b}, 1 - alpha)])["w"]
    (mixed * slopes).sum().backward()
    assert a.grad.tolist() == [0.25, 0.5, 1.0]
    assert b.grad.tolist() == [0.75, 1.5, 3.0]
    assert alpha.grad.item() == pytest.approx(((a - b) * slopes).sum().item(), abs=1e-5)
