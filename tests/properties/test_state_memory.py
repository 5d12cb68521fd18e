"""States on disk (`state.memory_mib`): the bits of states in memory, for all methods, interrupted or not."""

from __future__ import annotations

import pytest
import torch

from silotune.distributed.protocol.handshake import check_federated
from silotune.errors import InputError
from silotune.runs.personal_model import load_model
from silotune.runs.run_result import load_run
from silotune.runs.storage.checkpoints import Checkpoints, StateMemory, StoredState
from silotune.training.silo import SiloState
from tests.properties.test_resume import interrupted_at
from tests.support.method_cases import assert_as_if_never_interrupted, every_case, same

ON_DISK = "state.memory_mib=0"


def state(value: float, size: int = 256) -> SiloState:
    return SiloState({"head": {"weight": torch.full((size,), float(value))}}, {"steps": torch.tensor([float(value)])})


# -- whole runs --------------------------------------------------------------------------------------------------------


@every_case
def test_the_bits_of_states_in_memory(federate, reference, case, tmp_path):
    """Interrupted in both rounds."""
    whole, _ = reference(case)
    silos = len(whole.federation.silos)
    out = tmp_path / "run"
    interrupted_at(federate, case, out, silos, ON_DISK)
    interrupted_at(federate, case, out, silos + 1, ON_DISK, resume=True)
    assert_as_if_never_interrupted(federate.run(case, out, ON_DISK, resume=True), whole)


def test_few_of_many_silos_a_round(federate, tmp_path):
    """Silos keep files of earlier rounds."""
    words = ("sampling.count=2", "rounds=6", "train.steps=1")
    whole = federate.run("moon", tmp_path / "memory", *words)
    for at in (1, 5, 9, 14):
        out = tmp_path / f"run{at}"
        interrupted_at(federate, "moon", out, at, *words, ON_DISK)
        assert_as_if_never_interrupted(federate.run("moon", out, *words, ON_DISK, resume=True), whole)


def test_finished_in_every_round(federate, tmp_path):
    """`evaluation.finish_per_round` trains final phases that it takes back: those states are not kept in memory."""
    words = ("evaluation.finish_per_round=true",)
    in_memory = federate.run("fedalt", tmp_path / "memory", *words)
    assert same(federate.run("fedalt", tmp_path / "disk", *words, ON_DISK).summary) == same(in_memory.summary)


@pytest.mark.parametrize("settings", [(ON_DISK, "seed=1"), ("seed=1", ON_DISK), ("state.memory_mib=1", ON_DISK)])
def test_a_run_goes_on_with_another_setting(federate, reference, settings, tmp_path):
    whole, _ = reference("fedmcp")
    first, second = settings
    out = tmp_path / "run"
    interrupted_at(federate, "fedmcp", out, len(whole.federation.silos) + 1, first)
    resumed = federate.run("fedmcp", out, second, resume=True)
    assert same(resumed.summary) == same(whole.summary)


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


def test_no_more_than_so_many_bytes_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    memory = StateMemory(checkpoints, 1)
    size = 2**18 // 4 - 2  # with its memory tensor a quarter of a MiB less four bytes
    stored = [memory.write(str(number), state(number, size)) for number in range(10)]
    assert len(memory._states) == 4
    assert [float(one.private["head"]["weight"][0]) for one in stored] == list(range(10))
    assert [float(one.memory["steps"]) for one in stored] == list(range(10))
    for number, one in enumerate(stored):  # as when a checkpoint is loaded again
        memory.stored(one.file, state(number, size))
    assert len(memory._states) == 4
    assert memory._bytes == sum(tensor.nbytes for one, _ in memory._states.values() for tensor in one.flat().values())
    assert memory._bytes <= 2**20
    used = stored[7]  # the last used ones stay
    assert used.private is memory._states[used.file][0].private
    memory.write("11", state(11, size))
    memory.write("12", state(12, size))
    assert used.file in memory._states
    checkpoints.close()


def test_a_state_larger_than_all_memory_is_read_each_time(tmp_path):
    memory = StateMemory(Checkpoints(tmp_path), 0)
    stored = memory.write("1", state(3.0))
    assert not memory._states
    assert memory._bytes == 0
    assert stored.compact().flat().keys() == state(3.0).flat().keys()
    assert stored.private is not stored.private
    with pytest.raises(AttributeError, match="anything"):
        _ = stored.anything
