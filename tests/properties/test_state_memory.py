"""States on disk (`state.memory_mib`): the bits of states in memory, for all methods, interrupted or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from silotune.distributed.protocol.agreement import check_federated
from silotune.errors import InputError
from silotune.runs.load import load_model, load_run
from silotune.runs.storage import state_shards
from silotune.runs.storage.checkpoints import Checkpoint, Checkpoints
from silotune.runs.storage.state_memory import StateMemory, StoredState
from silotune.runs.storage.state_shards import StateShards
from silotune.training.silo import SiloState
from tests.support.method_cases import assert_as_if_never_interrupted, every_case, same

ON_DISK = "state.memory_mib=0"


class Interruption:
    """A progress report that interrupts at its n-th call, n from 0."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def interrupted(federate, case, out: Path, at: int, *words: str, resume: bool = False) -> None:
    with pytest.raises(KeyboardInterrupt):
        federate.run(case, out, *words, progress=Interruption(at), resume=resume)


def tensor_files(out: Path) -> dict[str, list[str]]:
    """Ending → the tensor files of a run folder's checkpoints."""
    found: dict[str, list[str]] = {"safetensors": [], "states": []}
    for path in sorted((out / "checkpoints").rglob("*.*s")):
        if path.suffix[1:] in found:
            found[path.suffix[1:]].append(path.relative_to(out / "checkpoints").as_posix())
    return found


def state(value: float, size: int = 256) -> SiloState:
    return SiloState({"head": {"weight": torch.full((size,), float(value))}}, {"steps": torch.tensor([float(value)])})


# -- whole runs --------------------------------------------------------------------------------------------------------


@every_case
def test_the_bits_of_states_in_memory(federate, reference, case, tmp_path):
    """Never interrupted, and interrupted in both rounds; no silo has a file of its own."""
    in_memory, _ = reference(case)
    whole = federate.run(case, tmp_path / "whole", ON_DISK)
    assert same(whole.summary) == same(in_memory.summary)
    files = tensor_files(tmp_path / "whole")
    assert not any(name.startswith("silos/") for name in files["safetensors"])
    assert len(files["states"]) <= 2  # the last round's, and perhaps the best one's
    silos = len(whole.federation.silos)
    out = tmp_path / "run"
    interrupted(federate, case, out, silos, ON_DISK)
    interrupted(federate, case, out, silos + 1, ON_DISK, resume=True)
    assert_as_if_never_interrupted(federate.run(case, out, ON_DISK, resume=True), whole)


@pytest.mark.parametrize("case", ["fedmcp", "moon", "local"])
def test_few_of_many_silos_a_round(federate, case, tmp_path, monkeypatch):
    """Silos keep places of earlier rounds; shards are so small that a round fills several, and thin ones are joined."""
    words = ("sampling.count=2", "rounds=6", "train.steps=1")
    in_memory = federate.run(case, tmp_path / "memory", *words)
    monkeypatch.setattr(state_shards, "SHARD_BYTES", 4096)
    monkeypatch.setattr(state_shards, "_THIN_SHARDS", 1)
    whole = federate.run(case, tmp_path / "whole", *words, ON_DISK)
    assert same(whole.summary) == same(in_memory.summary)
    for at in (1, 5, 9, 14):
        out = tmp_path / f"run{at}"
        interrupted(federate, case, out, at, *words, ON_DISK)
        assert_as_if_never_interrupted(federate.run(case, out, *words, ON_DISK, resume=True), whole)


def test_finished_in_every_round(federate, tmp_path):
    """`evaluation.finish_per_round` trains final phases that it takes back: those states are not kept in memory."""
    words = ("evaluation.finish_per_round=true",)
    in_memory = federate.run("fedalt", tmp_path / "memory", *words)
    assert same(federate.run("fedalt", tmp_path / "disk", *words, ON_DISK).summary) == same(in_memory.summary)


def test_in_two_processes(federate, reference, tmp_path):
    whole, _ = reference("fedmcp")
    run = federate.run("fedmcp", tmp_path / "run", ON_DISK, workers=2)
    assert same(run.summary) | {"workers": 1} == same(whole.summary) | {"workers": 1}


@pytest.mark.parametrize("settings", [(ON_DISK, "seed=1"), ("seed=1", ON_DISK), ("state.memory_mib=1", ON_DISK)])
def test_a_run_goes_on_with_another_setting(federate, reference, settings, tmp_path):
    whole, _ = reference("fedmcp")
    first, second = settings
    out = tmp_path / "run"
    interrupted(federate, "fedmcp", out, len(whole.federation.silos) + 1, first)
    resumed = federate.run("fedmcp", out, second, resume=True)
    assert same(resumed.summary) == same(whole.summary)
    on_disk = second == ON_DISK
    assert all(name.startswith("states/") == on_disk for name in newest(out).silos.values())


def newest(out: Path) -> Checkpoint:
    checkpoint = Checkpoints(out / "checkpoints").latest()
    assert checkpoint is not None
    return checkpoint


def test_a_finished_run_is_opened(federate, reference, tmp_path):
    whole, _ = reference("fedmcp")
    out = tmp_path / "run"
    federate.run("fedmcp", out, ON_DISK)
    opened = load_run(out)
    assert opened.summary["state_sha256"] == whole.summary["state_sha256"]
    for name, silo in opened.federation.silos.items():
        assert isinstance(silo.state, StoredState)
        kept = whole.federation.silos[name].state.flat()
        assert {key: tensor.tolist() for key, tensor in silo.state.flat().items()} == {
            key: tensor.tolist() for key, tensor in kept.items()
        }
    silo = next(iter(whole.federation.silos))
    texts = ["a text", "another one"]
    assert load_model(out, silo).predict(texts) == load_model(whole.folder, silo).predict(texts)


def test_refused_where_silos_are_elsewhere(federate):
    with pytest.raises(InputError, match=r"^state\.memory_mib: .* use --engine inprocess$"):
        check_federated(federate.config("fedmcp", ON_DISK))
    with pytest.raises(InputError, match=r"state\.memory_mib"):
        federate.config("fedmcp", "state.memory_mib=-1")


def damage(out: Path, how: str) -> str:
    """Damage the last round's shard, or the manifest's place in it; returns what the error must name."""
    shard = out / "checkpoints" / tensor_files(out)["states"][-1]
    content = shard.read_bytes()
    manifest = out / "checkpoints" / "round-0001.json"
    if how == "missing":
        shard.unlink()
    elif how == "cut off":
        shard.write_bytes(content[:-1])
    elif how == "header":
        shard.write_bytes(b"\xff" * 64 + content[64:])
    elif how == "no file":
        shard.unlink()
        shard.mkdir()
    else:
        described = json.loads(manifest.read_text())
        name = max(described["silos"], key=lambda silo: int(described["silos"][silo].split("@")[1].split("+")[0]))
        described["silos"][name] = how.format(described["silos"][name].split("@")[0])
        manifest.write_text(json.dumps(described))
    return "round-0001.json" if how.startswith("..") else "0001-000.states"


@pytest.mark.parametrize(
    "how",
    ["missing", "cut off", "header", "no file", "{}@3+9", "{}@0+0", "{}@0+99999999999999999", "{}", "../{}@0+9"],
)
def test_a_damaged_shard_is_named_and_nothing_changes(federate, reference, how, tmp_path):
    whole, _ = reference("fedmcp")
    out = tmp_path / "run"
    interrupted(federate, "fedmcp", out, len(whole.federation.silos) + 1, ON_DISK)
    named = damage(out, how)
    before = tensor_files(out), (out / "events.jsonl").read_text()
    with pytest.raises(InputError, match=named) as caught:
        federate.run("fedmcp", out, ON_DISK, resume=True)
    assert "\n" not in str(caught.value)
    assert (tensor_files(out), (out / "events.jsonl").read_text()) == before


# -- memory and shards -------------------------------------------------------------------------------------------------


def test_no_more_than_so_many_bytes_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    memory = StateMemory(checkpoints, 1)
    size = 2**18 // 4 - 2  # with its memory tensor a quarter of a MiB less four bytes
    stored = [memory.write(1, state(number, size)) for number in range(10)]
    assert len(memory._states) == 4
    assert [float(one.private["head"]["weight"][0]) for one in stored] == list(range(10))
    assert [float(one.memory["steps"]) for one in stored] == list(range(10))
    for number, one in enumerate(stored):  # as when a checkpoint is loaded again
        memory.stored(one.location, state(number, size))
    assert len(memory._states) == 4
    assert memory._bytes == sum(tensor.nbytes for one, _ in memory._states.values() for tensor in one.flat().values())
    assert memory._bytes <= 2**20
    used = stored[7]  # the last used ones stay
    assert used.private is memory._states[used.location][0].private
    memory.write(1, state(11, size))
    memory.write(1, state(12, size))
    assert used.location in memory._states
    checkpoints.close()


def test_a_state_larger_than_all_memory_is_read_each_time(tmp_path):
    memory = StateMemory(Checkpoints(tmp_path), 0)
    stored = memory.write(1, state(3.0))
    assert not memory._states
    assert memory._bytes == 0
    assert stored.compact().flat().keys() == state(3.0).flat().keys()
    assert stored.private is not stored.private
    with pytest.raises(AttributeError, match="anything"):
        _ = stored.anything


def commit(
    checkpoints: Checkpoints, number: int, locations: dict[str, str], keep: Checkpoint | None = None
) -> Checkpoint:
    shared = checkpoints.write(f"shared-{number:04d}", {"part": torch.zeros(1)})
    checkpoint = Checkpoint(number, shared, dict(locations), {})
    checkpoints.commit(checkpoint, keep)
    return checkpoint


def test_files_stay_few_and_hold_few_dead_bytes(tmp_path, monkeypatch):
    """200 rounds of 3 out of 60 silos; every state is what was written last, whatever moved."""
    monkeypatch.setattr(state_shards, "SHARD_BYTES", 16 * 1024)
    checkpoints = Checkpoints(tmp_path)
    shards = StateShards(checkpoints)
    locations: dict[str, str] = {}
    values: dict[str, float] = {}
    moved = 0
    for number in range(1, 201):
        for name in (f"silo-{(7 * number + k) % 60}" for k in range(3)):
            values[name] = number
            locations[name] = shards.write(number, state(number))
        moves = shards.joined(number, locations)
        moved += len(moves)
        locations |= moves
        commit(checkpoints, number, locations)
        checkpoints.read(locations[name])
        files = list((tmp_path / "states").iterdir())
        length = max(int(place.rpartition("+")[2]) for place in locations.values())
        alive = length * len(locations)
        assert len(files) <= state_shards._THIN_SHARDS + 1 + 2 * alive // state_shards.SHARD_BYTES
        dead = sum(path.stat().st_size for path in files) - alive
        assert dead <= alive + (state_shards._THIN_SHARDS + 2) * (state_shards.SHARD_BYTES + length)
    for name, place in locations.items():
        assert float(SiloState.from_flat(checkpoints.read(place)).private["head"]["weight"][0]) == values[name]
    assert 0 < moved < 200 * 12  # a state moves now and then, not in every round
    checkpoints.close()


def test_the_best_round_keeps_its_shard_when_states_move_away(tmp_path, monkeypatch):
    monkeypatch.setattr(state_shards, "_THIN_SHARDS", 0)
    checkpoints = Checkpoints(tmp_path)
    shards = StateShards(checkpoints)
    best = commit(checkpoints, 1, {"a": shards.write(1, state(1.0)), "b": shards.write(1, state(2.0))})
    locations = best.silos | {"a": shards.write(2, state(3.0))}
    moves = shards.joined(2, locations)
    assert moves.keys() == {"b"}
    assert moves["b"] != best.silos["b"]
    commit(checkpoints, 2, locations | moves, keep=best)
    for place, value in ((best.silos["a"], 1.0), (best.silos["b"], 2.0), (moves["b"], 2.0), (locations["a"], 3.0)):
        assert float(SiloState.from_flat(checkpoints.read(place)).private["head"]["weight"][0]) == value
    commit(checkpoints, 3, locations | moves)
    checkpoints.read(moves["b"])
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["0002-000.states"]
    checkpoints.close()


def test_what_a_killed_round_left_in_its_shard_is_overwritten(tmp_path):
    killed = Checkpoints(tmp_path)
    shards = StateShards(killed)
    for value in range(5):
        shards.write(1, state(value))
    killed.close()
    again = Checkpoints(tmp_path)
    place = StateShards(again).write(1, state(9.0))
    commit(again, 1, {"a": place})
    assert again.read(place)["memory/steps"].tolist() == [9.0]
    assert (tmp_path / "states" / "0001-000.states").stat().st_size == int(place.rpartition("+")[2])
