"""Building blocks without any knowledge of learning; `core` imports no other room.

`tensors` (states as nested dictionaries of tensors), `serialization` (safetensors bytes), `files` (atomic writes),
`async_writer` (writes in a background thread), `locking` (one process per folder), `process_pool` (worker processes),
`randomness` (seeds derived from a purpose), `numeric` and `norms` (means, fractions, vector norms).
"""
