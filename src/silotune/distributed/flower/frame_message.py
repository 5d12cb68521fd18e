"""A frame's bytes as the content of a Flower message, which Flower sends in pieces of 5 MB."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Message, RecordDict

from silotune.distributed.protocol.frames import ProtocolError

_RECORD, _ARRAY = "silotune", "frame"


def wrap(data: bytes) -> RecordDict:
    """Wrap a frame's bytes as the content of a Flower message."""
    array = Array(dtype="uint8", shape=(len(data),), stype="silotune.frame", data=data)
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: array})})


def unwrap(message: Message) -> bytes:
    """Return the bytes of a message's frame.

    Raises:
        ProtocolError: the message holds no frame.
    """
    content = message.content
    record = content.array_records.get(_RECORD)
    if record is None or _ARRAY not in record:
        raise ProtocolError("a message without a frame")
    return bytes(record[_ARRAY].data)
