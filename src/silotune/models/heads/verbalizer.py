"""Classify by the words that the frozen language-model head predicts at the mask of a cloze (FedPrompt).

FedPrompt, section 2; it has no tensors to train. Masked language models are read at the mask; encoder–decoders get
`<extra_id_0>` in the text and are read at the decoder's second position, which answers it; causal models read the text
up to the mask, and a word of several tokens scores its mean log-likelihood there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from silotune.core.tensors import Tensors
from silotune.data.batching import Batch
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.templates import CAUSAL_PAIR, PAIR, SINGLE, ClozeTemplate, encode_fitting
from silotune.data.tokenized import HEAD_INPUTS, READ_POSITIONS, READ_ROWS, Inputs, TokenizedRows
from silotune.errors import InputError, require_known, unknown_name_error
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.stored_model import is_causal
from silotune.models.forward.views import HeadReading, View
from silotune.models.heads.base import Head, TokenizeRows

if TYPE_CHECKING:
    from silotune.config.head import HeadConfig

MultiToken = Literal["refuse", "average"]

Average = Literal["logits", "probabilities", "best"]

SENTINEL = "<extra_id_0>"
"""T5's mask."""


@dataclass(frozen=True)
class LabelWords:
    """A task's label words as tokens.

    Args:
        ids: the tokens of all words, concatenated, shape (tokens,).
        of_word: shape (words, tokens), 1 / (number of the word's tokens) at its tokens: a word's score is their mean.
        of_class: shape (classes, words), 1 if the word belongs to the class, else 0.
        tokens: the tokens of each word.
    """

    ids: Tensor
    of_word: Tensor
    of_class: Tensor
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def continues(self) -> bool:
        """Whether a word has several tokens."""
        return any(len(ids) > 1 for ids in self.tokens)

    def classes(self, scores: Tensor, average: Average) -> Tensor:
        """Turn token scores, shape (rows, tokens), into class logits, shape (rows, classes).

        A class's logit is, by `average`, the mean of its words' logits (`logits`), the logarithm of the mean of their
        probabilities among the label words, up to a constant per row (`probabilities`), or the best word's logit
        (`best`; FedPrompt, section 2.1).
        """
        words = scores @ self.of_word.to(scores.dtype).T
        number = self.of_class.sum(1)
        if average == "logits":
            return words @ (self.of_class / number.unsqueeze(1)).to(scores.dtype).T
        absent = self.of_class == 0
        by_class = words.unsqueeze(1).masked_fill(absent, float("-inf"))  # (rows, classes, words)
        if average == "best":
            return by_class.amax(-1)
        return torch.logsumexp(by_class, -1) - number.log().to(scores.dtype)


class VerbalizerHead(Head):
    """Scores label words at the mask with the frozen language-model head.

    Args:
        template: for all tasks, or by task name; None: "{text} is {mask}." and, for pairs, "{a}? {mask}, {b}".
        words: label name → its words; a label without an entry is its own word.
        multi_token: for a word of several tokens: refuse it, or take the mean of their logits.
        average: for several words of a label: the mean of their logits or of their probabilities, or the best logit.
    """

    name = "verbalizer"
    model_class = "AutoModelForMaskedLM"
    has_tensors = False

    def __init__(
        self,
        template: str | Mapping[str, str] | None = None,
        words: Mapping[str, Sequence[str]] | None = None,
        multi_token: MultiToken = "refuse",
        average: Average = "logits",
    ) -> None:
        by_task = dict(template) if isinstance(template, Mapping) else {}
        self._by_task = {name: ClozeTemplate(text) for name, text in by_task.items()}
        self._template = ClozeTemplate(template) if isinstance(template, str) else None
        templates = [*self._by_task.values(), *([self._template] if self._template else [])]
        self.soft_slot = any(cloze.has_soft for cloze in templates)
        self._words = {label: tuple(synonyms) for label, synonyms in (words or {}).items()}
        self._multi_token = multi_token
        self._average = average
        self._tokenized_words: dict[Task, LabelWords] = {}

    @classmethod
    @override
    def make(cls, config: HeadConfig) -> Self:
        return cls(config.template, config.words, config.multi_token, config.average)

    @override
    def check(self, backbone: Backbone, tasks: Iterable[Task]) -> None:
        """Check that label words are in the vocabulary, and that a causal model reads all of a template."""
        templates = [*self._by_task.values(), *([self._template] if self._template else [])]
        for cloze in templates if is_causal(backbone.base.config) else []:
            cloze.check_ends_with_mask()
        words_of_tasks = [self._label_words(backbone, task) for task in tasks]
        self.forwards_again = is_causal(backbone.base.config) and any(words.continues for words in words_of_tasks)

    @override
    def check_names(self, tasks: Iterable[Task]) -> None:
        """Check that `words` names labels, and `template` tasks."""
        tasks = list(tasks)
        labels = {label for task in tasks for label in task.labels}
        for label in self._words:
            require_known("label in head.words", label, labels)
        for name in self._by_task:
            if name not in {task.name for task in tasks}:
                raise unknown_name_error("task in head.template", name, [task.name for task in tasks])

    def template(self, task: Task, texts: int, causal: bool = False) -> ClozeTemplate:
        """Return the template of a task whose rows have one or two texts, for a causal model or another."""
        pair = CAUSAL_PAIR if causal else PAIR
        cloze = self._by_task.get(task.name, self._template) or ClozeTemplate(SINGLE if texts == 1 else pair)
        if cloze.texts_per_row != texts:
            raise InputError(
                f"head.template: {cloze.text!r} takes {_slots(cloze.texts_per_row)}, "
                f"but rows of task {task.name!r} have {'one text' if texts == 1 else 'two texts'}: {_slots(texts)}"
            )
        return cloze

    def after(self, rows: Sequence[Row], task: Task, causal: bool) -> VerbalizerHead:
        """Return a copy of the head whose template begins with `rows` and their answers, one on each line."""
        cloze = self.template(task, len(rows[0].texts), causal)
        labels = [task.labels[row.label] for row in rows]
        words = [self._words.get(label, (label,))[0] for label in labels]
        filled = "".join(f"{cloze.fill(row.texts, word)[0]}\n" for row, word in zip(rows, words, strict=True))
        head = copy(self)
        head._by_task = {}
        head._template = ClozeTemplate(filled.replace("{", "{{").replace("}", "}}") + cloze.text)
        return head

    def row_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        """Tokenize filled templates and note the mask's position."""
        tokenizer: Any = backbone.tokenizer
        if is_causal(backbone.base.config):
            return self._causal_tokenizer(backbone, max_length)
        encoder_decoder = bool(backbone.base.config.is_encoder_decoder)
        mask = SENTINEL if encoder_decoder else tokenizer.mask_token
        mask_id = None if mask is None else tokenizer.convert_tokens_to_ids(mask)
        if mask_id is None or mask_id == tokenizer.unk_token_id:
            raise InputError(
                f"head=verbalizer: the backbone's tokenizer has no mask token{' <extra_id_0>' * encoder_decoder}"
            )
        start = backbone.base.config.decoder_start_token_id if encoder_decoder else None

        def tokenize(task: Task, rows: Sequence[Row]) -> TokenizedRows:
            labels = torch.tensor([row.label for row in rows], dtype=torch.int64)
            if not rows:
                return TokenizedRows(task, [], None, labels)
            template = self.template(task, len(rows[0].texts))
            encoded = encode_fitting(
                tokenizer, lambda texts: template.fill(texts, mask)[0], [row.texts for row in rows], max_length
            )
            ids = [text.ids for text in encoded]
            soft = [template.soft_position(text, mask) for text in encoded] if template.has_soft else None
            if encoder_decoder:
                decoder = [[start, mask_id]] * len(rows)
                return TokenizedRows(task, ids, None, labels, decoder=decoder, reads=[[1]] * len(rows), soft=soft)
            # A text may hold the mask's name itself: the template's mask is the one with the right end offset.
            reads = [
                [
                    position
                    for position, (token, (_, end)) in enumerate(zip(text.ids, text.offsets, strict=True))
                    if token == mask_id and end == template.fill(text.texts, mask)[1]
                ]
                for text in encoded
            ]
            failed = next((number for number, positions in enumerate(reads) if len(positions) != 1), None)
            if failed is not None:
                raise InputError(
                    f"head.template: this tokenizer does not keep {mask!r} apart from the words around it (task "
                    f"{task.name!r}, row {failed + 1}); put other words or blanks there"
                )
            types = [[0] * len(tokens) for tokens in ids] if "token_type_ids" in tokenizer.model_input_names else None
            return TokenizedRows(task, ids, types, labels, reads=reads, soft=soft)

        return tokenize

    def _causal_tokenizer(self, backbone: Backbone, max_length: int) -> TokenizeRows:
        """Tokenize templates up to their mask, where the next token is read; label words have room behind."""
        tokenizer: Any = backbone.tokenizer

        def tokenize(task: Task, rows: Sequence[Row]) -> TokenizedRows:
            labels = torch.tensor([row.label for row in rows], dtype=torch.int64)
            if not rows:
                return TokenizedRows(task, [], None, labels)
            template = self.template(task, len(rows[0].texts), causal=True)
            room = max_length + 1 - max(map(len, self._label_words(backbone, task).tokens))
            encoded = encode_fitting(tokenizer, template.before_mask, [row.texts for row in rows], room)
            soft = [template.soft_position(text, "") for text in encoded] if template.has_soft else None
            end = tokenizer.eos_token_id
            ids = [text.ids[:-1] if len(text.ids) > 1 and text.ids[-1] == end else text.ids for text in encoded]
            return TokenizedRows(task, ids, None, labels, reads=[[len(tokens) - 1] for tokens in ids], soft=soft)

        return tokenize

    @override
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Return no tensors."""
        return {}

    @override
    def reading(self, backbone: Backbone, task: Task) -> HeadReading:
        """Read class logits, shape (rows, classes), from the states at the masks."""
        words, vocabulary = self._label_words(backbone, task), backbone.lm_head
        assert vocabulary is not None, "the backbone was loaded without a language-model head"

        def read(states: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
            at_mask = states[inputs[READ_ROWS], inputs[READ_POSITIONS]]
            if words.continues and is_causal(backbone.base.config):
                scores = log_likelihoods(backbone, words, at_mask, inputs, plan)
            else:
                with backbone.autocast():
                    scores = vocabulary(at_mask, words.ids, plan.weights)
            return words.classes(scores.to(torch.promote_types(scores.dtype, torch.float32)), self._average)

        return read

    @override
    def loss_units(self, batch: Batch) -> int | None:
        """Count rows; with several forwards a row's gradient is not taken apart."""
        return None if self.forwards_again else len(batch)

    @override
    def logits(self, tensors: Tensors, view: View, task: Task) -> Tensor:
        return view[self.name]

    @override
    def description(self, config: HeadConfig, task: Task) -> dict[str, Any]:
        """Add the words of every label."""
        fields = super().description(config, task)
        words = config.words or {}
        fields["options"]["words"] = {label: words.get(label, [label]) for label in task.labels}
        return fields

    def _label_words(self, backbone: Backbone, task: Task) -> LabelWords:
        if task not in self._tokenized_words:
            words = [self._words.get(label, (label,)) for label in task.labels]
            lead = None
            if is_causal(backbone.base.config):
                cloze = self._by_task.get(task.name, self._template)
                lead = ClozeTemplate(SINGLE).lead if cloze is None else cloze.lead
            self._tokenized_words[task] = label_words(backbone, task, words, self._multi_token, lead)
        return self._tokenized_words[task]


def log_likelihoods(backbone: Backbone, words: LabelWords, at_end: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
    """Return the log-likelihood of every token of every label word behind the rows' prompts, shape (rows, tokens).

    Each word of several tokens takes a forward of its own, over the prompts with the word behind them.

    `at_end` are the last states of the prompts, shape (rows, hidden); the prompts are padded on the right.
    """
    vocabulary = backbone.lm_head
    assert vocabulary is not None, "the backbone was loaded without a language-model head"

    def scored(states: Tensor) -> Tensor:
        with backbone.autocast():
            scores = vocabulary(states, None, plan.weights)
        return torch.log_softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)

    first, ends, columns = scored(at_end), inputs[READ_POSITIONS], []
    for tokens in words.tokens:
        columns.append(first[:, tokens[0]].unsqueeze(1))
        if len(tokens) == 1:
            continue
        places = ends.unsqueeze(1) + torch.arange(1, len(tokens), device=ends.device)
        texts = {name: tensor for name, tensor in inputs.items() if name not in HEAD_INPUTS}
        for name, filler in (("input_ids", 0), ("attention_mask", 0)):
            texts[name] = nn.functional.pad(inputs[name], (0, len(tokens) - 1), value=filler)
        behind = torch.tensor(tokens[:-1], device=ends.device).expand_as(places)
        texts["input_ids"] = texts["input_ids"].scatter(1, places, behind)
        texts["attention_mask"] = texts["attention_mask"].scatter(1, places, 1)
        states = backbone.encode(texts, plan)
        states = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        following = scored(states.to(at_end.dtype))
        next_tokens = torch.tensor(tokens[1:], device=ends.device).expand_as(places)
        columns.append(following.gather(-1, next_tokens.unsqueeze(-1)).squeeze(-1))
    return torch.cat(columns, 1)


def label_words(
    backbone: Backbone,
    task: Task,
    words_by_label: Sequence[Sequence[str]],
    multi_token: MultiToken,
    lead: str | None = None,
) -> LabelWords:
    """Tokenize the words of each label.

    `lead` is what a causal model reads right before a word. Without it words stand at a mask, where those of several
    tokens may be refused.
    """
    tokens: list[list[int]] = []
    owners: list[int] = []
    label_of: dict[tuple[int, ...], int] = {}
    for number, (label, words) in enumerate(zip(task.labels, words_by_label, strict=True)):
        for word in words:
            ids = (
                _tokens_of(backbone.tokenizer, word) if lead is None else _tokens_behind(backbone.tokenizer, lead, word)
            )
            where = f"head.words: {word!r}, for label {label!r} of task {task.name!r},"
            if not ids or backbone.tokenizer.unk_token_id in ids:
                raise InputError(f"{where} is not in the backbone's vocabulary; choose another word")
            if len(ids) > 1 and multi_token == "refuse" and lead is None:
                pieces = " + ".join(cast("list[str]", backbone.tokenizer.convert_ids_to_tokens(ids)))
                raise InputError(f"{where} splits into {pieces}; choose a whole word, or head.multi_token=average")
            if label_of.setdefault(tuple(ids), number) != number:
                other = task.labels[label_of[tuple(ids)]]
                raise InputError(f"{where} is also the word of label {other!r}; choose different words")
            if ids not in tokens:  # an uncased tokenizer may read two of a label's words as one
                tokens.append(ids)
                owners.append(number)
    of_word = torch.zeros(len(tokens), sum(map(len, tokens)))
    of_class = torch.zeros(len(task.labels), len(tokens))
    begin = 0
    for number, (ids, owner) in enumerate(zip(tokens, owners, strict=True)):
        of_word[number, begin : begin + len(ids)] = 1 / len(ids)
        of_class[owner, number] = 1
        begin += len(ids)
    flat = torch.tensor([token for ids in tokens for token in ids])
    flat, of_word, of_class = (tensor.to(backbone.device) for tensor in (flat, of_word, of_class))
    return LabelWords(flat, of_word, of_class, tuple(map(tuple, tokens)))


def _tokens_of(tokenizer: Any, word: str) -> list[int]:
    """Tokenize a word as inside a text, behind a space, or alone where that gives fewer tokens."""
    forms: list[list[int]] = [
        list(tokenizer(form, add_special_tokens=False)["input_ids"]) for form in (f" {word}", word)
    ]
    return min(forms, key=len)


def _tokens_behind(tokenizer: Any, lead: str, word: str) -> list[int]:
    """Tokenize a word as it follows a text that ends with `lead`, whose blank belongs to the word."""
    before = f"x{lead}".rstrip(" ")
    blank = " " if f"x{lead}" != before else ""
    alone, whole = (
        list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (before, f"{before}{blank}{word}")
    )
    return whole[len(alone) :] if whole[: len(alone)] == alone else _tokens_of(tokenizer, word)


def _slots(texts: int) -> str:
    return "{text}" if texts == 1 else "{a} and {b}"
