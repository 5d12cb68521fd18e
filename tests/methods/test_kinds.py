"""The cases of `make test` span what methods declare: an attribute that none of them uses would run untested there."""

from __future__ import annotations

import dataclasses

import pytest

from silotune.methods import METHODS, Method, Part, Phase, Scope
from silotune.methods.base import PredictionMix
from silotune.methods.phase import even, odd
from silotune.models.forward.mixing import ANCHORS, parse_name
from tests.support.method_cases import CASES, KINDS, KINDS_OF_METHODS

METHODS_OF_KINDS = [CASES[kind].plain for kind in KINDS]
DECLARED = {
    Phase: [phase for method in METHODS_OF_KINDS for phase in (*method.phases(), *method.server_phases())],
    Part: [part for method in METHODS_OF_KINDS for part in method.parts().values()],
    PredictionMix: [method.prediction() for method in METHODS_OF_KINDS],
}
OF_NO_METHOD = {"alike", "lr"}
"""For methods of others (`tests/training/test_initial_parts.py`), and for `method.head_rounds`."""
FIELDS = [(kind, field) for kind in DECLARED for field in dataclasses.fields(kind) if field.name not in OF_NO_METHOD]


def default(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda value: getattr(value, "__name__", None) or value.name)
def test_every_field_is_declared_by_a_kind(kind, field):
    assert any(getattr(declared, field.name) != default(field) for declared in DECLARED[kind])


@pytest.mark.parametrize("member", [name for name in vars(Method) if not name.startswith("_")])
def test_every_member_that_methods_replace_is_replaced_by_a_kind(member):
    replaced = [name for name in METHODS if getattr(METHODS[name], member) is not getattr(Method, member)]
    assert not replaced or {*replaced} & {*KINDS_OF_METHODS}


def test_every_scope_anchor_and_weight_is_in_a_kind():
    mixes = [mix for phase in DECLARED[Phase] for mix in phase.views.values()]
    assert {part.scope for part in DECLARED[Part]} == {*Scope}
    assert {parse_name(name)[0] for mix in mixes for name in mix} == {"", *ANCHORS}
    assert {phase.when for phase in DECLARED[Phase]} == {"round", "end"}
    assert {odd, even} <= {phase.rounds for phase in DECLARED[Phase]}
    assert any(callable(weight) for mix in mixes for weight in mix.values())
    assert any("+" in name for mix in mixes for name in mix)
    assert {phase.by_row for phase in DECLARED[Phase] if phase.trains} == {True, False}
    assert {phase.renews_mixes for phase in DECLARED[Phase]} == {True, False}


def test_silos_of_a_kind_have_ranks_of_their_own():
    assert any(word.startswith("tuner.ranks") for kind in KINDS for word in CASES[kind].overrides)
