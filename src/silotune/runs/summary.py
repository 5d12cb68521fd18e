"""Make `summary.json`: scores, counts and costs of the best round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from silotune.config.head import HeadConfig
from silotune.core.numeric import mean_ignoring_none
from silotune.core.tensors import count_parameters, digest_of_sorted
from silotune.data.scores import constant_score
from silotune.data.tasks import LOSS_METRICS
from silotune.data.templates import CHAT
from silotune.evaluation.federation_scores import all_share_one_model, mean_score, overall
from silotune.evaluation.personalization import join, unseen
from silotune.models.heads import LanguageModelHead
from silotune.models.tuners import tuner_of
from silotune.runs.engines.base import Engine
from silotune.training.federation import Federation


def state_digest(federation: Federation) -> str:
    """Return the sha256 of the shared parts, the server optimizer's state, and all silos' private parts and memory."""
    return digest_of_sorted(_sorted_tensors(federation))


def _sorted_tensors(federation: Federation) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a federation's state in name order; one silo's state is in memory at a time."""
    flat = federation.coordinator.flat()
    # no silo's name has a slash, so that the tensors of each stand together
    silos = {f"silo/{silo.name}/": silo for silo in federation.silos.values()}
    for name in sorted({*flat, *silos}):
        if name in flat:
            yield name, flat[name]
        else:
            state = federation.context.state_of(silos[name]).flat()
            yield from ((name + tensor, state[tensor]) for tensor in sorted(state))


def summarize(engine: Engine) -> dict[str, Any]:
    """Return `summary.json` without digests, at the federation's present state."""
    federation, history = engine.federation, engine.history
    config = federation.config
    taking_part = {name for silo in engine.participants for name in federation.silos[silo].evaluations}
    silos = {name: entry | {"sampled": name in taking_part} for name, entry in engine.results().items()}
    central = central_result(federation, silos)
    attack = overall(silos, federation.malicious)
    return {
        "method": config.method.name,
        "backbone": config.backbone.name,
        "seed": config.seed,
        "rounds": federation.rounds,
        **({} if engine.stopped_after is None else {"stopped_after": engine.stopped_after}),
        "engine": engine.name,
        "precision": federation.backbone.precision,
        "quantization": federation.backbone.quantization,
        "threads": torch.get_num_threads(),
        "cohort": engine.cohort,
        "workers": engine.workers,
        "seconds": round(history.seconds, 3),
        "samples_per_second": history.samples_per_second,
        **parameters(federation),
        "bytes_up": history.bytes_up,
        "bytes_down": history.bytes_down,
        "silos": silos,
        "tasks": {name: task.fields() | {"texts": federation.texts[name]} for name, task in federation.tasks.items()},
        "global": central,
        **left_out(federation),
        "average": central["test"] if central else mean_test(silos),
        "averages": averages(silos),
        **averages_beside(silos),
        **average_sampled(silos, central is not None and all_share_one_model(federation)),
        **({"template": CHAT} if head_section(federation).template == CHAT else {}),
        **({"attack": attack} if attack else {}),
        **({"privacy": federation.privacy.summary()} if federation.privacy else {}),
    }


def head_section(federation: Federation) -> HeadConfig:
    """Return the section `head` as it took effect: conversations use the chat template by default."""
    head, config = federation.method.setting.head, federation.config.head
    if config.template != CHAT and isinstance(head, LanguageModelHead) and head.chat:
        return config.replace(template=CHAT)
    return config


def mean_test(silos: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the mean test score over the silos that have one; silos on other machines need not share theirs.

    None if silos have unlike metrics, whose mean would say nothing; `averages` has one for each.
    """
    if len({silo["metric"] for silo in silos.values()}) > 1:
        return None
    return mean_ignoring_none(silo["test"] for silo in silos.values())


def averages(silos: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return metric → mean test score over the silos that are judged by it."""
    return {
        metric: mean_ignoring_none(silo["test"] for silo in silos.values() if silo["metric"] == metric)
        for metric in dict.fromkeys(silo["metric"] for silo in silos.values())
    }


def averages_beside(silos: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean test scores over silos on their own kinds of rows and on all rows, where both are known."""
    kinds = {kind: [silo[f"test_{kind}"] for silo in silos.values() if f"test_{kind}" in silo] for kind in BESIDE}
    return {f"average_{kind}": mean_ignoring_none(scores) for kind, scores in kinds.items() if scores}


BESIDE = ("own", "shared")
"""The rows that may judge a silo of a partitioned data set."""


def intervals(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the 95 % bootstrap intervals of the test scores: `silos` (name → two bounds), `global` and `average`."""
    of_silos = {name: details["intervals"].get(details["metric"]) for name, details in scores["silos"].items()}
    central = scores["global"]
    overall = central["intervals"].get(central["metric"]) if central else None
    average = scores.get("average")
    return {"silos": of_silos, "global": overall} | ({"average": average} if average else {})


def average_sampled(silos: Mapping[str, Mapping[str, Any]], alike: bool) -> dict[str, float | None]:
    """Return the mean test score over the silos that were sampled, if some were not and silos are not all `alike`."""
    if alike or all(silo["sampled"] for silo in silos.values()):
        return {}
    return {"average_sampled": mean_test({name: silo for name, silo in silos.items() if silo["sampled"]})}


def left_out(federation: Federation) -> dict[str, Any]:
    """Return the entries of tasks and new silos that `evaluation` keeps out of training."""
    config = federation.config.evaluation
    entries: dict[str, Any] = {"unseen": unseen(federation)} if config.unseen else {}
    if config.new_silos:
        entries["new_silos"] = {name: join(federation, federation.absent[name]) for name in config.new_silos}
    return entries


def central_result(federation: Federation, silos: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the score on the central rows, if one data set is partitioned; with private parts, the mean over silos.

    `majority` is the score of a constant answer to the test rows: the most frequent label, the mean number, or the
    labels that most rows have; None for generation.
    """
    if federation.central is None:
        return None
    test = federation.central.test
    task = test.task
    has_constant = task.labeled and task.metric not in LOSS_METRICS and len(test)
    return {
        "metric": task.metric,
        "validation": mean_score({name: silo["validation"] for name, silo in silos.items()}),
        "test": mean_score({name: silo["test"] for name, silo in silos.items()}),
        "majority": constant_score(task, test.labels) if has_constant else None,
    }


def parameters(federation: Federation) -> dict[str, int]:
    """Return one silo's parameter counts (trained, sent, adapters, heads), the largest if heads differ."""
    changed = federation.method.changes()
    largest = {"trainable_parameters": 0, "sent_parameters": 0, "adapter_parameters": 0, "head_parameters": 0}
    ranks = federation.context.initial.ranks
    alike = {
        (ranks.get(silo.name), *(id(rows.task) for rows in silo.train.values())): silo
        for silo in federation.silos.values()
    }
    for silo in alike.values():  # drawing the first parts of a silo that was never sampled takes as long as a step
        state = federation.coordinator.shared_of(silo.name) | federation.context.state_of(silo).private
        state = {name: tensors for name, tensors in state.items() if name in changed}
        sizes = {name: count_parameters(tensors) for name, tensors in state.items()}
        parts = federation.context.parts
        adapters = sum(size for name, size in sizes.items() if tuner_of(parts[name].module) is not None)
        counts = {
            "trainable_parameters": sum(sizes.values()),
            "sent_parameters": sum(sizes[name] for name in federation.method.sends() if name in sizes),
            "adapter_parameters": adapters,
            "head_parameters": sum(sizes.values()) - adapters,
        }
        largest = {key: max(largest[key], counts[key]) for key in largest}
    return largest
