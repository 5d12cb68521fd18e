"""FedMCP's loss (Zhao et al. 2024, eqs. 3-8) under all its options, recomputed outside silotune.

Views by a hand-written BERT forward; heads, cross-entropy and CKA in NumPy.
"""

from __future__ import annotations

import pytest

from silotune.methods import METHODS
from silotune.runs.build.resolve import make_method
from tests.support import by_hand
from tests.support.fedmcp_rig import GAMMA, MU, OPTIONS, PARTS, forward_by_hand, pooled, set_up, words_of
from tests.support.numeric_rig import arrays, make_step, trained


def terms_by_hand(federation, silo, state, received, batch, options, pooling):
    """Compute L_a, L_b, L_c and the loss of eq. 8 from parts, rows and options alone."""
    rows, labels = batch.rows.tolist(), [int(silo.train[silo.name].labels[row]) for row in batch.rows.tolist()]
    g, p = state["global"], state["private"]
    full = forward_by_hand(federation, silo, rows, (0.5, g), (0.5, p))
    only_global = forward_by_hand(federation, silo, rows, (1.0, g))
    only_private = forward_by_hand(federation, silo, rows, (1.0, p))
    averaged = forward_by_hand(federation, silo, rows, (1.0, received["global"]))

    def loss_of(states, head):
        x = pooled(states, pooling).numpy()
        return by_hand.cross_entropy(by_hand.mlp_head(arrays(state[head]), silo.name, x), labels)

    loss_a, loss_b = loss_of(full, "head_full"), loss_of(only_global, "head_global")
    alike = by_hand.cosine if options.get("similarity") == "cosine" else by_hand.cka
    how = options.get("representation", "mean")
    other = full if options.get("private_view") == "full" else only_private
    x, y, z = (pooled(states, how).numpy() for states in (only_global, other, averaged))
    similarities = alike(x, y), alike(x, z)
    gamma, mu = options.get("gamma", GAMMA), options.get("mu", MU)
    loss_c = similarities[0] - similarities[1]
    return loss_a, loss_b, similarities, (1 - gamma) * loss_a + gamma * loss_b + mu * loss_c


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_its_terms_by_hand(name, tiny_federation):
    task, pooling = (("alpha", "first"), ("gamma", "mean"))[list(OPTIONS).index(name) % 2]
    options = OPTIONS[name]
    words = [*words_of(options), f"head.pooling={pooling}"]
    federation, silo, state, received, batch = set_up(tiny_federation, task, *words)
    (phase,) = federation.context.phases
    step = make_step(federation.context, phase, batch, state, received)
    loss = phase.loss(step)
    loss_a, loss_b, similarities, total = terms_by_hand(federation, silo, state, received, batch, options, pooling)
    loss_c = similarities[0] - similarities[1]
    assert float(loss) == pytest.approx(total, abs=1e-10)
    expected = {"full": loss_a}
    if options.get("gamma", GAMMA) > 0:
        expected["backbone"] = loss_b
    if options.get("mu", MU) > 0:
        expected["contrastive"] = loss_c
        expected["similarity_private"], expected["similarity_received"] = similarities
    assert {name: float(term) for name, term in step.terms.items()} == pytest.approx(expected, abs=1e-10)
    assert abs(loss_c) > 1e-3  # the parts differ enough for the comparison to mean something


@pytest.mark.parametrize(
    ("name", "views"),
    [
        ("paper", {"full", "global", "private", "received"}),
        ("no contrastive loss", {"full", "global"}),
        ("neither", {"full"}),
        ("private view full", {"full", "global", "received"}),
        ("no backbone loss", {"full", "global", "private", "received"}),
    ],
)
def test_no_unused_view_is_computed(name, views, tiny_config):
    (phase,) = make_method(tiny_config("fedmcp", *words_of(OPTIONS[name]))).phases()
    assert phase.views.keys() == views
    assert sorted(phase.trains) == sorted(PARTS)


def test_defaults_are_the_papers():
    assert METHODS["fedmcp"].Options().model_dump() == {
        "gamma": 0.5,
        "mu": 0.05,
        "similarity": "cka",
        "representation": "mean",
        "private_view": "alone",
        "head_rounds": 0,
        "head_lr": None,
    }


@pytest.mark.parametrize("rows", [3, 4])
def test_a_batch_too_small_for_cka_learns_from_labels_alone(rows, tiny_federation):
    federation, _, state, received, batch = set_up(tiny_federation, "gamma", *words_of({}), rows=rows)
    (phase,) = federation.context.phases
    leaves = trained(state, phase)
    step = make_step(federation.context, phase, batch, state, received)
    loss = phase.loss(step)
    loss.backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves.values())
    assert (float(step.terms["contrastive"]) == 0) is (rows < 4)
