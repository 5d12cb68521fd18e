"""What is written and kept of tensors is what safetensors itself would write, in whatever way they lie in memory."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from silotune.core.serialization import read_block, tensor_bytes
from silotune.core.tensors import compact

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_as_one_block_gives_what_safetensors_reads(dtype) -> None:
    for shapes in ([(3, 2), (), (5,)], [(2,), (0, 3)], []):
        tensors = {
            f"{n} é": torch.arange(8).repeat(9)[:9].prod().expand(shape).to(dtype) for n, shape in enumerate(shapes)
        }
        content = tensor_bytes(tensors, {"silotune": '{"round": 1}'})
        read, block = read_block(content)
        assert [*read] == sorted(tensors)
        for name, tensor in load(content).items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read[name], tensor)
        if block is not None:
            assert block.numel() == sum(tensor.numel() for tensor in tensors.values())
            assert block.data_ptr() == min(tensor.data_ptr() for tensor in read.values()), "tensors are parts of it"
        assert (block is None) == (not dtype.is_floating_point or (0, 3) in shapes or not shapes)


def test_tensors_of_several_types_are_read_one_by_one() -> None:
    read, block = read_block(tensor_bytes(_tensors()))
    assert block is None
    assert read.keys() == _tensors().keys()


def _file(header: object, numbers: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


_PLAIN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"a": _PLAIN}, 12),
        ({"a": _PLAIN}, 4),
        ({"a": _PLAIN | {"shape": [3]}}, 8),
        ({"a": _PLAIN | {"shape": [-2]}}, 8),
        ({"a": _PLAIN | {"shape": [2.0]}}, 8),
        ({"a": _PLAIN | {"shape": {}}}, 8),
        ({"a": _PLAIN | {"dtype": "F31"}}, 8),
        ({"a": _PLAIN | {"data_offsets": [0, 7]}}, 7),
        ({"a": _PLAIN | {"data_offsets": [4, 12]}}, 12),
        ({"a": _PLAIN, "b": _PLAIN | {"data_offsets": [4, 12]}}, 12),
        ({"a": _PLAIN, "b": _PLAIN | {"data_offsets": [9, 17]}}, 17),
        ({"a": _PLAIN, "__metadata__": {"silotune": 1}}, 8),
        (b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8),
        (b"[]", 0),
        (b'{"a": ', 8),
    ],
)
def test_what_safetensors_refuses_is_refused(header, length) -> None:
    content = _file(header, bytes(length))
    with pytest.raises(SafetensorError):
        load(content)
    with pytest.raises(SafetensorError):
        read_block(content)
