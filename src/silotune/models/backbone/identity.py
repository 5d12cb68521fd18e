"""`WeightIdentity`: fingerprint of the loaded weights and their quantization; also knows silotune 0.1.0's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from silotune.models.backbone.lm_head import LMHead, without_lm_head
from silotune.models.backbone.quantization import NONE


class WeightIdentity:
    """The digest of a model's stored weights and of their quantization.

    Args:
        model: the model, whose parameters are hashed if there is no digest.
        stored: the digest of the weights as stored; None: that of the parameters in float32.
        quantization: how the linear layers are stored.
        load_float32: loads the stored weights in float32; None: the model's own are.
    """

    def __init__(
        self, model: Any, stored: str | None, quantization: str, load_float32: Callable[[], Any] | None
    ) -> None:
        self._model = model
        self._stored = stored
        self._quantization = quantization
        self._load_float32 = load_float32

    @property
    def fingerprint(self) -> str:
        """The sha256 of the stored weights and their quantization."""
        if self._stored is None:
            self._stored = _float32_fingerprint(self._in_float32())
        if self._quantization == NONE:
            return self._stored
        return hashlib.sha256(f"{self._stored}|{self._quantization}".encode()).hexdigest()

    def has(self, recorded: str) -> bool:
        """Return whether a recorded fingerprint is of these weights; it may be one that silotune 0.1.0 recorded."""
        if recorded == self.fingerprint:
            return True
        return self._quantization == NONE and recorded == _float32_fingerprint(self._in_float32())

    def _in_float32(self) -> Any:
        return self._model if self._load_float32 is None else self._load_float32()


def _float32_fingerprint(model: Any) -> str:
    """Return the sha256 of a model's parameters in float32, without a pooler: the fingerprint of silotune 0.1.0."""
    base = without_lm_head(model)
    parameters = dict(base.named_parameters())
    if model.get_output_embeddings() is not None:
        parameters |= LMHead(model, base).parameters
    sha = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        if not name.startswith("pooler."):
            sha.update(f"{name}|{tuple(tensor.shape)}|".encode())
            sha.update(tensor.detach().float().cpu().contiguous().reshape(-1).numpy().data)
    return sha.hexdigest()
