"""A run's configuration on this silo's machine: refused where the operator's file excludes it, else with own paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from silotune.aggregation import BY_ROWS, score_read_by
from silotune.communication.privacy.accountant import DELTA
from silotune.config import BackboneConfig, Config
from silotune.config.coordinator import AggregationConfig
from silotune.config.data import PartitionConfig
from silotune.config.schema import Figure
from silotune.config.train import SamplingConfig
from silotune.config.uplink import PrivacyConfig
from silotune.distributed.protocol.frames import HandshakeRefused
from silotune.distributed.protocol.handshake import RUN_START
from silotune.distributed.silo.mask_work import read_masked
from silotune.distributed.silo.silo_config import SiloSettings
from silotune.methods import METHODS, Method
from silotune.models.backbone.quantization import NONE
from silotune.runs.model_file import MODELS


def check_settings(settings: SiloSettings, config: Config) -> None:
    """Compare a coordinator's configuration with the operator's settings; the policy is judged elsewhere."""
    who = f"silo {settings.name!r}"
    secure = config.aggregation.secure
    if secure and settings.masked is None:
        raise HandshakeRefused(
            f"{who}: sums under masks need the silos' identities; its silo config has no masked.peers"
        )
    if not secure and settings.policy.preset == "masked":
        raise HandshakeRefused(f"{who}: its policy is masked; allowed: runs with aggregation.secure=true")
    if config.aggregation.name in BY_ROWS and "rows" not in settings.share and not secure:
        raise HandshakeRefused(
            f"{who}: aggregation={config.aggregation.name} weighs silos by their rows, and this one does not say how "
            "many it has; allowed: uniform, median, trimmed-mean, krum, multi-krum"
        )
    if (score := score_read_by(config.aggregation.name)) and "loss" not in settings.share:
        raise HandshakeRefused(
            f"{who}: aggregation={config.aggregation.name} reads {score}, and this one does not say its losses "
            "(share); allowed: samples, uniform"
        )
    names_colluders = settings.masked is not None and settings.masked.colluders is not None
    if config.privacy.shares and settings.policy.preset == "private" and not names_colluders:
        raise HandshakeRefused(
            f"{who}: its policy is private, and ε of shared noise depends on other silos (privacy.shares); its silo "
            "config needs masked.colluders, how many of them may leave out their noise"
        )
    _check_noise(settings, config)
    _check_unit(settings, config)
    if config.survey.figures and not allowed_figures(settings, config):
        raise HandshakeRefused(
            f"{who}: tells no {', '.join(config.survey.figures)}; its silo config lets surveys ask for: "
            f"{', '.join(settings.survey) or 'nothing'} (survey)"
        )
    if config.audit.canaries > settings.canaries:
        raise HandshakeRefused(f"{who}: adds at most {settings.canaries} canaries to its rows (audit.canaries)")
    if config.start is not None and settings.start is None and run_before(config) is None:
        raise HandshakeRefused(f"{who}: the run starts from a LoRA; its silo config needs start")


def allowed_figures(settings: SiloSettings, config: Config) -> list[Figure]:
    """Return the figures of a survey that the operator allows; with noise, those that a unit moves by at most 1.

    Whether a row is a duplicate depends on other units' rows, so that one unit could move that count by many.
    """
    noised = config.privacy.unit is not None
    return [name for name in config.survey.figures if name in settings.survey and not (noised and name == "duplicates")]


def check_sent(settings: SiloSettings, method: Method) -> None:
    """Compare the parts that a method sends with the operator's `send`."""
    allowed = settings.send
    others = [] if allowed is None else [name for name in method.sends() if name not in allowed]
    if others:
        raise HandshakeRefused(
            f"silo {settings.name!r}: method={method.name} shares {', '.join(others)}; its silo config lets only "
            f"{', '.join(allowed or ['nothing'])} leave (send)"
        )


def _check_noise(settings: SiloSettings, config: Config) -> None:
    """Refuse a configuration whose noise in silos does not satisfy the operator's settings."""
    who = f"silo {settings.name!r}"
    if config.uplink.noise is None:
        if settings.secret is not None or settings.epsilon is not None:
            key = "secret" if settings.secret is not None else "epsilon"
            raise HandshakeRefused(f"{who}: answers with noise alone (its silo config has {key}); uplink has none")
        return
    if settings.secret is None and config.privacy.secret is not None:
        raise HandshakeRefused(f"{who}: its noise needs a secret; its silo config names none")
    if settings.secret is None and not settings.seeded_noise:
        raise HandshakeRefused(
            f"{who}: noise from the run's seed hides nothing from the coordinator, who knows the seed; its silo config "
            "needs secret (or seeded_noise: true, for a rehearsal)"
        )


def _check_unit(settings: SiloSettings, config: Config) -> None:
    """Refuse a run whose unit of noise on rows is another one than the operator's."""
    who, own, unit = f"silo {settings.name!r}", settings.privacy, config.privacy.unit
    if config.work == "scoring" and settings.policy.preset != "trusting":
        raise HandshakeRefused(f"{who}: its policy is {settings.policy.preset}: no score of its rows leaves (rounds=0)")
    if config.work == "survey" and unit is None and (settings.epsilon is not None or settings.secret is not None):
        raise HandshakeRefused(f"{who}: answers with noise alone; allowed: surveys with privacy.unit")
    if unit is None and settings.policy.preset == "private":
        raise HandshakeRefused(
            f"{who}: its policy is private; allowed: runs with privacy.unit={own.unit if own else ''}"
        )
    if unit is not None and own is not None and own.unit != unit:
        raise HandshakeRefused(f"{who}: its budget is of each {own.unit}; allowed: privacy.unit={own.unit}")


def local_config(settings: SiloSettings, config: Config, split_seed: int | None) -> Config:
    """Return the configuration with this machine's paths, for this silo alone, whose rows `split_seed` splits."""
    name = config.aggregation.name
    anything = METHODS.find(config.method.name).aggregations is None and not config.aggregation.secure
    anything = anything and not score_read_by(name)
    update: dict[str, Any] = {
        "backbone": _backbone(settings, config),
        "start": own_start(settings, config),
        "threads": settings.threads,
        "device": settings.device,
        "sampling": SamplingConfig(),
        # the coordinator's matter, but some methods name the ones that they are defined for
        "aggregation": AggregationConfig(
            name="uniform" if anything else name,
            secure=config.aggregation.secure,
            **_size_of_sums(settings, config),
        ),
        "partition": PartitionConfig(),
        "privacy": _privacy(settings, config),
        "silos": [] if settings.data is None else [settings.data],
    }
    if split_seed is not None:
        update["data"] = config.data.replace(seed=split_seed)
    return config.replace(**update)


def _size_of_sums(settings: SiloSettings, config: Config) -> dict[str, int]:
    """Return the operator's own `least` and `colluders` for a run in which silos share one noise."""
    if not config.privacy.shares or settings.masked is None:
        return {}
    _, peers = read_masked(settings)
    return {"least": peers.fewest, "colluders": peers.assumed}


def _privacy(settings: SiloSettings, config: Config) -> PrivacyConfig:
    """Return a run's noise on rows as it is, whose budget the ledger keeps; else the budget of noise on changes."""
    if config.privacy.unit is not None:
        return config.privacy.replace(secret=None)
    budgets = [epsilon for epsilon in (config.privacy.epsilon, settings.budget) if epsilon is not None]
    delta, bound = config.privacy.delta, config.privacy.delta or config.uplink.delta
    if settings.epsilon is not None and bound is not None:
        delta = min(bound, settings.delta or DELTA)
    return PrivacyConfig(secret=settings.secret, epsilon=min(budgets, default=None), delta=delta)


def run_before(config: Config) -> str | None:
    """Return the id of the federation's run with whose parts one begins, as a coordinator sends it; else None."""
    match = None if config.start is None else RUN_START.fullmatch(config.start)
    return None if match is None else match[1]


def own_start(settings: SiloSettings, config: Config) -> str | None:
    """Return what this silo begins with: its own model of the run before, or the operator's file.

    None where the run starts anew, or a run before had no such silo.
    """
    run = run_before(config)
    if run is None:
        return None if config.start is None else settings.start
    folders = [Path(settings.folder) / run, *([] if settings.start is None else [Path(settings.start)])]
    return next((str(folder) for folder in folders if (folder / MODELS).is_dir()), None)


def _backbone(settings: SiloSettings, config: Config) -> BackboneConfig:
    """Return the operator's backbone, quantized as the coordinator's unless the operator chose otherwise."""
    own = settings.backbone
    if own.quantization != NONE:  # if it is another one, the handshake says so
        return own
    return own.replace(quantization=config.backbone.quantization)
