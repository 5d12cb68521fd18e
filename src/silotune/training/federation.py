"""What a run consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from silotune.communication.privacy.budget import Privacy
from silotune.config import Config
from silotune.data.tasks import Task
from silotune.methods import Method
from silotune.models.backbone.backbone import Backbone
from silotune.training.client import SiloClient
from silotune.training.cohort import ALONE, Cohort
from silotune.training.context import TrainingContext
from silotune.training.coordinator import Coordinator
from silotune.training.local_trainer import LocalTrainer
from silotune.training.silo import Evaluation, Silo


@dataclass
class Federation:
    """Everything a run needs."""

    config: Config
    backbone: Backbone
    method: Method
    silos: dict[str, Silo]
    context: TrainingContext
    coordinator: Coordinator
    tasks: Mapping[str, Task]
    """Silo name → its task, before a centralised method puts silos together."""
    texts: Mapping[str, int]
    """Silo name → how many texts a row has."""
    server: Silo | None = None
    """The coordinator's own labeled rows, where the method trains there."""
    central: Evaluation | None = None
    """The rows on which all silos are judged together, where one data set is partitioned."""
    malicious: tuple[str, ...] = ()
    """The silos that attack, in name order."""
    absent: Mapping[str, Silo] = field(default_factory=dict)
    """What `evaluation` keeps out of training, by name."""
    privacy: Privacy | None = None
    """What the run promises; None where nothing is noised, or nothing is sent."""
    cohort: Cohort = ALONE
    """How many silos train together, where one process trains several."""

    @property
    def rounds(self) -> int:
        """As configured, or as many as the privacy budget lasts for."""
        return self.config.rounds if self.privacy is None else self.privacy.rounds

    @property
    def trainer(self) -> LocalTrainer:
        """Trains the silos of this federation."""
        return LocalTrainer(self.context)

    def client(self) -> SiloClient:
        """Return a silo's side of the exchange, for any of the silos."""
        noised_in_silos = self.config.uplink.noise is not None
        privacy_guarantee = self.privacy if noised_in_silos else None
        return SiloClient(self.trainer, self.coordinator.expected, self.coordinator.uplink, privacy_guarantee)
