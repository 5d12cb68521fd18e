"""Run the tasks of lm-evaluation-harness on a silo's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor, nn

from silotune.data.batching import evaluation_batches
from silotune.data.tokenized import READ_POSITIONS, READ_ROWS, READ_TARGETS, Inputs, TokenizedRows
from silotune.errors import InputError, library_errors
from silotune.evaluation.predict import Predictor
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.forward.generation import GenerationOptions, generate_ids
from silotune.models.forward.view_program import ViewProgram
from silotune.models.heads.lm import LanguageModelHead, scored_at_once, word_scores
from silotune.runs.personal_model import PersonalModel

LONGEST = 2048
"""Tokens of a request where the backbone has no limit of its own."""

NEW_TOKENS = 256
"""Tokens of an answer where a task names no number, as in the harness's own models."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """Scores and continues texts under a silo's mix; texts are tokenized as by the harness's own HFLM."""

    def __init__(self, model: PersonalModel) -> None:
        super().__init__()
        if model.task.labeled:
            raise InputError("--lm-eval: this model classifies texts; allowed: models with head=lm or dpo")
        self._context, self._task = model.context, model.task
        self._predictor = Predictor(model.context, model.state)
        self._backbone = self._context.backbone
        head = self._context.head
        assert isinstance(head, LanguageModelHead), "heads of written answers are"
        self._head = head
        if self._backbone.base.config.is_encoder_decoder:
            raise InputError("--lm-eval: needs a decoder-only backbone, not an encoder-decoder")
        self.tokenizer: Any = self._backbone.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads beside its tuner's virtual tokens."""
        virtual = self._context.virtual_tokens
        return (self._backbone.max_tokens or LONGEST) - virtual

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize; a text that begins with the begin token gets no second one."""
        begun = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        if add_special_tokens is None:
            add_special_tokens = not begun
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as a run does; a last turn of the assistant is the beginning of the answer."""
        turns = [(turn["role"], turn["content"]) for turn in chat_history]
        template = self._head.chat_template(self._backbone)
        if add_generation_prompt:
            return template.prompt(turns)
        return template.prompt(turns[:-1]) + turns[-1][1]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations, and whether each token of one is the likeliest."""
        ids, reads, targets, prompts = [], [], [], []
        for _, context, continuation in requests:
            whole = (context + continuation)[-(self.max_length + 1) :][:-1]
            ids.append(whole)
            reads.append(list(range(len(whole) - len(continuation), len(whole))))
            targets.append(continuation)
            prompts.append(max(len(whole) - len(continuation) + 1, 1))
        labels = torch.zeros(len(ids), dtype=torch.int64)
        rows = TokenizedRows(self._task, ids, None, labels, reads=reads, targets=targets, prompts=prompts)
        scores = torch.zeros(len(rows), 2)
        weights = self._predictor.weigh(rows)
        with torch.no_grad():
            for batch in evaluation_batches(
                rows, self._backbone.pad_id, self._backbone.call_cost, self._context.rows_scored
            ):
                mix = self._predictor.mix(None if weights is None else weights[batch.rows])
                program = ViewProgram(self._backbone, [{"": mix}], {}, lambda task: {"scores": self._read})
                scores[batch.rows] = program(batch)[""]["scores"].float().cpu()
        return [(float(value), bool(greedy)) for value, greedy in scores.tolist()]

    def _read(self, states: Tensor, inputs: Inputs, plan: ForwardPlan) -> Tensor:
        """Return per row its targets' log-likelihood, and 1 where all of them are the likeliest; shape (rows, 2)."""
        targets = inputs[READ_TARGETS]
        piece = scored_at_once(self._backbone)
        vectors = states[inputs[READ_ROWS], inputs[READ_POSITIONS]]
        losses, missed = [], []
        for some, words in zip(torch.split(vectors, piece), torch.split(targets, piece), strict=True):
            scores = word_scores(self._backbone, some, plan.weights)
            losses.append(nn.functional.cross_entropy(scores, words, reduction="none"))
            missed.append((scores.argmax(-1) != words).float())
        rows = inputs[READ_ROWS]
        sums = torch.zeros(len(states), device=rows.device).index_add(0, rows, -torch.cat(losses))
        misses = torch.zeros_like(sums).index_add(0, rows, torch.cat(missed))
        return torch.stack([sums, (misses == 0).float()], 1)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of `max_length` tokens."""
        totals = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            scored = self._loglikelihood_tokens([(None, *utils.make_disjoint_window(window)) for window in windows])
            totals.append(sum(value for value, _ in scored))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts greedily up to one of their end texts; long ones lose their beginning."""
        answers = []
        for text, settings in (request.args for request in requests):
            options = normalize_gen_kwargs(settings, NEW_TOKENS)
            if options["do_sample"] and options["temperature"]:
                raise InputError("--lm-eval: a task asks for sampled texts; allowed: greedy ones")
            new = options["max_gen_toks"]
            if not 0 < new < self.max_length:
                raise InputError(
                    f"--lm-eval: a task asks for texts of {new} tokens (max_gen_toks); allowed: 1 to "
                    f"{self.max_length - 1}, because the model reads {self.max_length} with its prompt"
                )
            prompt = self.tok_encode(text)[-(self.max_length - new) :]
            labels = torch.zeros(1, dtype=torch.int64)
            weights = self._predictor.weigh(TokenizedRows(self._task, [prompt], None, labels))
            mix = self._predictor.mix(weights)
            (ids,) = generate_ids(self._backbone, [prompt], mix, GenerationOptions(1, new))
            answer = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            for end in options["until"]:
                answer = answer.split(end)[0] if end else answer
            answers.append(answer)
        return answers


def evaluate_on(
    model: PersonalModel,
    tasks: Sequence[str],
    include: Path | None = None,
    limit: int | None = None,
    *,
    chat: bool = False,
) -> dict[str, Any]:
    """Evaluate a silo's model on tasks of the harness; returns task → metric → value."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager, get_task_dict

    with library_errors(f"--tasks-folder {include}: cannot be read"):
        manager = TaskManager(include_path=None if include is None else str(include))
    for name in tasks:
        if name not in manager.all_tasks:
            raise InputError(f"--lm-eval: unknown task {name!r}; `lm-eval ls tasks` lists the tasks")
        with library_errors(f"--lm-eval: task {name!r} cannot be loaded"):
            get_task_dict(name, manager)
    results: Any = simple_evaluate(
        HarnessModel(model),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        log_samples=False,
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    return {name: dict(results["results"][name]) for name in results["results"]}
