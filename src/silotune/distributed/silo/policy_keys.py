"""Which keys of a configuration a policy can judge (`JUDGED`); `unjudged`, `extreme_options`: what it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from silotune.config import Config
from silotune.config.registries import AGGREGATIONS, CODECS
from silotune.config.trees import flat
from silotune.config.uplink import NOISES

JUDGED = (
    *("description", "start", "seed", "rounds", "threads", "device", "cohort", "cache.*"),
    *("backbone", "backbone.name", "backbone.revision", "backbone.attention"),
    *("precision", "precision.name", "precision.deterministic", "precision.tf32"),
    *("method.*", "tuner.*", "sampling.*", "aggregation.*", "server.*", "privacy.*", "attack.*", "federation.*"),
    *("head.name", "head.scope", "head.pooling", "head.multi_token", "head.average", "head.beams", "head.train_on"),
    *(
        "head.max_new_tokens",
        "train.lr",
        "train.epochs",
        "train.steps",
        "train.batch_size",
        "train.batches",
        "train.optimizer",
    ),
    *("train.max_length", "train.gradient_checkpointing", "data.merge", "data.seed"),
    *("uplink.name", "uplink.clip", "uplink.norm", "uplink.epsilon", "uplink.delta", "uplink.rounding"),
    *("uplink.fraction", "uplink.values", "uplink.unbiased"),
    *("uplink.feedback", "train.tokens_at_once", "train.server_lr", "train.schedule", "train.warmup"),
    *("train.weight_decay", "train.clip_norm", "train.dropout"),
    "train.adam_epsilon",
    *("train.label_smoothing", "train.early_stopping"),
    *("evaluation.bootstrap", "evaluation.baselines", "evaluation.predictions"),
)
"""Patterns of keys that limits bound, or that choose nothing at a silo: who takes part, how the coordinator combines
updates, which files about its test rows a silo writes for itself. `attack.*` belongs to them because a run with an
attack is refused for every silo (`check_federated`)."""

PROMPTS = ("head.template", "head.words", "head.chat_template", "head.chat_kwargs")
"""Keys by which a coordinator puts words of its own around the rows, or decides which words stand for a label."""

ROW_CHOICE = (
    *("data.rows_per_silo", "data.train_rows", "data.validation_rows", "data.test_rows", "data.parts", "data.ratio"),
    *("train.class_weights", "train.class_weights.*"),
)
"""Patterns of keys by which a coordinator picks some of the rows: with 100 and then 101 of them, two updates differ by
one row; and the share at which a limit on rows begins to refuse would tell how many there are. Class weights can make
all rows but those of one label weigh nothing."""

OTHER_ROUNDS = ("train.schedule_over", "train.keep_optimizer")
"""Keys by which steps weigh otherwise in another round. With one order of rows, two rounds of one broadcast then differ
by a few steps: a warmup of one step over the run leaves the first batch out of round 1 alone, and the bias correction
of a kept Adam gives as many equations as rounds."""

LARGEST_OPTION, SMALLEST_OPTION = 10_000, 1e-6
"""Magnitudes of a method's or tuner's options. A factor of 1e30 in a loss, or a temperature of 1e-30, would undo the
other limits."""


def default_keys(config: Config) -> dict[str, Any]:
    """Return the schema's defaults by key, for the silos of a configuration."""
    federation = config.federation.model_dump(mode="json")
    return dict(flat(Config.model_validate({"federation": federation}).model_dump(mode="json")))


def changed_keys(config: Config) -> dict[str, Any]:
    """Return the keys of a configuration that differ from the schema's defaults, with their values."""
    defaults = default_keys(config)
    given = flat(config.model_dump(mode="json"))
    return {key: value for key, value in given if key not in defaults or defaults[key] != value}


def unjudged(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the changed keys that a policy cannot judge, with their values."""
    for key, value in changed_keys(config).items():
        if not any(fnmatchcase(key, pattern) for pattern in JUDGED) or _of_a_plugin(config, key):
            yield key, value


def _of_a_plugin(config: Config, key: str) -> bool:
    """Return whether a name is of a plug-in, which could do anything to an update, or a key one of its options."""
    if key.startswith("aggregation."):
        return key.removeprefix("aggregation.") in config.aggregation.options or (
            key == "aggregation.name" and config.aggregation.name not in AGGREGATIONS.reserved
        )
    return key == "uplink.name" and any(name not in ("clip", *NOISES, *CODECS.reserved) for name in config.uplink.name)


def extreme_options(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the options of method, tuner and head whose magnitude is too large or too small."""
    for key, value in changed_keys(config).items():
        if key.startswith(("method.", "tuner.", "head.")) and not all(map(_moderate, _numbers(value))):
            yield key, value


def _numbers(value: object) -> Iterator[float]:
    """Yield the numbers in an option; its class also reads those that are written as texts, as `"1e30"`."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            yield float(value)


def _moderate(value: float) -> bool:
    return value == 0 or SMALLEST_OPTION <= abs(value) <= LARGEST_OPTION
