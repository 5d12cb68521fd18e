"""The language-model head: tokenizes rows as prompt and response, and computes the loss over response tokens.

It uses the backbone's own frozen output layer and has no tensors to train. Vocabulary scores are computed for response
tokens alone, never for the prompt's. Answers are generated in `models/forward/generation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.instructions import lists_options
from silotune.data.tasks import Row, Task
from silotune.data.templates import CHAT, INSTRUCTION, FillTemplate, InstructionTemplate, chat_template, encode_fitting
from silotune.data.tokenized import READ_POSITIONS, READ_ROWS, READ_TARGETS, Inputs, TokenizedRows
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.forward.generation import GenerationOptions
from silotune.models.forward.pooling import HeadReading
from silotune.models.forward.views import View
from silotune.models.heads.base import Head, TokenizeRows

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig


SCORES_AT_ONCE = 2**25
"""Vocabulary scores held in memory at a time; beyond, they are recomputed piece by piece in the backward pass."""


class LanguageModelHead(Head):
    """Head of generation tasks.

    Args:
        template: text with `{instruction}` (and `{input}`), or `chat` for the tokenizer's own template.
        generation: options of generation; None: their defaults.
    """

    name = "lm"
    task_kind = "generation"
    model_class = "AutoModelForCausalLM"
    has_tensors = False

    def __init__(self, template: str = INSTRUCTION, generation: GenerationOptions | None = None) -> None:
        self._chat = template == CHAT
        self._template = InstructionTemplate() if self._chat else InstructionTemplate(template)
        self.generation = generation or GenerationOptions()

    @classmethod
    def make(cls, config: HeadConfig) -> Self:
        """See `Head.make`."""
        if isinstance(config.template, Mapping):
            raise InputError("head.template: head=lm takes one template for all tasks")
        return cls(config.template or INSTRUCTION, GenerationOptions(config.beams, config.max_new_tokens))

    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:
        """See `Head.check`."""
        if backbone.tokenizer.eos_token_id is None:
            raise InputError("head=lm: the backbone's tokenizer has no end token")

    def prompt_room(self, max_length: int) -> int:
        """Return the maximum length of a decoder-only model's prompt in tokens, which leaves room for the answer."""
        return max_length - min(self.generation.max_new_tokens, max_length // 2)

    def row_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        """See `Head.row_tokenizer`; makes token ids of prompts and responses.

        A decoder-only model's prompt is cut to `prompt_room`, however short its response is, so that it is the same in
        training and in generation. A response that does not fit behind it is cut and then has no end token.
        """
        tokenizer: Any = backbone.tokenizer
        fill: FillTemplate = chat_template(tokenizer) if self._chat else self._template
        end = int(tokenizer.eos_token_id)
        encoder_decoder = bool(backbone.base.config.is_encoder_decoder)
        room = max_length if encoder_decoder else self.prompt_room(max_length)

        def tokenize(task: Task, rows: Sequence[Row]) -> TokenizedRows:
            labels = torch.zeros(len(rows), dtype=torch.int64)
            if not rows:
                return TokenizedRows(task, [], None, labels, reads=[], targets=[], answers=[])
            encoded = encode_fitting(tokenizer, fill, [row.texts for row in rows], room, special_tokens=not self._chat)
            prompts = [prompt.ids for prompt in encoded]
            answer_ids = tokenizer([row.answer for row in rows], add_special_tokens=False)["input_ids"]
            if encoder_decoder:
                start = backbone.base.config.decoder_start_token_id
                responses = [[*ids, end][:max_length] for ids in answer_ids]
                decoder = [[start, *response[:-1]] for response in responses]
                reads = [list(range(len(response))) for response in responses]
                ids = prompts
            else:
                prompts = [prompt[:-1] if prompt[-1] == end else prompt for prompt in prompts]
                responses = [
                    [*ids, end][: max_length - len(prompt)] for prompt, ids in zip(prompts, answer_ids, strict=True)
                ]
                decoder = None
                reads = [
                    list(range(len(prompt) - 1, len(prompt) + len(response) - 1))
                    for prompt, response in zip(prompts, responses, strict=True)
                ]
                ids = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
            answers, options = [row.answer for row in rows], all(map(lists_options, rows))
            return TokenizedRows(
                task, ids, None, labels, decoder, reads=reads, targets=responses, answers=answers, options=options
            )

        return tokenize

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Head.init`; there are no tensors."""
        return {}

    def reading(self, backbone: Backbone, task: Task) -> HeadReading:
        """See `Head.reading`; shape (rows, 2): the sum of a row's token losses, and its number of response tokens."""

        def read(states: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
            rows = inputs[READ_ROWS]
            losses = token_losses(backbone, states[rows, inputs[READ_POSITIONS]], inputs[READ_TARGETS], plan.weights)
            counts = torch.bincount(rows, minlength=len(states))
            sums = torch.stack([row_losses.sum() for row_losses in torch.split(losses, counts.tolist())])
            return torch.stack([sums, counts.to(sums.dtype)], 1)

        return read

    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        """Refuse, since a written answer has no classes.

        Raises:
            InputError: always.
        """
        raise InputError("head=lm: this method needs class logits, which a language-model head does not have")

    def cross_entropy(self, tensors: Tensors, view: View, batch: Batch) -> Tensor:
        """See `Head.cross_entropy`; the mean over all response tokens of the batch, in all its micro-batches."""
        sums, counts = view[self.name].unbind(1)
        return sums.sum() / counts.sum()

    def loss_units(self, batch: Batch) -> int | None:
        """See `Head.loss_units`; response tokens."""
        if type(self).cross_entropy is not LanguageModelHead.cross_entropy:
            return None
        targets = batch.source.targets if batch.source else None
        assert targets is not None, "training rows have responses"
        return sum(len(targets[row]) for row in batch.rows.tolist())


def prompt_rows(rows: TokenizedRows) -> TokenizedRows:
    """Return the rows without their responses, for generation and for the vectors that represent a row's text."""
    if rows.decoder is None and rows.reads is not None:
        ids = [tokens[: reads[0] + 1] for tokens, reads in zip(rows.ids, rows.reads, strict=True)]
    else:
        ids = rows.ids
    return replace(rows, ids=ids, decoder=None, reads=None, targets=None)


def token_losses(backbone: Backbone, states: Tensor, targets: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Compute the cross-entropy of each target token.

    Args:
        backbone: loaded with its language-model head.
        states: the states that predict the targets, shape (tokens, hidden).
        targets: token ids, shape (tokens,).
        weights: replaced tensors of the backbone, as `ForwardPlan.weights`.

    Returns:
        Shape (tokens,), at least float32.
    """
    lm_head = backbone.lm_head
    assert lm_head is not None, "the backbone was loaded without a language-model head"

    def losses(states: Tensor, targets: Tensor) -> Tensor:
        with backbone.autocast():
            scores = lm_head(states, None, weights)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return nn.functional.cross_entropy(scores, targets, reduction="none")

    piece = max(SCORES_AT_ONCE // lm_head.vocabulary_size, 1)
    if len(states) <= piece:
        return losses(states, targets)
    pieces = zip(torch.split(states, piece), torch.split(targets, piece), strict=True)
    return torch.cat([checkpoint(losses, *pair, use_reentrant=False) for pair in pieces])
