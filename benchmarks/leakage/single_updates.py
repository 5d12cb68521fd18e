"""What one silo's update tells about its rows: words and membership, from full tuning of a row to noise.

A coordinator that looks at everything has the broadcast, one silo's update and the shared head, so the whole model.
It tries three things, each simple; better attacks exist, so the figures are lower bounds of what an update tells:

- `tokens`: with full tuning, rows of the embedding table that changed name the tokens of the training rows. `found`:
  the share of the rows' tokens that are named; `false`: the share of the named ones that are not in the rows.
- `words`: which tokens are in the training rows. For each candidate, half of them in no training row, the gradient of a
  row of this token alone is compared with the update (cosine, for the likelier label). AUC: 0.5 is guessing, 1 is sure.
- `loss`, `gradient`: whether a row was trained on (membership): by its loss under the updated model, and by the cosine
  of its gradient with the update. AUC, and the share of members found at 10 % false alarms (`…_at_10`).

Backbone: MiniLM; rows: 50 of the demo's sentiment task, and 50 others; averages over `seeds`. The cases:

- `full, one row`: one step of one row with full tuning.
- `adapter, one row`: a bottleneck in place of full tuning.
- `one pass`: one pass of eight rows a step. `20 passes`: many passes at a large rate.
- `noise`: `20 passes` with Laplace noise, ε = 8.
- `masked`: `20 passes` of three silos of 50 rows, whose sum under masks the coordinator has (`aggregation.secure`).

The last key is the AUC of membership by loss of one case, `20 passes` over a bottleneck.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.leakage.one_silo import private, some_rows
from silotune.communication.masks.coordinator import SumsInProcess
from silotune.communication.masks.fixed_point import read_summand
from silotune.communication.messages import broadcast_message
from silotune.core.tensors import State, Tensors, change_of, flatten
from silotune.data.tokenized import TokenizedRows
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.federation import Federation
from silotune.training.local_trainer import LocalTrainer
from silotune.training.silo import Silo

ROWS = 50
SUMMED = 3
"""Silos whose sum is attacked in the case `masked`."""

WORDS = 40
"""Candidates of each kind."""

SHARED = (
    "data.tasks=[sentiment]",
    "method=fedavg",
    "method.adapters=1",
    "head=linear",
    "head.scope=shared",
    "rounds=1",
)
ONE_ROW = ("train.optimizer=sgd", "train.steps=1", "train.batch_size=1", "train.lr=1")
ONE_PASS = ("train.optimizer=sgd", "train.batches=even", "train.epochs=1", "train.batch_size=8", "train.lr=0.01")
PASSES = ("train.optimizer=adam", "train.batches=even", "train.epochs=20", "train.batch_size=8", "train.lr=0.01")
NOISE = ("uplink=clip,laplace", "uplink.epsilon=8")
BOTTLENECK, LORA, FULL = ("tuner=bottleneck", "tuner.r=16"), ("tuner=lora", "tuner.r=8"), ("tuner=full",)

CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "full, one row": ((*FULL, *ONE_ROW), 1),
    "adapter, one row": ((*BOTTLENECK, *ONE_ROW), 1),
    "bottleneck, one pass": ((*BOTTLENECK, *ONE_PASS), ROWS),
    "lora, one pass": ((*LORA, *ONE_PASS), ROWS),
    "bottleneck, 20 passes": ((*BOTTLENECK, *PASSES), ROWS),
    "lora, 20 passes": ((*LORA, *PASSES), ROWS),
    "bottleneck, 20 passes, noise": ((*BOTTLENECK, *PASSES, *NOISE), ROWS),
    "bottleneck, 20 passes, masked": ((*BOTTLENECK, *PASSES), ROWS),
    "bottleneck, 20 passes, private": ((*BOTTLENECK, *PASSES, *private(1)), ROWS),
}
"""Case → configuration, and the number of training rows."""


def measure(seeds: int = 3, cases: list[str] | None = None) -> dict[str, Any]:
    """Per case, what the attacks find, averaged over seeds."""
    report: dict[str, Any] = {"seeds": seeds, "rows": ROWS, "words": WORDS}
    for name in cases or list(CASES):
        words, rows = CASES[name]
        summed = SUMMED if name.endswith("masked") else 1
        measures = [_attack(words, rows, seed, summed) for seed in range(1, seeds + 1)]
        report[name] = {key: round(statistics.mean(each[key] for each in measures), 3) for key in measures[0]}
        print(f"{name}: {report[name]}", file=sys.stderr, flush=True)
    return report | {"ratio": report.get("bottleneck, 20 passes", {}).get("loss")}


def _attack(words: tuple[str, ...], count: int, seed: int, summed: int) -> dict[str, float]:
    """Train one silo for one round and attack its update, or the mean of several under masks."""
    federation = build(read_config("demo", [*SHARED, *words, f"seed={seed}", "threads=1"]))
    (silo,) = federation.silos.values()
    (task,) = silo.train
    (evaluation,) = silo.evaluations.values()
    members, others = some_rows(silo.train[task], range(count)), some_rows(evaluation.test, range(ROWS))
    trained = replace(silo, train={task: members})
    shared = federation.coordinator.shared
    broadcast = broadcast_message(shared, 1)
    peers = [some_rows(silo.train[task], range(count * place, count * (place + 1))) for place in range(1, summed)]
    silos_beside = [replace(silo, name=f"peer {place}", train={task: rows}) for place, rows in enumerate(peers)]
    update = _update(federation, trained, silos_beside, shared, broadcast)
    if "tuner=full" in words:
        return _changed_tokens(update, members)
    probe = build(read_config("demo", [*SHARED, *words[:2], *ONE_ROW, f"seed={seed}", "threads=1"]))
    gradients = _Gradients(probe, silo, task, shared, update)
    result = {"words": _words(gradients, members, others)}
    if count == 1:
        return result
    after: State = {name: {key: tensors[key] + update[f"{name}/{key}"] for key in tensors} for name, tensors in
                    shared.items()}  # fmt: skip
    for name, score in (
        ("loss", lambda rows: [-value for value in _losses(federation, after, rows)]),
        ("gradient", lambda rows: [gradients.cosine(some_rows(rows, [row])) for row in range(len(rows))]),
    ):
        inside, outside = score(members), score(others)
        result |= {name: _auc(inside, outside), f"{name}_at_10": _found_at(inside, outside, 0.1)}
    return result


def _update(federation: Federation, silo: Silo, peers: list[Silo], shared: State, broadcast: bytes) -> Tensors:
    """Return the change that the coordinator reads from the silo's message, or from the sum with its peers'."""
    client, coordinator = federation.client(), federation.coordinator
    if peers:
        client.summands = (federation.config.seed, True)
        replies = {each.name: client.rounds([each], broadcast)[0] for each in (silo, *peers)}
        summands = {name: read_summand(reply.message) for name, reply in replies.items()}
        total = SumsInProcess(summands, 1).sum(1, summands)
        *_, received = coordinator.receive_sum(1, total, replies)
    else:
        (reply,) = client.rounds([silo], broadcast)
        received = coordinator.read_reply(1, reply)
    assert received.update is not None, "an honest silo's update is read"
    return {name: tensor.float() for name, tensor in change_of(flatten(shared), received.update.tensors).items()}


def _changed_tokens(update: Tensors, members: TokenizedRows) -> dict[str, float]:
    (table,) = [tensor for name, tensor in update.items() if name.endswith("word_embeddings.weight")]
    named = set(table.abs().amax(1).nonzero().flatten().tolist())
    real = {token for row in members.ids for token in row}
    return {"found": len(named & real) / len(real), "false": len(named - real) / max(len(named), 1)}


class _Gradients:
    """Compares the gradients of rows with an update."""

    def __init__(self, probe: Federation, silo: Silo, task: str, shared: State, update: Tensors) -> None:
        self._trainer, self._silo, self._task = LocalTrainer(probe.context), silo, task
        self._shared = shared
        self._start = flatten(shared)
        self._names = sorted(self._start)
        self._update = torch.cat([update[name].flatten() for name in self._names])

    def cosine(self, row: TokenizedRows) -> float:
        """Return the cosine of one row's step with the update."""
        (result,) = self._trainer.rounds([replace(self._silo, train={self._task: row}, state=None)], self._shared, 1)
        moved = flatten({name: result.state[name] for name in self._shared})
        step: Tensor = torch.cat([(moved[name] - self._start[name]).flatten() for name in self._names])
        return float(torch.nn.functional.cosine_similarity(step, self._update, dim=0))


def _words(gradients: _Gradients, members: TokenizedRows, others: TokenizedRows) -> float:
    """Return the AUC of telling the members' own tokens from tokens of the other rows alone."""
    first, last = members.ids[0][0], members.ids[0][-1]
    inside = {token for row in members.ids for token in row}
    outside = {token for row in others.ids for token in row}
    scores = []
    for tokens in (inside - outside, outside - inside):
        sample = sorted(tokens - {first, last})[:WORDS]
        rows = [_row(members, [first, token, last]) for token in sample]
        scores.append([max(gradients.cosine(_labeled(row, label)) for label in (0, 1)) for row in rows])
    return _auc(*scores)


def _losses(federation: Federation, state: State, rows: TokenizedRows) -> list[float]:
    from silotune.evaluation.predict import logits

    values = logits(federation.context, state, rows)
    return torch.nn.functional.cross_entropy(values, rows.labels, reduction="none").tolist()


def _row(rows: TokenizedRows, ids: list[int]) -> TokenizedRows:
    types = None if rows.types is None else [[0] * len(ids)]
    return replace(rows, ids=[ids], types=types, labels=rows.labels[:1])


def _labeled(row: TokenizedRows, label: int) -> TokenizedRows:
    return replace(row, labels=torch.tensor([label]))


def _auc(inside: list[float], outside: list[float]) -> float:
    """Return the probability that a score inside is higher than one outside; ties count half."""
    pairs = torch.tensor(inside)[:, None] - torch.tensor(outside)[None]
    return float(((pairs > 0).double() + (pairs == 0).double() / 2).mean())


def _found_at(inside: list[float], outside: list[float], alarms: float) -> float:
    """Return the share of scores inside above a threshold that this share of those outside exceeds."""
    threshold = torch.quantile(torch.tensor(outside), 1 - alarms)
    return float((torch.tensor(inside) > threshold).double().mean())
