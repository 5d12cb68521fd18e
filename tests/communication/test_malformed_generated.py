"""Malformed messages, generated, of parts and of changes: each is refused with a reason, nothing else is raised."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silotune.aggregation import by_samples
from silotune.communication.messages import MessageRefused
from silotune.communication.uplink import BUILT_IN_CODECS
from silotune.training.coordinator import Coordinator
from tests.support.small_messages import ROUND, SHARED, SILO, good_fields, good_tensors, packed
from tests.support.uplink_changes import pipeline

CHAINS = ((), ("clip",), *((name,) for name in BUILT_IN_CODECS), ("clip", "laplace", "int8"))
"""Steps of the uplink; without any, messages hold parts."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.bool)

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
silos = st.one_of(words, st.sampled_from(["Alpha", "alpha ", "", "alpha\x00", None])).filter(lambda silo: silo != SILO)
rounds = st.one_of(st.integers(-(2**70), ROUND - 1), st.integers(ROUND + 1, 2**70), st.sampled_from([3.0, "3", True]))
rows = st.one_of(
    st.integers(-(2**70), 0), st.integers(2**53 + 1, 10**400), st.sampled_from([40.0, "40", True, None, [40], math.nan])
)


@st.composite
def malformed(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[bytes, str]:
    """A message with one thing wrong, and a word of the reason."""
    tensors, fields = good_tensors(), good_fields()
    if names:
        tensors, _ = pipeline(*names).send(tensors, {}, SILO, ROUND)
        fields["uplink"] = ",".join(names)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]

    def extra() -> None:
        other = draw(words.filter(lambda word: word != "__metadata__"))
        tensors[draw(st.sampled_from(["", "private/", "global/"])) + other] = torch.ones(2)

    def renamed() -> None:
        others = [name + " ", name + ":scales", name.upper(), name.replace("/", "."), f"private/{name}", name[:-1]]
        tensors[draw(st.sampled_from(others))] = tensors.pop(name)

    def shape() -> None:
        sizes = st.lists(st.integers(0, 6), max_size=4).filter(lambda sizes: tuple(sizes) != tuple(tensor.shape))
        tensors[name] = torch.zeros(draw(sizes), dtype=tensor.dtype)

    def dtype() -> None:
        tensors[name] = tensor.to(draw(st.sampled_from([other for other in DTYPES if other != tensor.dtype])))

    def not_finite() -> None:
        floats = [key for key, value in sorted(tensors.items()) if value.is_floating_point()]
        found = tensors[draw(st.sampled_from(floats))].view(-1)
        found[draw(st.integers(0, len(found) - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))

    def field() -> None:
        if draw(st.booleans()):
            del fields[draw(st.sampled_from(sorted(fields)))]
        else:
            fields[draw(words.filter(lambda word: word not in fields))] = draw(st.one_of(st.integers(), words))

    harms: dict[Callable[[], object], str] = {
        extra: "unexpected",
        lambda: tensors.pop(name): "missing",
        renamed: "missing",
        shape: "shape",
        dtype: "dtype",
        not_finite: "NaN or infinity",
        field: "fields must be",
        lambda: fields.update(silo=draw(silos)): "silo|in the name of",
        lambda: fields.update(round=draw(rounds)): "round",
        lambda: fields.update(rows=draw(rows)): "rows",
        lambda: fields.update(uplink=draw(st.sampled_from(["", "int8,clip", "none", None]))): "uplink|fields must be",
    }
    if not any(value.is_floating_point() for value in tensors.values()):
        del harms[not_finite]
    harm = draw(st.sampled_from([*harms]))
    harm()
    message = packed(tensors, fields)
    if draw(st.integers(0, 9)) == 0:
        return message[: draw(st.integers(0, len(message) - 1))], ""
    return message, harms[harm]


@pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("names", CHAINS, ids=lambda names: ",".join(names) or "parts")
def test_malformed_messages_are_refused(names: tuple[str, ...], examples: int) -> None:
    receiver = Coordinator(SHARED, by_samples, uplink=pipeline(*names))

    @given(malformed(names))
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: tuple[bytes, str]) -> None:
        message, reason = case
        with pytest.raises(MessageRefused) as caught:
            receiver.receive(ROUND, SILO, message)
        assert len(str(caught.value).splitlines()) == 1
        assert any(part in str(caught.value) for part in reason.split("|"))

    check()


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_other_bytes_are_refused(message: bytes) -> None:
    with pytest.raises(MessageRefused):
        Coordinator(SHARED, by_samples).receive(ROUND, SILO, message)
