"""The whole configuration: all sections, the keys outside of sections, and the checks across sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from silotune.config.backbone import BackboneConfig, PrecisionConfig
from silotune.config.coordinator import AggregationConfig, FederationConfig, ServerConfig
from silotune.config.data import DATA_SOURCES, AttackConfig, DataConfig, PartitionConfig, SiloConfig
from silotune.config.head import GenerationConfig, HeadConfig
from silotune.config.section import Choice, Section
from silotune.config.train import CacheConfig, CohortSize, SamplingConfig, TrainConfig
from silotune.config.uplink import AuditConfig, PrivacyConfig, UplinkConfig
from silotune.config.validators import ConfigPath, Device, KeyGroup, RowsAtOnce, Words, distinct, listed
from silotune.errors import InputError


class EvaluationConfig(Section):
    """How models are judged: validation, test-time personalization (FedDPA, section 3.1), and silos left out."""

    validation: Literal["metric", "loss"] | None = Field(
        default=None,
        description="the validation score, which chooses the best round: `metric`, or `loss` (generates no answers). "
        "Unset: `loss` for generation, else `metric`.",
    )
    test_time: bool = Field(default=False, description="score every silo's model on the test rows of every task.")
    per_round: bool = Field(
        default=False,
        description="compute test scores, and those of `test_time`, after every round (FedDPA, Figure 3).",
    )
    finish_per_round: bool = Field(
        default=False,
        description="score methods with phases after the last round (FedLoRA, FedDPA-F) after every round: the phases "
        "run, and the silos are then restored.",
    )
    unseen: Words = Field(
        default=[],
        description="tasks (or entries of `silos`) without training; all models are scored on them (FedDPA, Table 14).",
    )
    new_silos: Words = Field(
        default=[],
        description="silos that join after the last round, with the private part of the most similar silo (appendix "
        "C.1).",
    )
    rows_at_once: RowsAtOnce = Field(default=64, description="rows per batch when rows are classified or embedded.")
    bootstrap: int = Field(
        default=1000,
        ge=0,
        le=100_000,
        description="bootstrap resamples of the test rows for 95 % intervals; 0: no intervals.",
    )
    unit: str | None = Field(
        default=None,
        min_length=1,
        description="the column that says whose a row is, such as `document`: a unit's rows stay in one split, and "
        "verdicts draw them together. With noise on rows it is that of `privacy.unit`.",
    )
    baselines: bool = Field(
        default=True,
        description="also score the most frequent label and a bag of words, learned from each silo's training rows, "
        "and for language models the untouched backbone.",
    )
    shots: int = Field(
        default=0, ge=0, le=100, description="also score the untouched backbone after this many training rows."
    )
    predictions: bool = Field(
        default=True, description="write `predictions.parquet`, the prediction for every test row."
    )

    @model_validator(mode="after")
    def _check_names_and_per_round(self) -> EvaluationConfig:
        distinct(self.absent)
        if self.per_round and not self.test_time:
            raise ValueError("per_round is about test_time; give evaluation.test_time=true too")
        return self

    @property
    def absent(self) -> list[str]:
        """The tasks and silos that are left out of the rounds."""
        return [*self.unseen, *self.new_silos]


def _listed_seeds(value: object) -> object:
    """Return one seed or text as a list; pydantic alone would take `true` for 1."""
    seeds = [value] if type(value) is int else listed(value)
    if isinstance(seeds, list) and any(isinstance(seed, bool) for seed in seeds):
        raise ValueError(f"must be whole numbers with commas between (got {value!r})")
    return seeds


Seeds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]],
    BeforeValidator(_listed_seeds),
    AfterValidator(distinct),
]
"""Different seeds: one, a list, or text with commas between."""


class StdConfig(Section):
    """The standard deviation over n seeds: its divisor is n − `ddof`."""

    ddof: Literal[0, 1] = 1


class CompareConfig(Section):
    """Entries and seeds of a comparison.

    Keys for one method alone are in the top-level `per_method`, which `silotune run` reads, too.
    """

    methods: Words = Field(default=[], description="the methods; if empty, the configuration's own method.")
    seeds: Seeds = Field(default=[], description="the seeds; if empty, the configuration's own seed.")
    ablation: bool = Field(default=False, description="add the ablations of each method's paper.")
    variants: dict[str, KeyGroup] = Field(
        default={},
        description="variant → keys that it changes; every method gets an entry per variant. The key `preset` replaces "
        "the preset of the source.",
    )
    grid: dict[str, dict[str, KeyGroup]] = Field(
        default={},
        description="groups of variants; every method gets an entry for each combination of one variant per group, and "
        "none without.",
    )
    best: Annotated[list[ConfigPath], BeforeValidator(listed), AfterValidator(distinct)] = Field(
        default=[], description="folders of `silotune sweep`, for each method's best values."
    )
    std: StdConfig = Field(default=StdConfig(), description="the standard deviation over seeds.")
    against: str = Field(
        default="", description="the entry that the others are judged against; by default `local`, or the first."
    )
    margin: float = Field(default=1.0, gt=0, description="a smaller difference, in points, does not matter.")
    claim: str = Field(default="", description="what the experiment is to show; printed above its verdicts.")
    primary: str = Field(
        default="",
        description="the one entry whose verdict is not corrected for the others; named before the first table.",
    )
    metric: str = Field(default="", description="judge by this metric of the test rows; by default by each silo's own.")
    looks: list[Annotated[int, Field(ge=1)]] = Field(
        default=[],
        description="numbers of seeds after which the results are looked at; seeds added after another look make a "
        "verdict exploratory.",
    )


Figure = Literal["units", "labels", "lengths", "cut", "duplicates", "dates"]
"""A kind of counts of a silo's rows that a survey asks for."""


class SurveyConfig(Section):
    """What silos on other machines are asked about their rows, instead of training (`silotune survey`)."""

    figures: Annotated[list[Figure], BeforeValidator(listed), AfterValidator(distinct)] = Field(
        default=[],
        description="kinds of counts: `units`, `labels`, `lengths` (tokens of rows), `cut` (rows longer than "
        "`train.max_length`), `duplicates` (rows with the texts of an earlier one), `dates` (years).",
    )
    column: str | None = Field(default=None, min_length=1, description="the column of `dates`.")


class Config(Section):
    """All keys of a run, a comparison or a sweep.

    The sections have modules of their own.
    """

    model_config = ConfigDict(validate_default=False)  # a section's defaults were checked when it was made

    description: str = Field(default="", description="description of a preset.")
    backbone: BackboneConfig = BackboneConfig()
    start: ConfigPath | None = Field(
        default=None,
        min_length=1,
        description="folder of a finished run, whose parts this run begins with; or initial LoRA of all adapters: a "
        "folder in peft's format, or a file of `silotune import`.",
    )
    method: Choice = Field(
        default=Choice(name="fedmcp"),
        description="what is trained, what leaves a silo, and how parts are mixed at prediction (`silotune methods`).",
    )
    tuner: Choice = Field(default=Choice(name="bottleneck"), description="the PEFT technique of the method's adapters.")
    head: HeadConfig = HeadConfig()
    rounds: int = Field(default=10, ge=0, description="rounds of the federation; 0 scores the untouched backbone.")
    seed: int = Field(default=1, ge=0, lt=2**31, description="the seed from which all random numbers are derived.")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of PyTorch. If unset, its own choice; with `flower-local` the cores divided by the "
        "silos.",
    )
    device: Device = Field(default="auto", description="`auto`, `cpu`, or a device of PyTorch such as `cuda:1`.")
    precision: PrecisionConfig = PrecisionConfig()
    cache: CacheConfig = CacheConfig()
    cohort: CohortSize | None = Field(
        default=None,
        description="silos trained and scored in one forward pass; `auto`: by device, backbone and memory. By "
        "default 1, and `auto` from 64 silos on.",
    )
    train: TrainConfig = TrainConfig()
    sampling: SamplingConfig = SamplingConfig()
    aggregation: AggregationConfig = AggregationConfig()
    server: ServerConfig = ServerConfig()
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    uplink: UplinkConfig = UplinkConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    attack: AttackConfig = AttackConfig()
    audit: AuditConfig = AuditConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    generation: GenerationConfig = GenerationConfig()
    silos: list[SiloConfig] = []
    federation: FederationConfig = FederationConfig()
    per_method: dict[str, KeyGroup] = Field(
        default={}, description="method → keys that replace others in comparisons and sweeps."
    )
    compare: CompareConfig = CompareConfig()
    survey: SurveyConfig = SurveyConfig()

    @model_validator(mode="before")
    @classmethod
    def _without_state(cls, keys: Any) -> Any:
        """Read the configurations of older runs, whose section `state` had one key."""
        if not isinstance(keys, dict) or not isinstance(keys.get("state"), dict):
            return keys
        rest = {key: value for key, value in keys["state"].items() if key != "memory_mib"}
        if keys["state"].get("memory_mib") is not None:
            raise InputError(
                "state.memory_mib: was removed; all silos' states stay in memory. Leave the key out; silos × private "
                "parts must fit (docs/performance.md), else choose fewer silos or smaller private parts"
            )
        return {key: value for key, value in keys.items() if key != "state"} | ({"state": rest} if rest else {})

    @property
    def validates_by_loss(self) -> bool:
        """Whether validation rows are judged by the mean loss, not by the task's metric."""
        measure = self.evaluation.validation
        return measure == "loss" or (measure is None and self.head.writes)

    @property
    def data_seed(self) -> int:
        """Seed of the choice of rows: `data.seed`, or the run's seed if that is unset."""
        return self.seed if self.data.seed is None else self.data.seed

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
            raise ValueError("no data: give 'silos', 'data.path' or a preset; over machines, 'federation.silos'")
        return self

    def _check_noise_on_rows(self, other_noise: bool) -> None:
        """Refuse keys with which noise on rows (`privacy.unit`) would protect nothing."""
        refused = {
            "uplink, aggregation.noise_multiplier: noise on whole silos is another promise; choose one": other_noise,
            f"precision: in {self.precision.name} a row's gradient is not known to be the same whoever shares its "
            "group; allowed: fp32, auto (which is fp32 then)": self.precision.name in ("bf16", "fp16"),
            "train.class_weights: balanced weights follow rows; allowed: none": self.train.class_weights != "none",
            f"tuner: {self.tuner.name} has no gradients row by row; allowed: lora and others": (
                self.tuner.name in ("full", "p-tuning")
            ),
            "partition, data.parts: would divide one unit's rows among silos; allowed: none, column": (
                self.privacy.unit_column is not None
                and (self.partition.name not in ("none", "column") or self.data.parts > 1)
            ),
            "backbone.quantization: int8 rounds rows together; allowed: none, nf4": (
                self.backbone.quantization in ("int8", "auto")
            ),
            "start: nobody says that its model was trained with noise; give no start, the run begins anew": (
                self.start is not None
            ),
            "train.early_stopping: scores without noise would end the run; leave it out": (
                self.train.early_stopping is not None
            ),
            "evaluation.new_silos: they train after the last round, beyond privacy.parts=all; leave it out": (
                self.privacy.parts == "all" and bool(self.evaluation.new_silos)
            ),
        }
        for why, condition in refused.items():
            if condition:
                raise ValueError(f"privacy.unit beside {why}")

    def _check_shares(self) -> None:
        """Refuse keys that do not go with a step that the coordinator takes, or with one noise for all silos."""
        privacy, train = self.privacy, self.train
        refused = {
            "privacy.unit: shares are of noise on rows; give privacy.unit and privacy.epsilon": privacy.unit is None,
            "aggregation.secure: only a sum may be seen; give aggregation.secure=true": not self.aggregation.secure,
            "aggregation: the sum is divided by all units; allowed: samples": self.aggregation.name != "samples",
            "privacy.rate, privacy.delta: all silos add shares of one noise; give both": (
                privacy.rate is None or privacy.delta is None
            ),
            "privacy.more_noise: all silos add shares of one noise; leave it out": privacy.more_noise,
            "privacy.parts: all; allowed: leaving": privacy.parts == "all",
            "train.steps: a round is one step of the shared parts; allowed: 1": train.steps != 1,
            "train.optimizer, train.momentum: the coordinator takes the step; allowed: train.optimizer=sgd without "
            "momentum (server.optimizer, server.beta1 have it)": train.optimizer != "sgd" or train.momentum > 0,
            "train.keep_optimizer, .clip_norm, .weight_decay: the coordinator takes the step; leave them out": (
                train.keep_optimizer or train.clip_norm is not None or train.weight_decay is not None
            ),
            "uplink: no change is sent; allowed: none": bool(self.uplink.name),
            "attack: no change is sent; leave it out": self.attack.name != "none",
        }
        for why, condition in refused.items():
            if condition:
                raise ValueError(f"privacy.shares beside {why}")

    @model_validator(mode="after")
    def _noise(self) -> Config:
        local, central = self.uplink.noise is not None, self.aggregation.noise_multiplier is not None
        if local and central:
            raise ValueError("aggregation.noise_multiplier: silos add noise already (uplink); choose one of them")
        if self.privacy.shares:
            self._check_shares()
        if self.privacy.unit is not None:
            self._check_noise_on_rows(local or central)
            return self
        if self.privacy.parts == "all":
            raise ValueError("privacy.parts: all is about noise on rows; give privacy.unit")
        keys = [key for key in ("epsilon", "delta", "secret") if getattr(self.privacy, key) is not None]
        if keys and not local and not central:
            raise ValueError(
                f"privacy.{keys[0]}: nothing adds noise; use uplink=clip,laplace, uplink=clip,gaussian or "
                "aggregation.noise_multiplier"
            )
        return self

    @property
    def work(self) -> Literal["training", "scoring", "survey"]:
        """What silos do in the run: train, score a model without training, or count their rows."""
        return "survey" if self.survey.figures else "training" if self.rounds else "scoring"

    @model_validator(mode="after")
    def _survey(self) -> Config:
        if self.survey.figures and (self.rounds or self.aggregation.secure):
            raise ValueError("survey: nothing is trained and summed under masks; give rounds=0 without secure")
        if ("dates" in self.survey.figures) != (self.survey.column is not None):
            raise ValueError("survey.column: is the column of survey.figures=dates; give both, or none")
        return self

    @model_validator(mode="after")
    def _sums(self) -> Config:
        """Refuse keys that say nothing of sums under masks."""
        refused = {
            "uplink: codecs have a scale for each silo's channels; allowed: clip, and noise": self.uplink.codec,
            "sampling: sums over changing silos tell their differences; leave it out": (
                self.sampling.count is not None or self.sampling.fraction not in (None, 1)
            ),
            "train.early_stopping: scores stay at the silos; leave it out": self.train.early_stopping is not None,
        }
        for why, condition in refused.items():
            if self.aggregation.secure and condition:
                raise ValueError(f"aggregation.secure beside {why}")
        return self

    @model_validator(mode="after")
    def _rows(self) -> Config:
        partitioned = self.partition.name != "none"
        if partitioned and self.data.rows_per_silo is not None:
            raise ValueError("data.rows_per_silo: not of a data set that is partitioned; use data.rows")
        if not partitioned and self.data.rows is not None:
            raise ValueError("data.rows: of a data set that is partitioned (partition=…); else use data.rows_per_silo")
        return self
