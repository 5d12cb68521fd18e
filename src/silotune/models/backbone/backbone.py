"""Hold the frozen transformer of a run and run batches through it under a plan of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from silotune.config.backbone import BackboneConfig
from silotune.core.tensors import Tensors, on_device
from silotune.data.batching import call_cost_for
from silotune.data.tokenized import Inputs
from silotune.models.backbone.architectures import ARCHITECTURES, Architecture, architecture_of, max_positions
from silotune.models.backbone.block_devices import BlockDevices, WeightPlacement
from silotune.models.backbone.device import resolve_device
from silotune.models.backbone.fingerprint import weight_fingerprint
from silotune.models.backbone.forward_plan import ForwardPlan, SharedActivations, StopForward
from silotune.models.backbone.hooks import FunctionalWrapper, HookManager
from silotune.models.backbone.lm_head import LMHead, without_lm_head
from silotune.models.backbone.padding import Padding, known_masks
from silotune.models.backbone.quantization import NONE, linear_weights
from silotune.models.backbone.virtual_tokens import (
    PreparedInputs,
    encoder_decoder_forward,
    gather_columns,
    pad_on_the_right,
    plain_forward,
    prepare_inputs,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Result = TypeVar("Result")

WEIGHT_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision → the type of the frozen weights and of autocast; float32 where there is no entry."""


class Backbone:
    """A frozen Hugging Face transformer and its tokenizer, loaded once per process and used by all silos in turn.

    A tuner writes its changes into a `ForwardPlan`, and `encode` runs a padded batch under it::

        backbone = load_backbone("default")
        text = backbone.tokenizer(["a fine film"], return_tensors="pt")
        states = backbone.encode(backbone.place(text), ForwardPlan())  # (rows, tokens, hidden)

    Args:
        model: any transformer; its parameters are frozen here. Families in `ARCHITECTURES` have named target modules.
        tokenizer: the model's tokenizer.
        settings: the section by which it was loaded, with `auto` of quantization resolved (a quantized model is on its
            device already); None: the model was made in memory.
        precision: `fp32`, `bf16` or `fp16` (autocast).
        devices: where the model runs, block by block; None: as the key `device=auto` chooses. A model of shapes without
            data (`silotune.cost`) stays where it is.
        keep_master: whether the weights are float32 whatever the precision (master weights), for tuners that train the
            backbone's own tensors; otherwise they are in the precision.
        checkpointing: keep only the blocks' inputs for the backward pass and compute their insides again there: less
            memory for about a third more time. Gradients are the same.
        fingerprint: the digest of the weights as stored; None: that of the model's parameters in float32.
        on_use: leave the weights where they are until the first use, and let `rest` take them back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: BackboneConfig | None = None,
        precision: str = "fp32",
        devices: BlockDevices | None = None,
        keep_master: bool = False,
        checkpointing: bool = False,
        fingerprint: str | None = None,
        on_use: bool = False,
    ) -> None:
        self.name = "" if settings is None else settings.name
        self._writes_fused = settings is not None and _writes_fused(settings.attention, model)
        self.model = cast(Any, model)  # transformers' annotations fail strict type checking
        self.base: Any = without_lm_head(model)
        self.model.requires_grad_(False)
        self.model.eval()
        self.tokenizer = tokenizer
        self.model_type = str(model.config.model_type)
        self.precision = precision
        self.quantization: str = NONE if settings is None else settings.quantization
        self.keep_master = keep_master or precision not in WEIGHT_TYPES
        if getattr(self.base, "pooler", None) is not None:
            self.base.pooler = None  # no head reads it
        self.lm_head = None if self.model.get_output_embeddings() is None else LMHead(model, self.base)
        """The language-model head; None if the model was loaded without (`load_backbone(…, model_class=…)`)."""
        self.shape_only = isinstance(next(model.parameters()), FakeTensor)
        self._stored_fingerprint = "" if self.shape_only else fingerprint
        self.block_devices = devices or BlockDevices(torch.device("cpu") if self.shape_only else resolve_device("auto"))
        self.device = self.block_devices.main
        stays = self.shape_only or self.quantization != NONE
        self._placement = WeightPlacement(self.model, self.base, self.block_devices, on_use, stays)
        self.block_devices.move_at_borders(self.base, self.known_architecture)
        self._hooks = HookManager(self.base)
        self._constants: dict[tuple[Any, ...], Any] = {}
        if checkpointing:
            for stack in self.architecture.stacks:
                for block in range(len(self.base.get_submodule(stack.blocks))):
                    self._hooks.checkpoint_block(f"{stack.blocks}.{block}")

    @property
    def known_architecture(self) -> Architecture | None:
        """The family's entry in the table of architectures; None if it has none."""
        return ARCHITECTURES.get(self.model_type)

    @property
    def architecture(self) -> Architecture:
        """The family's entry in the table of architectures."""
        return architecture_of(self.model_type)

    @cached_property
    def hidden_size(self) -> int:
        """The width of the last layer's states."""
        return int(self.base.config.hidden_size)

    @cached_property
    def blocks(self) -> int:
        """The number of transformer blocks; in an encoder–decoder, of its encoder."""
        return len(self.base.get_submodule(self.architecture.blocks))

    def constant(self, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
        """Return a sequence that a tuner makes of the weights and its options alone, made once for each key.

        Tuners keep it here because under `privacy.unit` a method, with its tuner, may hold nothing that a phase
        changed. `key` names all that it depends on beside the weights: options, module, device, dtype.
        """
        if key not in self._constants:
            result = make()
            if any(isinstance(each, FakeTensor) for each in cast(Sequence[object], result)):
                return result  # of a plan; kept, they would stand for the tensors
            self._constants[key] = result
        return cast(Result, self._constants[key])

    @property
    def word_embeddings(self) -> Tensor:
        """The word embeddings, shape (vocabulary, width)."""
        return cast(Tensor, self.base.get_input_embeddings().weight)

    @property
    def pad_id(self) -> int:
        """The id of the padding token; 0 if the tokenizer has none (the mask hides it)."""
        return int(self.tokenizer.pad_token_id or 0)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of the stored weights and their quantization: the identity on resume and in handshakes."""
        return weight_fingerprint(self.model, self._stored_fingerprint, self.quantization)

    def module(self, name: str) -> nn.Module:
        """Look up a module of the base transformer by name."""
        return cast(nn.Module, self.base.get_submodule(name))

    @cached_property
    def experts(self) -> frozenset[str]:
        """Names of the tensors that hold one layer of all experts of a block, shape (experts, out, in)."""
        return frozenset(
            f"{module_name}.{name}"
            for module_name, module in self.base.named_modules()
            if hasattr(module, "num_experts")
            for name, tensor in module.named_parameters(recurse=False)
            if tensor.dim() == 3
        )

    @cached_property
    def weights(self) -> int:
        """The number of weights of its linear layers, to which a token's work is proportional."""
        return linear_weights(self.base)

    @property
    def call_cost(self) -> int:
        """The overhead of one forward, in tokens; see `data.batching`."""
        return call_cost_for(self.device, self.weights)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that products are computed in under `autocast`; None: there is none, tensors keep their own."""
        return WEIGHT_TYPES.get(self.precision)

    @property
    def max_tokens(self) -> int | None:
        """The most tokens a text may have; None if the model has no table of learned positions."""
        return max_positions(self.base, self.known_architecture)

    def place(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Return tensors on the backbone's device, to be used with it; states at rest stay on the CPU.

        This is the one way from the CPU to the device for parts of a model. Weights at rest follow them there.
        """
        self._placement.wake()
        return on_device(tensors, self.device)

    def rest(self) -> None:
        """Free the device's memory until the next use, if the backbone was loaded `on_use`."""
        self._placement.rest()

    def encode(self, inputs: Inputs, plan: ForwardPlan, padding: Padding | None = None) -> Tensor:
        """Run one padded batch under a plan.

        Args:
            inputs: name → tensor of shape (rows, tokens), as the tokenizer names them, on the backbone's device.
            plan: the changes of this forward.
            padding: where the rows are padded; None: the device is asked, which waits for it.

        Returns:
            The last layer's states, shape (rows, tokens, hidden), without those of virtual tokens. An encoder–decoder's
            are its decoder's if the inputs hold `decoder_input_ids`, else its encoder's.
        """
        return self.applied(plan, lambda: self._forward(inputs, plan, padding))

    def applied(self, plan: ForwardPlan, run: Callable[[], Result]) -> Result:
        """Call a function under a plan and in the backbone's precision.

        Returns:
            Its result.
        """
        with self._hooks.applied(plan), self.autocast():
            if not plan.weights:
                return run()
            replaced = {f"base.{name}": tensor for name, tensor in plan.weights.items()}
            return cast(Result, torch.func.functional_call(FunctionalWrapper(self.base), replaced, (run,)))

    def keeping_all(self) -> AbstractContextManager[None]:
        """Return a context in which blocks keep all activations, whatever `checkpointing` says."""
        return self._hooks.keeping_all()

    def prepare_inputs(self, inputs: Inputs, plan: ForwardPlan, padded_left: bool | None = None) -> PreparedInputs:
        """Put the plan's virtual tokens into a batch; in an encoder–decoder only those of the encoder.

        Args:
            inputs: name → tensor of shape (rows, tokens).
            plan: its prompts and prefixes are put in. If the attention modules take prefixes one by one, the prefixes
                are stored in `plan.past`, where the hooks find them.
            padded_left: whether any row begins with padding; None: its mask is asked.
        """
        encoder_decoder = bool(self.base.config.is_encoder_decoder)
        prefixes = [prefix for prefix in plan.prefixes if not (encoder_decoder and prefix.decoder)]
        batch = prepare_inputs(self.base, self.known_architecture, inputs, plan.prompts, prefixes, padded_left)
        if encoder_decoder and batch.prefix is not None:
            for block in range(self.blocks):
                name = self.architecture.modules("self_attention", block)[0]
                self._hooks.register([name])
                plan.past[name] = batch.prefix
        return batch

    def _forward(self, inputs: Inputs, plan: ForwardPlan, padding: Padding | None) -> Tensor:
        if padding is not None and not padding.left:
            return self._forward_right_padded(inputs, plan, padding)
        inputs, original_columns = pad_on_the_right(inputs)
        states = self._forward_right_padded(inputs, plan, None)
        if original_columns is None or "decoder_input_ids" in inputs:
            return states
        return gather_columns(states, original_columns)

    def _forward_right_padded(self, inputs: Inputs, plan: ForwardPlan, padding: Padding | None) -> Tensor:
        decoder = {name: tensor for name, tensor in inputs.items() if name.startswith("decoder_")}
        text = {name: tensor for name, tensor in inputs.items() if name not in decoder}
        batch = self.prepare_inputs(text, plan, None if padding is None else padding.left)
        prefixes = [prefix for prefix in plan.prefixes if prefix.decoder]
        hides: dict[int, bool] = {}
        presence = [virtual.present for group in (plan.prompts, plan.prefixes) for virtual in group]
        if padding is not None and all(rows is None for rows in presence):
            columns = batch.mask.shape[1]
            ids = decoder.get("decoder_input_ids")
            own = 0 if ids is None else ids.shape[1] + sum(prefix.tokens for prefix in prefixes)
            hides = padding.by_length((columns, columns - batch.prefix_tokens), own)
        with known_masks(hides, str(self.base.config._attn_implementation)):
            if not self.base.config.is_encoder_decoder:
                return plain_forward(self.base, batch)
            return encoder_decoder_forward(self.base, batch, decoder, prefixes)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Take the attention in which answers are written fastest while the context lasts."""
        if not self._writes_fused or self.device.type != "cpu":
            yield
            return
        config = self.base.config
        trained_with = config._attn_implementation
        config._attn_implementation = "sdpa"
        try:
            yield
        finally:
            config._attn_implementation = trained_with

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context of autocast to the precision, for the backbone and for heads on top of it."""
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def shared_activations(self, plans: Sequence[ForwardPlan]) -> SharedActivations:
        """Return an empty record for the activations that forwards under these plans over the same rows share."""
        inputs = frozenset(name for plan in plans for name in plan.inputs)
        outputs = frozenset(name for plan in plans for name in plan.outputs)
        return SharedActivations.below_first_change(self.base, self.known_architecture, inputs, outputs)

    @torch.no_grad()
    def record(self, inputs: Inputs, shared: SharedActivations, padding: Padding | None = None) -> None:
        """Compute the activations that forwards over these rows share, in a forward that ends where they do.

        Arguments as for `encode`; nothing is computed if nothing can be shared.
        """
        if shared.modules:
            with suppress(StopForward):
                self.encode(inputs, ForwardPlan(record=shared), padding)


def _writes_fused(name: str, model: PreTrainedModel) -> bool:
    """Return whether `auto` is PyTorch's fused attention where answers are written, on a CPU, too.

    Only its backward pass is slow there. Families that cap attention scores (Gemma 2) have to compute them apart.
    """
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return name == "auto" and model._supports_sdpa and not capped and not model.config.is_encoder_decoder
