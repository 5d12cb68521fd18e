"""What a coordinator that lies asks for, and the refusal by name at the silo; nothing leaves then."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from silotune.communication.masks.agreement import MasksRefused, sign
from silotune.communication.masks.shared_noise import SharedNoise
from silotune.distributed.silo import mask_ledger
from tests.support.masks import ByHand, unsigned

NOISE = SharedNoise(1.5, 1.0, 0.25, least=3, colluders=1).text


@pytest.fixture(params=["", NOISE], ids=["", "shares"])
def silos(tmp_path, request):
    return ByHand(tmp_path, noise=request.param)


def refused(silos, words, stage, shown):
    """Check that s00 refuses in a stage what it is shown."""
    with pytest.raises(MasksRefused, match=words):
        silos.ask("s00", stage, shown)


def test_swapped_keys(silos):
    silos.until("share")
    offers = silos.offers
    swapped = offers | {"s01": offers["s02"]}
    own = offers | {"s01": offers["s01"][:64] + offers["s00"][64:128] + offers["s01"][128:]}
    for shown in (swapped, own):
        refused(silos, "keys of silo 's01' are not signed by it", "share", shown)
    for shown in (offers | {"s00": offers["s01"]}, {name: offers[name] for name in ("s01", "s02", "s03")}):
        refused(silos, "not its own", "share", shown)


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 2}, {"run": "1" * 16}, {"attempt": "b"}, {"configuration": "other"}, {"first": 1, "rounds": 2},
        {"noise": "other"}, {"members": ["s00", "s01", "s02"]},
    ],
    ids=str,
)  # fmt: skip
def test_keys_of_another_round_run_broadcast_or_list_are_refused(silos, changes):
    """A replayed round, two configurations, two member lists: no peer's keys fit."""
    silos.until("share")
    replayed = silos.offers
    silos.made("s00", replace(silos.agreement, **changes))
    own = silos.ask("s00", "offer", {})
    shown = {name: offer for name, offer in replayed.items() if name in changes.get("members", silos.names)}
    refused(silos, "keys of silo 's01' are not signed by it for this run, round, attempt", "share", shown | own)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": 2}, "another round: 2, here it is 1"),
        ({"run": "1" * 16}, "another run: 1111111111111111, here it is 0000000000000000"),
        ({"configuration": "x" * 64}, "another configuration: xxxxxxxxxxxxxxxxxxxx, here it is config"),
        ({"broadcast": "other"}, "another broadcast"),
        ({"base": "1 ab"}, "another base: 1 ab, here it is first"),
        ({"pinned_list": "0" * 64}, "another pinned list"),
        ({"numbers": 5}, "another numbers: 5"),
        ({"threshold": 2}, "another threshold: 2, here it is 3"),
        ({"noise": "less"}, "another noise: less, here it is"),
    ],
    ids=str,
)
def test_a_proposal_that_differs_from_what_the_silo_knows_is_refused(silos, changes, words):
    with pytest.raises(MasksRefused, match=words):
        silos.agreement.require_same(asdict(replace(silos.agreement, **changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"members": ["ghost", "s00", "s01", "s02"]}, "silo 'ghost' is not in this silo's pinned list"),
        ({"members": ["s00", "s01"]}, "2 members; this silo takes part in sums of at least 3 of its 4"),
        ({"members": ["s01", "s02", "s03"]}, "without this silo"),
    ],
    ids=str,
)
def test_proposals_that_hide_too_little_are_refused(silos, changes, words):
    with pytest.raises(MasksRefused, match=words):
        silos.begin("s00", **changes)


def test_three_members_picked_out_of_forty(tmp_path):
    silos = ByHand(tmp_path, 40)
    with pytest.raises(MasksRefused, match="3 members; this silo takes part in sums of at least 27 of its 40"):
        silos.begin("s00", members=["s00", "s01", "s02"])
    silos.until("share")
    few = {name: silos.offers[name] for name in ("s00", "s01", "s02")}
    refused(silos, "3 members with keys", "share", few)
    ghost = silos.offers | {"ghost": silos.offers["s01"]}
    refused(silos, "keys of silo 'ghost', which is no member", "share", ghost)


def test_shares_that_were_changed_or_meant_for_another(silos):
    silos.until("mask")
    sealed = silos.sealed["s00"]
    for wrong in (silos.sealed["s02"]["s01"], sealed["s01"][:-2] + "00", sealed["s02"]):
        refused(silos, "shares of silo 's01' were not sealed by it", "mask", sealed | {"s01": wrong})
    refused(silos, "2 members with shares", "mask", {"s01": sealed["s01"]})
    for other in ("ghost", "s00"):
        refused(silos, f"shares of silo '{other}'", "mask", sealed | {other: "00"})


def test_a_stage_is_gone_through_once(silos):
    silos.until("consent")
    less = {name: silos.offers[name] for name in ("s00", "s01", "s02")}
    refused(silos, "again in the same attempt with other keys", "share", less)
    fewer = {name: silos.sealed["s00"][name] for name in ("s01", "s02")}
    refused(silos, "again in the same attempt with shares of other members", "mask", fewer)
    silos.silos["s00"].summand = silos.summands["s01"]
    refused(silos, "again in the same attempt with another summand", "mask", silos.sealed["s00"])
    silos.ask("s00", "consent", unsigned(silos.names))
    refused(silos, "again in the same attempt with another list", "consent", unsigned(silos.names[:3]))


@pytest.mark.parametrize("changes", [{"broadcast": "other"}, {"base": "other"}], ids=str)
def test_a_mask_key_is_of_one_sum(silos, changes):
    """Keys are signed before a broadcast is known; with masks drawn for two of them no sum comes out, nor a consent."""
    silos.until("consent")
    honest = silos.silos["s00"]
    other = replace(silos.agreement, **changes)
    silos.made("s00", other, honest.kept)
    for stage, shown in (("mask", silos.sealed["s00"]), ("consent", unsigned(silos.names))):
        refused(silos, "again in the same attempt with another agreement; a mask key is of one sum", stage, shown)
    honest.kept["rounds"].clear()  # as if it had answered for the other alone
    silos.made("s00", other, honest.kept)
    silos.ask("s00", "mask", silos.sealed["s00"])
    signed = silos.ask("s00", "consent", unsigned(silos.names))
    others = {name: silos.ask(name, "consent", unsigned(silos.names))[name] for name in silos.names[1:]}
    with pytest.raises(MasksRefused, match="silo 's00' has not signed this list of survivors"):
        silos.ask("s01", "unmask", others | signed)


@pytest.mark.parametrize(
    ("survivors", "words"),
    [
        (["s00", "s01"], "2 survivors"),
        (["s01", "s02", "s03"], "without this silo"),
        (["s00", "s01", "ghost"], "must be members with shares"),
    ],
)
def test_survivors_that_are_refused(silos, survivors, words):
    silos.until("consent")
    refused(silos, words, "consent", unsigned(survivors))


def test_split_survivor_lists(silos):
    """Some sign one list, others another: no silo unmasks, as fewer than t have signed its own."""
    silos.until("consent")
    lists = {"s00": ["s00", "s01", "s02"], "s01": ["s00", "s01", "s02"], "s02": silos.names, "s03": silos.names}
    signed = {name: silos.ask(name, "consent", unsigned(listed))[name] for name, listed in lists.items()}
    shown = {name: signed[name] for name in lists["s00"]}
    refused(silos, "silo 's02' has not signed this list of survivors", "unmask", shown)
    refused(silos, "2 silos have signed the survivors; t = 3", "unmask", shown | {"s02": ""})


def test_both_shares_of_one_peer(silos):
    """With s03 among the survivors its seed is told; without it, its key: nobody is told both."""
    silos.until("unmask")
    kept = silos.silos["s00"].kept
    seeds = {name: of_seed for name, [(of_seed, _)] in kept["shares"].items()}
    told = silos.ask("s00", "unmask", silos.signatures)
    assert told == seeds, "of each the share of the seed alone"
    assert kept["seal"] == "", "all else is erased"
    assert [*kept["seeds"], *(pair for (pair,) in kept["shares"].values())] == [["", ""]] * 5
    less = silos.names[:3]
    text = silos.agreement.text("survivors", less)
    forged = {name: sign(silos.identities[name], text).hex() for name in less}  # even if peers lie, too
    refused(silos, "of a peer it tells its share of the seed or that of the key, never both", "unmask", forged)
    for stage, shown in (("offer", {}), ("consent", unsigned(less)), ("mask", silos.sealed["s00"])):
        refused(silos, f"{stage}: asked after the last stage of the attempt", stage, shown)


def test_of_a_silo_that_dropped_the_share_of_its_key_alone(silos):
    silos.until("consent")
    less = silos.names[:3]
    signed = {name: silos.ask(name, "consent", unsigned(less))[name] for name in less}
    shares = silos.silos["s00"].kept["shares"].items()
    expected = {name: of_seed if name in less else of_key for name, [(of_seed, of_key)] in shares}
    assert silos.ask("s00", "unmask", signed) == expected


@pytest.mark.parametrize("changes", [{"attempt": "b"}, {"round": 2, "attempt": "c"}, {"run": "1" * 16}], ids=str)
def test_n_and_then_one_less_for_the_same_tensors(silos, changes):
    """Under another attempt, another round's number, or in another run."""
    silos.until("unmask")
    silos.until("consent", **changes)
    less = unsigned(["s00", "s01", "s02"])
    refused(silos, "same broadcast tensors this silo has signed other survivors, s00, s01", "consent", less)
    assert silos.ask("s01", "consent", unsigned(silos.names))


def test_a_silo_that_dropped_stays_out_of_the_run(silos):
    silos.until("consent")
    silos.ask("s00", "consent", unsigned(["s00", "s01", "s02"]))
    later = {"round": 2, "broadcast": "later"}
    silos.begin("s00", members=["s00", "s01", "s02"], **later)
    again = {"run": "1" * 16, "attempt": "b"}  # of the same tensors, as with the same seed
    for changes in (later, again, again | later):
        with pytest.raises(MasksRefused, match="silo 's03' dropped out of this run, or of a sum of the same tensors"):
            silos.begin("s00", **changes)
    silos.begin("s00", members=["s00", "s01", "s02"], **again)


BEGUN = "a sum of round 1 was begun here; the round is not trained anew"
NOT_LAST = r"asked to start from .*; the last sum that was begun here is"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": "1 ab"}, BEGUN),
        ({"attempt": "b", "base": "1 ab"}, BEGUN),
        ({"broadcast": "other"}, BEGUN),
        ({"configuration": "other"}, BEGUN),
        ({"round": 2, "base": "first"}, NOT_LAST),
        ({"round": 2, "base": "1 ab"}, NOT_LAST),
        ({"run": "1" * 16, "base": "1 ab"}, NOT_LAST),
        ({"run": "1" * 16, "round": 2, "base": "1 ab"}, NOT_LAST),
    ],
    ids=str,
)
def test_a_sum_starts_from_the_last_and_a_round_has_one(silos, changes, words):
    """The first participation once more, a state of another history, or a second broadcast for the round."""
    silos.until("consent")
    with pytest.raises(MasksRefused, match=words):
        silos.begin("s00", **changes)
    silos.begin("s00", attempt="c")
    silos.begin("s00", round=2, broadcast="later")


@pytest.mark.parametrize("changes", [{}, {"attempt": "b"}], ids=str)
def test_a_round_has_one_summand(silos, changes):
    silos.until("mask")
    silos.summands["s00"] = silos.summands["s01"]
    with pytest.raises(MasksRefused, match="another summand of round 1 than that with which its sum was begun"):
        silos.begin("s00", **changes)


@pytest.mark.parametrize("stage", ["share", "mask", "consent", "unmask"])
def test_stages_that_are_left_out_or_malformed(silos, stage):
    silos.until("share")
    asked = {"mask": {}, "consent": unsigned(silos.names), "unmask": {}}
    if stage != "share":
        refused(silos, f"{stage}: asked before the stages that come first", stage, asked[stage])
    silos.until(stage)
    names = silos.names
    for malformed in ({}, 3, names, dict.fromkeys(names, 3), dict.fromkeys(names, "no digits"), {"s00": {}}):
        if stage == "consent" and isinstance(malformed, dict) and len(malformed) == 4:
            continue  # its texts say nothing
        with pytest.raises(MasksRefused):
            silos.ask("s00", stage, malformed)
    refused(silos, "no such stage", "tell me all", {})


@pytest.mark.parametrize("stage", ["share", "mask", "consent", "unmask"])
def test_after_a_crash_a_silo_goes_on_from_what_it_kept(silos, stage):
    """And says the same again, so that a repeated request tells nothing more."""
    silos.until(stage)
    asked = {
        "share": silos.offers,
        "mask": getattr(silos, "sealed", {}).get("s00"),
        "consent": unsigned(silos.names),
        "unmask": getattr(silos, "signatures", {}),
    }[stage]
    silo, records = silos.silos["s00"], silos.records["s00"]
    first = silo.answer(stage, asked)
    mask_ledger.keep(records, silo.agreement, silo.kept)
    again = silos.made("s00", silo.agreement, mask_ledger.kept(records, silo.agreement))
    assert again.answer(stage, asked) == first
