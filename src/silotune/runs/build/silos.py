"""Build silos of rows: tokenized, poisoned in malicious silos, and with canaries for an audit."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from silotune.communication.privacy.noise import NoiseStream
from silotune.config import Config
from silotune.core.clock import log_line
from silotune.data.backdoor import Backdoor, check_trigger, make_backdoor
from silotune.data.loading import without_labels
from silotune.data.rows import UNREAD, Row, SiloData
from silotune.data.tasks import Task
from silotune.data.tokenized import ANY_LENGTH, TokenizedRows
from silotune.errors import InputError
from silotune.methods import Method
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads.base import TokenizeRows
from silotune.training.context import TrainingContext
from silotune.training.silo import AttackedRows, EvaluationRows, Silo, centralized

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_WORDS, _LENGTH = 6, 5


def build_silos(
    config: Config,
    context: TrainingContext,
    data: Sequence[SiloData],
    labeled: SiloData | None = None,
    secret: bytes | None = None,
) -> tuple[dict[str, Silo], tuple[str, ...]]:
    """Build silos from their rows, and name the malicious ones in name order; a centralized method puts silos together.

    `labeled` are the coordinator's rows, if the method trains on them alone. Canaries are drawn from the silo's own
    secret; without one they follow from the seed.
    """
    backdoor = _backdoor(config, data, context.method, context.backbone)
    tokenize = context.method.setting.head.row_tokenizer(context.backbone, config.train.max_length)
    silos: dict[str, Silo] = {}
    evaluations: dict[tuple[int, int], EvaluationRows] = {}  # silos that are judged on the same rows share them
    for item in data:
        validation, test = item.splits.validation, item.splits.test
        key = (id(validation), id(test))
        if key not in evaluations:
            evaluations[key] = _evaluation(tokenize, item, config.privacy.unit is not None)
            if backdoor is not None and backdoor.has_target(item.task):
                attacked = tokenize(item.task, backdoor.test_rows(item.task, test))
                evaluations[key].attack = AttackedRows(attacked, backdoor.target(item.task))
        own, weights = evaluations[key], item.weights
        if item.judged_by_own or any(weights.get("test", ())):
            own = own.weighted(weights, primary=item.judged_by_own)
        added = [] if backdoor is None else backdoor.poisoned_rows(item)
        key_of_canaries = f"canaries {config.seed}".encode() if secret is None else secret
        texts, count = len(item.splits.train[0].texts), config.audit.canaries
        canaries = make_canaries(item.task, texts, count, item.name, key_of_canaries)
        train = [*item.splits.train, *added, *canaries.trained]
        train = without_labels(train) if context.method.unlabeled else train
        units = None if config.privacy.unit_column is None else [row.unit for row in train]
        if units is not None and "" in units:
            raise InputError(f"silo {item.name!r}: privacy.unit={config.privacy.unit}: a row does not say whose it is")
        token_rows, readable = _tokenized(tokenize, item, "training", train, config.privacy.unit is not None)
        unread = len(train) - len(readable) if units is None else len({*units} - {row.unit for row in readable})
        rows = replace(token_rows, poisoned=len(added), units=None if units is None else [row.unit for row in readable])
        malicious = backdoor is not None and item.name in backdoor.malicious
        scale = config.attack.scale if malicious else 1.0
        silos[item.name] = Silo(
            item.name,
            {item.task.name: rows},
            {item.name: own},
            attack_scale=scale,
            empty_units=unread + len(canaries.rows) - len(canaries.trained),
        )
        if canaries.rows:
            silos[item.name].canaries = tokenize(item.task, canaries.rows), list(canaries.present)
    attackers = () if backdoor is None else tuple(sorted(backdoor.malicious))
    if context.method.centralized:
        silos = centralized(silos, context.method.name)
    if labeled is not None:
        silos[context.method.name].train = server_silo(context, labeled).train
    return silos, attackers


def absent_silo(context: TrainingContext, data: SiloData) -> Silo:
    """Build a silo that takes no part in training."""
    tokenize = context.method.setting.head.row_tokenizer(context.backbone, context.train.max_length)
    splits = data.splits
    train = without_labels(splits.train) if context.method.unlabeled else splits.train
    rows, _ = _tokenized(tokenize, data, "training", train)
    return Silo(data.name, {data.task.name: rows}, {data.name: _evaluation(tokenize, data)})


def _evaluation(tokenize: TokenizeRows, data: SiloData, noised: bool = False) -> EvaluationRows:
    validation, _ = _tokenized(tokenize, data, "validation", data.splits.validation, noised)
    test, readable = _tokenized(tokenize, data, "test", data.splits.test, noised)
    if any(row.unit for row in readable):
        test = replace(test, units=[row.unit or f" row {number}" for number, row in enumerate(readable)])
    return EvaluationRows(validation, test)


def _tokenized(
    tokenize: TokenizeRows, data: SiloData, kind: str, rows: Sequence[Row], noised: bool = False
) -> tuple[TokenizedRows, Sequence[Row]]:
    """Tokenize rows of a silo; returns also which they are. An error names them.

    Where rows have noise, those that the reader of files or the head cannot read are left out, unless all are: a
    refusal would tell of them.
    """
    readable, why = [row for row in rows if row.label != UNREAD], "without a declared label, or without a unit"
    try:
        if not readable and rows:
            raise InputError(f"all are {why}")
        token_rows = tokenize(data.task, readable)
    except InputError as error:
        readable = [row for row in readable if noised and _can_read(tokenize, data.task, row)]
        if not readable:
            raise InputError(f"silo {data.name!r}, {kind} rows: {error}") from error
        token_rows, why = tokenize(data.task, readable), str(error)
    if len(readable) < len(rows):
        log_line(f"silo {data.name!r}: {len(rows) - len(readable)} {kind} rows are left out, as empty: {why}")
    return token_rows, readable


def _can_read(tokenize: TokenizeRows, task: Task, row: Row) -> bool:
    try:
        tokenize(task, [row])
    except InputError:
        return False
    return True


def server_silo(context: TrainingContext, labeled: SiloData) -> Silo:
    """Build the coordinator's own silo, of its labeled rows."""
    tokenize = context.method.setting.head.row_tokenizer(context.backbone, context.train.max_length)
    rows = tokenize(labeled.task, labeled.splits.train)
    return Silo(":coordinator", {labeled.task.name: rows}, {})  # no other silo can have this name


def _backdoor(config: Config, data: Sequence[SiloData], method: Method, backbone: Backbone) -> Backdoor | None:
    """Return the backdoor that malicious silos put into their rows, or None without an attack."""
    if config.attack.name == "none":
        return None
    check_trigger(config.attack.triggers, backbone.tokenizer)
    tokenize = method.setting.head.row_tokenizer(backbone, ANY_LENGTH)

    def lengths(task: Task, rows: Sequence[Row]) -> list[int]:
        return [len(ids) for ids in tokenize(task, rows).ids]

    return make_backdoor(config.attack, config.seed, list(data), lengths, config.train.max_length)


@dataclass(frozen=True)
class Canaries:
    """A silo's canaries: rows of random words, whose presence in the training rows a fair coin decides.

    An audit guesses the coins from a finished model. Each right guess more than chance tells something of the model's
    privacy (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one training run").
    """

    rows: Sequence[Row]
    present: Sequence[bool]

    @property
    def trained(self) -> list[Row]:
        """The rows that the silo trains on."""
        return [row for row, present in zip(self.rows, self.present, strict=True) if present]


def make_canaries(task: Task, texts: int, count: int, silo: str, secret: bytes) -> Canaries:
    """Draw a silo's canaries and their coins, the same for the same secret."""
    stream = NoiseStream(hmac.digest(secret, f"canaries\x1f{silo}\x1f{count}".encode(), "sha256"))
    rows = []
    for number in range(count):
        words = [_text(stream, f"{number}/{place}") for place in range(texts)]
        draw = float(stream.uniform("label", str(number), (1,)))
        drawn = (*words,) if task.labeled else (words[0], _text(stream, f"{number}/answer"))
        rows.append(replace(task.rules.drawn_row(task, drawn, draw), unit=f"canary {number}"))
    return Canaries(rows, (stream.uniform("coins", "", (count,)) < 0.5).tolist())


def _text(stream: NoiseStream, name: str) -> str:
    letters = (stream.uniform("letters", name, (_WORDS, _LENGTH)) * len(_LETTERS)).long().tolist()
    return " ".join("".join(_LETTERS[letter] for letter in word) for word in letters)
