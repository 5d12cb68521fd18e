"""Federations on the fake CUDA device, and everything that is done with a model on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from silotune.config import Config
from silotune.core.tensors import flatten
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state, score_silos
from silotune.evaluation.personalization import score_test_time as every_model_on_every_task
from silotune.methods import METHODS
from silotune.models.forward.mixing import can_share_forward
from silotune.runs.build.builder import build
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.personal_model import PersonalModel
from silotune.training.federation import Federation
from tests.support.fake_cuda import build_guard, fake_cuda, load_guard, to_fake_cuda
from tests.support.language_models import folder_of
from tests.support.preferences import write_kinds
from tests.support.tiny import ONE_TASK

WORDS = "head.words={bad: awful, good: [great, warm], other: cold, same: kind}"
COMMON = (
    *("precision=fp32", "device=cpu", "threads=1", "data.merge=false", "rounds=1"),
    *("train.batch_size=6", "train.steps=1", "per_method={}"),
)
HEAD_WORDS: dict[str, tuple[str, ...]] = {
    "mlp": ("head=mlp",),
    "linear": ("head=linear",),
    "verbalizer": ("head=verbalizer", WORDS),
    "entities": ("head=entities", "data.task=names", "data.labels=[PER,LOC]"),
    "retrieval": ("head=retrieval", "data.task=passages"),
    "lm": ("head=lm", "head.max_new_tokens=3"),
    "dpo": ("head=dpo", "head.max_new_tokens=3"),
}
SERVER = ("server.labels_per_class=2", "partition=iid", "partition.silos=2")


@pytest.fixture(scope="session")
def device() -> None:
    """The fake device is known to PyTorch."""
    load_guard(build_guard())


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kinds(tmp_path_factory.mktemp("placement"), {"train": 8, "validation": 2, "test": 3})


def config_of(
    method: str, head: str, words: Sequence[str], data: Path, models: Path, family: str | None = None
) -> Config:
    """Return the configuration of a method under a head, over `write_kinds`' rows and a tiny model of a family."""
    rows = {"lm": "texts", "dpo": "pairs", "entities": "marks", "retrieval": "queries"}.get(head, "classes")
    texts = head in ("lm", "dpo")
    folder = folder_of(family or ("llama" if texts else "bert"), models)
    tasks = "echo,always" if texts else "alpha" if method in ONE_TASK else "alpha,beta"
    own = [f"method={method}", f"backbone={folder}", f"data.tasks=[{tasks}]", f"data.path={data / rows}"]
    own += [f"train.max_length={64 if texts else 32}", *HEAD_WORDS[head], *(SERVER if method in ONE_TASK else ())]
    return read_config("demo", [*own, *words])


Make = Callable[..., Federation]


@pytest.fixture(scope="session")
def make(device: None, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make(method, head, *words)` → a federation of two silos; `on_cuda=False`: on the CPU; `blocks`: some there."""
    models = tmp_path_factory.mktemp("models")

    def federation(
        method: str,
        head: str,
        *words: str,
        family: str | None = None,
        on_cuda: bool = True,
        blocks: Mapping[str, torch.device] | None = None,
    ) -> Federation:
        config = config_of(method, head, [*COMMON, *words], data, models, family)
        backbone = BackboneRequirements.of(config, make_method(config)).load()
        if not on_cuda:
            return build(config, backbone)
        with fake_cuda():
            return build(config, to_fake_cuda(backbone, blocks))

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
    federation.client().rounds([*federation.silos.values()], federation.coordinator.broadcast(2))


def final_phases(federation: Federation) -> None:
    federation.client().finals([*federation.silos.values()], federation.coordinator.broadcast(2))


def late_adaptation(federation: Federation) -> None:
    silo = next(iter(federation.silos.values()))
    federation.trainer.adapt(silo, federation.coordinator.shared, 3, from_start=False)


def server_step(federation: Federation) -> None:
    assert federation.server is not None
    result = federation.trainer.server_step(federation.server, federation.coordinator.shared, 1)
    federation.coordinator.adopt(result.state)


def validation(federation: Federation) -> None:
    assert all(value is not None for value in score_silos(federation, "validation").values())


def test_time_scores(federation: Federation) -> None:
    every_model_on_every_task(federation)


test_time_scores.__test__ = False  # type: ignore[attr-defined]


def prediction(federation: Federation) -> list[object]:
    """Answers of one silo's personal model, and the weights of its parts."""
    silo = next(iter(federation.silos.values()))
    task = federation.tasks[next(iter(federation.tasks))]
    state = current_model_state(federation, silo)
    texts_per_row = federation.texts.get(task.name, 1)
    model = PersonalModel(federation.context, federation.method.setting.tuner, state, task, texts_per_row, {})
    texts: list[str | tuple[str, str]] = ["the garden was kind", "a song"]
    if model.context.method.name == "fedalt":
        with pytest.raises(InputError, match="weighs its adapters per token"):
            model.explain(texts)
    else:
        assert len(model.explain(texts)) == 2
    if task.kind == "generation":
        return list(model.write(texts))
    if task.rules.gives == "vectors":
        return [*model.embed([str(text) for text in texts]).flatten()]
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
    """Make a federation; skip heads that a run of the method refuses on any device."""
    try:
        return make(method, head, *words)
    except InputError as refusal:
        skip_refused(method, head, refusal)


def skip_refused(method: str, head: str, refusal: InputError) -> NoReturn:
    """Skip a head that a run of the method refuses; the method's own head must be possible."""
    if head == METHODS[method].defaults.get("head", "mlp"):
        raise refusal
    pytest.skip(f"refused: {refusal}")
