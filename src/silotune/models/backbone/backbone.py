"""The frozen backbone: loaded once per process, changed only for the length of one forward."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from silotune.data.tokenized import Inputs as Inputs
from silotune.models.backbone.architectures import ARCHITECTURES, Architecture, architecture_of
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.hooks import HookManager
from silotune.models.backbone.lm_head import LMHead
from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.backbone.virtual_tokens import (
    FunctionalWrapper,
    PreparedInputs,
    columns_of,
    encoder_decoder_forward,
    plain_forward,
    positions,
    prepare_inputs,
    to_the_left,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Result = TypeVar("Result")


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Backbone:
    """A frozen Hugging Face transformer and its tokenizer.

    Args:
        model: any transformer; its parameters are frozen here. Families in `ARCHITECTURES` have named sites.
        tokenizer: its tokenizer.
        precision: `fp32`, `bf16` or `fp16` (autocast).
        keep_master: keep the frozen linear weights in float32 (needed where a tuner trains the backbone's own
            tensors); otherwise they are cast once, so that no forward has to.
        checkpointing: keep only the blocks' inputs for the backward pass and compute their insides again there: less
            memory for about a third more time. Gradients are the same.
        shape_only: the model has shapes but no data (`silotune.cost`): it stays where it is, without fingerprint.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: str = "fp32",
        keep_master: bool = False,
        checkpointing: bool = False,
        shape_only: bool = False,
        name: str = "",
    ) -> None:
        self.name = name
        self.model = cast(Any, model)  # transformers' own annotations do not hold under strict checking
        self.base: Any = _transformer(model)
        self.model.requires_grad_(False)
        self.model.eval()
        self.tokenizer = tokenizer
        self.model_type = str(model.config.model_type)
        self.precision = precision
        self.keep_master = keep_master or precision not in _DTYPES
        if getattr(self.base, "pooler", None) is not None:
            self.base.pooler = None  # no head here reads it
        self.vocabulary = None if self.model.get_output_embeddings() is None else LMHead(model, self.base)
        """The language-model head, where the model was loaded with one (`load_backbone(…, model_class=…)`)."""
        own = self.vocabulary.parameters if self.vocabulary else {}
        self.shape_only = shape_only
        self._fingerprint = "" if shape_only else _fingerprint(self.base, own)
        self.device = torch.device("cuda" if torch.cuda.is_available() and not shape_only else "cpu")
        if not shape_only:
            self.model.to(self.device)
        if not self.keep_master:
            for module in self.base.modules():
                if isinstance(module, nn.Linear):
                    module.to(_DTYPES[precision])
        self._interventions = HookManager(self.base)
        if checkpointing:
            for stack in self.architecture.stacks:
                for block in range(len(self.base.get_submodule(stack.blocks))):
                    self._interventions.checkpoint(f"{stack.blocks}.{block}")

    @property
    def known(self) -> Architecture | None:
        """The family's sites, None for a family without an entry."""
        return ARCHITECTURES.get(self.model_type)

    @property
    def architecture(self) -> Architecture:
        """The family's sites.

        Raises:
            InputError: for a family without an entry.
        """
        return architecture_of(self.model_type)

    @cached_property
    def hidden_size(self) -> int:
        """Width of the last layer."""
        return int(self.base.config.hidden_size)

    @cached_property
    def blocks(self) -> int:
        """The number of transformer blocks (of an encoder–decoder: of its encoder)."""
        return len(self.base.get_submodule(self.architecture.blocks))

    @property
    def word_embeddings(self) -> Tensor:
        """The table of word embeddings, shape (vocabulary, width)."""
        return cast(Tensor, self.base.get_input_embeddings().weight)

    @property
    def pad_id(self) -> int:
        """The token that fills rows up; 0 where the tokenizer has none (the mask hides it)."""
        return int(self.tokenizer.pad_token_id or 0)

    @property
    def fingerprint(self) -> str:
        """sha256 of the float32 weights as loaded: the backbone's identity on resume and in handshakes."""
        return self._fingerprint

    def site(self, name: str) -> nn.Module:
        """A module of the base transformer by name."""
        return cast(nn.Module, self.base.get_submodule(name))

    @property
    def longest(self) -> int | None:
        """The most tokens a text may have; None where positions have no table that could end."""
        return positions(self.base, self.known)

    def encode(self, inputs: Inputs, plan: ForwardPlan) -> Tensor:
        """The last layer's states, shape (rows, tokens, hidden), of one padded batch under a plan.

        Virtual tokens have no states here. An encoder–decoder returns its decoder's states where the inputs hold
        `decoder_input_ids`, else its encoder's.

        Raises:
            InputError: where virtual tokens and text together are too long for the backbone.
        """
        return self.applied(plan, lambda: self._forward(inputs, plan))

    def applied(self, plan: ForwardPlan, run: Callable[[], Result]) -> Result:
        """Run something that calls the base transformer or modules of it, under a plan and in the precision."""
        with self._interventions.applied(plan), self.autocast():
            if not plan.weights:
                return run()
            replaced = {f"base.{name}": tensor for name, tensor in plan.weights.items()}
            return cast(Result, torch.func.functional_call(FunctionalWrapper(self.base), replaced, (run,)))

    def prepare_inputs(self, inputs: Inputs, plan: ForwardPlan) -> PreparedInputs:
        """A batch with the plan's virtual tokens in place, but those of a decoder behind an encoder."""
        several = bool(self.base.config.is_encoder_decoder)
        before = [prefix for prefix in plan.prefixes if not (several and prefix.decoder)]
        batch = prepare_inputs(self.base, self.known, inputs, plan.prompts, before)
        if several and batch.prefix is not None:
            for block in range(self.blocks):
                name = self.architecture.modules("self_attention", block)[0]
                self._interventions.reach([name])
                plan.past[name] = batch.prefix
        return batch

    def _forward(self, inputs: Inputs, plan: ForwardPlan) -> Tensor:
        inputs, back = to_the_left(inputs)
        states = self._padded_right(inputs, plan)
        if back is None or "decoder_input_ids" in inputs:
            return states
        return columns_of(states, back.repeat(len(states) // len(back), 1))  # a row for each of the plan's copies

    def _padded_right(self, inputs: Inputs, plan: ForwardPlan) -> Tensor:
        decoder = {name: tensor for name, tensor in inputs.items() if name.startswith("decoder_")}
        batch = self.prepare_inputs({name: tensor for name, tensor in inputs.items() if name not in decoder}, plan)
        if not self.base.config.is_encoder_decoder:
            return plain_forward(self.base, batch)
        behind = [prefix for prefix in plan.prefixes if prefix.decoder]
        return encoder_decoder_forward(self.base, batch, decoder, behind)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision's context, for the backbone and everything put on top of it."""
        if self.precision in _DTYPES:
            with torch.autocast(self.device.type, dtype=_DTYPES[self.precision]):
                yield
        else:
            yield

    def below(self, plans: Sequence[ForwardPlan]) -> SharedActivations:
        """What forwards under these plans over the same rows have in common; to be put into all of them.

        The embeddings, the blocks below the first with a change, and in that block what runs before the change. Empty
        where that is not known, or where the embeddings run twice (encoder–decoders).
        """
        inputs = frozenset(name for plan in plans for name in plan.inputs)
        outputs = frozenset(name for plan in plans for name in plan.outputs)
        known = self.known
        if known is None or self.base.config.is_encoder_decoder:
            return SharedActivations(frozenset(), inputs, outputs)
        names = [known.embeddings]
        for block in range(self.blocks):
            name = f"{known.blocks}.{block}"
            names.append(name)
            if any(site.startswith(f"{name}.") for site in inputs | outputs):
                names += [f"{name}.{inner}" for inner, _ in self.site(name).named_modules() if inner]
                break
        return SharedActivations(frozenset(names), inputs, outputs)


def _transformer(model: Any) -> Any:
    """The model without its language-model head. T5 has no module of its own for that: its parts, put together."""
    if model.base_model is not model or model.get_output_embeddings() is None:
        return model.base_model
    from transformers import AutoModel

    with torch.device("meta"):
        bare: Any = AutoModel.from_config(model.config)  # type: ignore[no-untyped-call]
    for name, _ in bare.named_children():
        setattr(bare, name, getattr(model, name))
    return bare.requires_grad_(False).eval()


def _fingerprint(model: nn.Module, more: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *more.items()]):
        sha.update(f"{name}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.detach().float().cpu().contiguous().reshape(-1).numpy().data)
    return sha.hexdigest()
