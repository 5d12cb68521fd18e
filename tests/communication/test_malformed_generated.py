"""Malformed messages, generated: each is refused with the reason, and nothing else is ever raised."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.small_messages import GOOD, ROUND, SILO, good_fields, good_tensors, packed, refused

names = st.sampled_from(sorted(good_tensors()))
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
OTHER_DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)


@st.composite
def extra(draw: st.DrawFn) -> bytes:
    name = draw(words.filter(lambda word: word not in good_tensors() and word != "__metadata__"))
    return packed(
        good_tensors() | {draw(st.sampled_from(["", "private/", "global/"])) + name: torch.ones(2)}, good_fields()
    )


@st.composite
def missing(draw: st.DrawFn) -> bytes:
    dropped = draw(st.sets(names, min_size=1))
    return packed({name: tensor for name, tensor in good_tensors().items() if name not in dropped}, good_fields())


@st.composite
def renamed(draw: st.DrawFn) -> bytes:
    tensors, name = good_tensors(), draw(names)
    other = draw(st.sampled_from([name.upper(), name + " ", name.replace("/", "."), f"private/{name}", name[:-1]]))
    tensors[other] = tensors.pop(name)
    return packed(tensors, good_fields())


@st.composite
def reshaped(draw: st.DrawFn) -> bytes:
    tensors, name = good_tensors(), draw(names)
    old = tuple(tensors[name].shape)
    shape = draw(st.lists(st.integers(0, 6), max_size=4).map(tuple).filter(lambda shape: shape != old))
    tensors[name] = torch.zeros(shape)
    return packed(tensors, good_fields())


@st.composite
def of_other_dtype(draw: st.DrawFn) -> bytes:
    tensors = good_tensors()
    dtype = draw(st.sampled_from(OTHER_DTYPES))
    return packed(tensors | {name: tensors[name].to(dtype) for name in draw(st.sets(names, min_size=1))}, good_fields())


@st.composite
def not_finite(draw: st.DrawFn) -> bytes:
    tensors = good_tensors()
    flat = tensors[draw(names)].view(-1)
    flat[draw(st.integers(0, len(flat) - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return packed(tensors, good_fields())


def truncated() -> st.SearchStrategy[bytes]:
    return st.integers(0, len(GOOD) - 1).map(lambda length: GOOD[:length])


def of_other_silo() -> st.SearchStrategy[bytes]:
    silos = st.one_of(words, st.sampled_from(["Alpha", "alpha ", "", "alpha\x00"])).filter(lambda silo: silo != SILO)
    return silos.map(lambda silo: packed(good_tensors(), good_fields() | {"silo": silo}))


def of_other_round() -> st.SearchStrategy[bytes]:
    rounds = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([ROUND - 1, ROUND + 1, 3.0, "3", True, None]))
    other = rounds.filter(lambda number: type(number) is not int or number != ROUND)
    return other.map(lambda number: packed(good_tensors(), good_fields() | {"round": number}))


def of_bad_rows() -> st.SearchStrategy[bytes]:
    rows = st.one_of(
        st.integers(-(2**70), 0),
        st.integers(2**53 + 1, 10**400),
        st.sampled_from([40.0, "40", True, None, [40], math.nan, math.inf]),
    )
    return rows.map(lambda number: packed(good_tensors(), good_fields() | {"rows": number}))


@st.composite
def of_other_fields(draw: st.DrawFn) -> bytes:
    fields = good_fields()
    if draw(st.booleans()):
        del fields[draw(st.sampled_from(sorted(fields)))]
    else:
        fields[draw(words.filter(lambda word: word not in fields))] = draw(st.one_of(st.integers(), words))
    return packed(good_tensors(), fields)


KINDS = {
    "extra": extra(),
    "missing": missing(),
    "renamed": renamed(),
    "shape": reshaped(),
    "dtype": of_other_dtype(),
    "not finite": not_finite(),
    "truncated": truncated(),
    "silo": of_other_silo(),
    "round": of_other_round(),
    "rows": of_bad_rows(),
    "fields": of_other_fields(),
    "random bytes": st.binary(max_size=400),
}
TELLS = {
    "extra": "unexpected",
    "missing": "missing",
    "renamed": "missing",
    "shape": "shape",
    "dtype": "dtype",
    "not finite": "NaN or infinity",
    "silo": "in the name of",
    "rows": "rows",
    "fields": "fields must be",
}
calm = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@given(st.sampled_from(sorted(KINDS)).flatmap(lambda kind: KINDS[kind].map(lambda message: (kind, message))))
@settings(max_examples=60, **calm)
def test_malformed_messages_are_refused(kind_and_message):
    kind, message = kind_and_message
    assert TELLS.get(kind, "") in refused(message)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_malformed_message_is_refused(kind):
    @given(KINDS[kind])
    @settings(max_examples=10, **calm)
    def check(message: bytes) -> None:
        assert TELLS.get(kind, "") in refused(message)

    check()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_malformed_messages_of_every_kind_are_refused(kind):
    @given(KINDS[kind])
    @settings(max_examples=1000, **calm)
    def check(message: bytes) -> None:
        assert TELLS.get(kind, "") in refused(message)

    check()
