"""A chain that promises nothing, or cannot be, is refused in one line that names the key."""

from __future__ import annotations

import pytest

from silotune.config import dump
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config

WORDS: dict[str, tuple[list[str], list[str]]] = {
    "unknown": (["uplink=clip,int9"], ["uplink.name", "'int9'", "laplace", "int4"]),
    "twice": (["uplink=clip,clip"], ["uplink.name", "'clip' appears twice"]),
    "noise first": (["uplink=laplace,clip"], ["uplink.name", "the order is clip", "laplace,clip"]),
    "codec first": (["uplink=int8,clip"], ["uplink.name", "the order is clip"]),
    "codec before noise": (["uplink=clip,int8,laplace"], ["uplink.name", "the order is clip"]),
    "two codecs": (["uplink=fp16,int8"], ["uplink.name", "one of fp16, int8, int4"]),
    "two noises": (["uplink=clip,laplace,gaussian"], ["uplink.name", "laplace or gaussian"]),
    "noise without clip": (["uplink=laplace"], ["uplink", "without clip before it", "add clip, or give scale"]),
    "noise without clip, coded": (["uplink=gaussian,int8"], ["without clip before it"]),
    "scale beside clip": (["uplink=clip,laplace", "uplink.scale=1"], ["scale", "follows from clip and epsilon"]),
    "epsilon without clip": (["uplink=laplace", "uplink.scale=1", "uplink.epsilon=1"], ["epsilon", "add clip"]),
    "budget without clip": (["uplink=laplace", "uplink.scale=1", "privacy.epsilon=9"], ["nothing adds noise"]),
    "clip of zero": (["uplink=clip", "uplink.clip=0"], ["uplink.clip", "greater than 0"]),
    "clip": (["uplink=int8", "uplink.clip=1"], ["clip belongs to uplink=clip", "uplink=int8", "leave uplink.clip out"]),
    "epsilon": (["uplink.epsilon=1"], ["epsilon belongs to uplink=laplace or uplink=gaussian", "uplink=none"]),
    "epsilon of clip": (["uplink=clip", "uplink.epsilon=1"], ["epsilon belongs to uplink=laplace or uplink=gaussian"]),
    "delta of laplace": (["uplink=clip,laplace", "uplink.delta=1e-5"], ["delta belongs to uplink=gaussian"]),
    "delta of one": (["uplink=clip,gaussian", "uplink.delta=1"], ["uplink.delta", "less than 1"]),
    "norm of laplace": (["uplink=clip,laplace", "uplink.norm=l2"], ["laplace noise", "allowed: l1"]),
    "norm of gaussian": (["uplink=clip,gaussian", "uplink.norm=l1"], ["gaussian noise", "allowed: l2"]),
    "norm unknown": (["uplink=clip", "uplink.norm=l3"], ["uplink.norm", "'l1'", "'l2'"]),
    "rounding": (["uplink=fp16", "uplink.rounding=stochastic"], ["rounding belongs to uplink=int8 or uplink=int4"]),
    "feedback": (
        ["uplink=clip", "uplink.feedback=true"],
        ["feedback belongs to uplink=fp16 or uplink=int8 or uplink=int4"],
    ),
    "fraction above one": (["uplink=topk", "uplink.fraction=2"], ["uplink.fraction: must be less than or equal to 1"]),
    "fraction of int8": (["uplink=int8", "uplink.fraction=0.1"], ["fraction belongs to uplink=topk or uplink=randomk"]),
    "unbiased": (["uplink=topk", "uplink.unbiased=true"], ["unbiased belongs to uplink=randomk, not to uplink=topk"]),
    "kept error": (["uplink=randomk", "uplink.unbiased=true", "uplink.feedback=true"], ["feedback: what an unbiased"]),
    "budget of nothing": (["privacy.epsilon=5"], ["privacy.epsilon", "nothing adds noise", "clip,laplace"]),
    "secret of nothing": (["uplink=int8", "privacy.secret=key"], ["privacy.secret", "nothing adds noise"]),
    "both noises": (
        ["uplink=clip,laplace", "aggregation=uniform", "aggregation.clip=1", "aggregation.noise_multiplier=1"],
        ["aggregation.noise_multiplier", "silos add noise already"],
    ),
    "central without clip": (
        ["aggregation=uniform", "aggregation.noise_multiplier=1"],
        ["aggregation", "noise_multiplier", "give aggregation.clip"],
    ),
    "central weighted": (
        ["aggregation=samples", "aggregation.clip=1", "aggregation.noise_multiplier=1"],
        ["noise_multiplier", "needs aggregation=uniform, not samples"],
    ),
    "central median": (
        ["aggregation=median", "aggregation.clip=1", "aggregation.noise_multiplier=1"],
        ["needs aggregation=uniform, not median"],
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_it_is_refused_in_one_line(case):
    words, tells = WORDS[case]
    with pytest.raises(InputError) as caught:
        read_config("demo", words)
    assert len(str(caught.value).splitlines()) == 1
    for tell in tells:
        assert tell in str(caught.value)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["uplink=clip,laplace,int8"], ["clip", "laplace", "int8"]),
        (["uplink=[clip, gaussian, fp16]"], ["clip", "gaussian", "fp16"]),
        (["uplink=int4"], ["int4"]),
        (["uplink=none"], []),
        (["uplink="], []),
        ([], []),
    ],
    ids=str,
)
def test_a_chain_is_read_and_its_file_gives_it_again(words, names, tmp_path):
    config = read_config("demo", words)
    assert config.uplink.name == names
    (tmp_path / "config.yaml").write_text(dump(config))
    assert read_config(str(tmp_path / "config.yaml")).uplink == config.uplink


def test_options_that_are_not_set_are_filled_in_and_those_that_do_not_apply_are_not():
    found = read_config("demo", ["uplink=clip,gaussian,int8"]).uplink
    assert (found.clip, found.norm, found.epsilon, found.delta) == (1.0, "l2", 8.0, 1e-5)
    assert (found.rounding, found.feedback) == ("nearest", True)
    bare = read_config("demo", []).uplink
    assert bare == read_config("demo", ["uplink=none"]).uplink
    assert {bare.clip, bare.norm, bare.epsilon, bare.delta, bare.rounding, bare.feedback} == {None}
