"""FedEx-LoRA, FLoRA, LoRA-FAIR, FedMomentum: two rounds of two silos by hand; limits; products against dense NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from silotune.aggregation import Update
from silotune.aggregation.product_error import ProductError
from silotune.communication.messages import read_broadcast
from silotune.core.tensors import flatten
from silotune.errors import InputError
from silotune.methods import fedmomentum
from silotune.methods.fedmomentum import BalancedSVD, BalancedSVDOptions
from silotune.methods.flora_na import MixedFactors
from silotune.methods.lora_products import CorrectedMeans, MeansAndResidual, ProductSVD, StackedProducts
from tests.support.method_cases import logged
from tests.support.numeric_rig import doubled, random_parts
from tests.support.rounds_by_hand import WORDS, Stage, cross_entropy, descended, states

ALPHA, RANK, ROWS = 6, 4, 8
SCALE, REGULARIZATION = ALPHA / RANK, 0.05
SILOS = ("alpha", "gamma")
MODULES = [f"encoder.layer.{block}.attention.self.{name}" for block in (0, 1) for name in ("query", "value")]


def factors(tensors, module):
    """B and A of a module as arrays."""
    return tensors[f"{module}.lora_B.weight"].numpy(), tensors[f"{module}.lora_A.weight"].numpy()


def as_lora(delta):
    """A delta as LoRA of full rank, which the hand-written BERT reads."""
    tensors = {}
    for module in MODULES:
        tensors[f"{module}.lora_B.weight"] = delta[f"{module}.delta.weight"]
        tensors[f"{module}.lora_A.weight"] = torch.eye(delta[f"{module}.delta.weight"].shape[1], dtype=torch.float64)
    return tensors


def two_silos(tiny_federation, method, *words):
    """A federation in float64, and the whole states of two silos: random heads and random shared parts."""
    federation = doubled(tiny_federation(method, *WORDS, f"tuner.alpha={ALPHA}", *words))
    found = {}
    for seed, name in enumerate(SILOS):
        silo = federation.silos[name]
        (rows,) = silo.train.values()
        count = ROWS + 3 * seed  # unequal, so that means by rows are no plain means
        silo.train[name] = replace(rows, ids=rows.ids[:count], types=rows.types[:count], labels=rows.labels[:count])
        found[name] = random_parts(federation, silo, seed=seed)
        silo.state = federation.context.state_of(silo)
        silo.state.private = {"head": found[name]["head"]}
    shared = {part: found["alpha"][part] for part in federation.coordinator.shared}
    federation.coordinator.adopt(shared)
    return federation, {name: state | shared for name, state in found.items()}


def trained_by_hand(federation, silo, state):
    def loss(now):
        loras = [(SCALE, now["global"])]
        if "delta" in now:
            loras.append((SCALE, as_lora(now["delta"])))
        return cross_entropy(federation, silo, states(federation, silo, loras=loras), now["head"])

    return descended(state, [Stage(("global", "head"), loss)])


def means(trained, rows):
    """Weighted means of products, of B's and of A's, per module, in NumPy."""
    total = sum(rows.values())
    found = {}
    for module in MODULES:
        pairs = {name: factors(state["global"], module) for name, state in trained.items()}
        product = sum(rows[name] / total * (b @ a) for name, (b, a) in pairs.items())
        mean_b, mean_a = (sum(rows[name] / total * pair[which] for name, pair in pairs.items()) for which in (0, 1))
        found[module] = product, mean_b, mean_a
    return found


def fedex_by_hand(shared, found, drawn):
    for module, (product, b, a) in found.items():
        shared["global"][f"{module}.lora_B.weight"] = torch.from_numpy(b)
        shared["global"][f"{module}.lora_A.weight"] = torch.from_numpy(a)
        shared["delta"][f"{module}.delta.weight"] += torch.from_numpy(product - b @ a)


def flora_by_hand(shared, found, drawn):
    for module, (product, _, _) in found.items():
        shared["delta"][f"{module}.delta.weight"] += torch.from_numpy(product)
    shared["global"] = {name: tensor.double() for name, tensor in drawn["global"].items()}


def fair_by_hand(shared, found, drawn):
    for module, (product, b, a) in found.items():
        # the normal equations of [Āᵀ; √λ·I]·ΔBᵀ = [(W̄ − B̄·Ā)ᵀ; 0], by NumPy's least squares
        system = np.concatenate([a.T, np.sqrt(REGULARIZATION) * np.eye(RANK)])
        right = np.concatenate([(product - b @ a).T, np.zeros((RANK, len(b)))])
        correction = np.linalg.lstsq(system, right, rcond=None)[0].T
        shared["global"][f"{module}.lora_B.weight"] = torch.from_numpy(b + correction)
        shared["global"][f"{module}.lora_A.weight"] = torch.from_numpy(a)


def balanced(mean, rank=RANK):
    """B and A of the largest components of a matrix, each with the roots of its singular values."""
    u, values, vt = np.linalg.svd(mean)
    signs = np.sign(vt[range(rank), np.abs(vt[:rank]).argmax(1)])
    return u[:, :rank] * signs * np.sqrt(values[:rank]), (vt[:rank].T * signs * np.sqrt(values[:rank])).T


def momentum_by_hand(shared, found, drawn):
    for module, (product, _, _) in found.items():
        b, a = balanced(product)
        shared["global"][f"{module}.lora_B.weight"] = torch.from_numpy(b)
        shared["global"][f"{module}.lora_A.weight"] = torch.from_numpy(a)
        shared["delta"][f"{module}.delta.weight"] += torch.from_numpy(product - b @ a)


BY_HAND = {
    "fedmomentum": (momentum_by_hand, ()),
    "fedex-lora": (fedex_by_hand, ()),
    "flora": (flora_by_hand, ()),
    "lora-fair": (fair_by_hand, (f"aggregation.regularization={REGULARIZATION}",)),
}


@pytest.mark.parametrize("method", BY_HAND)
def test_two_rounds_of_two_silos(tiny_federation, method):
    by_hand, words = BY_HAND[method]
    federation, expected = two_silos(tiny_federation, method, *words)
    coordinator, rows = federation.coordinator, {name: federation.silos[name].rows for name in SILOS}
    for number in (1, 2):
        silos = [federation.silos[name] for name in SILOS]
        results = federation.trainer.rounds(silos[:1], coordinator.shared, number)
        results += federation.trainer.rounds(silos[1:], coordinator.shared, number)
        updates = [
            Update(silo.name, flatten({"global": result.state["global"]}), silo.rows)
            for silo, result in zip(silos, results, strict=True)
        ]
        for silo, result in zip(silos, results, strict=True):
            silo.state.private = {"head": result.state["head"]}
        coordinator.aggregate(updates, number)
        drawn = federation.context.initial.redrawn(number + 1)
        coordinator.adopt({part: {n: t.double() for n, t in ts.items()} for part, ts in coordinator.shared.items()})

        trained = {silo.name: trained_by_hand(federation, silo, expected[silo.name]) for silo in silos}
        shared = {part: {n: t.clone() for n, t in expected["alpha"][part].items()} for part in coordinator.shared}
        by_hand(shared, means(trained, rows), drawn)
        expected = {name: {"head": trained[name]["head"]} | shared for name in SILOS}
    torch.testing.assert_close(coordinator.shared, shared, rtol=0, atol=1e-9)
    for silo in silos:
        torch.testing.assert_close(silo.state.private["head"], expected[silo.name]["head"], rtol=0, atol=1e-9)


# -- limits, over random updates --------------------------------------------------------------------------------------

OUT, IN = 7, 11
EXACT = BalancedSVD(BalancedSVDOptions())


def made(silos=3, ranks=(3,), seed=1, dtype=torch.float64):
    """Shared tensors before a round, and updates of its silos, whose ranks may differ."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=dtype)

    def pair(rank):
        return {"global/q.lora_A.weight": normal(rank, IN), "global/q.lora_B.weight": normal(OUT, rank)}

    before = pair(max(ranks)) | {"delta/q.delta.weight": normal(OUT, IN)}
    updates = [Update(f"silo{k}", pair(ranks[k % len(ranks)]), rows=2 + 3 * k) for k in range(silos)]
    return before, updates


def product(tensors):
    return tensors["global/q.lora_B.weight"] @ tensors["global/q.lora_A.weight"]


def effective(tensors):
    """What a model adds to its frozen weights, without the scale."""
    return tensors["delta/q.delta.weight"] + product(tensors)


def mean_effective(before, updates):
    rows = sum(update.rows for update in updates)
    return sum(update.rows / rows * effective(before | update.tensors) for update in updates)


def test_effective_weights_of_fedex_and_flora_are_the_mean_of_the_silos():
    before, updates = made()
    for aggregation in (MeansAndResidual(), StackedProducts(), EXACT):
        error = ProductError(before, by_rows=True)
        after = before | aggregation.aggregate(error.watch(iter(updates)), before)
        torch.testing.assert_close(effective(after), mean_effective(before, updates), rtol=0, atol=1e-12)
        assert error.of(after) < 1e-12


def test_fedmomentum_with_all_ranks_is_fedex():
    """Where LoRA holds the whole mean product the delta stays; with less energy the smallest components are lost."""
    before, updates = made(ranks=(9,))
    fedex, whole = (
        before | aggregation.aggregate(iter(updates), before) for aggregation in (MeansAndResidual(), EXACT)
    )
    torch.testing.assert_close(effective(whole), effective(fedex), rtol=0, atol=1e-12)
    torch.testing.assert_close(whole["delta/q.delta.weight"], before["delta/q.delta.weight"], rtol=0, atol=1e-12)
    a, b = (whole[f"global/q.lora_{letter}.weight"] for letter in "AB")
    torch.testing.assert_close(b.T @ b, a @ a.T, rtol=0, atol=1e-12)
    before, updates = made(ranks=(2,))
    mean = (mean_effective(before, updates) - before["delta/q.delta.weight"]).numpy()
    u, values, vt = np.linalg.svd(mean, full_matrices=False)
    count = 1 + int((np.cumsum(values**2) < 0.9 * np.sum(values**2)).sum())
    assert 2 < count < 6
    after = before | BalancedSVD(BalancedSVDOptions(energy=0.9)).aggregate(iter(updates), before)
    best = torch.from_numpy((u[:, :count] * values[:count]) @ vt[:count]) + before["delta/q.delta.weight"]
    torch.testing.assert_close(effective(after), best, rtol=0, atol=1e-12)


def test_fedmomentum_leaves_a_lora_that_is_zero():
    before, updates = made()
    zeros = {"global/q.lora_B.weight": torch.zeros(OUT, 3, dtype=torch.float64)}
    unmoved = [replace(update, tensors=update.tensors | zeros) for update in updates]
    assert EXACT.aggregate(iter(unmoved), before | zeros).keys() <= {"head/out.weight"}


def test_fedmomentum_of_a_mean_of_lower_rank_is_finite(monkeypatch):
    """An SVD of such a mean may give columns so small that the sum of their squares is 0, though they are not."""
    before, updates = made(dtype=torch.float32)
    real = fedmomentum.truncated

    def of_rank_one(left, right, rank):
        b, a = real(left, right, rank)
        return b * torch.tensor([1, 1e-90, 1e-170, *[0] * (rank - 3)], dtype=b.dtype), a

    monkeypatch.setattr(fedmomentum, "truncated", of_rank_one)
    after = EXACT.aggregate(iter(updates), before)
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_silos_of_unlike_ranks_are_merged_exactly():
    before, updates = made(ranks=(2, 5, 3))
    after = before | StackedProducts().aggregate(iter(updates), before)
    torch.testing.assert_close(effective(after), mean_effective(before, updates), rtol=0, atol=1e-12)


def test_in_float32_fedex_makes_up_for_the_rounding_of_the_means():
    before, updates = made(dtype=torch.float32)
    after = before | MeansAndResidual().aggregate(iter(updates), before)
    exact = mean_effective(
        {name: tensor.double() for name, tensor in before.items()},
        [Update(u.silo, {name: tensor.double() for name, tensor in u.tensors.items()}, u.rows) for u in updates],
    )
    found = effective({name: tensor.double() for name, tensor in after.items()})
    assert (found - exact).abs().max() <= torch.finfo(torch.float32).eps * after["delta/q.delta.weight"].abs().max()


def test_lora_fair_corrects_the_more_the_less_it_is_held_back():
    before, updates = made()
    rows = sum(update.rows for update in updates)
    target = sum(update.rows / rows * product(update.tensors) for update in updates).numpy()
    missing, corrections = [], []
    mean_b = sum(update.rows / rows * update.tensors["global/q.lora_B.weight"] for update in updates)
    for regularization in (0.0, 1e-9, 0.01, 1.0, 1e12):
        after = before | CorrectedMeans(regularization).aggregate(updates, before)
        missing.append(np.linalg.norm(product(after).numpy() - target))
        corrections.append(float((after["global/q.lora_B.weight"] - mean_b).norm()))
    assert missing == sorted(missing)
    assert corrections == sorted(corrections, reverse=True)
    assert corrections[-1] < 1e-9
    # at 0 no other B comes nearer: the projection of the mean product on the rows of Ā
    a = (before | CorrectedMeans(0.0).aggregate(updates, before))["global/q.lora_A.weight"].numpy()
    best = np.linalg.norm(target - target @ np.linalg.pinv(a) @ a)
    assert missing[0] == pytest.approx(best, abs=1e-9)
    assert missing[1] == pytest.approx(best, abs=1e-6)


def test_where_b_can_solve_it_lora_fair_without_regularization_is_exact():
    before, updates = made()
    same_a = updates[0].tensors["global/q.lora_A.weight"]
    updates = [replace(update, tensors=update.tensors | {"global/q.lora_A.weight": same_a}) for update in updates]
    after = before | CorrectedMeans(0.0).aggregate(updates, before)
    torch.testing.assert_close(effective(after), mean_effective(before, updates), rtol=0, atol=1e-9)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_lora_begins_anew_in_every_round(reference):
    run, wire = reference("flora")
    federation = run.federation
    first, second = (read_broadcast(wire.down[index], federation.coordinator.expected)[0] for index in (0, -1))
    for name, tensor in second["global"].items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any()
        else:
            assert tensor.any()
            assert not torch.isclose(tensor, first["global"][name]).any()
            assert torch.equal(tensor, federation.context.initial.redrawn(2)["global"][name])
    assert all(tensor.any() for tensor in second["delta"].values())
    assert not any(tensor.any() for tensor in first["delta"].values())


@pytest.mark.parametrize("method", ["fedex-lora", "flora"])
def test_a_delta_is_counted_on_its_way_down_alone(reference, method):
    run, wire = reference(method)
    errors = [event["product_error"] for event in logged(run.folder, "aggregation")]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    shared = run.federation.coordinator.shared
    lora, delta = (sum(tensor.numel() for tensor in shared[part].values()) for part in ("global", "delta"))
    assert run.summary["adapter_parameters"] == run.summary["sent_parameters"] == lora
    assert run.summary["bytes_down"] - run.summary["bytes_up"] >= 4 * delta * len(wire.down)


def test_a_round_without_updates_draws_nothing_anew(tiny_federation):
    coordinator = tiny_federation("flora", "tuner.r=4").coordinator
    before = flatten(coordinator.shared)
    coordinator.aggregate([], 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in flatten(coordinator.shared).items())


def test_what_a_codec_left_out_of_a_redrawn_part_is_forgotten(tiny_federation):
    words = ("uplink=topk", "uplink.fraction=0.1")
    kept = {}
    for method in ("fedex-lora", "flora"):
        federation = tiny_federation(method, *words)
        silo = federation.silos["alpha"]
        federation.client().rounds([silo], federation.coordinator.broadcast(1, "alpha"))
        kept[method] = {name.split("/")[1] for name in silo.state.memory if name.startswith("uplink/")}
    assert kept["fedex-lora"] - kept["flora"] == {"global"}


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        ("flora", ("aggregation=samples",), "aggregation=samples: method flora is not defined for it; allowed: flora"),
        ("fedex-lora", ("tuner=ia3",), "tuner=ia3: method fedex-lora is not defined for it; allowed: lora"),
        ("fedavg", ("tuner=lora", "aggregation=flora"), "aggregation=flora: the shared parts hold no delta of encoder"),
        (
            "fedavg",
            ("tuner=bottleneck", "aggregation=lora-fair"),
            "aggregation=lora-fair: the shared parts hold no pairs",
        ),
        ("fedex-lora", ("server.optimizer=adam",), "server.optimizer=adam, server.lr=1: aggregation=fedex-lora makes"),
        ("flexlora", ("server.lr=0.5",), "server.optimizer=none, server.lr=0.5: aggregation=flexlora makes"),
        ("fedsvd", ("server.optimizer=adam",), "server.optimizer=adam, server.lr=1: aggregation=fedsvd makes"),
        ("flexlora", ("uplink=int8",), "uplink.feedback: aggregation=flexlora issues other tensors .* allowed: false"),
        ("fedsvd", ("uplink=topk",), "uplink.feedback: aggregation=fedsvd issues other tensors"),
        ("fedalt", ("uplink=clip,laplace,fp16",), "uplink.feedback: aggregation=rest-of-world issues other tensors"),
        ("fedavg", ("aggregation.regularization=1",), "regularization belongs to aggregation=lora-fair"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tiny_federation, method, words, message):
    with pytest.raises(InputError, match=message) as refusal:
        tiny_federation(method, *words)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("sent", ["lora_A", "lora_B"])
@pytest.mark.parametrize(
    "aggregation", [ProductSVD(), CorrectedMeans(0.05), MixedFactors()], ids=lambda each: each.name
)
def test_a_factor_that_no_silo_sends_is_the_one_that_all_have(aggregation, sent):
    """RoLoRA's rounds: means of the other factor are exact, so that each aggregation gives the mean product."""
    draws = torch.Generator().manual_seed(3)
    ends = {"lora_A": (2, 5), "lora_B": (4, 2)}
    before = {f"global/m.{end}.weight": torch.randn(*shape, generator=draws).double() for end, shape in ends.items()}
    (name,) = (name for name in before if sent in name)
    tensors = [torch.randn(ends[sent], generator=draws).double() for _ in range(3)]
    updates = [Update(str(rows), {name: tensor}, rows) for rows, tensor in enumerate(tensors, 1)]
    after = before | aggregation.aggregate(iter(updates), before)
    mean = sum(rows * tensor for rows, tensor in enumerate(tensors, 1)) / 6
    a, b = ((before | {name: mean})[f"global/m.{end}.weight"] for end in ends)
    product = after["global/m.lora_B.weight"] @ after["global/m.lora_A.weight"]
    torch.testing.assert_close(product, b @ a, rtol=0, atol=1e-12)
