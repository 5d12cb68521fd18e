"""The coordinator's side of a round: sample silos, broadcast, check and aggregate updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from silotune.aggregation import (
    BY_ROWS,
    Aggregation,
    BroadcastAggregation,
    PartAggregation,
    Server,
    SiloAggregation,
    Update,
    by_samples,
    change_norm,
    clipped,
    mixing_ranks,
    score_read_by,
    uniform,
)
from silotune.aggregation.outliers import OutlierFilter, Refuse, check_aggregate
from silotune.aggregation.product_error import ProductError
from silotune.aggregation.server_optimizer import ServerOptimizer
from silotune.communication.masks.fixed_point import Sum, mean_of_sum
from silotune.communication.messages import CHANGE_FIELDS, UPDATE_FIELDS, Expected, Fields, MessageRefused, unpack
from silotune.communication.privacy.noise import CentralNoise
from silotune.communication.uplink.pipeline import NO_UPLINK, UplinkPipeline
from silotune.config.coordinator import AggregationConfig
from silotune.core.tensors import State, Tensors, flatten, unflatten
from silotune.errors import InputError, SilotuneError
from silotune.training.broadcasts import NO_RANKS, Broadcasts, VariantKey
from silotune.training.client import SiloReply
from silotune.training.context import TrainingContext
from silotune.training.mean_of_iterates import MeanOfIterates
from silotune.training.shared_step import SharedStep
from silotune.training.silo_sampling import SiloSampling

NOTHING_REFUSED = AggregationConfig(outlier=None)

_MOST_ROWS = 2**53  # larger weights are not exact in float64, and their sums can overflow


class _OpenRound(NamedTuple):
    """The round whose updates arrive.

    Args:
        number: its number.
        shared: the shared parts that it began with.
        variants: per key of `Broadcasts.key`: the tensors as those silos received them, and what an update must have.
    """

    number: int
    shared: State
    variants: dict[VariantKey, tuple[Tensors, Expected]]


@dataclass(frozen=True)
class Received:
    """A silo's reply and the update read from its message, or the reason why the message was refused.

    A run that shares nothing has neither update nor refusal. Under masks one reply of a round brings the update, the
    mean over all of them; `forwarded` counts the bytes of other silos that this one was sent.
    """

    reply: SiloReply
    update: Update | None = None
    refusal: str = ""
    forwarded: int = 0


class Coordinator:
    """Holds the shared parts and combines updates; it has no rows of silos.

    Args:
        shared: the shared parts before round 1.
        aggregation: how updates are combined; an aggregation that reads broadcasts first checks the shared parts.
            Central noise is a private mean, in the place of any other and of clipping.
        context: its method says what silos send in a round, which parts are redrawn before one, and which have
            aggregations of their own; None: silos send all shared parts in every round, and no part is special.
        sampling: chooses the silos of a round; if None, all take part in every one.
        settings: which updates are refused or clipped, and whether they come as their sum alone (`receive_sum`).
        optimizer: the server optimizer; if None, the aggregate replaces the shared parts.
        uplink: the silos' uplink, which decodes their changes; under an empty pipeline updates hold the parts.
        ranks: silo → its LoRA rank, for silos of another one than the shared parts have.
        silos: the number of all silos in the federation, which aggregations of single parts read.
        mean: replaces the shared parts by their mean over rounds; None: never.
    """

    def __init__(
        self,
        shared: State,
        aggregation: Aggregation | BroadcastAggregation | CentralNoise,
        context: TrainingContext | None = None,
        *,
        sampling: SiloSampling | None = None,
        settings: AggregationConfig = NOTHING_REFUSED,
        optimizer: ServerOptimizer | None = None,
        uplink: UplinkPipeline = NO_UPLINK,
        ranks: Mapping[str, int] = NO_RANKS,
        silos: int = 0,
        mean: MeanOfIterates | None = None,
    ) -> None:
        self.shared = shared
        self.secure = settings.secure and self.communicates
        self.optimizer = optimizer or ServerOptimizer()
        self._noise = aggregation if isinstance(aggregation, CentralNoise) else None
        aggregation = uniform if isinstance(aggregation, CentralNoise) else aggregation
        self._aggregation = aggregation
        self._context = context
        self._sampling = sampling or SiloSampling(0)
        self._settings = settings
        self.expected = Expected.like(flatten(shared))
        """Names and shapes of the tensors in a broadcast, as the coordinator has them; see `expected_of`."""
        self.uplink = uplink
        self.shared_step: SharedStep | None = None
        """The step that a sum stands for where silos share one noise; None: a sum is of changes."""
        self.report: Mapping[str, Any] = {}
        """What the last aggregate's aggregation says of it; see `BroadcastAggregation`."""
        self.product_error: float | None = None
        """Of the last aggregate (`ProductError`), measured in rounds 1, 2, 4, 8 and so on; None in other rounds."""
        self._by_rows = settings.name in BY_ROWS
        self._own: Mapping[str, PartAggregation] = {}
        """Part → the aggregation that alone sets its new value."""
        self._head_rounds = 0
        """First rounds, whose updates hold heads alone; these are averaged whatever is said of adapters."""
        if context is not None:
            self._own = context.method.aggregations_of_parts if self.communicates else {}
            self._head_rounds = context.method.options.head_rounds
        self._silos = silos
        self._mean = mean
        self._own_states: dict[str, Tensors] = {}  # part → the state of its own aggregation
        self._broadcasts = Broadcasts(shared)
        self._open: _OpenRound | None = None  # of the round whose updates arrive
        if isinstance(aggregation, BroadcastAggregation) and self.communicates:
            feedback = uplink.codec is not None and uplink.feedback
            aggregation.check(self._in_common(flatten(shared)), self.optimizer, feedback)
        if ranks and self.communicates:
            self._broadcasts = Broadcasts(shared, ranks, mixing_ranks(aggregation, ranks))
        elif isinstance(aggregation, SiloAggregation):
            self._broadcasts = Broadcasts(shared, aggregation=aggregation)

    @property
    def communicates(self) -> bool:
        """Whether there is anything to send."""
        return any(self.shared.values())

    def choose(self, number: int, silos: Sequence[str]) -> list[str]:
        """Sample the silos of a round, in name order: at least one, and at least one of each group."""
        return self._sampling.choose(number, silos)

    @property
    def broadcasts(self) -> Broadcasts:
        """The broadcasts of the present shared parts."""
        if self._broadcasts.shared is not self.shared:
            self._broadcasts = self._broadcasts.of(self.shared)
        return self._broadcasts

    def shared_of(self, silo: str) -> State:
        """Return the shared parts as a silo receives them."""
        return self.broadcasts.state(silo)

    def broadcast(self, number: int, silo: str | None = None) -> bytes:
        """Return the message that opens a round for a silo; None: with the shared parts as the coordinator has them."""
        return self.broadcasts.message(silo, number)

    def expected_of(self, silo: str) -> Expected:
        """Return names and shapes of the tensors in a silo's broadcast."""
        return self.expected if self.broadcasts.key(silo) is None else Expected.like(self.broadcasts.tensors(silo))

    def receive(self, number: int, silo: str, message: bytes) -> Update:
        """Check one silo's update.

        Raises:
            MessageRefused: malformed, of another round, sent in another silo's name, or by another uplink.
        """
        if self._open is None or self._open.number != number or self._open.shared is not self.shared:
            self._open = _OpenRound(number, self.shared, {})
        opened, key = self._open.variants, self.broadcasts.key(silo)
        if key not in opened:
            before = self._sent_before(number, silo)
            opened[key] = before, self.uplink.expected(Expected.like(before))
        tensors, fields = self._read_message(message, *opened[key])
        if fields["round"] != number:
            raise MessageRefused(f"update of round {fields['round']}, expected {number}")
        if fields["silo"] != silo:
            raise MessageRefused(f"update in the name of {fields['silo']!r}")
        rows = int(fields["rows"])
        if not 1 <= rows <= _MOST_ROWS:
            raise MessageRefused(f"field 'rows' must be between 1 and {_MOST_ROWS}")
        update = Update(silo, tensors, rows, None if key is None else self.broadcasts.tensors(silo))
        most = self._settings.max_norm
        if most is not None and (norm := change_norm(update.tensors, update.before(flatten(self.shared)))) > most:
            raise MessageRefused(f"norm of the update {norm:.3g} is above aggregation.max_norm={most:g}")
        return update

    def summand_length(self, number: int) -> int:
        """Return how many numbers a silo adds to a round's sum: its weight, and those that it sends."""
        return 1 + sum(tensor.numel() for tensor in self._sent_before(number).values())

    def receive_sum(self, number: int, result: Sum, replies: Mapping[str, SiloReply]) -> Iterator[Received]:
        """Yield the replies of a sum's silos; the last one brings the mean over all of them as one update."""
        before = self._sent_before(number)
        step = self.shared_step
        mean = mean_of_sum(result.total, before) if step is None else step(result.total, before, number)
        update = Update("the sum", *mean)
        for name in result.survivors:
            reply = replace(replies[name], message=result.sent[name])
            yield Received(reply, update if name == result.survivors[-1] else None, forwarded=result.received[name])

    def _sent_before(self, number: int, silo: str | None = None) -> Tensors:
        """Return the tensors that a silo sends in a round, as they are in its broadcast."""
        shared = self.broadcasts.state(silo)
        parts = shared if self._context is None else self._context.sent(number)
        return flatten({name: tensors for name, tensors in shared.items() if name in parts})

    def _read_message(self, message: bytes, before: Tensors, expected: Expected) -> tuple[Tensors, Fields]:
        """Return the shared parts in a silo's message, of which an uplink sends the change, and its fields.

        Raises:
            MessageRefused: malformed, or sent by another uplink.
        """
        uplink = self.uplink
        tensors, fields = unpack(message, expected, CHANGE_FIELDS if uplink.names else UPDATE_FIELDS)
        if uplink.names:
            if fields["uplink"] != uplink.label:
                raise MessageRefused(f"update passed uplink={fields['uplink']}, expected {uplink.label}")
            tensors = uplink.read(tensors, before, str(fields["silo"]), int(fields["round"]))
        return tensors, fields

    def read_reply(self, number: int, reply: SiloReply) -> Received:
        """Read a reply to a round, once: its update by `receive`, or the reason why it is refused."""
        if not self.communicates:
            return Received(reply)
        try:
            update = self.receive(number, reply.silo, reply.message)
            return Received(reply, replace(update, score=self._score_in(reply)))
        except MessageRefused as refusal:
            return Received(reply, refusal=str(refusal))

    def _score_in(self, reply: SiloReply) -> float | None:
        """Return the number in a reply that the aggregation reads; refuse a reply without it."""
        aggregation = self._aggregation
        if not isinstance(aggregation, BroadcastAggregation) or not aggregation.reads:
            return None
        score = reply.metrics.get(aggregation.reads)
        if score is None or not aggregation.accepts(score):
            raise MessageRefused(f"{aggregation.reads} is {score}, which aggregation={aggregation.name} cannot read")
        return score

    def aggregate(
        self,
        updates: Iterable[Update],
        number: int | None = None,
        refuse: Refuse = lambda *_: None,
        chosen: int = 0,
    ) -> None:
        """Set the shared parts from a round's updates; without updates they stay.

        Args:
            updates: a sequence in any order; or an iterator in silo-name order, of which a mean keeps no update.
            number: the round's number, needed with central noise, which is added even without updates, and for parts
                that are redrawn; None: none is.
            refuse: called with a silo whose update is held back, and the reason. With central noise none is, as every
                change is clipped, and the guarantee counts all.
            chosen: how many silos the round has; of many, no update is kept for `product_error`. 0: not known.

        Raises:
            SilotuneError: the aggregate is not finite; the shared parts stay as they were.
        """
        before = flatten(self.shared)
        ordered = iter(sorted(updates, key=lambda update: update.silo) if isinstance(updates, Sequence) else updates)
        self.product_error, self.report = None, {}
        if self._noise is not None:
            assert number is not None, "each round has its own noise"
            noised = self._noise(self._sent_before(number), ordered, number)
            self._set(before | self.optimizer.step(before, noised), number)
            return
        without_outliers, momentum = OutlierFilter(before, self._settings.outlier, refuse), dict(self.optimizer.state)
        ordered = without_outliers(ordered)
        if (first := next(ordered, None)) is not None:
            ordered = chain([first], ordered)
            if (limit := self._settings.clip) is not None:
                ordered = (clipped(update, before, limit) for update in ordered)
            whole: list[Update] = []  # with the parts that have aggregations of their own
            heads_alone = number is not None and 0 < number <= self._head_rounds
            if self._own and not heads_alone:
                ordered = self._watch_own(ordered, whole)
            in_common = self._in_common(before)
            plain = not score_read_by(self._settings.name)  # no mean of all silos by rows, nor a uniform one
            measured = plain and not self.secure and (number is None or number & (number - 1) == 0)
            error = ProductError(in_common if measured else {}, self._by_rows, chosen)
            combined = self._combine(error.watch(ordered), in_common, heads_alone)
            self.product_error = error.of(combined)
            if isinstance(self._aggregation, BroadcastAggregation) and not heads_alone:
                self.report = self._aggregation.report
            own, own_states = ({}, self._own_states) if heads_alone else self._combine_own(whole)
            aggregate = before | self.optimizer.step(before, combined) | own
            try:
                check_aggregate(aggregate, without_outliers.norms, number)
            except SilotuneError:
                self.optimizer.state = momentum
                raise
            self._own_states = own_states
            self._set(aggregate, number)
            if number is not None and self._context is not None:
                self.shared |= self._context.initial.redrawn(number + 1)

    def _set(self, aggregate: Tensors, number: int | None) -> None:
        """Set the shared parts to a round's aggregate, or to the mean over rounds if its stage ends."""
        if self._mean is not None and number is not None:
            mean = self._mean.after(number, aggregate)
            if mean is not None:
                aggregate, self.optimizer.state = mean, {}  # momentum leads away from where the last round was
        self.shared = unflatten(aggregate)

    def _combine(self, updates: Iterable[Update], before: Tensors, heads_alone: bool) -> Tensors:
        aggregation = self._aggregation
        if heads_alone and isinstance(aggregation, BroadcastAggregation):
            aggregation = by_samples if self._by_rows else uniform
        if isinstance(aggregation, BroadcastAggregation):
            return aggregation.aggregate(updates, before)
        return aggregation(updates)

    def _in_common(self, tensors: Tensors) -> Tensors:
        """Return the tensors of the parts that have no aggregation of their own."""
        return {name: tensor for name, tensor in tensors.items() if name.split("/", 1)[0] not in self._own}

    def _watch_own(self, updates: Iterable[Update], whole: list[Update]) -> Iterator[Update]:
        """Yield the updates without parts that have aggregations of their own; keep the whole ones in a list."""
        for update in updates:
            whole.append(update)
            yield replace(update, tensors=self._in_common(update.tensors))

    def _combine_own(self, updates: Sequence[Update]) -> tuple[Tensors, dict[str, Tensors]]:
        """Return the new tensors of the parts with aggregations of their own, and these aggregations' new state."""
        parts: State = {}
        own_states: dict[str, Tensors] = {}
        for part, aggregation in self._own.items():
            before = self.shared[part]
            server = Server(part, before, self.shared, self._silos, dict(self._own_states.get(part, {})))
            new = aggregation(updates, server)
            if not isinstance(new, Mapping):
                raise InputError(f"part {part!r}: its aggregation returns {type(new).__name__}; allowed: name → tensor")
            for name, tensor in new.items():
                if name not in before or tensor.shape != before[name].shape:
                    raise SilotuneError(
                        f"part {part!r}: its aggregation returns {name!r} of shape {tuple(tensor.shape)}; allowed: "
                        f"{', '.join(f'{key} {tuple(value.shape)}' for key, value in before.items())}"
                    )
            parts[part] = {name: tensor.to(before[name].dtype) for name, tensor in new.items()}
            own_states[part] = server.state
        return flatten(parts), own_states

    def adopt(self, state: State) -> None:
        """Set the shared parts to those of a state: from a server step, or received with a broadcast."""
        self.shared = {name: state.get(name, {}) for name in self.shared}

    def flat(self) -> Tensors:
        """Return all state as one flat mapping, as in checkpoints and digests.

        Its names are `shared/part/tensor`, `server/…` of the server optimizer, `part/part/…` of aggregations of
        parts, `mean/…` of the mean over rounds, and `aggregation/…` of an aggregation with a state.
        """
        groups = {"shared": flatten(self.shared), "server": self.optimizer.state, "part": flatten(self._own_states)}
        if self._mean is not None:
            groups["mean"] = self._mean.state
        if isinstance(self._aggregation, BroadcastAggregation):
            groups["aggregation"] = self._aggregation.state
        return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}

    def load_flat(self, tensors: Tensors) -> None:
        """Set the coordinator to a state from `flat`."""
        groups: dict[str, Tensors] = {"shared": {}, "server": {}, "part": {}, "aggregation": {}, "mean": {}}
        for name, tensor in tensors.items():
            group, rest = name.split("/", 1)
            groups[group][rest] = tensor
        self.shared, self.optimizer.state = unflatten(groups["shared"]), groups["server"]
        self._own_states = unflatten(groups["part"])
        if self._mean is not None:
            self._mean.state = groups["mean"]
        if isinstance(self._aggregation, BroadcastAggregation):
            self._aggregation.state = groups["aggregation"]
        elif groups["aggregation"]:
            raise InputError("the checkpoint has the state of an aggregation that is not known here")
