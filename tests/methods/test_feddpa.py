"""FedDPA on a tiny LLaMA: its view against merged weights, its weights against NumPy, its phases bit for bit."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from silotune.core.randomness import derive, sampler
from silotune.core.tensors import copy as copied
from silotune.data.batching import make_batch
from silotune.distributed.protocol.handshake import check_federated
from silotune.errors import InputError
from silotune.evaluation import instance_vectors
from silotune.evaluation.federation_scores import current_model_state
from silotune.evaluation.instance_vectors import weigh
from silotune.evaluation.personalization import score_test_time as judged_on_all_tasks
from silotune.evaluation.predict import answers, score
from silotune.methods.instance_weighting import VECTORS, InstanceWeighting
from silotune.methods.step import Step
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from silotune.training.local_trainer import LocalTrainer
from tests.support.language_models import generated, made
from tests.support.method_cases import logged
from tests.support.tiny import GOOD, NOUNS

SILOS = {"echo": 12, "always": 9, "noun": 10}
R, ALPHA = 3, 5.0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three silos of instructions of unequal lengths."""
    path = tmp_path_factory.mktemp("instructions")
    answer = {"echo": lambda n: GOOD[n % 6], "always": lambda n: "sweet", "noun": lambda n: NOUNS[n % 10]}
    for task, count in SILOS.items():
        (path / task).mkdir()
        for split, number in (("train", count), ("test", 5)):
            rows = [
                {
                    "instruction": f"{task} {GOOD[n % 6]} and {NOUNS[(n + len(split)) % 10]}" + " again" * (n % 3),
                    "input": "" if n % 2 else "now",
                    "output": answer[task](n),
                }
                for n in range(number)
            ]
            (path / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def config(data, model_folder):
    def make(method, *more):
        words = [f"method={method}", f"backbone={model_folder('llama')}", f"data.path={data}", "head.beams=1"]
        words += [f"data.tasks={','.join(SILOS)}", f"tuner.r={R}", f"tuner.alpha={ALPHA}", "head.max_new_tokens=4"]
        words += ["rounds=2", "train.epochs=1", "train.batch_size=8", "train.max_length=64", "precision=fp32"]
        return read_config("feddpa-dataset1", [*words, "threads=1", *more])

    return make


def fold_entries(config, *words, seed=3):
    """A federation and a silo that has trained, with parts far from where they start."""
    federation = build(config(*words))
    silo = federation.silos["echo"]
    draws = torch.Generator().manual_seed(seed)

    def moved(state):
        return {
            part: {name: tensor + 0.3 * torch.randn(tensor.shape, generator=draws) for name, tensor in tensors.items()}
            for part, tensors in state.items()
        }

    federation.coordinator.shared = moved(federation.coordinator.shared)
    silo.state = federation.context.state_of(silo)
    silo.state.private = moved(silo.state.private)
    return federation, silo


def merged(state, weights):
    """transformers' own model with `Σ weight·(alpha / r)·B·A` added to its weights."""
    model = copy.deepcopy(made("llama")[0]).double()
    matrices = dict(model.named_parameters())
    for part, weight in weights.items():
        for name, down in state[part].items():
            if name.endswith("lora_A.weight"):
                up = state[part][name.replace("lora_A", "lora_B")]
                target = matrices[f"model.{name.removesuffix('.lora_A.weight')}.weight"]
                target.data += weight * ALPHA / R * (up.double() @ down.double())
    return model


def hidden(model, ids):
    return model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]


def prompt_of(rows, row):
    """The tokens before the answer: up to the place that is read first."""
    return rows.ids[row][: rows.reads[row][0] + 1]


# -- the view of training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_local_phase_sees_base_and_both_updates(config, alpha):
    """Token losses under `(1 − α)·Δθ_g + α·Δθ_l` are those of one model with both updates merged into its weights."""
    federation, silo = fold_entries(config, "feddpa-t", f"method.alpha={alpha}")
    training, rows = federation.context, silo.train["echo"]
    phase = next(phase for phase in training.phases if phase.name == "local")
    state = current_model_state(federation, silo)
    batch = make_batch(rows, range(7), 0)
    mixes = {name: training.resolve(mix, state, {}, {}) for name, mix in phase.views.items()}
    views = training.program([mixes])(batch)
    with torch.no_grad():
        found = phase.loss(Step(batch, views, state, {}, {}, training.parts))
        model = merged(state, {"global": 1 - alpha, "private": alpha})
        losses = []
        for row in range(7):
            logits = model(input_ids=torch.tensor([rows.ids[row]])).logits[0]
            losses += torch.nn.functional.cross_entropy(
                logits[rows.reads[row]], torch.tensor(rows.targets[row]), reduction="none"
            ).tolist()
    assert float(found) == pytest.approx(np.mean(losses), rel=2e-5)
    other = merged(state, {"global": 0.55, "private": 0.45})
    with torch.no_grad():
        assert not torch.allclose(hidden(other, rows.ids[0]), hidden(model, rows.ids[0]), atol=1e-3)


# -- weights of texts --------------------------------------------------------------------------------------------------


def by_numpy(similarity, x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    if similarity == "l2":
        return 1 / (1 + np.sqrt(((x - y) ** 2).sum()))
    if similarity == "pearson":
        return np.corrcoef(x, y)[0, 1]
    return x @ y / np.sqrt((x @ x) * (y @ y))


CASES = [
    ("feddpa-t", 0.3, ("method.alpha=0.3",)),
    ("feddpa-t", 0.8, ("method.scale=0.8", "method.samples=3")),
    ("feddpa-f", 1.0, ("method.similarity=l2",)),
    ("feddpa-f", 1.0, ("method.similarity=pearson", "method.samples=9")),
    ("feddpa-f", 1.0, ("method.representation=mean", "method.samples=1")),
    ("feddpa-f", 1.0, ("method.embed=base", "method.clip=false")),
    ("feddpa-f", 1.0, ("method.embed=local", "method.samples=100")),
]


@pytest.mark.parametrize(("method", "scale", "words"), CASES)
@torch.no_grad()
def test_alpha_is_the_mean_similarity_by_hand(config, method, scale, words):
    """Embeddings from transformers' own forward over merged weights, one text at a time; sums by NumPy."""
    federation, silo = fold_entries(config, method, *words)
    options = federation.method.options
    state = current_model_state(federation, silo)
    under = {"global": {"global": 1.0}, "local": {"private": 1.0}, "base": {}}[options.embed]
    model = merged(state, under)

    def known_by(rows, row):
        states = hidden(model, prompt_of(rows, row)).numpy()
        return states[-1] if options.representation == "last" else states.mean(0)

    own, asked = silo.train["echo"], federation.silos["noun"].evaluations["noun"].test
    found = weigh(federation.context, state, asked)
    draws, expected = [], []
    for row in range(len(asked)):
        seed = derive(1, "instances", "echo")
        drawn = sampler(seed, "instances", *prompt_of(asked, row)).sample(range(12), min(options.samples, 12))
        values = [by_numpy(options.similarity, known_by(asked, row), known_by(own, other)) for other in drawn]
        expected.append(scale * np.mean(np.clip(values, 0, 1) if options.clip else values))
        draws.append(drawn)
    assert found.sampled.tolist() == draws
    np.testing.assert_allclose(found.alpha.numpy(), expected, rtol=2e-5, atol=2e-6)
    assert len({tuple(sorted(drawn)) for drawn in draws}) > 1 or options.samples >= 9
    assert np.ptp(expected) > 1e-4


@torch.no_grad()
def test_answers_are_those_of_every_texts_own_merged_model(config):
    """Batched, with a cache, under different weights: what transformers' own search writes, row by row."""
    for beams in (1, 3):
        federation, silo = fold_entries(config, "feddpa-f", f"head.beams={beams}", "head.max_new_tokens=6")
        training, state = federation.context, current_model_state(federation, silo)
        asked = federation.silos["noun"].evaluations["noun"].test
        alpha = weigh(training, state, asked).alpha.tolist()
        written = answers(training, state, asked)
        for row, weight in enumerate(alpha):
            model = merged(state, {"global": 1 - weight, "private": weight}).float()
            found = generated(model, prompt_of(asked, row), 6, beams)
            assert written[row] == made("llama")[1].decode(found, skip_special_tokens=True)
        assert len(set(written)) > 1


# -- phases ------------------------------------------------------------------------------------------------------------


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_phases_of_feddpa_t_leave_each_other_alone(config):
    """The global part after a round is that of FedIT's: no bit comes from the local phase; and the reverse."""
    federation, silo = fold_entries(config, "feddpa-t")
    training, shared = federation.context, {name: copied(t) for name, t in federation.coordinator.shared.items()}
    before = {name: copied(tensors) for name, tensors in silo.state.private.items()}
    whole = LocalTrainer(training).rounds([silo], shared, 1)[0]
    alone = build(config("fedit")).context
    plain = LocalTrainer(alone).rounds([silo], shared, 1)[0]
    assert equal(whole.state["global"], plain.state["global"])
    assert not equal(whole.state["global"], shared["global"])
    phases, training.phases = training.phases, [phase for phase in training.phases if phase.name == "global"]
    only_global = LocalTrainer(training).rounds([silo], shared, 1)[0]
    assert equal(only_global.state["private"], before["private"])
    training.phases = [phase for phase in phases if phase.name == "local"]
    only_local = LocalTrainer(training).rounds([silo], shared, 1)[0]
    assert equal(only_local.state["global"], shared["global"])
    assert not equal(only_local.state["private"], before["private"])
    # The local phase beside the received global part is not the one beside the part just trained (Algorithm 2).
    assert not equal(only_local.state["private"], whole.state["private"])
    received = build(config("feddpa-t", "method.sees=received")).trainer.rounds([silo], shared, 1)[0]
    assert equal(received.state["private"], only_local.state["private"])
    assert equal(received.state["global"], whole.state["global"])


def test_the_local_part_begins_as_the_global_one_and_leaves_it(config):
    """With a step too small to see, local = global in all silos, sampled or not; the rounds are FedIT's."""
    federation, silo = fold_entries(config, "feddpa-f", "train.lr=1e-30")
    shared = federation.coordinator.shared
    result = federation.trainer.finals([silo], shared, 2)[0]
    assert equal(result.state["private"], shared["global"])
    usual = build(config("feddpa-f"))
    trained = usual.trainer.finals([silo], shared, 2)[0]
    assert equal(trained.state["global"], shared["global"])
    assert not equal(trained.state["private"], shared["global"])
    rounds = [one.trainer.rounds([silo], shared, 1)[0].state["global"] for one in (usual, build(config("fedit")))]
    assert equal(*rounds)


@pytest.mark.parametrize("method", ["feddpa-f", "feddpa-t"])
def test_fedprox_holds_the_global_part_near_the_received_one(config, method):
    federation, silo = fold_entries(config, method)
    shared = federation.coordinator.shared

    def moved(mu):
        words = (f"method.mu={mu}", "train.epochs=4", "train.lr=0.01")
        state = build(config(method, *words)).trainer.rounds([silo], shared, 1)[0].state["global"]
        return sum(float((tensor - shared["global"][name]).square().sum()) for name, tensor in state.items())

    assert moved(100) < 0.5 * moved(0)


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    words = ("sampling.count=2", "rounds=1", "evaluation.per_round=true", "train.lr=0.01")
    return run(config("feddpa-t", *words), out=tmp_path_factory.mktemp("runs") / "run")


def test_every_silo_is_judged_on_every_task(finished):
    """Against scores made one by one; the silo that was not sampled has the global part alone."""
    federation, silos = finished.federation, finished.silos
    assert silos.keys() == SILOS.keys()
    for name, entry in silos.items():
        state = current_model_state(federation, federation.silos[name])
        expected = {
            task: score(federation.context, state, federation.silos[task].evaluations[task].test) for task in SILOS
        }
        assert entry["on_tasks"] == expected
        assert entry["personalization"] == entry["test"] == expected[name]
        assert entry["test_time"] == pytest.approx(np.mean(list(expected.values())))
    (event,) = logged(finished.folder, "evaluation")
    assert event["test_time"] == {name: entry["test_time"] for name, entry in silos.items()}
    assert event["personalization"] == {name: entry["personalization"] for name, entry in silos.items()}


def test_a_tasks_rows_are_embedded_once_for_all_silos(finished, monkeypatch):
    programs, program = [], instance_vectors.ViewProgram
    monkeypatch.setattr(instance_vectors, "ViewProgram", lambda *given: programs.append(given) or program(*given))
    judged_on_all_tasks(finished.federation)
    assert len(programs) == len(SILOS)
    assert finished.federation.context.vectors is None


def test_an_opened_run_answers_as_it_did(finished):
    texts = ["echo warm", ("noun kind", "now")]
    again = load_run(finished.folder)
    for name in SILOS:
        assert again.model(name).write(texts) == finished.model(name).write(texts)
        assert again.model(name).explain(texts) == finished.model(name).explain(texts)
    victim = finished.folder / "models" / "echo" / "model.safetensors"  # has the row vectors
    content = victim.read_bytes()
    for harm in (content[:-9], b"", None):
        victim.unlink() if harm is None else victim.write_bytes(harm)
        with pytest.raises(InputError, match="missing or damaged"):
            load_run(finished.folder).model("echo")
    victim.write_bytes(content)


def test_one_model_for_all_is_judged_once_and_alike(config, tmp_path):
    for method in ("fedit", "centralised"):
        words = ("tuner=lora", "rounds=1", "train.epochs=1")
        done = run(config(method, *words), out=tmp_path / method)
        assert len({entry["test_time"] for entry in done.silos.values()}) == 1
        own = [entry["personalization"] for entry in done.silos.values()]
        assert next(iter(done.silos.values()))["test_time"] == pytest.approx(np.mean(own))


def test_unseen_tasks_and_new_silos(config, tmp_path):
    """`noun` is left out of training; then it joins, from the silo whose texts are most like its own."""
    words = ("rounds=1", "train.lr=0.01", "evaluation.test_time=false")
    left = run(config("feddpa-t", *words, "evaluation.unseen=noun"), out=tmp_path / "left")
    assert left.silos.keys() == {"echo", "always"}
    found = left.summary["unseen"]["noun"]
    assert found["silos"].keys() == left.silos.keys()
    assert found["average"] == pytest.approx(np.mean(list(found["silos"].values())))
    assert found["maximum"] == max(found["silos"].values())
    joined = run(config("feddpa-t", *words, "evaluation.new_silos=noun"), out=tmp_path / "joined")
    entry = joined.summary["new_silos"]["noun"]
    federation = joined.federation
    means = {
        name: float(
            weigh(
                federation.context, current_model_state(federation, silo), federation.absent["noun"].train["noun"]
            ).similarities.mean()
        )
        for name, silo in federation.silos.items()
    }
    assert entry["similarities"] == pytest.approx(means, abs=1e-6)
    assert entry["most_similar"] == max(means, key=means.__getitem__)
    assert all(0 <= entry[key] <= 100 for key in ("found", "test", "alone"))
    assert joined.summary["state_sha256"] == left.summary["state_sha256"]  # neither changes what is trained


def test_parts_of_a_task_are_judged_on_the_same_rows(config, tmp_path):
    done = run(config("feddpa-t", "data.parts=2", "rounds=1"), out=tmp_path / "run")
    assert done.silos.keys() == {f"{name}-{part}" for name in SILOS for part in (1, 2)}
    assert done.silos["always-1"]["rows"]["train"] == 5
    assert done.silos["always-2"]["rows"]["train"] == 4
    assert all(entry["on_tasks"].keys() == SILOS.keys() for entry in done.silos.values())


def test_a_silo_may_be_called_as_the_task_of_another(data, config, tmp_path):
    """`echo` and `always` hold task `noun`; the silo of task `echo` is called `other`. Three sets stay three."""
    silos = {"echo": ("echo", "noun"), "always": ("always", "noun"), "other": ("noun", "echo")}
    lines = [f"- {{name: {n}, path: {data / d}, task: {t}, kind: generation, " for n, (d, t) in silos.items()]
    rest = "text: [instruction, input], label: output}\n"
    (tmp_path / "own.yaml").write_text("silos:\n" + "".join(line + rest for line in lines))
    words = [f"backbone={config('fedit').backbone.name}", "method=fedit", "tuner=lora", "head=lm"]
    words += ["head.max_new_tokens=2", "precision=fp32", "threads=1"]
    federation = build(read_config(str(tmp_path / "own.yaml"), words))
    found = judged_on_all_tasks(federation)
    assert found.own == {name: name for name in silos}
    assert all(row.keys() == silos.keys() for row in found.measured.values())


@pytest.mark.parametrize("method", ["fedlora", pytest.param("feddpa-f", marks=pytest.mark.long)])
def test_every_round_judged_as_if_it_was_the_last(config, tmp_path, method):
    """Round 1 has the scores of a run of one round; the run itself ends in the same bits as without."""

    def finished(name, *words):
        done = run(config(method, "train.lr=0.01", "data.tasks=echo,noun", *words), out=tmp_path / name)
        return done.summary, {event["round"]: event for event in logged(done.folder, "evaluation")}

    judged = ("evaluation.per_round=true", "evaluation.finish_per_round=true")
    alone, last_alone = finished("one", "rounds=1", "evaluation.per_round=true")
    plain, only_last = finished("plain", "rounds=2", "evaluation.per_round=true")
    whole, every = finished("whole", "rounds=2", *judged)
    assert (only_last.keys(), every.keys()) == ({2}, {1, 2})
    measures = ("personalization", "test_time")
    assert [every[1][key] for key in measures] == [last_alone[1][key] for key in measures]
    assert [every[2][key] for key in measures] == [only_last[2][key] for key in measures]
    assert whole["state_sha256"] == plain["state_sha256"] != alone["state_sha256"]
    assert (whole["best_round"], whole["bytes_down"]) == (plain["best_round"], plain["bytes_down"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluation.unseen=nou",), "noun"),
        (("evaluation.unseen=noun", "evaluation.new_silos=noun"), "appears twice"),
        (("evaluation.unseen=noun,echo,always",), "no silo is left"),
        (("evaluation.test_time=false", "evaluation.per_round=true"), "test_time=true"),
        (("method=fedlora", "evaluation.new_silos=noun"), "allowed: feddpa-f"),
        (("method.weighting=fixed", "evaluation.new_silos=noun"), "allowed: feddpa-f"),
        (("method.samples=0",), "method.samples"),
        (("method.alpha=1.5",), "method.alpha"),
        (("partition=iid", "data.tasks=noun", "data.parts=2"), "data.parts"),
    ],
)
def test_what_cannot_be_is_said(config, words, said):
    with pytest.raises(InputError) as error:
        build(config("feddpa-t", *words))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["test_time=true", "unseen=noun", "new_silos=noun", "finish_per_round=true"])
def test_other_engines_refuse_what_needs_other_silos(config, word):
    with pytest.raises(InputError, match=rf"^evaluation\.{word.split('=')[0]}: .* use --engine inprocess$"):
        check_federated(config("feddpa-f", "evaluation.test_time=false", f"evaluation.{word}"))


def test_predict_explains_itself(silotune, finished, tmp_path):
    """JSON lines: the answer, and the weights it was written with; the mean of the similarities, times λ."""
    (tmp_path / "texts").write_text("echo warm\nnoun kind\tnow\n", encoding="utf-8")
    outcome = silotune("predict", finished.folder, "--silo", "echo", "--file", tmp_path / "texts", "--explain")
    assert (outcome.code, outcome.err) == (0, "")
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    model = finished.model("echo")
    assert [line["answer"] for line in lines] == model.write(["echo warm", ("noun kind", "now")])
    for line, why in zip(lines, model.explain(["echo warm", ("noun kind", "now")]), strict=True):
        assert line["alpha"] == pytest.approx(why.alpha)
        assert line["mix"] == pytest.approx({"global": 1 - line["alpha"], "private": line["alpha"]}, abs=1e-6)
        trained = finished.federation.silos["echo"].state is not None
        expected = 0.5 * np.mean(line["similarities"]) if trained else 0
        assert line["alpha"] == pytest.approx(expected, abs=1e-6)
    plain = silotune("predict", finished.folder, "--silo", "echo", "--text", "echo warm")
    assert json.loads(plain.out).keys() == {"text", "answer"}


def test_tables_and_figures_of_both_measures(silotune, finished, config, tmp_path):
    other = run(config("fedit", "rounds=1", "evaluation.unseen=noun"), out=tmp_path / "fedit")
    outcome = silotune("personalization", finished.folder, other.folder, "--out", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    text = (tmp_path / "out" / "tables.md").read_text()
    blocks = text.split("## ")[1:]
    assert [block.split(" (%)")[0] for block in blocks] == [
        "personalization", "test-time personalization", "tasks left out of training",
    ]  # fmt: skip
    for block, key in zip(blocks, ("personalization", "test_time"), strict=False):
        rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in block.splitlines() if "|" in line}
        for done in (finished, other):
            (name,) = [label for label in rows if label.startswith(done.summary["method"])]
            mean = np.mean([silo[key] for silo in done.silos.values()])
            assert f"{mean:.2f}" in rows[name][-1]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "tables.md",
        "tables.tex",
        "silo-task.png",
        "rounds.png",
    }
    plain = run(config("fedit", "rounds=1", "evaluation.test_time=false"), out=tmp_path / "plain")
    refused = silotune("personalization", plain.folder, "--out", tmp_path / "none")
    assert refused.code == 2
    assert "evaluation.test_time=true" in refused.err


def test_a_folder_for_the_tables_that_cannot_be_made(silotune, finished, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused = silotune("personalization", finished.folder, "--out", tmp_path / "file" / "out")
    assert refused.code == 2
    assert f"--out {tmp_path / 'file' / 'out'}: cannot be made" in refused.err
    assert len(refused.err.splitlines()) == 1


@pytest.mark.parametrize(("clip", "expected"), [(True, [1.0, 0.0, 1.0]), (False, [1.0, -1.0, 1.0])])
def test_a_text_unlike_the_rows_has_no_negative_weight(clip, expected):
    """In tiny models all cosines are positive, so this one is made by hand."""
    weighting = InstanceWeighting("private", "global", {}, scale=0.5, clip=clip)
    instances = {VECTORS: torch.tensor([[2.0, 0.0], [-3.0, 0.0]])}
    found = weighting.similarities(instances, torch.tensor([[1.0, 0.0]]), torch.tensor([[0, 1, 0]]))
    assert found.tolist() == [expected]
    assert weighting.alpha(found).tolist() == pytest.approx([0.5 * sum(expected) / 3])
