"""Silos, from their rows: tokenized, poisoned where they attack, put together where the method is centralised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from silotune.config import Config
from silotune.data.backdoor import Backdoor, check_trigger, make_backdoor
from silotune.data.server_rows import without_labels
from silotune.data.tasks import Row, SiloData, Task
from silotune.data.tokenized import TokenizedRows
from silotune.methods import Method
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads.base import TokenizeRows
from silotune.training.silo import AttackedRows, Evaluation, Silo

_ANY_LENGTH = 2**20  # tokens; no row is cut at this


def make_silos(
    data: list[SiloData], tokenize: TokenizeRows, method: Method, backdoor: Backdoor | None = None
) -> dict[str, Silo]:
    """Silos with their rows tokenized; a centralised method puts them together."""
    silos: dict[str, Silo] = {}
    evaluations: dict[tuple[int, int], Evaluation] = {}  # silos that are judged on the same rows share them
    for item in data:
        held_out = (item.splits.validation, item.splits.test)
        key = (id(held_out[0]), id(held_out[1]))
        if key not in evaluations:
            validation, test = (tokenize(item.task, rows) for rows in held_out)
            evaluations[key] = Evaluation(validation, test)
            if backdoor is not None and backdoor.has_target(item.task):
                attacked = tokenize(item.task, backdoor.test_rows(item.task, held_out[1]))
                evaluations[key].attack = AttackedRows(attacked, backdoor.target(item.task))
        added = [] if backdoor is None else backdoor.poisoned_rows(item)
        train = [*item.splits.train, *added]
        rows = replace(tokenize(item.task, without_labels(train) if method.unlabelled else train), poisoned=len(added))
        silos[item.name] = Silo(item.name, {item.task.name: rows}, {item.name: evaluations[key]})
        if backdoor is not None and item.name in backdoor.malicious:
            silos[item.name].attack_scale = backdoor.config.scale
    if not method.centralized:
        return silos
    return _put_together(silos)


def _put_together(silos: dict[str, Silo]) -> dict[str, Silo]:
    """One training silo of all silos' rows, judged on each silo's rows."""
    train: dict[str, TokenizedRows] = {}
    for silo in sorted(silos.values(), key=lambda silo: silo.name):  # the order in which they were named cannot matter
        for task, found in silo.train.items():
            train[task] = train[task].concatenated(found) if task in train else found
    evaluations = {name: evaluation for silo in silos.values() for name, evaluation in silo.evaluations.items()}
    return {"centralised": Silo("centralised", train, evaluations)}


def backdoor(config: Config, data: list[SiloData], method: Method, backbone: Backbone) -> Backdoor | None:
    """What the malicious silos do to their rows; None where none are.

    Raises:
        InputError: for a trigger or an attack that cannot be.
    """
    if config.attack.name == "none":
        return None
    check_trigger(config.attack.triggers, backbone.tokenizer)
    whole = method.setting.head.row_tokenizer(backbone, _ANY_LENGTH)

    def lengths(task: Task, rows: Sequence[Row]) -> list[int]:
        return [len(ids) for ids in whole(task, rows).ids]

    return make_backdoor(config.attack, config.seed, data, lengths, config.train.max_length)
