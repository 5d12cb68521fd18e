"""Train and answer generation tasks with the backbone's own frozen output layer, on answers or preference pairs.

It uses the backbone's own frozen output layer and has no tensors to train. Vocabulary scores are computed for response
tokens alone, never for the prompt's. Answers are generated in `models/forward/generation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from silotune.config.head import PLAIN
from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.chat_template import ChatTemplate
from silotune.data.generation_tokenizer import GenerationTokenizer
from silotune.data.tasks import Task
from silotune.data.templates import CHAT, INSTRUCTION, InstructionTemplate
from silotune.data.tokenized import READ_COUNTS, READ_POSITIONS, READ_ROWS, READ_TARGETS, Inputs, TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.lm_head import LMHead
from silotune.models.forward.generation import GenerationOptions
from silotune.models.forward.views import HeadReading, View
from silotune.models.heads.base import Head, LossRecipe, TokenizeRows

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig

SCORES_AT_ONCE = 2**25
"""Vocabulary scores held in memory at a time; beyond, losses are computed piece by piece.

Where the backbone itself is trained, or in fp16, such pieces are computed again in the backward pass.
"""


class LanguageModelHead(Head):
    """Writes answers, and trains on the tokens of given ones.

    Args:
        template: text with `{instruction}` (and `{input}`), or `chat` for the tokenizer's own template.
        generation: options of generation; None: their defaults.
        chat_template: the name of the tokenizer's template, if it has several.
        chat_kwargs: variables for the chat template, such as `enable_thinking`.
        train_on: the turns of a conversation that are trained: all of the assistant's, or its last.
        choices: how a task whose prompts list their answers is judged: by the likeliest of them, or by what is written.
    """

    name = "lm"
    task_kind = "generation"
    model_class = "AutoModelForCausalLM"
    has_tensors = False
    pairs: ClassVar[bool] = False
    """Whether it is trained on preference pairs."""

    def __init__(
        self,
        template: str = INSTRUCTION,
        generation: GenerationOptions | None = None,
        *,
        chat_template: str | None = None,
        chat_kwargs: Mapping[str, Any] | None = None,
        train_on: Literal["assistant", "last"] = "assistant",
        choices: Literal["likelihood", "write"] = "likelihood",
    ) -> None:
        self.picks = choices == "likelihood"
        self.chat = template == CHAT
        self._chat_name, self._chat_kwargs = chat_template, dict(chat_kwargs or {})
        self._last_only = train_on == "last"
        self._template = InstructionTemplate() if self.chat else InstructionTemplate(template)
        self.generation = generation or GenerationOptions()

    @classmethod
    @override
    def make(cls, config: HeadConfig) -> Self:
        if isinstance(config.template, Mapping):
            raise InputError("head.template: head=lm takes one template for all tasks")
        template = INSTRUCTION if config.template in (None, PLAIN) else config.template
        if config.template not in (None, CHAT) and config.chat_keys:
            raise InputError(f"head.{config.chat_keys[0]}: of head.template=chat; leave it out")
        return cls(
            template,
            GenerationOptions(config.beams, config.max_new_tokens),
            chat_template=config.chat_template,
            chat_kwargs=config.chat_kwargs,
            train_on=config.train_on,
            choices=config.choices,
        )

    @override
    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:
        if backbone.tokenizer.eos_token_id is None:
            raise InputError("head=lm: the backbone's tokenizer has no end token")
        if self.chat:
            self.chat_template(backbone)

    def prompt_room(self, max_length: int) -> int:
        """Return the maximum length of a decoder-only model's prompt in tokens, which leaves room for the answer."""
        return max_length - min(self.generation.max_new_tokens, max_length // 2)

    @override
    def row_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        """Return a `GenerationTokenizer`."""
        encoder_decoder = bool(backbone.base.config.is_encoder_decoder)
        return GenerationTokenizer(
            backbone.tokenizer,
            self.chat_template(backbone) if self.chat else self._template,
            max_length,
            room=max_length if encoder_decoder else self.prompt_room(max_length),
            decoder_start=backbone.base.config.decoder_start_token_id if encoder_decoder else None,
            last_only=self._last_only or self.pairs,
            pairs=self.pairs,
        )

    def chat_template(self, backbone: Backbone) -> ChatTemplate:
        """Return the tokenizer's template of the keys `head.chat_template` and `head.chat_kwargs`."""
        return ChatTemplate(backbone.tokenizer, self._chat_name, self._chat_kwargs)

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Return no tensors."""
        return {}

    @override
    def reading(self, backbone: Backbone, task: Task) -> HeadReading:
        """Read each row's sum of token losses and number of response tokens, shape (rows, 2)."""
        return self.smoothed_reading(backbone, task, 0.0)

    @override
    def smoothed_reading(self, backbone: Backbone, task: Task, smoothing: float) -> HeadReading:
        """Smooth labels by spreading a token's probability over the vocabulary."""

        def read(states: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
            rows, targets = inputs[READ_ROWS], inputs[READ_TARGETS]
            losses = token_losses(backbone, states[rows, inputs[READ_POSITIONS]], targets, plan.weights, smoothing)
            counts = inputs[READ_COUNTS]  # on the CPU
            sums = torch.stack([row_losses.sum() for row_losses in torch.split(losses, counts.tolist())])
            return torch.stack([sums, counts.to(sums)], 1)

        return read

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Refuse, since a written answer has no classes."""
        raise InputError("head=lm: this method needs class logits, which a language-model head does not have")

    @override
    def cross_entropy(self, tensors: Tensors, view: View, batch: Batch) -> Tensor:
        """Return the mean loss over all response tokens of the batch, in all its micro-batches."""
        sums, counts = view[self.name].unbind(1)
        return sums.sum() / counts.sum()

    @override
    def training_loss(self, tensors: Tensors, view: View, batch: Batch, recipe: LossRecipe) -> Tensor:
        """Return the cross-entropy; the view's reading is already smoothed."""
        return self.cross_entropy(tensors, view, batch)

    @override
    def check_loss(self, recipe: LossRecipe) -> None:
        """Refuse losses of labels, because tokens have none."""
        if recipe.class_weights != "none":
            raise InputError(f"train.class_weights: head={self.name} has no labels; leave it out")
        if recipe.label_smoothing and type(self).cross_entropy is not LanguageModelHead.cross_entropy:
            raise InputError(f"train.label_smoothing: head={self.name} has a loss of its own; leave it out")

    @override
    def loss_units(self, batch: Batch) -> int | None:
        """Count response tokens."""
        if type(self).cross_entropy is not LanguageModelHead.cross_entropy:
            return None
        targets = batch.source.targets if batch.source else None
        assert targets is not None, "training rows have responses"
        return sum(len(targets[row]) for row in batch.rows.tolist())


class PreferenceHead(LanguageModelHead):
    """Trains on pairs of a chosen and a rejected answer by DPO (Rafailov et al. 2023); the backbone is the reference.

    Attributes:
        beta: β, how strongly the model is kept near the reference.
    """

    name = "dpo"
    pairs = True
    reads_reference = True
    beta: float = 0.1

    @classmethod
    @override
    def make(cls, config: HeadConfig) -> Self:
        head = super().make(config)
        head.beta = config.beta
        return head

    def referenced_loss(self, tensors: Tensors, view: View, reference: View, batch: Batch) -> Tensor:
        """Compute equation 7 of the paper, the mean over pairs.

        `-log σ(β (log π(chosen) - log π_ref(chosen) - log π(rejected) + log π_ref(rejected)))`, where the probability
        of an answer is the product over its tokens.
        """
        margins = self._log_ratio(view, batch) - self._log_ratio(reference, batch)
        return -nn.functional.logsigmoid(self.beta * margins).mean()

    def _log_ratio(self, view: View, batch: Batch) -> Tensor:
        """Return `log p(chosen) - log p(rejected)` of each pair, shape (pairs,)."""
        if batch.source is None or not batch.source.pairs:
            raise InputError("head=dpo: needs preference pairs (columns prompt, chosen, rejected); allowed: head=lm")
        losses = view[self.name][:, 0]
        order = torch.argsort(batch.rows).to(losses.device)  # a pair's two rows are neighbors in the source
        chosen, rejected = (-losses[order]).reshape(-1, 2).unbind(1)
        return chosen - rejected

    def cross_entropy(self, tensors: Tensors, view: View, batch: Batch) -> Tensor:
        """Refuse: the loss needs the reference."""
        raise InputError("head=dpo: this method's loss is of labels or tokens, not of preference pairs")

    @override
    def loss_units(self, batch: Batch) -> int | None:
        """Return None, because a preference pair's loss depends on two rows."""
        return None

    @override
    def description(self, config: HeadConfig, task: Any) -> dict[str, Any]:
        return super().description(config, task) | {"loss": f"DPO, beta = {self.beta:g}"}


def prompt_rows(rows: TokenizedRows) -> TokenizedRows:
    """Return the rows without their responses, for generation and for the vectors that represent a row's text."""
    ids = rows.ids
    if rows.prompts is not None:
        ids = [tokens[:prompt] for tokens, prompt in zip(rows.ids, rows.prompts, strict=True)]
    return replace(rows, ids=ids, decoder=None, reads=None, targets=None, prompts=None, sizes=None)


def token_losses(
    backbone: Backbone, states: Tensor, targets: Tensor, weights: Mapping[str, Tensor], smoothing: float = 0.0
) -> Tensor:
    """Compute the cross-entropy of each target token.

    Args:
        backbone: loaded with its language-model head.
        states: the states that predict the targets, shape (tokens, hidden).
        targets: token ids, shape (tokens,).
        weights: replaced tensors of the backbone, as `ForwardPlan.weights`.
        smoothing: the share of a target's probability that is spread over the vocabulary.

    Returns:
        Shape (tokens,), at least float32.
    """

    def losses(states: Tensor, targets: Tensor) -> Tensor:
        scores = word_scores(backbone, states, weights)
        return nn.functional.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)

    piece = scored_at_once(backbone)
    scaled = backbone.autocast_dtype is torch.float16  # against underflow, by a factor that only the backward pass has
    if states.requires_grad and not scaled and not any(tensor.requires_grad for tensor in weights.values()):
        result: Tensor = cast(Any, _LossesWithGradient).apply(states, targets, losses, piece)
        return result
    if len(states) <= piece:
        return losses(states, targets)
    pieces = zip(torch.split(states, piece), torch.split(targets, piece), strict=True)
    return torch.cat([checkpoint(losses, *pair, use_reentrant=False) for pair in pieces])


class _LossesWithGradient(torch.autograd.Function):
    """Compute token losses and, in the same pass, gradients by their states, so that no scores are kept."""

    @staticmethod
    @override
    def forward(
        ctx: Any, states: Tensor, targets: Tensor, losses: Callable[[Tensor, Tensor], Tensor], piece: int
    ) -> Tensor:
        parts: list[Tensor] = []
        gradients: list[Tensor] = []
        for some, labels in zip(torch.split(states, piece), torch.split(targets, piece), strict=True):
            with torch.enable_grad():
                own = some.detach().requires_grad_()
                values = losses(own, labels)
                torch.autograd.backward([values.sum()])
            gradients.append(cast(Tensor, own.grad))
            parts.append(values.detach())
        ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(parts)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return (gradients * outer[0].unsqueeze(1)).to(gradients.dtype), None, None, None


def word_scores(backbone: Backbone, states: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the vocabulary scores of some tokens, at least float32; arguments as for `token_losses`."""
    scores = _lm_head(backbone)
    with backbone.autocast():
        logits: Tensor = scores(states, None, weights)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def scored_at_once(backbone: Backbone) -> int:
    """Return for how many tokens `SCORES_AT_ONCE` has room."""
    return max(SCORES_AT_ONCE // _lm_head(backbone).vocabulary_size, 1)


def _lm_head(backbone: Backbone) -> LMHead:
    assert backbone.lm_head is not None, "the backbone was loaded without a language-model head"
    return backbone.lm_head
