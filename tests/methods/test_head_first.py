"""Rounds of heads alone (`method.head_rounds`) and no adapters at all (`method.adapters=0`), over all methods."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.methods.head_first import HEAD_FIRST, heads_alone
from silotune.methods.parts import Scope
from silotune.models.heads.classifier import LinearHead
from tests.support.method_cases import of_kinds, read_message, tapped

LABELED = [name for name in METHODS if name not in ("fedfame", "ifca")]


@pytest.mark.parametrize("case", of_kinds(LABELED, ("fedmcp", "scaffold", "rolora", "fdlora")))
def test_heads_alone_change_and_leave_in_the_first_rounds_and_the_methods_own_rounds_follow(federate, case, tmp_path):
    with tapped() as wire:
        run = federate.run(case, tmp_path / "run", "method.head_rounds=1", "method.head_lr=0.1", "rounds=2")
    context = run.federation.context
    heads = {*heads_alone(context.parts)}
    first = [phase for phase in context.phases if phase.runs_in(1)]
    assert [phase.name for phase in first if phase.trains] == [HEAD_FIRST]
    second = [phase.name for phase in context.phases if phase.runs_in(2)]
    own = context.method.phases()
    assert second == [phase.name for phase in own if phase.runs_in(1)], "the method's rounds are counted from their own"
    for (number, silo), result in wire.results.items():
        if number == 1:
            untrained = replace(run.federation.silos[silo], state=None)
            before = context.model_state(untrained, context.initial.shared([untrained]))
            for part in heads:
                assert any(not torch.equal(new, before[part][name]) for name, new in result.state[part].items())
    for number, _, message in wire.up:
        sent = {name.split("/")[0] for name in read_message(message)[0]}
        shared = {name for name in sent if context.parts[name].scope is Scope.SHARED}
        assert sent == shared
        assert number > 1 or sent <= heads


@pytest.mark.parametrize("case", ["fedavg, shared head", "fedprox", "scaffold", "feddyn", "moon", "fedrep"])
def test_without_adapters_the_head_reads_the_untouched_backbone(federate, case, tmp_path):
    run = federate.run(case, tmp_path / "run", "method.adapters=0", "rounds=1")
    assert run.federation.context.prediction.mix == {}
    assert run.summary["adapter_parameters"] == 0 < run.summary["head_parameters"]


@pytest.mark.parametrize(
    ("case", "words", "culprit"),
    [
        ("fedfame", ("method.head_rounds=1",), "rows have no labels"),
        ("fedavg", ("method.head_rounds=-1",), "head_rounds"),
        ("fedavg", ("method.head_rounds=9", "rounds=2"), r"9 rounds of heads in a run of 2; allowed: 0 to 2"),
        ("fedavg", ("method.adapters=3",), "adapters"),
        ("fedavg", ("train.momentum=0.9",), "momentum"),
        ("scaffold", ("server.average=0.5",), "server.average"),
    ],
)
def test_what_has_no_such_rounds_is_refused_by_name(federate, case, words, culprit, tmp_path):
    with pytest.raises(InputError, match=culprit):
        federate.run(case, tmp_path / "run", *words)


def test_a_head_of_normalized_vectors_divides_by_their_length():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(LinearHead("mean", 3.0)._scaled(x), 3 * x / x.square().sum(1, keepdim=True).sqrt())
