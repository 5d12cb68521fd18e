"""Who is greeted when, and what is asked again: with a clock of its own, and nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.coordinator.dispatcher import SiloDispatcher
from silotune.distributed.flower.link import Arrival
from silotune.distributed.protocol.frames import Frame, HandshakeRefused, decode
from silotune.distributed.silo.session import Session
from silotune.runs.storage.readers import read_summary
from tests.support.session_rig import DirectLink, LostError, answering, job, local_configs

PATIENCE = 10.0
HELLO = Frame("hello", {})
ROUND = Frame("round", {})


@dataclass
class Nodes:
    """Nodes that answer when a script says so; `clock` and `sleep` are theirs too."""

    online: dict[int, str] = field(default_factory=dict)
    now: float = 0.0
    sent: list[tuple[float, int, str]] = field(default_factory=list)
    answers: dict[str, bytes] = field(default_factory=dict)
    script: dict[float, object] = field(default_factory=dict)
    """What happens at which moment."""

    def nodes(self):
        return self.online

    def push(self, node, data):
        self.sent.append((self.now, node, decode(data).kind))
        return f"m{len(self.sent)}"

    def pull(self, messages):
        return [Arrival(message, self.answers.pop(message)) for message in [*messages] if message in self.answers]

    def clock(self):
        return self.now

    def sleep(self, _seconds):
        self.now = round(self.now + 0.5, 3)
        if self.now in self.script:
            self.script.pop(self.now)()

    def answer(self, number, frame):
        """The answer to the n-th message (from 1)."""
        self.answers[f"m{number}"] = frame.encode()

    def when(self, kind):
        return [(moment, node) for moment, node, event in self.sent if event == kind]

    def last(self, kind):
        """The number of the last message of a kind, from 1."""
        return max(number for number, (_, _, event) in enumerate(self.sent, 1) if event == kind)


def hello(silo):
    return Frame("hello", {"silo": silo})


def dispatcher_of(nodes, *silos, admit=lambda frame: None):
    reports = []

    def report(*event):
        reports.append(event)

    return SiloDispatcher(nodes, silos, HELLO, admit, report, PATIENCE, nodes.clock, nodes.sleep), reports


def test_a_greeting_that_went_under_is_repeated_until_the_silo_is_in():
    """Its process died, or it was restarted before anybody saw it away; nobody is greeted once it is in."""
    nodes = Nodes({1: "", 2: ""})
    nodes.script = {1.0: lambda: nodes.answer(1, hello("north")), 21.0: lambda: nodes.answer(4, hello("south"))}
    dispatcher, reports = dispatcher_of(nodes, "north", "south")
    assert dispatcher.wait_for_all(100) == []
    assert nodes.when("hello") == [(0.0, 1), (0.0, 2), (10.0, 2), (20.0, 2)]
    assert reports == []


def test_a_silo_that_is_only_slow_answers_the_first_greeting_and_once_more():
    nodes = Nodes({1: ""})
    nodes.script = {15.0: lambda: (nodes.answer(1, hello("north")), nodes.answer(2, hello("north")))}
    dispatcher, _ = dispatcher_of(nodes, "north")
    assert dispatcher.wait_for_all(100) == []
    assert nodes.now < 16


def test_a_silo_that_is_absent_at_first_is_greeted_when_it_comes_and_again_when_it_returns():
    nodes = Nodes({})
    nodes.script = {
        5.0: lambda: nodes.online.update({1: ""}),
        6.0: nodes.online.clear,  # before it could answer
        30.0: lambda: nodes.online.update({1: ""}),  # a registered key keeps its node's id
        31.0: lambda: nodes.answer(2, hello("north")),
    }
    dispatcher, _ = dispatcher_of(nodes, "north")
    assert dispatcher.wait_for_all(100) == []
    assert nodes.when("hello") == [(5.0, 1), (30.0, 1)]


def test_a_node_whose_worker_is_not_there_is_greeted_again_soon():
    nodes = Nodes({1: ""})
    nodes.script = {
        1.0: lambda: nodes.answer(1, Frame("unavailable", {"reason": "no worker"})),
        2.0: lambda: nodes.answer(2, hello("north")),
    }
    dispatcher, reports = dispatcher_of(nodes, "north")
    assert dispatcher.wait_for_all(5) == []
    assert reports == [("node 1", "no worker")]


def test_a_silo_that_was_refused_while_the_run_goes_on_is_asked_again_and_let_in_when_it_is_right():
    """Before round 1 a refusal ends the run; later the reason is said once."""
    nodes, wrong = Nodes({1: "", 2: ""}), [True]

    def admit(frame):
        if frame.fields["silo"] == "south" and wrong[0]:
            raise HandshakeRefused("another backbone")

    nodes.script = {0.5: lambda: nodes.answer(1, hello("north"))}
    dispatcher, reports = dispatcher_of(nodes, "north", "south", admit=admit)
    assert dispatcher.wait_for_all(2) == ["south"]
    nodes.script = {
        number: lambda number=number: nodes.answer(nodes.last("hello"), hello("south")) for number in (3.0, 13.0, 23.0)
    }
    nodes.script[20.5] = lambda: wrong.clear() or wrong.append(False)
    nodes.script[25.0] = lambda: [
        nodes.answer(number + 1, Frame("answer", {"silo": {1: "north", 2: "south"}[node]}))
        for number, (_, node, kind) in enumerate(nodes.sent)
        if kind == "round"
    ]
    assert {frame.fields["silo"] for frame in dispatcher.request({"north": ROUND, "south": ROUND}, 100)} == {
        "north",
        "south",
    }
    assert reports.count(("south", "another backbone")) == 1
    assert [node for _, node in nodes.when("hello")].count(1) == 1

    strict, _ = dispatcher_of(Nodes({1: ""}), "south", admit=admit)
    wrong[:] = [True]
    strict.link.script = {0.5: lambda: strict.link.answer(1, hello("south"))}
    with pytest.raises(HandshakeRefused):
        strict.wait_for_all(5)


def test_only_who_owes_an_answer_is_asked_again_and_ever_less_often():
    nodes = Nodes({1: "", 2: ""})
    nodes.script = {0.5: lambda: [nodes.answer(1, hello("north")), nodes.answer(2, hello("south"))]}
    dispatcher, reports = dispatcher_of(nodes, "north", "south")
    assert dispatcher.wait_for_all(5) == []
    began = nodes.now
    nodes.script = {began + 1: lambda: nodes.answer(3, Frame("answer", {"silo": "north"}))}
    assert [frame.fields["silo"] for frame in dispatcher.request({"north": ROUND, "south": ROUND}, 160)] == ["north"]
    assert nodes.when("round") == [(began, 1), *((began + after, 2) for after in (0, 10, 30, 70, 150))]
    assert [event for sender, event in reports if sender == "south"][-1] == "no answer within 160 s"


def test_a_run_whose_handshake_was_disturbed_ends_with_the_same_bits(whole, tmp_path):
    """One silo's process is killed on its first greeting, and another one is there then."""
    config, expected = whole("fedmcp", "rounds=1", "train.steps=1", "federation.patience=0.05")
    out, greeted = tmp_path / "run", []
    configs = local_configs(config, out)
    answers = answering(configs)

    def disturbed(data):
        if decode(data).kind == "hello" and not greeted:
            greeted.append(data)
            answers[1](data)
            answers[1] = Session(configs["beta"]).answer
            raise LostError
        return answers[1](data)

    coordinate(job(config, out, configs), DirectLink(answers | {1: disturbed}))
    assert greeted
    assert read_summary(out)["state_sha256"] == expected["state_sha256"]


def test_texts_of_a_silo_are_short_and_printable():
    """They go to logs and terminals; a silo could fill the one, and write to the other."""
    nodes = Nodes({1: "a"})
    dispatcher, reported = dispatcher_of(nodes, "a")
    nodes.script = {
        0.5: lambda: nodes.answer(1, Frame("hello", {"silo": "a"})),
        1.5: lambda: nodes.answer(2, Frame("waiting", {"silo": "a", "reason": "\x1b[2J" + "x" * 2**20})),
    }
    dispatcher.wait_for_all(5.0)
    assert list(dispatcher.request({"a": ROUND}, 3.0)) == []
    ((_, text), _) = reported
    assert text.startswith(r"\x1b[2Jxxx")
    assert len(text) < 1100


def test_an_operator_is_waited_for_without_end_and_asked_ever_less_often():
    """Another silo that is not there is missing after the deadline all the same."""
    nodes = Nodes({1: "north"})
    waiting = Frame("waiting", {"silo": "north", "reason": "waits for approval at north"})

    def answers(begin, end, frame):
        script = {half / 2: lambda: nodes.answer(len(nodes.sent), frame) for half in range(2 * begin + 1, 2 * end)}
        nodes.script |= script

    answers(0, 3600, waiting)
    answers(3600, 3700, hello("north"))
    dispatcher, reports = dispatcher_of(nodes, "north")
    assert dispatcher.wait_for_all(10.0) == []
    asked = [moment for moment, _ in nodes.when("hello")]
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert (min(pauses), max(pauses), len(asked)) == (5.5, 60.5, pytest.approx(85, abs=15))
    assert reports == [("north", "waits for approval at north")]
    nodes = Nodes({1: "north"})
    answers(0, 30, waiting)
    dispatcher, _ = dispatcher_of(nodes, "north", "south")
    assert dispatcher.wait_for_all(10.0) == ["south"]
