"""What is written and kept of tensors is what safetensors itself would write, in whatever way they lie in memory."""

from pathlib import Path

import torch
from safetensors.torch import save

from silotune.core.serialization import tensor_bytes
from silotune.core.tensors import compact
from silotune.runs.storage.checkpoints import Checkpoint, Checkpoints

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def _tensors() -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    tensors = {
        f"part/{place} é\n": (9 * torch.randn(place % 4, 3, generator=draws)).to(dtype)  # the first is empty
        for place, dtype in enumerate(DTYPES)
    }
    return tensors | {"scalar": torch.tensor(3), "across": torch.randn(4, 5, generator=draws).t()}


def test_the_bytes_are_those_of_safetensors() -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in _tensors().items()}
    for metadata in (None, {"silotune": '{"round": 1}'}):
        assert tensor_bytes(_tensors(), metadata) == save(contiguous, metadata)
    assert tensor_bytes({}) == save({})


def test_a_compact_copy_is_the_same_and_lies_in_lines_of_64_bytes() -> None:
    before = _tensors()
    copies = compact(before)
    assert [*copies] == [*before]
    for name, tensor in copies.items():
        assert tensor.dtype is before[name].dtype
        assert torch.equal(tensor, before[name])
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
    blocks = {tensor.untyped_storage().data_ptr() for tensor in copies.values() if tensor.numel()}
    assert len(blocks) == len({tensor.dtype for tensor in copies.values() if tensor.numel()})
    copies["scalar"].fill_(4)
    assert int(before["scalar"]) == 3


def test_a_commit_drops_what_no_checkpoint_needs_also_what_a_killed_run_left(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path)
    left = folder.path / "silos" / "a.safetensors" / "0009.safetensors"  # a silo may be called so
    left.parent.mkdir(parents=True)
    left.write_bytes(b"cut o")
    there: list[Checkpoint] = []
    for number in (1, 2, 3):
        names = [folder.write(f"silos/{silo}/{number:04d}", {"x": torch.ones(1)}) for silo in "ab"]
        checkpoint = Checkpoint(
            number, folder.write(f"shared-{number:04d}", {}), dict(zip("ab", names, strict=True)), {}
        )
        folder.commit(checkpoint, there[0] if there else None)  # the first stays the best
        there.append(checkpoint)
        folder.close()
        files = {
            path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*.safetensors") if path.is_file()
        }
        assert files == there[0].files | checkpoint.files
