"""`Policy` judges by the operator's limits: a configuration, tensors and rows, numbers, every broadcast.

It looks at what the resolved configuration, the parts' tensors and the rows are, not at their names: a part called
`global` is an adapter of one method and the whole backbone of another. What it cannot judge, it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from silotune.config import Config
from silotune.core.tensors import State, flatten
from silotune.distributed.protocol.handshake import HandshakeRefused
from silotune.distributed.silo.exposure import rounded_rows
from silotune.distributed.silo.policy_config import PolicyConfig, most
from silotune.distributed.silo.policy_keys import OTHER_ROUNDS, PROMPTS, ROW_CHOICE, extreme_options, unjudged
from silotune.distributed.silo.request_work import RequestWork
from silotune.models.backbone.backbone import Backbone
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.silo import Silo

POLICY_REFUSES = "its policy refuses"
"""Words in every reason of the policy."""


class PolicyRefused(HandshakeRefused):
    """The operator's policy excludes a run or a request."""


@dataclass(frozen=True)
class Policy:
    """The operator's limits for one silo.

    Args:
        silo: the silo's name, for messages.
        limits: the section `policy`.
        share: the numbers that may leave.
    """

    silo: str
    limits: PolicyConfig
    share: tuple[str, ...] = ()

    def check_configuration(self, config: Config) -> None:
        """Judge a configuration, before backbone and rows are loaded for it.

        Raises:
            PolicyRefused: naming the key, its value and what is allowed.
        """
        limits, train = self.limits, config.train
        for kind, key, name in (
            ("methods", "method", config.method.name),
            ("tuners", "tuner", config.tuner.name),
            ("heads", "head", config.head.name),
        ):
            allowed = getattr(limits, kind)
            if allowed != "any" and name not in allowed:
                raise self.refused(f"{key}={name}", f"allowed: {', '.join(allowed) or 'none'} (policy.{kind})")
        self._check_keys(config)
        self._at_least("train.batch_size", train.batch_size, "batch_size")
        if limits.batches != "any" and train.batches != limits.batches:
            why = "the rows of a short last batch weigh more than the others; allowed: even (policy.batches)"
            raise self.refused(f"train.batches={train.batches}", why)
        self._at_least("train.max_length", train.max_length, "max_length")
        tuner = config.tuner.model_dump()
        ratio = tuner.get("lr_ratio", 1.0)  # texts are refused where options are read
        self._at_most("train.lr", train.lr, "lr")  # a schedule only lowers it
        if isinstance(ratio, (int, float)) and ratio > 1:
            self._at_most("train.lr × tuner.lr_ratio", train.lr * ratio, "lr")
        self._at_most("train.server_lr", train.server_lr or 0.0, "lr")
        self._at_most("train.weight_decay", train.weight_decay or 0.0, "weight_decay")
        self._at_most("train.dropout", 0.0 if isinstance(train.dropout, str) else train.dropout or 0.0, "dropout")
        # of inputs that a dropout near 1 leaves, each column of a LoRA's A shows one feature of one token
        tuner_dropout = tuner.get("dropout", 0.0)
        if isinstance(tuner_dropout, (int, float)):
            self._at_most("tuner.dropout", tuner_dropout, "dropout")
        self._at_most("train.epochs", train.epochs, "epochs")
        self._at_most("train.steps", train.steps or 0, "steps")
        if train.steps is not None and not limits.partial_passes:
            why = "rounds that leave out some rows each tell these; allowed: train.epochs (policy.partial_passes)"
            raise self.refused(f"train.steps={train.steps:,}", why)
        self._at_most("rounds", config.rounds, "rounds")
        self._at_most("tokens of a step: train.batch_size × train.max_length", train.batch_size * train.max_length,
                      "step_tokens")  # fmt: skip
        self._at_most("cache.mib", config.cache.mib, "memory_mib")
        if config.uplink.noise is None and limits.noise:
            raise self.refused("uplink without noise", "only noised changes leave (policy.noise)")
        if config.uplink.noise is not None:
            self._at_most("uplink.epsilon", config.uplink.epsilon or 0.0, "epsilon_per_round")
            self._at_most("uplink.delta", config.uplink.delta or 0.0, "delta_per_round")

    def check_at_once(self, context: TrainingContext) -> None:
        """Refuse micro-batches that rows cut at `train.max_length` may not fit: the refusals would tell the longest.

        An encoder–decoder's answer may be as long as its text.

        Raises:
            PolicyRefused: naming the key.
        """
        at_once, limits = context.train.tokens_at_once, self.limits
        if not isinstance(at_once, int) or not limits.max_length:
            return
        views = max((phase.views_with_gradient for phase in context.phases), default=1)
        texts = 2 if getattr(context.backbone.base.config, "is_encoder_decoder", False) else 1
        least = max(views, 1) * (texts * context.train.max_length + context.virtual_tokens)
        if at_once < least:
            raise self.refused(f"train.tokens_at_once={at_once:,}", f"at least {least:,}, room for a row of "
                               "train.max_length tokens (policy.max_length)")  # fmt: skip

    def _check_keys(self, config: Config) -> None:
        allowed = self.limits.keys
        if allowed == "any":
            return
        for key, value in unjudged(config):
            prompt, choice = key.startswith(PROMPTS), any(fnmatchcase(key, pattern) for pattern in ROW_CHOICE)
            if key in allowed or (prompt and self.limits.prompts):
                continue
            why = "the policy cannot judge this key"
            if prompt:
                why = "the coordinator may not choose words around the rows (policy.prompts)"
            elif choice:
                why = "the coordinator may not choose among the rows"
            elif key in OTHER_ROUNDS:
                why = "steps that weigh otherwise in another round are told by the difference of the two"
            raise self.refused(_assignment(key, value), f"{why}; its default is allowed (policy.keys names exceptions)")
        for key, value in extreme_options(config):
            if key not in allowed:
                raise self.refused(_assignment(key, value), "too large or too small for an option (policy.keys)")

    def check_federation(self, federation: Federation, private_numbers: int) -> None:
        """Judge what the configuration came to: tensors that leave, rows that are read, steps that are taken.

        Args:
            federation: of this silo alone, before its first round.
            private_numbers: numbers of the parts that stay here.

        Raises:
            PolicyRefused: naming the limit; the number of rows is not said.
        """
        limits, context = self.limits, federation.context
        (silo,) = federation.silos.values()
        shapes = federation.coordinator.expected.shapes
        self._check_shapes(shapes, federation.backbone)
        self.check_numbers(sum(map(math.prod, shapes.values())), federation.backbone)
        self._check_private(private_numbers, federation.backbone)
        pull = context.train.lr * context.method.proximal_weight
        self._at_most("train.lr × weight of the method's proximal term", pull, "proximal", tell=False)
        rows = sum(len(rows) for rows in silo.train.values())
        if rows < limits.train_rows:
            raise self.refused("a training split of so few rows", f"at least {limits.train_rows} (policy.train_rows)")
        for split in ("validation", "test"):
            scored = [len(getattr(evaluation, split)) for evaluation in silo.evaluations.values()]
            if split in self.share and any(0 < count < limits.scored_rows for count in scored):
                least = f"at least {limits.scored_rows} (policy.scored_rows)"
                raise self.refused(f"scores of a {split} split of so few rows", least)
        final = [phase for phase in context.phases if phase.when == "end"]
        for phases in (*context.kinds_of_rounds(), final):
            work = RequestWork.of(context, silo, phases)
            self._at_most("passes over the rows in a phase", work.epochs, "epochs", tell=False)
            self._at_most("optimizer steps of a request", work.steps, "steps", tell=False)
            self._at_most("tokens of a request", work.tokens, "tokens", tell=False)
            if phases is not final:
                self._check_row_steps(work)
        longest = federation.config.head.max_new_tokens * federation.config.head.beams
        if silo.evaluations and any(task.kind == "generation" for task in federation.tasks.values()):
            answered = rounded_rows(sum(len(each.validation) + len(each.test) for each in silo.evaluations.values()))
            self._at_most("tokens of generated answers", answered * longest, "tokens", tell=False)

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]], backbone: Backbone) -> None:
        """Refuse tensors with the shape of a matrix of the backbone, or with one entry per word of the vocabulary."""
        allowed = self.limits.shapes
        if allowed == "any":
            return
        matrices = backbone_matrices(backbone)
        words = int(getattr(backbone.model.config, "vocab_size", 0) or 0)
        for name, shape in sorted(shapes.items()):
            if list(shape) in allowed:
                continue
            size, what = " × ".join(map(str, shape)), ""
            if words and words in shape:
                what = "it has a row for every word of the vocabulary, which tells the words of the rows"
            elif shape in matrices or shape[::-1] in matrices:
                what = "it has the shape of a weight matrix of the backbone"
            if what:
                raise self.refused(f"the tensor {name!r} ({size})", f"{what} (policy.shapes names exceptions)")

    def check_skipped(self, context: TrainingContext, silo: Silo, skipped: int, noised: bool = False) -> None:
        """Judge an update after training in float16, which skips steps whose gradients overflow.

        Args:
            context: of the run.
            silo: the silo that trained.
            skipped: its skipped steps.
            noised: whether noise hides what a step adds.

        Raises:
            PolicyRefused: a step was skipped, or too few rows × steps are left behind the update.
        """
        most_skipped = self.limits.skipped_steps
        if not noised and most_skipped is not None and skipped > most_skipped:
            # of two broadcasts that are almost equal, one whose gradients overflow leaves out one batch
            raise self.refused(
                "an update without some steps, which float16 skips",
                f"at most {most_skipped:,} skipped; precision=fp32 or bf16 skip none (policy.skipped_steps)",
            )
        kinds = [RequestWork.of(context, silo, phases) for phases in context.kinds_of_rounds()]
        planned = min(kinds, key=lambda work: work.shared_steps)
        taken = max(0, planned.shared_steps - skipped)
        rows = min(planned.rows, taken * context.train.batch_size)
        self._check_row_steps(replace(planned, rows=rows, shared_steps=taken))

    def _check_row_steps(self, work: RequestWork) -> None:
        if work.shared_steps and work.rows * work.shared_steps < self.limits.row_steps:
            least = f"at least {self.limits.row_steps} (policy.row_steps)"
            raise self.refused("an update of so few rows × steps", least)

    def check_numbers(self, count: int, backbone: Backbone) -> None:
        """Judge how many numbers a message's tensors hold.

        Raises:
            PolicyRefused: there are too many.
        """
        limit = most(self.limits.numbers_per_round, backbone_parameters(backbone))
        if limit is not None and count > limit:
            raise self.refused(
                f"{count:,} numbers in a message",
                f"at most {limit:,} ({self.limits.numbers_per_round}; policy.numbers_per_round)",
            )

    def _check_private(self, count: int, backbone: Backbone) -> None:
        limit = most(self.limits.private_numbers, backbone_parameters(backbone))
        if limit is not None and count > limit:
            raise self.refused(
                f"{count:,} numbers in private parts",
                f"at most {limit:,} ({self.limits.private_numbers}; policy.private_numbers)",
            )

    def check_broadcast(self, shared: State, start: State) -> None:
        """Judge the shared parts that a coordinator sent.

        Honest ones are near the start: they are averages of what silos trained. Far ones are made, so that an update
        tells which row it came from.

        Raises:
            PolicyRefused: a number is too far from its start, or is none.
        """
        if self.limits.drift is None:
            return
        before = flatten(start)
        for name, tensor in flatten(shared).items():
            distance = float((tensor - before[name]).abs().max()) if tensor.numel() else 0.0
            if not distance <= self.limits.drift:
                raise self.refused(
                    f"a broadcast whose {name!r} is {distance:.3g} from its start",
                    f"at most {self.limits.drift:g} (policy.drift)",
                )

    def _at_most(self, what: str, value: float, limit: str, tell: bool = True) -> None:
        bound = getattr(self.limits, limit)
        if bound is not None and value > bound:
            raise self.refused(f"{what}{f'={value:,}' if tell else ''}", f"at most {bound:,} (policy.{limit})")

    def _at_least(self, what: str, value: float, limit: str) -> None:
        bound = getattr(self.limits, limit)
        if value < bound:
            raise self.refused(f"{what}={value:,}", f"at least {bound:,} (policy.{limit})")

    def refused(self, what: str, allowed: str) -> PolicyRefused:
        """Return the refusal of something, with what is allowed."""
        return PolicyRefused(f"silo {self.silo!r}: {POLICY_REFUSES} {what}; {allowed}")


def _assignment(key: str, value: object) -> str:
    text = repr(value)
    return f"{key}={text if len(text) <= 60 else f'{text[:57]}...'}"


def backbone_parameters(backbone: Backbone) -> int:
    """Return how many parameters a backbone has."""
    return sum(int(parameter.numel()) for parameter in backbone.base.parameters())


def backbone_matrices(backbone: Backbone) -> set[tuple[int, ...]]:
    """Return the shapes of a backbone's weight matrices; small tables, such as those of segments, are none."""
    smallest = int(getattr(backbone.model.config, "hidden_size", 0) or 0) // 2
    shapes = (tuple(parameter.shape) for parameter in backbone.base.parameters())
    return {shape for shape in shapes if len(shape) >= 2 and min(shape) >= max(smallest, 2)}
