"""Types of the keys of `run`, `compare` and others in Python, for editors and type checkers: `Keys`.

Made of the schema by `python -m scripts.config_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypedDict

from silotune.config.tables import Table


class StdKeys(TypedDict, total=False):
    """The section `std`."""

    ddof: Literal[0, 1]


class SiloKeys(TypedDict, total=False):
    """An entry of `silos`; `rows` is a table instead of `path`."""

    name: str
    path: str | PurePath
    text: str | Sequence[str]
    label: str
    task: str | None
    labels: Sequence[str | int] | None
    kind: str
    metric: str | None
    positive: str | None
    encoding: str
    column_separator: str | None
    rank: int | None
    label_separator: str | None
    passages: str | PurePath | None
    rows: Table


class BackboneKeys(TypedDict, total=False):
    """The section `backbone`."""

    name: str
    revision: str | None
    attention: Literal["auto", "eager", "sdpa", "flash"]
    quantization: Literal["none", "auto", "int8", "nf4", "int8-torchao"]
    device_map: Literal["auto"] | None


class HeadKeys(TypedDict, total=False):
    """The section `head`."""

    name: str
    scope: Literal["private", "shared"]
    pooling: Literal["auto", "first", "mean", "last"]
    normalize: float | None
    template: str | Mapping[str, str] | None
    words: Mapping[str, str | Sequence[str]] | None
    multi_token: Literal["refuse", "average"]
    average: Literal["logits", "probabilities", "best"]
    chat_template: str | None
    chat_kwargs: Mapping[str, bool | int | float | str | None]
    train_on: Literal["assistant", "last"]
    choices: Literal["likelihood", "write"]
    beta: float
    beams: int
    temperature: float
    negatives: int | None
    in_batch: bool
    max_new_tokens: int


class PrecisionKeys(TypedDict, total=False):
    """The section `precision`."""

    name: Literal["auto", "fp32", "bf16", "fp16"]
    deterministic: bool
    tf32: bool


class CacheKeys(TypedDict, total=False):
    """The section `cache`."""

    name: Literal["none", "frozen-prefix"]
    mib: int


class TrainKeys(TypedDict, total=False):
    """The section `train`."""

    lr: float
    server_lr: float | None
    schedule: Literal["constant", "linear", "cosine"]
    schedule_over: Literal["round", "run"]
    warmup: float
    epochs: int
    steps: int | None
    batch_size: int
    batches: Literal["full", "even"]
    optimizer: Literal["adam", "adamw", "sgd", "adafactor"]
    momentum: float
    weight_decay: float | None
    adam_epsilon: float
    clip_norm: float | None
    keep_optimizer: bool
    dropout: float | Literal["own"] | None
    label_smoothing: float
    class_weights: Mapping[str, float] | Literal["none", "balanced"]
    early_stopping: int | None
    max_length: int
    gradient_checkpointing: bool
    tokens_at_once: int | Literal["auto"] | None


class SamplingKeys(TypedDict, total=False):
    """The section `sampling`."""

    fraction: float | None
    count: int | None
    per_task: bool


class AggregationKeys(TypedDict, total=False):
    """The section `aggregation`."""

    name: str
    outlier: float | None
    max_norm: float | None
    clip: float | None
    trim: float
    byzantine: int | None
    keep: int | None
    regularization: float
    noise_multiplier: float | None
    secure: bool
    least: int | None
    colluders: int


class ServerKeys(TypedDict, total=False):
    """The section `server`."""

    optimizer: Literal["none", "avgm", "nesterov", "adam", "yogi", "adagrad"]
    lr: float
    average: float | None
    beta1: float
    beta2: float
    tau: float
    labels_per_class: int | None
    labelled_rows: int | None


class DataKeys(TypedDict, total=False):
    """The section `data`."""

    set: Literal["glue", "mixed6", "sentiment5", "feddpa", "fedprompt", "demo"] | None
    path: str | PurePath | None
    tasks: str | Sequence[str]
    task: str | None
    labels: Sequence[str | int] | None
    metric: str | None
    positive: str | None
    merge: bool
    ratio: Sequence[float]
    seed: int | None
    rows_per_silo: int | None
    rows: int | None
    train_rows: int | None
    validation_rows: int | None
    test_rows: int | None
    allow_cut: bool
    long_texts: Literal["cut", "windows", "refuse"]
    window_overlap: int | None
    windows_per_row: int
    parts: int


class PartitionKeys(TypedDict, total=False):
    """The section `partition`."""

    name: Literal["none", "iid", "dirichlet", "quantity", "shards", "column"]
    silos: int
    alpha: float
    seed: int | None
    min_rows: int
    balanced: bool
    shards: int
    column: str | None
    evaluation: Literal["shared", "own"]


class UplinkKeys(TypedDict, total=False):
    """The section `uplink`."""

    name: str | Sequence[str]
    clip: float | None
    norm: Literal["l1", "l2"] | None
    epsilon: float | None
    delta: float | None
    scale: float | None
    rounding: Literal["nearest", "stochastic"] | None
    feedback: bool | None


class PrivacyKeys(TypedDict, total=False):
    """The section `privacy`."""

    unit: str | None
    epsilon: float | None
    delta: float | None
    more_noise: bool
    clip: float
    rows_per_unit: int
    rate: float | None
    units: int | None
    plan: Literal["auto"] | None
    secret: str | PurePath | None
    parts: Literal["leaving", "all"]
    shares: bool


class AttackKeys(TypedDict, total=False):
    """The section `attack`."""

    name: Literal["none", "backdoor"]
    fraction: float
    rate: float
    trigger: str | str | Sequence[str]
    position: Literal["start", "end", "random"]
    target: str | None
    scale: float


class AuditKeys(TypedDict, total=False):
    """The section `audit`."""

    canaries: int


class EvaluationKeys(TypedDict, total=False):
    """The section `evaluation`."""

    validation: Literal["metric", "loss"] | None
    test_time: bool
    per_round: bool
    finish_per_round: bool
    unseen: str | Sequence[str]
    new_silos: str | Sequence[str]
    rows_at_once: int | Literal["auto"]
    bootstrap: int
    unit: str | None
    baselines: bool
    shots: int
    predictions: bool


class GenerationKeys(TypedDict, total=False):
    """The section `generation`."""

    rows_at_once: int | Literal["auto"]


class FederationKeys(TypedDict, total=False):
    """The section `federation`."""

    silos: str | Sequence[str]
    labelled: str | PurePath | None
    join: float
    deadline: float
    quorum: float
    retries: int
    patience: float
    away: float


class CompareKeys(TypedDict, total=False):
    """The section `compare`."""

    methods: str | Sequence[str]
    seeds: str | Sequence[int]
    ablation: bool
    variants: Mapping[str, Mapping[str, Any]]
    grid: Mapping[str, Mapping[str, Mapping[str, Any]]]
    best: str | Sequence[str]
    std: StdKeys
    against: str
    margin: float
    claim: str
    primary: str
    metric: str
    looks: str | Sequence[int]


class SurveyKeys(TypedDict, total=False):
    """The section `survey`."""

    figures: Sequence[Literal["units", "labels", "lengths", "cut", "duplicates", "dates"]]
    column: str | None


class RunKeys(TypedDict, total=False):
    """The keys of a run without a backbone."""

    description: str
    start: str | PurePath | None
    method: str | Mapping[str, Any]
    tuner: str | Mapping[str, Any]
    head: str | HeadKeys
    rounds: int
    seed: int
    threads: int | None
    device: str
    precision: str | PrecisionKeys
    cache: str | CacheKeys
    cohort: int | Literal["auto"] | None
    train: TrainKeys
    sampling: SamplingKeys
    aggregation: str | AggregationKeys
    server: ServerKeys
    data: DataKeys
    partition: str | PartitionKeys
    uplink: str | Sequence[str] | UplinkKeys
    privacy: PrivacyKeys
    attack: str | AttackKeys
    audit: AuditKeys
    evaluation: EvaluationKeys
    generation: GenerationKeys
    silos: Sequence[SiloKeys] | Mapping[str, Table]
    federation: FederationKeys
    per_method: Mapping[str, Mapping[str, Any]]
    compare: CompareKeys
    survey: SurveyKeys


class Keys(RunKeys, total=False):
    """All keys of a run."""

    backbone: str | BackboneKeys
