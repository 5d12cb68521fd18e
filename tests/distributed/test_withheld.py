"""Runs in which silos withhold an update: it costs their part in the training, and the run ends, also after a crash."""

from __future__ import annotations

from collections import Counter

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.flower.link import ConnectionLost
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo.limits import RequestLimits
from silotune.distributed.silo.state_store import StateStore
from silotune.lab.report.caveats import list_caveats
from silotune.lab.report.entries import read_entries
from silotune.runs.engines.history import History
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.storage.readers import read_summary
from silotune.runs.storage.run_folder import RunFolder
from tests.support.malicious import ALLOWED
from tests.support.method_cases import logged
from tests.support.processes import SAME
from tests.support.session_rig import DirectLink, answering, job, local_configs

WATCHED = {"preset": "lab", "effective_rows": 5}
SILOS = ["alpha", "beta", "gamma"]


@pytest.fixture
def withhold(monkeypatch):
    """`withhold(beta=2)`: from its round 2 on, one row alone is behind beta's updates; `others` are those unnamed."""

    def begin(**first):
        judged = RequestLimits.withhold

        def watched(limits, entry, *_):
            begins = first.get(limits.policy.silo, first.get("others", 99))
            judged(limits, entry, 1.0 if entry.round >= begins else None)

        monkeypatch.setattr(RequestLimits, "withhold", watched)

    return begin


def federation(config, folder, out, link=DirectLink, **changes):
    """Run a federation whose silos watch their rows; returns the summary and the link."""
    configs = local_configs(config, folder, policy=WATCHED | changes)
    carried = link(answering(configs))
    coordinate(job(config, out, configs, local=False), carried)
    return read_summary(out), carried


def asked(link, silo):
    """Kind and round of the requests to a silo, in their order."""
    frames = [decode(data) for node, data in link.sent if node == SILOS.index(silo)]
    return [(frame.kind, frame.fields["round"]) for frame in frames if frame.kind != "hello"]


def test_a_silo_that_withholds_trains_no_more_and_goes_on_to_score(tiny_config, withhold, tmp_path):
    withhold(beta=2)
    out = tmp_path / "run"
    summary, link = federation(tiny_config("fedavg", "train.steps=2", "rounds=4"), tmp_path, out)
    assert [(event["round"], event["silo"]) for event in logged(out, "withheld")] == [(2, "beta")]
    assert [event["silos"] for event in logged(out, "round")] == [SILOS, *[["alpha", "gamma"]] * 3]
    assert all(None not in event["validation"].values() for event in logged(out, "round"))
    kinds = [kind for kind, _ in asked(link, "beta")]
    assert kinds == ["round", "round", *["score"] * (len(kinds) - 2)]
    assert not logged(out, "quorum")
    assert not logged(out, "silo-failed")
    assert summary["silos"]["beta"]["test"] is not None
    assert "stopped_after" not in summary
    (caveat,) = [text for text in list_caveats(read_entries([out])) if "withheld" in text]
    assert "beta withheld its update of round 2 and trained no more" in caveat


@pytest.mark.parametrize("method", ["fedavg", "fedfame", "fedlora"])
def test_where_all_withhold_a_run_ends_as_its_method_does(method, tiny_config, withhold, tmp_path):
    """A run ends at once, unless the coordinator's own rows or final phases go on."""
    withhold(alpha=2, beta=1, others=3)
    out = tmp_path / "run"
    config = tiny_config(method, "train.steps=1", "rounds=5")
    summary, _ = federation(config, tmp_path, out)
    assert len({event["silo"] for event in logged(out, "withheld")}) == 3
    stops = method == "fedavg"
    assert summary.get("stopped_after") == (3 if stops else None)
    assert [event["round"] for event in logged(out, "round")] == list(range(1, 4 if stops else 6))
    assert len(logged(out, "stopped")) == stops
    assert all(entry["test"] is not None for entry in summary["silos"].values())
    before = {key: summary[key] for key in SAME}
    again, _ = federation(config, tmp_path, out)  # a finished run that is started again
    assert {key: again[key] for key in SAME} == before


@pytest.mark.parametrize("moments", [[9], pytest.param(range(4, 30), marks=pytest.mark.long)])
def test_a_run_that_is_cut_off_at_any_message_ends_with_the_same_bits(moments, tiny_config, withhold, tmp_path):
    withhold(beta=2, gamma=3)
    config = tiny_config("fedmcp", "train.steps=1", "rounds=4")
    expected, whole = federation(config, tmp_path / "whole", tmp_path / "whole" / "run")
    for when in (moment for moment in moments if moment < len(whole.sent)):
        out = tmp_path / str(when) / "run"

        class Broken(DirectLink):
            def push(self, node, data, when=when):
                if len(self.sent) == when:
                    raise ConnectionLost("Flower: ConnectError")
                return super().push(node, data)

        with pytest.raises(ConnectionLost):
            federation(config, out.parent, out, Broken)
        summary, _ = federation(config, out.parent, out)
        assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
        assert [event["silo"] for event in logged(out, "withheld")] == ["beta", "gamma"]


def test_a_silo_that_is_killed_before_its_reply_is_kept_gives_the_same_one(
    tiny_config, withhold, monkeypatch, tmp_path
):
    """The count is written before the reply: a crash between them must neither count twice nor lose the scores."""
    withhold(beta=2)
    words = ("fedavg", "train.steps=1", "rounds=3")
    expected, _ = federation(tiny_config(*words), tmp_path / "whole", tmp_path / "whole" / "run")
    keep, killed = StateStore.keep_reply, []

    def die_once(store, name, request, reply):
        if reply.frame.kind == "withheld" and not killed:
            killed.append(name)
            raise OSError("killed")
        keep(store, name, request, reply)

    monkeypatch.setattr(StateStore, "keep_reply", die_once)
    out = tmp_path / "run"
    summary, _ = federation(tiny_config(*words, "federation.retries=2", "federation.deadline=1"), tmp_path, out)
    assert killed
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert [event["validation"] for event in logged(out, "round")] == [
        event["validation"] for event in logged(tmp_path / "whole" / "run", "round")
    ]


def test_a_request_that_was_withheld_is_answered_where_the_operator_lifts_the_limit(attack, withhold):
    withhold(alpha=1)
    attacker = attack(ALLOWED, policy=WATCHED)
    assert [attacker.ask("round").kind for _ in range(2)] == ["withheld", "withheld"]
    lifted = attack(ALLOWED, policy={"preset": "lab"})
    assert lifted.ask("round").kind == "answer"


def test_the_draw_that_a_guarantee_counts_on_looks_at_no_row(tiny_federation, tmp_path):
    """Otherwise those that are left would take part more often than their ε says."""
    federation = tiny_federation(
        "fedavg", "rounds=6", "aggregation=uniform", "aggregation.clip=1", "aggregation.noise_multiplier=1",
        "sampling.count=1",
    )  # fmt: skip
    drawn = [federation.coordinator.choose(number, SILOS) for number in range(1, 7)]
    engine = InProcessEngine(federation, RunFolder(tmp_path))
    engine.history.withheld = ["alpha"]
    left = [engine._choose(number) for number in range(1, 7)]
    assert left == [[name for name in names if name != "alpha"] for names in drawn]
    assert federation.privacy.uses == max(Counter(name for names in drawn for name in names).values())
    assert [] in left


@pytest.mark.parametrize("nonsense", [5, None, [["beta"]]])
def test_a_checkpoint_with_nonsense_for_those_that_withheld_is_damaged(nonsense):
    with pytest.raises(TypeError, match="withheld"):
        History(withheld=nonsense)
