"""`Config`: all sections, the keys outside of sections (`rounds`, `seed`, `device`, …), and their joint checks."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from silotune.config.aggregation import AggregationConfig
from silotune.config.attack import AttackConfig
from silotune.config.backbone import BackboneConfig
from silotune.config.comparison import CompareConfig
from silotune.config.data import DATA_SOURCES, DataConfig
from silotune.config.evaluation import EvaluationConfig
from silotune.config.federation import FederationConfig
from silotune.config.generation import GenerationConfig
from silotune.config.head import HeadConfig
from silotune.config.partition import PartitionConfig
from silotune.config.precision import PrecisionConfig
from silotune.config.privacy import PrivacyConfig
from silotune.config.registries import METHODS
from silotune.config.sampling import SamplingConfig
from silotune.config.section import Choice, Section
from silotune.config.server import ServerConfig
from silotune.config.silos import SiloConfig
from silotune.config.train import CacheConfig, CohortSize, StateConfig, TrainConfig
from silotune.config.uplink import UplinkConfig
from silotune.config.validators import Device, distinct


class Config(Section):
    """All keys of a run, a comparison or a sweep.

    The sections have modules of their own.

    Attributes:
        description: what a preset says of itself.
        start: a LoRA that the run's adapters begin with: a folder in peft's format, or a file of `silotune import`.
        method: what is trained, what leaves a silo, and how parts mix at prediction (`silotune methods`).
        tuner: the kind of PEFT of the method's adapters.
        rounds: rounds of the federation.
        seed: the seed from which all random numbers are derived.
        threads: CPU threads of PyTorch. If unset, its own choice; with `flower-local` the cores divided by the silos.
        device: `auto`, `cpu`, or a device of PyTorch such as `cuda:1`.
        cohort: silos that train in one forward; `auto` chooses the number by device and memory.
        per_method: method → keys that it gets instead, in comparisons and sweeps.
    """

    model_config = ConfigDict(validate_default=False)  # a section's defaults were checked when it was made

    description: str = ""
    backbone: BackboneConfig = BackboneConfig()
    start: str | None = Field(None, min_length=1)
    method: Choice = Choice(name="fedmcp")
    tuner: Choice = Choice(name="bottleneck")
    head: HeadConfig = HeadConfig()
    rounds: int = Field(10, ge=1)
    seed: int = Field(1, ge=0, lt=2**31)
    threads: int | None = Field(None, ge=1, le=1024)
    device: Device = "auto"
    precision: PrecisionConfig = PrecisionConfig()
    cache: CacheConfig = CacheConfig()
    state: StateConfig = StateConfig()
    cohort: CohortSize = 1
    train: TrainConfig = TrainConfig()
    sampling: SamplingConfig = SamplingConfig()
    aggregation: AggregationConfig = AggregationConfig()
    server: ServerConfig = ServerConfig()
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    uplink: UplinkConfig = UplinkConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    attack: AttackConfig = AttackConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    generation: GenerationConfig = GenerationConfig()
    silos: list[SiloConfig] = []
    federation: FederationConfig = FederationConfig()
    per_method: dict[str, dict[str, Any]] = {}
    compare: CompareConfig = CompareConfig()

    @property
    def validates_by_loss(self) -> bool:
        """Whether validation rows are judged by the mean loss, not by the task's metric."""
        chosen = self.evaluation.validation
        return chosen == "loss" or (chosen is None and self.head.writes)

    @property
    def data_seed(self) -> int:
        """Seed of the choice of rows: `data.seed`, or the run's seed if that is unset."""
        return self.seed if self.data.seed is None else self.data.seed

    @field_validator("method")
    @classmethod
    def _method_id(cls, method: Choice) -> Choice:
        """Replace an alias by the method's id, so that files contain ids only."""
        name = METHODS.canonical(method.name)
        return method if name == method.name else method.model_copy(update={"name": name})

    @field_validator("silos")
    @classmethod
    def _once(cls, silos: list[SiloConfig]) -> list[SiloConfig]:
        distinct([silo.name for silo in silos])
        return silos

    @model_validator(mode="after")
    def _source(self) -> Config:
        if self.silos:
            for key in DATA_SOURCES:
                if getattr(self.data, key):
                    raise ValueError(f"'silos' and 'data.{key}' exclude each other; give one of them")
        if not self.silos and not self.data.set and not self.data.path and not self.federation.silos:
            raise ValueError("no data: give 'silos', 'data.path' or a preset")
        return self

    @model_validator(mode="after")
    def _noise(self) -> Config:
        local, central = self.uplink.noise is not None, self.aggregation.noise_multiplier is not None
        if local and central:
            raise ValueError("aggregation.noise_multiplier: silos add noise already (uplink); choose one of them")
        given = [key for key in ("epsilon", "delta", "secret") if getattr(self.privacy, key) is not None]
        if given and not local and not central:
            raise ValueError(
                f"privacy.{given[0]}: nothing adds noise; use uplink=clip,laplace, uplink=clip,gaussian or "
                "aggregation.noise_multiplier"
            )
        return self

    @model_validator(mode="after")
    def _rows(self) -> Config:
        partitioned = self.partition.name != "none"
        if partitioned and self.data.rows_per_silo is not None:
            raise ValueError("data.rows_per_silo: not of a data set that is partitioned; use data.rows")
        if not partitioned and self.data.rows is not None:
            raise ValueError("data.rows: of a data set that is partitioned (partition=…); else use data.rows_per_silo")
        return self
