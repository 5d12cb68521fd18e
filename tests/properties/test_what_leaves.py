"""A message holds the shared parts that its round trains, the round, the silo's name and number of rows, no more."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest
import torch

from silotune.communication.messages import update_message
from silotune.core.tensors import flatten
from silotune.distributed.protocol.handshake import parse_wire_config, wire_config
from silotune.distributed.silo.run_description import describe
from silotune.distributed.silo.silo_config import REHEARSAL, SiloSettings
from silotune.methods.parts import Scope
from silotune.training.context import TrainingContext
from silotune.training.silo_round import LocalResult
from tests.support.method_cases import (
    CASES,
    KINDS,
    ONE_TASK_ROWS,
    TRAIN_ROWS,
    every_case,
    of_kinds,
    read_message,
    tapped,
)

SENT = {
    "local": set(),
    "centralised": set(),
    "server-only": set(),
    "fedavg": {"global", "global_2"},
    "fedavg-full": {"global"},
    "fedper": {"global", "global_2"},
    "fedmatch": {"global"},
    "fedprox": {"global", "global_2"},
    "fedmcp": {"global"},
    "fedavg, shared head": {"global", "head"},
    "fedmcp, full": {"global"},
    "fedavg, server adam": {"global", "global_2"},
    "fedfame": {"global", "head", "head_projection"},
    "fedavg-server": {"global", "head"},
    "ffa-lora": {"lora_B"},
    "fedsa-lora": {"lora_A"},
    "rolora": {"lora_A", "lora_B"},
    "fedsvd": {"lora_B"},
    "flexlora": {"global"},
    "apfl": {"global"},
    "pfedme": {"global"},
    "fdlora": {"global"},
    "fedalt": {"global"},
    "hetlora": {"global"},
    "fedex-lora": {"global"},
    "flora": {"global"},
    "lora-fair": {"global"},
    "fedrot-lora": {"global"},
    "fedmomentum": {"global"},
    "flora-na": {"global"},
    "la-lora": {"lora_A", "lora_B"},
    "ravan": {"global"},
    "scaffold": {"global", "global_c"},
    "feddyn": {"global"},
    "fedproto": {"prototypes"},
    "ifca": {"global", "head"},
}
"""Sent parts by the papers; heads are private unless the case shares them, the demo's baselines have two adapters."""

ONLY_DOWN = {"fedsvd": {"lora_A"}, "fedex-lora": {"delta"}, "flora": {"delta"}, "fedmomentum": {"delta"}}
ONLY_DOWN["ifca"] = {"global-1", "head-1"}
"""Shared parts that silos receive and never send."""


def shared_names(training: TrainingContext) -> set[str]:
    return {name for name, part in training.parts.items() if part.scope is Scope.SHARED}


@pytest.mark.parametrize("case", of_kinds(SENT, (*KINDS, "fedmcp")))
def test_the_sent_parts_are_those_of_the_paper(reference, case):
    run, wire = reference(case)
    found = {name.split("/")[0] for _, _, message in wire.up for name in read_message(message)[0]}
    assert found == SENT[case]
    assert shared_names(run.federation.context) == SENT[case] | ONLY_DOWN.get(case, set())


def trained_names(training: TrainingContext, number: int) -> set[str]:
    """The shared parts that a phase of a round changes."""
    phases = [phase for phase in training.phases if phase.when == "round" and phase.rounds(number)]
    return shared_names(training) & {name for phase in phases for name in phase.changes}


def at_rank(shapes: dict[str, tuple[int, ...]], rank: int | None) -> dict[str, tuple[int, ...]]:
    """The shapes of a silo's tensors: with a rank of its own, LoRA's A has so many rows and B so many columns."""
    changed = dict(shapes)
    for name, shape in shapes.items() if rank is not None else ():
        if name.endswith("lora_A.weight"):
            changed[name] = (rank, shape[1])
        elif name.endswith("lora_B.weight"):
            changed[name] = (shape[0], rank)
    return changed


@every_case
def test_a_message_holds_exactly_the_shared_parts_of_its_round_as_trained(reference, case):
    run, wire = reference(case)
    training, silos = run.federation.context, run.federation.silos
    tasks = {rows.task.name: rows.task for silo in silos.values() for rows in silo.train.values()}.values()
    whole = {
        f"{name}/{tensor}": tuple(value.shape)
        for name in shared_names(training)
        for tensor, value in training.parts[name].module.init(training.backbone, tasks, torch.Generator()).items()
    }
    rows = {"centralised": sum(TRAIN_ROWS.values())} | TRAIN_ROWS | ONE_TASK_ROWS
    senders = [(number, silo) for number in (1, 2) for silo in sorted(silos)] if whole else []
    shapes = {silo: at_rank(whole, training.method.setting.tuner.ranks.get(silo)) for silo in silos}
    assert [(number, silo) for number, silo, _ in wire.up] == senders
    for number, silo, message in wire.up:
        tensors, header = read_message(message)
        sent = {
            name: shape for name, shape in shapes[silo].items() if name.split("/")[0] in trained_names(training, number)
        }
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == sent
        trained = flatten(wire.results[number, silo].state)
        assert all(torch.equal(tensor, trained[name]) for name, tensor in tensors.items())
        assert list(header.pop("__metadata__").items()) == [
            ("silotune", f'{{"round": {number}, "rows": {rows[silo]}, "silo": "{silo}"}}')
        ]
        assert header.keys() == sent.keys()
        length = int.from_bytes(message[:8], "little")
        assert len(message) == 8 + length + sum(4 * math.prod(shape) for shape in sent.values())
    for message in wire.down if whole else []:
        tensors, header = read_message(message)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} in shapes.values()
        assert list(header["__metadata__"]) == ["silotune"]


@every_case
def test_the_operator_reads_what_leaves_and_not_what_only_comes_down(reference, case):
    run, wire = reference(case)
    federation, bounded = run.federation, run.federation.method.setting.tuner.ranks
    sent = {number: Counter[str]() for number in (1, 2)}
    for number, silo, message in wire.up:
        if silo not in bounded:  # one whose rank is the run's
            sent[number] = Counter()
            for name, tensor in read_message(message)[0].items():
                sent[number][name.split("/")[0]] += tensor.numel()
    settings = SiloSettings(name="none", folder="none", rows="none", share=[], policy=dict(REHEARSAL))
    config = parse_wire_config(wire_config(federation.config, sorted(federation.silos)))
    leaving, numbers = (
        line for line in describe(config, federation, settings) if line.startswith(("leaves in", "in n"))
    )
    parts = [f"part '{part}' ({count:,} numbers)" for part, count in sorted((sent[1] | sent[2]).items())]
    assert leaving == f"leaves in a round: {', '.join(parts) or 'no part'}"
    most, total = (of(count.total() for count in sent.values()) for of in (max, sum))
    assert numbers.startswith(f"in numbers: at most {most:,} a round, ")
    assert numbers.endswith(f"; {total:,} in the whole run")


def hashes(messages: dict[str, bytes]) -> dict[str, str]:
    return {silo: hashlib.sha256(message).hexdigest() for silo, message in messages.items()}


def spoil_private(result: LocalResult, training: TrainingContext) -> None:
    """Overwrite all private tensors with other numbers."""
    draws = torch.Generator().manual_seed(99)
    for part in result.state.keys() - shared_names(training):
        for tensor in result.state[part].values():
            tensor.copy_(torch.randn(tensor.shape, generator=draws))
    for tensor in result.memory.values():
        tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.zero_()
    result.memory["stowaway"] = torch.full((3,), 7.0)


@every_case
def test_private_state_changed_by_hand_changes_no_byte_of_what_the_engine_sends(federate, reference, case, tmp_path):
    _, honest = reference(case)
    with tapped(spoil=spoil_private) as wire:
        federate.run(case, tmp_path / "run", "rounds=1")
    assert hashes(wire.updates(1)) == hashes(honest.updates(1))
    assert {silo for _, silo in wire.results} == {silo for number, silo in honest.results if number == 1}


@every_case
def test_each_private_tensor_changed_by_hand_changes_no_byte(reference, case):
    run, wire = reference(case)
    training = run.federation.context
    shared = shared_names(training)
    (number, silo), result = next(iter(wire.results.items()))
    whole = {part: dict(tensors) for part, tensors in result.state.items()}
    message = update_message(whole, training.parts, number, silo, 7)
    for part in whole.keys() - shared:
        for name, tensor in list(whole[part].items()):
            for other in (tensor + 1, torch.full_like(tensor, math.nan), torch.zeros(2, 3, dtype=torch.int8)):
                whole[part][name] = other
                assert update_message(whole, training.parts, number, silo, 7) == message, f"{part}/{name} leaks"
            whole[part][name] = tensor
        whole[part]["stowaway"] = torch.ones(5)
        assert update_message(whole, training.parts, number, silo, 7) == message
    for part in shared:  # and the check is able to fail: a shared tensor does change the message
        name, tensor = next(iter(whole[part].items()))
        whole[part][name] = tensor + 1
        assert update_message(whole, training.parts, number, silo, 7) != message
        whole[part][name] = tensor


def test_every_method_has_a_case():
    from silotune.methods import METHODS

    assert {case.method for case in CASES.values()} == set(METHODS)
