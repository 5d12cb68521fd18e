"""One run from configuration to summary, and what a user holds afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from silotune.assembly.building import build
from silotune.assembly.configuration import read_config
from silotune.assembly.federation import Federation
from silotune.averages import mean_of_known
from silotune.backbone import Backbone
from silotune.config import Config, dump
from silotune.data.batching import TokenisedRows
from silotune.data.metrics import majority_score
from silotune.data.tasks import Row, Task
from silotune.engines.base import Engine, Progress
from silotune.engines.inprocess import InProcess
from silotune.errors import OR_RESUME, InputError, require_unused, unknown
from silotune.evaluation.backdoor import overall
from silotune.evaluation.instances import keep_instances, weigh
from silotune.evaluation.newcomers import join
from silotune.evaluation.predict import answers, logits
from silotune.evaluation.scores import mean, state_of
from silotune.evaluation.testtime import unseen
from silotune.interop.start import keep_start
from silotune.parts import Scope, State, count, digest, flatten
from silotune.runs import working_in, write_text
from silotune.training import LocalTraining
from silotune.tuners import Tuner
from silotune.views import settled


@dataclass(frozen=True)
class Prediction:
    """One text's label and the probability of every label."""

    label: str
    probabilities: dict[str, float]


@dataclass(frozen=True)
class Explanation:
    """What one text is answered with: each part's weight.

    Where weights are found anew for each text: `alpha`, and `similarities` to the silo's rows that were drawn for it.
    """

    mix: dict[str, float]
    alpha: float | None = None
    similarities: list[float] | None = None


class PersonalModel:
    """A silo's personalised model."""

    def __init__(self, training: LocalTraining, state: State, task: Task, max_length: int) -> None:
        self._training = training
        self._state = state
        self._max_length = max_length
        self.task = task

    def predict(self, texts: Sequence[str | tuple[str, str]]) -> list[Prediction]:
        """Classify texts, or pairs of texts.

        Raises:
            InputError: if single texts and pairs are mixed.
        """
        if self.task.kind != "classification":
            raise InputError(f"predict: task {self.task.name!r} is one of generation; use write")
        probabilities = torch.softmax(logits(self._training, self._state, self._encoded(texts)), -1).tolist()
        found = [dict(zip(self.task.labels, row, strict=True)) for row in probabilities]
        return [Prediction(max(row, key=row.__getitem__), row) for row in found]

    def write(self, instructions: Sequence[str | tuple[str, str]]) -> list[str]:
        """Answer instructions, or pairs of instruction and input.

        Raises:
            InputError: if the silo's task is one of classification.
        """
        if self.task.kind != "generation":
            raise InputError(f"write: task {self.task.name!r} is one of classification; use predict")
        return answers(self._training, self._state, self._encoded(instructions))

    def explain(self, texts: Sequence[str | tuple[str, str]]) -> list[Explanation]:
        """With which weights the model's parts answer each text.

        Raises:
            InputError: as `predict` and `write`.
        """
        prediction = self._training.method.prediction()
        found = weigh(self._training, self._state, self._encoded(texts))
        if found is None:
            fixed = {name: float(weight) for name, weight in settled(prediction.mix, self._state).items()}
            return [Explanation(fixed) for _ in texts]
        mix = {name: torch.as_tensor(weights).tolist() for name, weights in prediction.mixed(found.alpha).items()}
        return [
            Explanation({name: weights[row] for name, weights in mix.items()}, alpha, similarities)
            for row, (alpha, similarities) in enumerate(
                zip(found.alpha.tolist(), found.similarities.tolist(), strict=True)
            )
        ]

    def _encoded(self, texts: Sequence[str | tuple[str, str]]) -> TokenisedRows:
        """Texts as token ids; a missing input of an instruction is an empty one."""
        single = ("",) if self.task.kind == "generation" else ()
        rows = [Row((text, *single) if isinstance(text, str) else tuple(text), 0) for text in texts]
        if len({len(row.texts) for row in rows}) > 1:
            raise InputError("predict: give either single texts or pairs, not both")
        training = self._training
        return training.method.setting.head.tokeniser(training.backbone, self._max_length)(self.task, rows)


@dataclass
class Run:
    """A finished run: its summary, and every silo's personalised model at the best round."""

    folder: Path
    summary: dict[str, Any]
    federation: Federation

    @property
    def silos(self) -> dict[str, dict[str, Any]]:
        """Per silo: metric, validation and test score (percent), row counts."""
        return dict(self.summary["silos"])

    def model(self, silo: str) -> PersonalModel:
        """The silo's personalised model.

        Raises:
            InputError: if there is no such silo.
        """
        for owner in self.federation.silos.values():
            if silo in owner.evaluations:
                task = owner.evaluations[silo].test.task
                max_length = self.federation.config.train.max_length
                return PersonalModel(self.federation.training, state_of(self.federation, owner), task, max_length)
        raise unknown("silo", silo, self.silos)


def run(
    source: str | Config,
    *overrides: str,
    out: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
    backbone: Backbone | None = None,
    announce: Callable[[str], None] | None = None,
) -> Run:
    """Run a preset, a YAML file or a configuration.

    Args:
        source: preset name, path of a YAML file, or a `Config`.
        overrides: `key=value` words.
        out: the run folder; must be new or empty unless `resume`.
        resume: continue an interrupted run (a finished one is only summarised again).
        progress: called before every piece of work.
        backbone: one already loaded, to run several configurations over it.
        announce: called with each line that belongs before the first round: what the run's noise promises.

    Raises:
        InputError: for bad configuration or data, before any training.
    """
    config = source if isinstance(source, Config) else read_config(source, list(overrides))
    path = Path(out)
    if not resume:
        require_unused(path, "--out", OR_RESUME)
    federation = build(config, backbone)
    if federation.privacy is not None:
        federation.privacy.require_a_round()
    config = federation.config
    with working_in(path, dump(config), federation.backbone.fingerprint, resume) as folder:
        keep_start(path, federation.training)
        engine = InProcess(federation, folder, progress)
        if announce is not None and federation.privacy is not None:
            for line in federation.privacy.lines():
                announce(line)
        engine.run()
        shared, whole = digest(flatten(federation.coordinator.shared)), state_digest(federation)
        best = engine.load_best()
        summary = summarise(engine) | {"best_round": best, "shared_sha256": shared, "state_sha256": whole}
        keep_instances(path, federation.silos.values())
        write_text(path / "summary.json", json.dumps(summary, indent=1) + "\n")
    return Run(path, summary, federation)


def state_digest(federation: Federation) -> str:
    """sha256 over the shared parts, the server optimiser's state and every silo's private parts and memory."""
    tensors = federation.coordinator.flat()
    for silo in federation.silos.values():
        kept = federation.training.state_of(silo).flat()
        tensors |= {f"silo/{silo.name}/{name}": tensor for name, tensor in kept.items()}
    return digest(tensors)


def summarise(engine: Engine) -> dict[str, Any]:
    """`summary.json` without digests, at the federation's present state."""
    federation, history = engine.federation, engine.history
    config = federation.config
    taking_part = {name for silo in engine.took_part for name in federation.silos[silo].evaluations}
    silos = {name: entry | {"sampled": name in taking_part} for name, entry in engine.results().items()}
    central = central_result(federation, silos)
    attack = overall(silos, federation.malicious)
    return {
        "method": config.method.name,
        "backbone": config.backbone,
        "seed": config.seed,
        "rounds": federation.rounds,
        "engine": engine.name,
        "precision": federation.backbone.precision,
        "threads": torch.get_num_threads(),
        "cohort": engine.cohort,
        "seconds": round(history.seconds, 3),
        "samples_per_second": round(history.training_rows / max(history.training_seconds, 1e-9), 2),
        **parameters(federation),
        "bytes_up": history.bytes_up,
        "bytes_down": history.bytes_down,
        "silos": silos,
        "tasks": {
            name: asdict(task) | {"labels": list(task.labels), "texts": federation.texts[name]}
            for name, task in federation.tasks.items()
        },
        "global": central,
        **left_out(federation),
        "average": central["test"] if central else mean_test(silos),
        **average_sampled(silos, central),
        **({"attack": attack} if attack else {}),
        **({"privacy": federation.privacy.summary()} if federation.privacy else {}),
    }


def mean_test(silos: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The mean test score over the silos that have one: on other machines a silo may keep its own to itself."""
    return mean_of_known(silo["test"] for silo in silos.values())


def average_sampled(
    silos: Mapping[str, Mapping[str, Any]], central: Mapping[str, Any] | None
) -> dict[str, float | None]:
    """The mean over the silos that ever took part, where some did not and silos are judged one by one."""
    if central or all(silo["sampled"] for silo in silos.values()):
        return {}
    return {"average_sampled": mean_test({name: silo for name, silo in silos.items() if silo["sampled"]})}


def left_out(federation: Federation) -> dict[str, Any]:
    """What models do on tasks kept out of training, and what becomes of new silos, where there are such."""
    config = federation.config.evaluation
    found: dict[str, Any] = {"unseen": unseen(federation)} if config.unseen else {}
    if config.new_silos:
        found["new_silos"] = {name: join(federation, federation.absent[name]) for name in config.new_silos}
    return found


def central_result(federation: Federation, silos: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The score on the central rows, where one data set is partitioned; with private parts, the mean over silos.

    `majority`: what always answering the test rows' most frequent label scores; None for generation.
    """
    if federation.central is None:
        return None
    test = federation.central.test
    task = test.task
    known = task.kind == "classification" and len(test)
    return {
        "metric": task.metric,
        "validation": mean({name: silo["validation"] for name, silo in silos.items()}),
        "test": mean({name: silo["test"] for name, silo in silos.items()}),
        "majority": majority_score(task.metric, test.labels) if known else None,
    }


def parameters(federation: Federation) -> dict[str, int]:
    """Parameter counts of one silo, the largest where heads differ: trained, sent, and adapters and heads apart."""
    shared = federation.coordinator.shared
    largest = {"trainable_parameters": 0, "sent_parameters": 0, "adapter_parameters": 0, "head_parameters": 0}
    for silo in federation.silos.values():
        state = shared | federation.training.state_of(silo).private
        sizes = {name: count(tensors) for name, tensors in state.items()}
        parts = federation.training.parts
        adapters = sum(size for name, size in sizes.items() if isinstance(parts[name].module, Tuner))
        found = {
            "trainable_parameters": sum(sizes.values()),
            "sent_parameters": sum(size for name, size in sizes.items() if parts[name].scope is Scope.SHARED),
            "adapter_parameters": adapters,
            "head_parameters": sum(sizes.values()) - adapters,
        }
        largest = {key: max(largest[key], found[key]) for key in largest}
    return largest
