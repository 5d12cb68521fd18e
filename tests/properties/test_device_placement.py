"""Nothing is left on the CPU where a model is used, and nothing stays on the device: every method, head and action.

The device is a fake one (`tests/support/fake_cuda.py`), which needs no GPU. Round, final phases, server step, scores,
test-time personalization, prediction and generation run as they are; only the backward pass is replaced. With
`SILOTUNE_TEST_DEVICE=cuda` they run on a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from silotune.core.tensors import flatten
from silotune.errors import InputError
from silotune.evaluation.federation_scores import score_silos
from silotune.evaluation.personalization import score_test_time as every_model_on_every_task
from silotune.methods import METHODS
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import can_share_forward
from silotune.models.heads import HEADS
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import BackboneRequirements, make_method, read_config
from silotune.runs.personal_model import PersonalModel
from silotune.training.federation import Federation
from tests.support.chats import write_lines
from tests.support.fake_cuda import (
    MISMATCH,
    build_guard,
    counted_syncs,
    fake_cuda,
    is_on_device,
    is_tensor_on_device,
    load_guard,
    to_fake_cuda,
    without_float64,
)
from tests.support.language_models import folder_of
from tests.support.tiny import write_data

WORDS = "head.words={bad: awful, good: [great, warm], other: cold, same: kind}"
COMMON = (
    *("precision=fp32", "device=cpu", "threads=1", "data.merge=false", "aggregation=uniform", "rounds=1"),
    *("train.batch_size=6", "train.steps=1", "per_method={}"),
)
HEAD_WORDS: dict[str, tuple[str, ...]] = {
    "mlp": ("head=mlp",),
    "linear": ("head=linear",),
    "verbalizer": ("head=verbalizer", WORDS),
    "lm": ("head=lm", "head.max_new_tokens=3"),
    "dpo": ("head=dpo", "head.max_new_tokens=3"),
}
SERVER = ("server.labels_per_class=2", "partition=iid", "partition.silos=2", "head.scope=shared")


def quick(method: str, head: str) -> bool:
    """Whether a case runs in the short suite: every method once, with the head that it brings along."""
    return head == METHODS[method].defaults.get("head", "mlp")


CASES = [
    pytest.param(method, head, id=f"{method} {head}", marks=[] if quick(method, head) else [pytest.mark.long])
    for method in METHODS
    for head in HEADS
]
every_case = pytest.mark.parametrize(("method", "head"), CASES)


@pytest.fixture(scope="session")
def _device(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_guard(build_guard(tmp_path_factory.mktemp("guard")))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`classes/`: two tasks of classification; `texts/` and `pairs/`: two tasks of instructions, and of preferences."""
    root = tmp_path_factory.mktemp("placement")
    rows = {"train": 8, "validation": 2, "test": 3}
    write_data(root / "classes", ["alpha", "beta"], rows)
    for task in ("echo", "always"):
        for kind in ("texts", "pairs"):
            (root / kind / task).mkdir(parents=True)
        for split, count in rows.items():
            lines = [{"instruction": f"say {n}", "input": "now" * (n % 2), "output": "sweet"} for n in range(count)]
            write_lines(root / "texts" / task / f"{split}.jsonl", lines)
            pairs = [{"prompt": f"say {n}", "chosen": "sweet " * (n % 3 + 1), "rejected": "cold"} for n in range(count)]
            write_lines(root / "pairs" / task / f"{split}.jsonl", pairs)
    return root


Make = Callable[..., Federation]


@pytest.fixture(scope="session")
def make(_device: None, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make(method, head, *words)` → a federation of two silos; with `on_cuda=False` on the CPU."""
    models = tmp_path_factory.mktemp("models")

    def federation(method: str, head: str, *words: str, family: str | None = None, on_cuda: bool = True) -> Federation:
        rows = {"lm": "texts", "dpo": "pairs"}.get(head, "classes")
        texts = rows != "classes"
        folder = folder_of(family or ("llama" if texts else "bert"), models)
        tasks = "echo,always" if texts else "alpha" if method == "fedfame" else "alpha,beta"
        own = [f"method={method}", f"backbone={folder}", f"data.tasks=[{tasks}]"]
        own += [f"data.path={data / rows}", f"train.max_length={64 if texts else 32}"]
        server = SERVER if method == "fedfame" else ()
        config = read_config("demo", [*own, *COMMON, *HEAD_WORDS[head], *server, *words])
        backbone = BackboneRequirements.of(config, make_method(config)).load()
        if not on_cuda:
            return build(config, backbone)
        with fake_cuda():
            return build(config, to_fake_cuda(backbone))

    return federation


# -- what is done with a model -----------------------------------------------------------------------------------------


def local_rounds(federation: Federation) -> None:
    """One round of each silo, alone; the coordinator adopts what the last one shares."""
    client, broadcast = federation.client(), federation.coordinator.broadcast(1)
    for silo in federation.silos.values():
        (reply,) = client.rounds([silo], broadcast)
        if reply.message:
            federation.coordinator.aggregate([federation.coordinator.receive(1, silo.name, reply.message)], 1)


def cohort(federation: Federation) -> None:
    """One round of all silos together."""
    federation.client().rounds([*federation.silos.values()], federation.coordinator.broadcast(2))


def final_phases(federation: Federation) -> None:
    """The phases after the last round."""
    federation.client().finals([*federation.silos.values()], federation.coordinator.broadcast(2))


def late_adaptation(federation: Federation) -> None:
    """The training of a silo that joins late."""
    silo = next(iter(federation.silos.values()))
    federation.trainer.adapt(silo, federation.coordinator.shared, 3, from_start=False)


def server_step(federation: Federation) -> None:
    """The coordinator's own training."""
    assert federation.server is not None
    result = federation.trainer.server_step(federation.server, federation.coordinator.shared, 1)
    federation.coordinator.adopt(result.state)


def validation(federation: Federation) -> None:
    """Validation scores of every silo."""
    assert all(value is not None for value in score_silos(federation, "validation").values())


def test_time_scores(federation: Federation) -> None:
    """Every silo's model on every task."""
    every_model_on_every_task(federation)


test_time_scores.__test__ = False  # type: ignore[attr-defined]


def prediction(federation: Federation) -> list[object]:
    """Answers of one silo's personal model, and the weights of its parts."""
    silo = next(iter(federation.silos.values()))
    task = federation.tasks[next(iter(federation.tasks))]
    model = PersonalModel(
        federation.context, silo, federation.coordinator.shared, task, federation.texts.get(task.name, 1)
    )
    texts: list[str | tuple[str, str]] = ["the garden was kind", "a song"]
    assert len(model.explain(texts)) == 2
    if task.kind == "generation":
        return list(model.write(texts))
    return [answer.probabilities for answer in model.predict(texts)]


def actions(federation: Federation) -> dict[str, Callable[[Federation], object]]:
    """What there is to do with a federation, in order."""
    context = federation.context
    found: dict[str, Callable[[Federation], object]] = {}
    if context.phases:
        found["round"], found["second round"] = local_rounds, local_rounds
    if any(phase.when == "end" for phase in context.phases):
        found["final phases"] = final_phases
    if federation.server is not None:
        found["server step"] = server_step
    if context.phases and all(can_share_forward(context.backbone, tuner) for tuner in context.tuners):
        found["cohort"] = cohort
    if context.method.name.startswith("feddpa"):
        found["late adaptation"] = late_adaptation
    found["validation"] = validation
    if not context.method.setting.head.has_tensors:
        found["test-time personalization"] = test_time_scores
    found["prediction"] = prediction
    return found


def at_rest(federation: Federation) -> list[Tensor]:
    """All tensors that a federation keeps between calls."""
    kept = [*flatten(federation.coordinator.shared).values()]
    for silo in federation.silos.values():
        kept += [] if silo.state is None else silo.state.flat().values()
        kept += [] if silo.instances is None else silo.instances[1].values()
    return kept


def made_or_skipped(make: Make, method: str, head: str, *words: str) -> Federation:
    """Make a federation; skip combinations that a run refuses on any device."""
    try:
        return make(method, head, *words)
    except InputError as refusal:
        pytest.skip(f"refused: {refusal}")


# -- every case --------------------------------------------------------------------------------------------------------


@every_case
def test_every_action_runs_on_the_device_and_leaves_its_results_on_the_cpu(make, method, head):
    federation = made_or_skipped(make, method, head)
    assert is_on_device(federation.backbone)
    with fake_cuda():
        for action in actions(federation).values():
            action(federation)
            assert not any(is_tensor_on_device(tensor) for tensor in at_rest(federation))


@every_case
def test_without_placement_every_action_fails(make, method, head, monkeypatch):
    federation = made_or_skipped(make, method, head)
    monkeypatch.setattr(Backbone, "place", lambda self, tensors: dict(sorted(tensors.items())))
    chosen = actions(federation)
    if all(phase.skips_first for phase in federation.context.phases):  # no silo trains in its first round
        chosen = {name: action for name, action in chosen.items() if name not in ("round", "second round", "cohort")}
    with fake_cuda():
        for action in chosen.values():
            with pytest.raises(MISMATCH):
                action(federation)


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("method", ["fedavg", "feddpa-t"])
@pytest.mark.parametrize("beams", [1, 3])
def test_answers_are_those_of_the_cpu(make, method, beams, family):
    words = [f"head.beams={beams}", "tuner=lora", *(["method.adapters=1"] if method == "fedavg" else [])]
    on_cpu = prediction(make(method, "lm", *words, family=family, on_cuda=False))
    federation = make(method, "lm", *words, family=family)
    with fake_cuda():
        assert prediction(federation) == on_cpu


# -- how often the host waits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
def test_the_host_waits_once_for_a_generated_token(make, beams):
    tokens = 6
    words = (f"head.beams={beams}", f"head.max_new_tokens={tokens}", "tuner=lora", "method.adapters=1")
    federation = make("fedavg", "lm", *words)
    with fake_cuda(), counted_syncs() as waits:
        prediction(federation)
    assert waits.total() <= tokens + 1  # and once to see on which side the prompts are padded


@pytest.mark.parametrize("method", ["fedavg", "fedmcp"])
def test_losses_are_fetched_once_a_step_and_states_once_a_round(make, method):
    counts = []
    for steps in (1, 3):
        federation = make(method, "mlp", "tuner=lora", f"train.steps={steps}", "train.batch_size=2")
        with fake_cuda(), counted_syncs() as waits:
            federation.client().rounds([federation.silos["alpha"]], federation.coordinator.broadcast(1))
        counts.append(waits)
    assert [waits["tolist"] for waits in counts] == [1, 3]
    assert counts[0]["to cpu"] == counts[1]["to cpu"] > 0


def test_loss_scaling_waits_once_a_phase(make, monkeypatch):
    """A fused optimizer leaves out a step without asking the host; the number of such steps is fetched at the end."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    waits = {}
    for precision in ("fp32", "fp16"):
        words = ("tuner=lora", "train.steps=3", "train.batch_size=2", f"precision={precision}")
        federation = make("fedavg", "mlp", *words)
        with fake_cuda(), counted_syncs() as waits[precision]:
            client, silo = federation.client(), federation.silos["alpha"]
            (reply,) = client.rounds([silo], federation.coordinator.broadcast(1))
    assert reply.metrics["skipped_steps"] == 0
    assert waits["fp16"] - waits["fp32"] == {"tolist": 1}


@pytest.mark.parametrize("bounded", [pytest.param(False, marks=pytest.mark.long, id="whole"), True])
@pytest.mark.parametrize(
    ("method", "attention"),
    [(method, "eager") for method in METHODS]
    + [pytest.param(method, "sdpa", marks=pytest.mark.long) for method in METHODS],
)
def test_training_waits_once_a_step_however_many_micro_batches(make, method, attention, bounded):
    """Whatever has no padding, some, several views, two passes: only the losses are fetched, and states at the end."""
    head = str(METHODS[method].defaults.get("head", "mlp"))
    federation = made_or_skipped(make, method, head, "train.steps=2", f"backbone.attention={attention}")
    context, silo = federation.context, next(iter(federation.silos.values()))
    if bounded and context.phases:
        longest = max(rows.longest for rows in silo.train.values()) + context.virtual_tokens
        context.tokens_at_once = longest * max(phase.views_with_gradient for phase in context.phases)
    forwards = 0
    with fake_cuda(), counted_syncs() as waits, pytest.MonkeyPatch.context() as patch:
        encode = Backbone.encode

        def counted(*args: object) -> Tensor:
            nonlocal forwards
            forwards += 1
            return encode(*args)  # type: ignore[arg-type]

        patch.setattr(Backbone, "encode", counted)
        taken = 0
        for number in (1, 2):  # in the first round, some methods have no anchors yet
            (reply,) = federation.client().rounds([silo], federation.coordinator.broadcast(number))
            taken += int(reply.metrics["steps"])
    if federation.context.phases:
        assert taken > 0
        assert waits["tolist"] == taken
        assert not waits.keys() - {"tolist", "to cpu"}
        assert not bounded or forwards > taken


@pytest.mark.parametrize(
    ("method", "head"), [("fedmcp", "mlp"), pytest.param("feddpa-t", "lm", marks=pytest.mark.long)]
)
def test_nothing_on_the_device_is_float64(make, method, head):
    """`mps` has no float64. Beams are not searched here: they use it where the device has it."""
    federation = make(method, head)
    with fake_cuda(), without_float64():
        for action in actions(federation).values():
            action(federation)
