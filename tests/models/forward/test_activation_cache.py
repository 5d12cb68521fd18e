"""`cache=frozen-prefix`: the same round with what lies below the lowest adapter kept; bits, bounds and refusals."""

from __future__ import annotations

import pytest
import torch

from silotune.core.tensors import digest, flatten
from silotune.data.batching import make_batch
from silotune.errors import InputError
from silotune.models.forward.activation_cache import GROUP
from silotune.runs.build.builder import build
from tests.support.numeric_rig import doubled, random_parts
from tests.support.views import views_of_batch

CACHED = "cache=frozen-prefix"
UPPER = "tuner.sites=encoder.layer.1.attention.output.dense,encoder.layer.1.output.dense"


def one_round(federation, number=1):
    silo = federation.silos["gamma"]
    return federation.trainer.rounds([silo], federation.coordinator.shared, number)[0].state


def largest_difference(one, other):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def double_start(federation):
    """Parts in float64, so that nothing but the order of sums differs."""
    silo = federation.silos["gamma"]
    state = random_parts(federation, silo, spread=0.05)
    federation.coordinator.shared = {name: state[name] for name in federation.coordinator.shared}
    silo.state = None
    federation.context.state_of = lambda _: type("S", (), {"private": state, "memory": {}})()
    return federation


@pytest.mark.parametrize("method", ["fedmcp", "moon", "fedavg"])
@pytest.mark.parametrize("sites", ["houlsby", UPPER.removeprefix("tuner.sites=")])
def test_in_double_precision_a_round_is_the_same(method, sites, tiny_federation):
    words = (f"tuner.sites={sites}", "train.epochs=2", "train.batch_size=8")
    plain, cached = (double_start(doubled(tiny_federation(method, *words, *more))) for more in ((), (CACHED,)))
    expected, cached_state = one_round(plain), one_round(cached)
    assert largest_difference(expected, plain.coordinator.shared | plain.context.state_of(None).private) > 1e-4
    assert largest_difference(expected, cached_state) < 1e-9
    cache = cached.context.cache
    assert cache.misses == -(-len(cached.silos["gamma"].train["gamma"]) // GROUP)
    assert cache.hits > cache.misses


def test_to_the_bit_where_batches_are_the_groups(tiny_federation):
    """As many rows as a group holds, in one batch: the group's composition is the micro-batch's."""
    federation, plain = tiny_federation("fedavg", CACHED), tiny_federation("fedavg")
    rows = federation.silos["gamma"].train["gamma"]
    order = sorted(range(len(rows)), key=lambda row: (len(rows.ids[row]), row))
    batch = make_batch(rows, order[:GROUP], 0, 10**9)
    assert len(batch.micro) == 1
    state = federation.coordinator.shared | federation.context.state_of(federation.silos["gamma"]).private
    mixes = {"full": federation.context.resolve(federation.method.prediction().mix, state, {}, {})}
    with torch.no_grad():
        computed, found = (federation.context.program([mixes])(batch)["full"]["mean"] for _ in "12")
        expected = views_of_batch(plain.backbone, batch, mixes)["full"]["mean"]
    assert torch.equal(computed, expected)
    assert torch.equal(found, expected)


def test_what_is_kept_does_not_depend_on_history_or_room(tiny_federation):
    """Other rows before, and no room at all: the same bits, as a resumed run must have."""
    results = set()
    for room, before in ((512, False), (512, True), (0, False)):
        federation = tiny_federation("fedmcp", CACHED, "train.batch_size=8")
        cache = federation.context.cache
        if before:
            one_round(federation, number=7)
        if not room:
            cache._limit = 0
        results.add(digest(flatten(one_round(federation))))
        assert cache.size <= room * 2**20
    assert len(results) == 1


def test_frozen_modules_run_once_per_row(tiny_federation):
    """Adapters in the upper block alone: the lower one never runs again."""
    federation = tiny_federation("fedavg", CACHED, UPPER, "train.epochs=3", "train.batch_size=8")
    counts = {"encoder.layer.0.output.dense": 0, "encoder.layer.1.output.dense": 0}
    for name in counts:

        def count(module, args, output, name=name):
            counts[name] += len(output)

        federation.backbone.module(name).register_forward_hook(count)
    one_round(federation)
    rows = len(federation.silos["gamma"].train["gamma"])
    assert counts == {"encoder.layer.0.output.dense": rows, "encoder.layer.1.output.dense": 3 * rows}


@pytest.mark.parametrize("tuner", ["prompt", "prefix", "full"])
def test_refused_where_nothing_lies_below(tuner, tiny_config):
    with pytest.raises(InputError, match=rf"^cache=frozen-prefix: .*tuner={tuner} .*cache=none"):
        build(tiny_config("fedavg", f"tuner={tuner}", CACHED))
