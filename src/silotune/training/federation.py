"""Hold the objects of a run: configuration, context, silos, coordinator and privacy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from silotune.aggregation import BY_ROWS
from silotune.communication.privacy.accountant import Privacy
from silotune.config import Config
from silotune.data.tasks import Task, lower_is_better
from silotune.methods import Method
from silotune.models.backbone.backbone import Backbone
from silotune.training.at_once import ALONE, Cohort
from silotune.training.client import SiloClient
from silotune.training.context import TrainingContext
from silotune.training.coordinator import Coordinator
from silotune.training.local_trainer import LocalTrainer
from silotune.training.silo import EvaluationRows, Silo


@dataclass(frozen=True)
class Federation:
    """Everything that a run consists of.

    Args:
        config: the run's configuration.
        context: backbone, method and parts, as local rounds read them.
        silos: the training silos by name.
        coordinator: holds the shared parts.
        tasks: silo name → task, before a centralized method puts silos together.
        texts: silo name → number of texts in a row (2 for pairs).
        server: the coordinator's own labeled rows, if the method trains there.
        malicious: names of the attacking silos, in name order.
        absent: silos that `evaluation` keeps out of training, by name.
        privacy: the privacy guarantee; None if nothing is noised, or nothing is sent.
        cohort: how many silos train together in one process.
    """

    config: Config
    context: TrainingContext
    silos: Mapping[str, Silo]
    coordinator: Coordinator
    tasks: Mapping[str, Task]
    texts: Mapping[str, int]
    server: Silo | None = None
    malicious: tuple[str, ...] = ()
    absent: Mapping[str, Silo] = field(default_factory=dict)
    privacy: Privacy | None = None
    cohort: Cohort = ALONE

    @property
    def backbone(self) -> Backbone:
        """The backbone of all silos."""
        return self.context.backbone

    @property
    def method(self) -> Method:
        """The method, over its tuner and head."""
        return self.context.method

    @property
    def central(self) -> EvaluationRows | None:
        """The rows that all silos are judged on alike, if one data set is partitioned; otherwise None."""
        if not self.config.partition.judges_alike:
            return None
        return next(evaluation for silo in self.silos.values() for evaluation in silo.evaluations.values())

    @property
    def lower_is_better(self) -> bool:
        """Whether lower validation scores are better."""
        metrics = (task.metric for task in self.tasks.values())
        return self.config.validates_by_loss or any(map(lower_is_better, metrics))

    @property
    def rounds(self) -> int:
        """The number of rounds: as configured, or as many as the privacy budget lasts for."""
        return self.config.rounds if self.privacy is None else self.privacy.rounds

    @cached_property
    def trainer(self) -> LocalTrainer:
        """Trains the silos of this federation."""
        return LocalTrainer(self.context)

    def sent_numbers(self, number: int) -> Counter[str]:
        """Return how many numbers of each part leave a silo in a round, before the uplink."""
        parts, numbers = self.method.sends(number), Counter[str]()
        for name, shape in self.coordinator.expected.shapes.items():
            if (part := name.partition("/")[0]) in parts:
                numbers[part] += math.prod(shape)
        return numbers

    @property
    def numbers_in_all(self) -> int:
        """How many numbers leave a silo in all rounds, before the uplink."""
        kinds = self.method.kinds_of_rounds(self.config.rounds)
        return sum(count * self.sent_numbers(number).total() for number, count in kinds.items())

    def client(self, measures: bool = False) -> SiloClient:
        """Return a silo's side of the exchange, for any of the silos; `measures`: as in `SiloClient`."""
        noised_in_silos = self.config.uplink.noise is not None
        privacy = self.privacy if noised_in_silos else None
        summands = (
            (self.context.draw_seed, self.config.aggregation.name in BY_ROWS) if self.coordinator.secure else None
        )
        expected, uplink = self.coordinator.expected_of, self.coordinator.uplink
        return SiloClient(self.trainer, expected, uplink, privacy, measures, summands)
