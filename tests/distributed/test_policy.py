"""What a silo's policy refuses: the attacks of a coordinator that knows protocol and source, and no honest run."""

from __future__ import annotations

import time

import pytest
import yaml

from silotune.config.registries import METHODS
from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.protocol.frames import decode
from silotune.distributed.silo import limits as limits_module
from silotune.distributed.silo.policy_config import PRESETS, PolicyConfig, most
from silotune.distributed.silo.request_ledger import REQUESTS_FILE, RequestLedger, RequestRecord
from silotune.distributed.silo.silo_config import SiloSettings, read_silo_settings
from silotune.errors import InputError
from silotune.methods.fedavg import FedAvg
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary
from silotune.training import phase_optimizer
from tests.support.malicious import ALLOWED
from tests.support.session_rig import DirectLink, answering, job, local_configs

B1 = ("fedavg", "method.adapters=1", "tuner=full", "train.optimizer=sgd", "train.steps=1", "train.batch_size=1",
      "train.lr=1.0")  # fmt: skip
"""The attack that gave the tokens of a single row: one step of one row, of the whole backbone."""

FEW = {"data__train_rows": 2}


# -- the attacks of the review -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_of_single_rows_by_full_tuning(attack, seed):
    attacker = attack((*B1, f"seed={seed}"), changes=FEW)
    assert "refuses tuner=full; allowed: bottleneck, lora" in attacker.reason()
    assert attacker.ask("round").kind == "refused"
    assert attacker.ask("hello").kind == "refused"


def test_each_limit_stands_by_itself(attack):
    """Full tuning of single rows, with one limit after the other lifted by the operator."""
    lifted, reasons = {}, []
    for change in (
        {}, {"tuners": "any"}, {"keys": ["data.train_rows"]}, {"batch_size": 1}, {"batches": "any"}, {"lr": None},
        {"partial_passes": True}, {"shapes": "any"},
        {"numbers_per_round": None}, {"row_steps": 0}, {"effective_rows": 0},
    ):  # fmt: skip
        lifted |= change
        reasons.append(attack(B1, changes=FEW, policy=dict(lifted)).reason())
    expected = (
        "tuner=full",
        "data.train_rows=2",
        "train.batch_size=1; at least 8",
        "train.batches=full; the rows of a short last batch weigh more",
        "train.lr=1.0; at most 0.01",
        "train.steps=1; rounds that leave out some rows each tell these; allowed: train.epochs (policy.partial_passes)",
        "shape of a weight matrix",
        "numbers in a message",
        "so few rows × steps",
        "too few rows are behind it",
    )
    for reason, words in zip(reasons, expected, strict=False):
        assert words in reason
    assert reasons[-1] == ""  # nothing else refuses: each of these limits did it alone


def test_noise_that_is_none(attack, tmp_path):
    (tmp_path / "key").write_bytes(b"s" * 32)
    with pytest.raises(ValueError, match=r"epsilon: is missing beside secret.*epsilon: unlimited"):
        SiloSettings(name="a", folder="f", rows="r", share=[], secret="key")
    words = (*ALLOWED, "uplink=clip,laplace", "uplink.clip=1000", "uplink.epsilon=1e12")
    settings = {"secret": str(tmp_path / "key"), "epsilon": "unlimited"}
    assert "refuses uplink.epsilon=1,000,000,000,000.0; at most 16" in attack(words, **settings).reason()
    words = (*ALLOWED, "uplink=clip,gaussian", "uplink.epsilon=8", "uplink.delta=0.9")
    assert "refuses uplink.delta=0.9; at most 1e-05 (policy.delta_per_round)" in attack(words, **settings).reason()
    honest = (*ALLOWED, "uplink=clip,laplace", "uplink.epsilon=8")
    assert attack(honest, **settings).reason() == ""


def test_wide_adapters(attack):
    reason = attack(("fedmcp", "tuner.r=384", "train.batches=even")).reason()
    assert "numbers in a message; at most" in reason
    assert "3%; policy.numbers_per_round" in reason
    words = ("fedmcp", "tuner=lora", "tuner.r=32", "train.batches=even")
    square = attack(words, policy={"numbers_per_round": None}).reason()
    assert "shape of a weight matrix of the backbone (policy.shapes" in square


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("train.epochs=1000000", "train.epochs=1,000,000; at most 20"),
        ("train.steps=1000000000", "train.steps=1,000,000,000; at most 10,000"),
        ("rounds=1000000", "rounds=1,000,000; at most 200"),
        ("train.batch_size=100000", "tokens of a step"),
        ("train.max_length=8", "train.max_length=8; at least 32"),
        ("train.lr=1", "train.lr=1.0; at most 0.01"),
        ("train.server_lr=1", "train.server_lr=1.0; at most 0.01"),
        ("tuner=lora tuner.lr_ratio=100", "train.lr × tuner.lr_ratio=0.1; at most 0.01"),
        ("train.weight_decay=100", "train.weight_decay=100.0; at most 0.1"),
        ("train.dropout=0.99", "train.dropout=0.99; at most 0.5"),
    ],
)
def test_work_without_end_and_updates_of_few_tokens(attack, word, refused):
    assert refused in attack((*ALLOWED, *word.split())).reason("hello")


def test_a_million_score_requests(attack):
    """Each with another broadcast: an oracle for any model. Restarts and other rounds do not help."""
    attacker, answered = attack((*ALLOWED, "rounds=1")), 0
    while not (reason := attacker.reason("score", broadcast=attacker.broadcast(add=answered * 1e-6))):
        answered += 1
        assert answered <= 12
    assert answered == 12
    assert "more score requests in this run; at most 12 (policy.scores)" in reason
    attacker.restart()
    assert "policy.scores" in attacker.reason("score", 0, broadcast=attacker.broadcast(0, add=0.5))
    assert "policy.scores" in attacker.reason("round", judge=True)  # a round that scores as it begins


# -- more of them ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_scores_of_other_runs_count(attack):
    policy = {"scores_in_all": 3}
    for name in "abc":
        assert attack(ALLOWED, run=name * 16, policy=policy).reason("score") == ""
    for name in "abcd":  # what was asked before is answered as before
        reason = attack((*ALLOWED, "seed=2"), run=name * 16, policy=policy).reason("score")
        assert "more score requests in all runs; at most 3 (policy.scores_in_all)" in reason


def test_the_same_round_with_slightly_other_broadcasts(attack):
    """Differences of answers would tell how the rows react to one number."""
    attacker = attack(ALLOWED)
    asked = [attacker.broadcast(add=step * 1e-6) for step in range(4)]
    assert [attacker.reason(broadcast=each) for each in asked[:3]] == ["", "", ""]
    refused = "more requests for round 1; at most 3 (policy.requests_per_round)"
    assert refused in attacker.reason(broadcast=asked[3])
    attacker.restart()
    assert refused in attacker.reason(base="0001")
    attacker.configure(description="another text")
    assert refused in attacker.reason()
    assert attacker.ask("round", 2).kind == "answer"


@pytest.mark.long
def test_new_names_seeds_and_restarts_do_not_rewind(attack):
    policy = {"rounds_in_all": 3}
    for number, name in enumerate("abcd"):
        reason = attack((*ALLOWED, f"seed={number + 1}"), run=name * 16, policy=policy).reason()
        assert ("rounds_in_all" in reason) is (number == 3)
    assert "rounds_in_all" in attack(ALLOWED, run="e" * 16, policy=policy).reason("final")


def test_numbers_of_all_runs_together(attack):
    attacker = attack(ALLOWED, policy={"numbers_in_all": 1000})
    shared = attacker.federation.coordinator.shared
    numbers = sum(tensor.numel() for part in shared.values() for tensor in part.values())
    answered = [attacker.ask("round", number).kind for number in (1, 2, 3)]
    assert answered == ["answer"] * (1000 // numbers) + ["refused"] * (3 - 1000 // numbers)
    assert "refused" in answered


@pytest.mark.parametrize("number", [-1, 4, 10**30])
def test_rounds_that_the_run_does_not_have(attack, number):
    for kind in ("round", "final", "score"):
        assert attack(ALLOWED).ask(kind, number).kind in ("refused", "failed")


def test_no_training_before_the_first_round(attack):
    """Under `train.schedule_over=run` its rates would be negative."""
    for kind in ("round", "final"):
        assert "round 0; the run has 3" in attack(ALLOWED).reason(kind, 0)


@pytest.mark.parametrize("change", [{"add": 2.0}, {"scale": 1e6}, {"scale": -1e6}])
def test_broadcasts_that_were_made_and_not_averaged(attack, change):
    attacker = attack(ALLOWED)
    for kind in ("round", "score", "final"):
        reason = attacker.reason(kind, broadcast=attacker.broadcast(**change))
        assert "from its start; at most 1 (policy.drift)" in reason
    assert attacker.reason("round", broadcast=attacker.broadcast(add=0.1)) == ""


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"data__path": "/etc"}, "data.path='/etc'; the policy cannot judge this key"),
        ({"data__test_rows": 1}, "data.test_rows=1; the coordinator may not choose among the rows"),
        ({"data__rows_per_silo": 10}, "data.rows_per_silo=10; the coordinator may not choose among the rows"),
        ({"data__tasks": ["alpha"]}, "data.tasks"),
        ({"train__class_weights": "balanced"}, "train.class_weights='balanced'; the coordinator may not choose among"),
        ({"train__class_weights": {"good": 1e-6}}, "train.class_weights.good=1e-06; the coordinator may not choose"),
        ({"partition": {"name": "iid", "silos": 3}}, "partition.name='iid'; the policy cannot judge"),
        ({"silos": [{"name": "alpha", "path": "/etc/passwd"}]}, "silos="),
        ({"per_method": {"fedmcp": {"tuner": "full"}}}, "per_method.fedmcp.tuner='full'; the policy cannot judge"),
        ({"policy": "lab"}, "unknown key 'policy'"),
        ({"share": ["validation"]}, "unknown key 'share'"),
        ({"attack": {"name": "backdoor", "target": "good"}}, "attack: simulated"),
        ({"method__gamma": 1e30}, "method.gamma=1e+30; too large or too small for an option"),
        (
            {"method__mu": "1e30"},
            "method.mu='1e30'; too large or too small for an option",
        ),  # the option reads texts, too
        ({"method__gamma": 1e-30}, "method.gamma=1e-30; too large or too small for an option"),
        ({"data__ratio": [0.5, 0.25, 0.25]}, "data.ratio=[0.5, 0.25, 0.25]; the coordinator may not choose among"),
        ({"description": "x" * 300_000}, "a configuration of 30"),
        ({"evaluation__test_time": True}, "evaluation.test_time"),
        ({"cache": {"name": "frozen-prefix", "mib": 4_000_000}}, "cache.mib=4,000,000; at most 16,384"),
    ],
)
def test_keys_that_a_coordinator_puts_in(attack, changes, refused):
    attacker = attack(ALLOWED, changes=changes)
    assert refused in attacker.reason("hello")


def test_a_dropout_that_leaves_single_tokens(attack):
    """Of inputs that LoRA's dropout leaves, each column of A shows one feature of one token."""
    reason = attack((*ALLOWED, "tuner=lora", "tuner.dropout=0.999")).reason()
    assert "tuner.dropout=0.999; at most 0.5 (policy.dropout)" in reason
    assert attack((*ALLOWED, "tuner=lora", "tuner.dropout=0.1")).reason() == ""


def test_a_recipe_within_the_limits(attack):
    words = ("train.schedule=linear", "train.warmup=0.1", "train.weight_decay=0.01", "train.clip_norm=1")
    words += ("train.dropout=own", "train.label_smoothing=0.1")
    words += ("train.early_stopping=3", "train.server_lr=0.001", "train.epochs=2")
    assert attack((*ALLOWED, *words)).reason() == ""


@pytest.mark.parametrize("mu", ["0.2", "100", "1100"])
def test_a_proximal_term_that_undoes_all_steps_but_one(attack, mu):
    """With lr · mu = 1 the last step alone is left; far above 2 the first one outgrows all others."""
    refused = "train.lr × weight of the method's proximal term; at most 0.001 (policy.proximal)"
    for method in ("fedprox", "fedit"):
        words = (*ALLOWED[1:], "train.lr=0.01", f"method.mu={mu}", *_ONE_ADAPTER[method])
        assert refused in attack((method, *words)).reason("hello")
    words = (*ALLOWED[1:], "train.lr=0.01", "method.mu=0.1", *_ONE_ADAPTER["fedprox"])
    assert attack(("fedprox", *words)).reason("hello") == ""


_ONE_ADAPTER = {"fedprox": ("method.adapters=1",), "fedit": ("tuner=bottleneck", "head=linear")}


@pytest.mark.parametrize(
    "words",
    [
        ("train.warmup=1", "train.schedule_over=run", "train.epochs=2"),
        ("train.schedule=linear", "train.schedule_over=run", "train.epochs=2"),
        ("train.keep_optimizer=true", "train.adam_epsilon=1"),
    ],
)
def test_steps_that_weigh_otherwise_in_another_round(attack, words):
    """Two rounds of one broadcast then differ by the steps that weigh less in one of them, here the first batch."""
    assert "steps that weigh otherwise in another round" in attack((*ALLOWED, *words)).reason("hello")
    allowed = {"keys": ["train.schedule_over", "train.keep_optimizer"]}
    assert attack((*ALLOWED, *words), policy=allowed).reason("hello") == ""


def test_steps_under_a_schedule_count_half(attack):
    """A warmup of all steps but the last would otherwise hide the first ones' rows."""
    steps, refused = 12, "an update of so few rows × steps"
    partial = {"partial_passes": True}
    limit = partial | {"row_steps": 50 * steps}  # the silo has 60 rows, which count as 50
    assert attack((*ALLOWED, f"train.steps={steps}"), policy=limit).reason() == ""
    words = (*ALLOWED, f"train.steps={steps}", f"train.warmup={steps - 1}")
    assert refused in attack(words, policy=limit).reason()
    half = partial | {"row_steps": 20 * (steps // 2)}  # six batches of eight rows, which count as 20
    assert refused not in attack(words, policy=half).reason()


def test_steps_that_float16_skips_do_not_count(attack, monkeypatch):
    """A coordinator whose broadcast lets most gradients overflow would otherwise get an update of one step."""
    words = (*ALLOWED, "precision=fp16", "train.steps=12")
    limit = {"row_steps": 50 * 12, "partial_passes": True, "skipped_steps": None}
    assert attack(words, policy=limit).reason() == ""
    monkeypatch.setattr(phase_optimizer, "INITIAL_SCALE", 2.0**26)
    attacker = attack(words, policy=limit, run="b" * 16)
    assert attacker.reason("hello") == ""
    assert "an update of so few rows × steps; at least 600 (policy.row_steps)" in attacker.reason()
    attacker = attack(words, policy={"partial_passes": True}, run="c" * 16)
    assert "float16 skips; at most 0 skipped; precision=fp32 or bf16 skip none (policy.skipped" in attacker.reason()


def test_words_around_the_rows(attack):
    attacker = attack(("fedavg", "tuner.r=1", "head=mlp"), changes={
        "head__template": {"alpha": "{text} the patient is [MASK]"}, "head__name": "verbalizer",
        "head__words": {"bad": ["awful"], "good": ["bright"]},
    })  # fmt: skip
    assert "may not choose words around the rows (policy.prompts)" in attacker.reason("hello")


def test_a_method_of_a_plugin(attack, monkeypatch):
    class Stealing(FedAvg):
        pass

    monkeypatch.setattr(METHODS, "_entries", {**METHODS._entries, "stealing": Stealing})
    attacker = attack(ALLOWED)
    attacker.configure(method={"name": "stealing", "adapters": 1})
    assert "refuses method=stealing; allowed: local, fedavg" in attacker.reason("hello")


@pytest.mark.long
def test_a_split_that_no_silo_scores(attack):
    for splits in (["train"], ["train", "validation"], ["validation", "../x"], [], ["test"] * 9):
        reply = attack(ALLOWED).ask("score", splits=splits)
        assert (reply.kind, "no such splits" in reply.fields["reason"]) == ("failed", True)


def test_two_choices_of_rows_that_differ_by_a_few(attack, data_folder):
    """The silo splits a file of its own; ratio and seed come from the coordinator."""
    data = {"path": str(data_folder / "alpha" / "train.jsonl"), "text": "sentence1", "label": "label", "name": "alpha"}
    few = {"keys": ["data.ratio"], "train_rows": 20, "scored_rows": 5, "row_steps": 0, "effective_rows": 0}

    def reason(ratio, seed=1, run="a", **policy):
        attacker = attack(ALLOWED, run=run * 16, rows=None, data=data, policy=few | policy)
        attacker.configure(data__ratio=ratio, data__seed=seed)
        return attacker.reason()

    assert reason([0.6, 0.2, 0.2]) == ""
    refused = "split that differs by a few rows from one of an earlier run; at least 10"
    assert refused in reason([0.62, 0.19, 0.19], run="b")
    assert reason([0.6, 0.2, 0.2], run="c") == ""
    assert "another choice of rows; at most 1 (policy.row_sets)" in reason([0.6, 0.2, 0.2], 2, "d", row_sets=1)


def test_few_rows_are_refused_and_not_counted_for_the_coordinator(attack):
    for key, least in (("train_rows", 61), ("scored_rows", 21)):
        reason = attack(ALLOWED, policy={key: least}).reason("hello")
        assert f"of so few rows; at least {least} (policy.{key})" in reason
        assert "60" not in reason
    assert attack(ALLOWED, policy={"scored_rows": 21}, share=["loss"]).reason("hello") == ""


def test_a_request_ends_at_its_time_and_memory(attack, monkeypatch):
    attacker = attack(ALLOWED, policy={"seconds": 5})
    assert attacker.reason("hello") == ""
    now = time.monotonic()
    monkeypatch.setattr(limits_module.time, "monotonic", lambda: now)
    training = attacker.session._setup.guard.begin
    monkeypatch.setattr(attacker.session._setup.guard, "begin", lambda: (training(), later(now + 6)))

    def later(then):
        monkeypatch.setattr(limits_module.time, "monotonic", lambda: then)

    assert "a request of so many seconds; at most 5 (policy.seconds)" in attacker.reason()
    monkeypatch.undo()
    assert attack(ALLOWED).reason("round", 2) == ""
    monkeypatch.setattr(limits_module, "memory_mib", lambda: 20_000)
    assert "so much memory; at most 16,384 MiB" in attack(ALLOWED).reason("round", 3)


def test_a_request_over_a_state_that_changed_counts_again(attack):
    """Two requests in turn, each from the state that the other left: every answer is new, though the words repeat."""
    attacker = attack(ALLOWED)
    assert attacker.reason() == ""
    broadcasts = [attacker.broadcast(add=1e-3), attacker.broadcast()]
    replies = [attacker.ask("round", base="0001", broadcast=broadcasts[turn % 2]) for turn in range(5)]
    assert len({reply.blobs["message"] for reply in replies if reply.kind == "answer"}) == 2
    assert "more requests for round 1; at most 3" in replies[-1].fields["reason"]


def test_a_broadcast_of_another_round(attack):
    """It would choose the order of rows: that of one round, for as many requests as the run has rounds."""
    attacker = attack(ALLOWED)
    for kind in ("round", "score", "final"):
        reason = attacker.reason(kind, 2, broadcast=attacker.broadcast(number=1))
        assert "a broadcast of round 1 in a request for round 2" in reason


def test_a_refused_request_deletes_nothing(attack):
    attacker = attack(ALLOWED)
    assert attacker.reason() == ""
    folder = attacker.session._setup.limits.ledger.folder / attacker.run
    before = sorted(path.name for path in folder.iterdir())
    assert before == ["0001.answer", "0001.safetensors", "rows.json"]
    assert attacker.reason("round", 4)  # the run has three
    assert attacker.reason("round", 3, broadcast=attacker.broadcast(3, add=2.0))
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_refusal_does_not_count_the_rows(attack):
    """The number of passes that some steps come to would tell the rows of a silo that does not share them."""
    reason = attack((*ALLOWED, "train.steps=5000"), share=[], policy={"partial_passes": True}).reason("hello")
    assert "refuses passes over the rows in a phase; at most 20 (policy.epochs)" in reason
    reason = attack((*ALLOWED, "train.epochs=20"), policy={"steps": 50}, share=[]).reason("hello")
    assert "refuses optimizer steps of a request; at most 50 (policy.steps)" in reason


def test_a_damaged_record_answers_nothing_more(attack):
    attacker = attack(ALLOWED)
    assert attacker.reason() == ""
    path = attacker.session._setup.limits.ledger.folder / REQUESTS_FILE
    path.write_text(path.read_text() + '{"run": "x"}\n')
    assert "cannot be read (requests.jsonl)" in attacker.reason("round", 2)


def test_a_request_is_counted_before_it_is_worked_on(attack, monkeypatch):
    """A worker that is killed again and again as it answers must not forget."""
    attacker = attack(ALLOWED)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("silotune.training.client.SiloClient.rounds", killed)
    for step in range(3):
        with pytest.raises(KeyboardInterrupt):
            attacker.ask("round", broadcast=attacker.broadcast(add=step * 1e-6))
    monkeypatch.undo()
    assert "policy.requests_per_round" in attacker.reason(broadcast=attacker.broadcast(add=1e-3))


# -- honest runs -------------------------------------------------------------------------------------------------------


def test_an_honest_run_is_what_it_was(tiny_config, tmp_path):
    method, *words = (*ALLOWED, "sampling.count=2", "rounds=2")
    config = tiny_config(method, *words)
    configs = local_configs(
        config, tmp_path / "run", policy={"row_order": "seed", "score_digits": None, "score_noise": 0}
    )
    coordinate(job(config, tmp_path / "run", configs), DirectLink(answering(configs)))
    expected = run(config, out=tmp_path / "whole").summary
    summary = read_summary(tmp_path / "run")
    assert summary["shared_sha256"] == expected["shared_sha256"]
    assert summary["silos"] == expected["silos"]
    # asked again from the start, everything is answered from what was kept or counted once
    counted = [path.read_text() for path in (tmp_path / "run").rglob(REQUESTS_FILE)]
    coordinate(job(config, tmp_path / "run", configs), DirectLink(answering(configs)))
    assert [path.read_text() for path in (tmp_path / "run").rglob(REQUESTS_FILE)] == counted
    assert len(counted) == 3


def test_presets_and_their_keys(tmp_path):
    assert PRESETS.keys() == {"partners", "hospital", "lab"}
    assert all(preset.keys() == PRESETS["partners"].keys() for preset in PRESETS.values())
    assert PolicyConfig.of().preset == "partners"
    hospital = PolicyConfig.model_validate({"preset": "hospital", "rounds": 7})
    assert (hospital.rounds, hospital.noise, hospital.numbers_per_round) == (7, True, "1%")
    for key, value in PRESETS["hospital"].items():  # nothing that it names is wider than the default
        other = PRESETS["partners"][key]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            least = key in (
                "train_rows",
                "scored_rows",
                "score_noise",
                "batch_size",
                "max_length",
                "row_steps",
                "row_difference",
            )
            assert value >= other if least else value <= other, key
    assert most("3%", 1000) == 30
    assert (most(5, 1000), most(None, 1000)) == (5, None)
    tree = {"name": "north", "folder": "f", "data": {"path": "d.csv"}, "share": [], "approval": "policy"}
    path = tmp_path / "silo.yaml"
    for policy, words in (
        ("hospitl", "did you mean 'hospital'"),
        ({"preset": "lab", "round": 3}, "did you mean 'policy.rounds'"),
        ({"numbers_per_round": "3 percent"}, "such as 3%"),
        ("hospital", "only noised changes leave"),
    ):
        path.write_text(yaml.safe_dump(tree | {"policy": policy}))
        with pytest.raises(InputError, match=words):
            read_silo_settings(path)
    path.write_text(yaml.safe_dump(tree | {"policy": {"preset": "lab", "rounds": 3}}))
    assert read_silo_settings(path).policy.rounds == 3


def test_repeated_requests_count_once(tmp_path):
    ledger, entry = RequestLedger(tmp_path), RequestRecord("a" * 16, "round", 1, "x", 100)
    for _ in range(2):
        ledger.record(entry)
    tally = ledger.tally(entry)
    assert (tally.known, tally.rounds_in_all, tally.numbers_in_all) == (True, 1, 100)
    other = ledger.tally(RequestRecord("b" * 16, "round", 1, "x", 100))
    assert (other.known, other.requests_for_round, other.rounds_in_all) == (False, 0, 1)


def test_what_leaves_is_measured_not_promised(attack, monkeypatch):
    """A message that is larger than the shared parts are does not leave, whatever made it."""
    import silotune.communication.messages as messages

    attacker = attack(ALLOWED, policy={"numbers_per_round": 600})
    assert attacker.reason("hello") == ""
    monkeypatch.setattr("silotune.distributed.silo.local_work.message_numbers", lambda _: 601)
    reply = attacker.ask("round")
    assert (reply.kind, reply.blobs) == ("refused", {})
    assert "601 numbers in a message; at most 600" in reply.fields["reason"]
    assert messages.message_numbers(attacker.broadcast()) < 600


def test_a_policy_stands_above_an_agreed_configuration(attack, tmp_path, tiny_config):
    from silotune.config import dump

    method, *words = B1
    agreed = tmp_path / "agreed.yaml"
    agreed.write_text(dump(tiny_config(method, *words)), encoding="utf-8")
    assert "tuner=full" in attack(B1, config=str(agreed)).reason()
    assert decode(attack(ALLOWED).session.answer(b"")).kind == "failed"
