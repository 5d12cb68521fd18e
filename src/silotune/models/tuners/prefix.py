"""Prefix tuning: trained keys and values before the text in every attention layer (Li and Liang 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors, draw_linear
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.architectures import families_with_prefix
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.virtual_tokens import Prefix
from silotune.models.tuners.base import MergedAdapter, TunerOptions, WeightedTensors
from silotune.models.tuners.prompts import PROMPT_TENSOR, SEQ_TO_SEQ, VirtualTokenTuner, blend, is_folded, prompt_fields


class PrefixOptions(TunerOptions):
    """The options of prefix tuning."""

    tokens: int = Field(default=6, ge=1, description="number of virtual tokens")
    reparametrise: int = Field(
        default=512, ge=0, description="hidden width of the MLP that computes the tokens; 0: no MLP"
    )
    width: int | None = Field(
        default=None,
        ge=1,
        description="width of the MLP's input (None: that of the keys; the 8.16 % of PEFT in FL imply 512)",
    )
    stack: Literal["encoder", "decoder"] = Field(
        default="encoder",
        description="the self-attention of an encoder–decoder that gets the tokens: `encoder` (FedPrompt, OpenPrompt) "
        "or `decoder` (peft)",
    )


class PrefixTuning(VirtualTokenTuner):
    """Keys and values of shape (tokens, layers · 2 · key-value heads · head width), in this order, as in peft.

    Tensors of a reparametrized part, named as in peft: `embedding.weight` (tokens, width), `transform.0.weight`
    (hidden, width), `transform.0.bias`, `transform.2.weight` (all keys and values, hidden), `transform.2.bias`, with
    tanh between. A direct or reparametrized part is one `prompt_embeddings` (tokens, all keys and values). Mixes
    interpolate keys and values, not the MLPs.
    """

    name = "prefix"
    Options = PrefixOptions
    example = {"tokens": 3, "reparametrise": 7}

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Draw the MLP as PyTorch does, and direct values from N(0, 0.02²)."""
        layers, heads, head_width = self._shape(backbone)
        columns = layers * 2 * heads * head_width
        options = self._options
        if not options.reparametrise:
            return {PROMPT_TENSOR: torch.randn(options.tokens, columns, generator=generator) * 0.02}
        width, hidden = options.width or heads * head_width, options.reparametrise
        tensors: Tensors = {"embedding.weight": torch.randn(options.tokens, width, generator=generator)}
        for number, (before, after) in {0: (width, hidden), 2: (hidden, columns)}.items():
            tensors |= draw_linear(f"transform.{number}", after, before, generator)
        return tensors

    @override
    def reparametrize(self, tensors: Tensors) -> Tensors:
        """Run the MLP."""
        if is_folded(tensors):
            return tensors
        hidden = nn.functional.linear(
            tensors["embedding.weight"], tensors["transform.0.weight"], tensors["transform.0.bias"]
        )
        vectors = nn.functional.linear(torch.tanh(hidden), tensors["transform.2.weight"], tensors["transform.2.bias"])
        return {PROMPT_TENSOR: vectors}

    @override
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        blended = blend([self.reparametrize(part.tensors)[PROMPT_TENSOR] for part in mix], mix)
        if blended is None:
            return
        flat, present = blended  # (rows or 1, tokens, columns)
        layers, heads, head_width = self._shape(backbone)
        split = flat.view(len(flat), -1, layers, 2, heads, head_width).permute(2, 3, 0, 4, 1, 5)
        pairs: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in split]
        plan.prefixes.append(Prefix(pairs, present, decoder=self._on_decoder(backbone)))

    @override
    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any]:
        """Describe a prefix; in an encoder–decoder, peft knows prefixes of the decoder alone."""
        config = {"peft_type": "PREFIX_TUNING"} | prompt_fields(adapter.tensors[PROMPT_TENSOR], task_type)
        config |= {"prefix_projection": False, "encoder_hidden_size": None}
        if not backbone.architecture.more:
            return config
        if task_type != SEQ_TO_SEQ or adapter.options["stack"] != "decoder":
            raise InputError(
                "export: peft has no prefix in an encoder's attention; what it loads on "
                f"{backbone.model_type}: prompt, p-tuning, lora, ia3, and tuner.stack=decoder under a language-model "
                "head"
            )
        layers, heads = _decoder_layers(backbone), int(backbone.base.config.num_attention_heads)
        width = adapter.tensors[PROMPT_TENSOR].shape[1] // layers // 2
        return config | {"num_layers": layers, "num_attention_heads": heads, "token_dim": width}

    def peft_tensors(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> Tensors:
        """Order a decoder's layers as peft reads them: behind an encoder, layer i of n has the values for 2·i mod n."""
        vectors = adapter.tensors[PROMPT_TENSOR]
        if not backbone.architecture.more:
            return {PROMPT_TENSOR: vectors}
        layers = _decoder_layers(backbone)
        by_layer = vectors.view(len(vectors), layers, -1)  # (tokens, layers, 2 · heads · head width)
        sources = [2 * layer % layers for layer in range(layers)]
        saved = torch.zeros_like(by_layer)
        for layer, source in enumerate(sources):
            saved[:, source] = by_layer[:, layer]
        if not torch.equal(saved[:, sources], by_layer):
            raise InputError(
                f"export: peft gives a decoder of {layers} layers (an even number) only {layers // 2} different "
                f"prefixes, so that this one cannot be expressed; what it loads on {backbone.model_type}: prompt, "
                "p-tuning, lora, ia3"
            )
        return {PROMPT_TENSOR: saved.flatten(1)}

    def _on_decoder(self, backbone: Backbone) -> bool:
        return bool(backbone.architecture.more) and self._options.stack == "decoder"

    def _shape(self, backbone: Backbone) -> tuple[int, int, int]:
        """Return the number of layers, the number of key-value heads and the head width."""
        architecture = backbone.known_architecture
        if architecture is None or architecture.prefix is None:
            others = "prompt, p-tuning, lora, bottleneck, ia3"
            raise InputError(
                f"tuner: prefix does not work on {backbone.model_type}, whose attention takes no keys from outside; "
                f"it works on {', '.join(families_with_prefix())}; on {backbone.model_type} use {others}"
            )
        stack = architecture.more[0] if self._on_decoder(backbone) else architecture
        config = backbone.base.config
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
        width = int(width or config.hidden_size // config.num_attention_heads)
        return len(cast("Sequence[object]", backbone.module(stack.blocks))), heads, width

    @property
    def _options(self) -> PrefixOptions:
        return cast(PrefixOptions, self.options)


def _decoder_layers(backbone: Backbone) -> int:
    """Number of layers of the decoder behind an encoder."""
    return len(cast("Sequence[object]", backbone.module(backbone.architecture.more[0].blocks)))
