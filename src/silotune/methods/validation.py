"""A method whose parts, phases and prediction do not fit together is refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from silotune.core.tensors import State
from silotune.errors import InputError
from silotune.methods.base import Method
from silotune.methods.head_first import heads_alone
from silotune.methods.instance_weighting import INSTANCES
from silotune.methods.parts import Part, Scope
from silotune.methods.phase import Phase
from silotune.methods.step import WhichHead, heads_of
from silotune.models.forward.mixing import ANCHORS, members, parse_name, parts_in, received
from silotune.models.heads import Head
from silotune.models.tuners import TensorGroup, tuner_of


def check_method(method: Method) -> None:
    """Check parts, phases and prediction against each other."""
    for fault in _faults(method, method.parts()):
        raise InputError(f"method {method.name}: {fault}")


def _faults(method: Method, parts: dict[str, Part]) -> Iterator[str]:
    """Yield the faults of a method; later ones may follow from the first."""
    for name, part in parts.items():
        if {*name} & {*"/:+"}:
            yield f"part name {name!r} holds a slash, colon or plus sign"
        if part.scope is Scope.FIXED and tuner_of(part.module) is None:
            way = "private(module, alike=True) makes a part that begins equal in all silos"
            yield f"the fixed part {name!r} is neither a tuner nor a group of its tensors; {way}"
        if part.alike and part.scope is not Scope.PRIVATE:
            yield f"the part {name!r} is not private, so that it begins equal in all silos anyway; leave alike out"
        if part.redrawn and (part.scope is not Scope.SHARED or tuner_of(part.module) is None):
            yield f"the part {name!r} cannot be drawn anew: it is no shared tuner"
        if part.aggregation is not None and part.scope is not Scope.SHARED:
            yield f"the part {name!r} has an aggregation, but is not shared"
        if name == INSTANCES:
            yield f"the part name {name!r} is reserved for the vectors of a silo's rows"
        if part.start is not None and part.start not in parts:
            yield f"part {name!r} starts from an unknown part {part.start!r}"
    if method.options.head_rounds and (method.unlabeled or not heads_alone(parts)):
        why = "its silos' rows have no labels" if method.unlabeled else "its heads have no tensors"
        yield f"method.head_rounds trains heads on labels, and {why}; leave it out"
    for phase in (*method.local_phases(), *method.server_phases()):
        yield from _phase_faults(method, parts, phase)
    for phase in method.server_phases():
        mixed = parts_in(key for mix in phase.views.values() for key in mix)
        used = {*phase.changes, *phase.copied.values(), *mixed}
        private = sorted(name for name in used if parts[name].scope is Scope.PRIVATE)
        if private:
            yield f"the server phase {phase.name!r} uses the private part {private[0]!r}"
    prediction = method.prediction()
    weighting = prediction.weighting
    for key in prediction.mix:
        yield from _key_faults(method, parts, "the prediction", key)
    yield from _head_faults(parts, prediction.head)
    for key in () if weighting is None else (weighting.local_part, weighting.global_part, *weighting.view):
        yield from _key_faults(method, parts, "the prediction", key)
        if ":" in key:
            yield f"the prediction weighs the anchor {key!r}; anchors exist in training only"


def _head_faults(parts: dict[str, Part], head: WhichHead) -> Iterator[str]:
    for name in heads_of(head):
        if name not in parts or not isinstance(parts[name].module, Head):
            yield f"the prediction names an unknown head {name!r}"
    for key in () if isinstance(head, str) else head:
        if ":" in key:
            yield f"the prediction mixes the head {key!r}; anchors exist in training only"
    if len({id(parts[name].module) for name in heads_of(head)}) > 1:
        yield "the prediction mixes heads of several kinds"


def check_shared(method: Method, shared: State) -> None:
    """Check that every shared part has tensors.

    A head without tensors may be shared beside parts with tensors, because it is the same in all silos.
    """
    parts = method.parts()
    heads = {name: module for name in shared if isinstance(module := parts[name].module, Head)}
    empty = [name for name, tensors in shared.items() if not tensors and name not in heads]
    if not empty and len(heads) == len(shared) and not any(head.has_tensors for head in heads.values()):
        empty = list(heads)
    if empty:
        raise _has_no_tensors(method, empty[0], "send")


def check_tuners(method: Method, state: State) -> None:
    """Check that every private or fixed tuner has tensors; a private head may have none."""
    parts = method.parts()
    for name, tensors in state.items():
        if not tensors and tuner_of(parts[name].module) is not None:
            raise _has_no_tensors(method, name, "use" if parts[name].scope is Scope.FIXED else "train")


def _has_no_tensors(method: Method, name: str, purpose: str) -> InputError:
    part = method.parts()[name]
    kind = "head" if isinstance(part.module, Head) else "module" if tuner_of(part.module) is None else "tuner"
    return InputError(
        f"method {method.name}: its {part.scope} part {name!r} has no tensors to {purpose} "
        f"({kind} {part.module.name}); choose another {kind}"
    )


def _phase_faults(method: Method, parts: dict[str, Part], phase: Phase) -> Iterator[str]:
    where = f"phase {phase.name!r}"
    if phase.skips_first and not method.remembers:
        yield (
            f"{where} skips a silo's first participation, but 'remembers' names no part, so no silo can tell it from "
            "later ones"
        )
    for name in (*phase.changes, *phase.copied.values(), *method.remembers):
        if name not in parts:
            yield f"{where} names an unknown part {name!r}; there are: {', '.join(parts)}"
    if phase.also_first and any(name in parts and parts[name].scope is Scope.SHARED for name in phase.changes):
        yield f"{where} changes a shared part in rounds that depend on the silo"
    if phase.gathers and phase.trains:
        yield f"{where} trains and gathers; a phase of its own gathers"
    if phase.steps_per_batch < 1:
        yield f"{where} takes {phase.steps_per_batch} steps per batch; allowed: 1 or more"
    if phase.turns and {name for group in phase.turns for name in group} != {*phase.trains}:
        yield f"{where} has turns that do not name the parts that it trains, {', '.join(phase.trains)}"
    for name in phase.changes:
        if parts[name].scope is Scope.FIXED:
            yield f"{where} changes the fixed part {name!r}"
    for target, source in phase.copied.items():
        unsent = parts[source].scope is Scope.PRIVATE and not _only_copies(method, parts, source, target)
        if parts[target].scope is Scope.SHARED and unsent:
            yield f"{where} copies the private part {source!r} into the shared {target!r}"
    for mix in phase.views.values():
        for key in mix:
            yield from _key_faults(method, parts, where, key)
    for anchor, view in phase.same_at_start.items():
        own = phase.views.get(view, {})
        if not own or phase.views.get(anchor) != {received(name): weight for name, weight in own.items()}:
            yield (
                f"{where} calls the views {anchor!r} and {view!r} the same at its start, but the first is not the "
                "second with received parts"
            )


def _only_copies(method: Method, parts: dict[str, Part], part: str, shared: str) -> bool:
    """Return whether a private part never holds anything but a copy of this shared one."""
    phases = [phase for phase in method.local_phases() if part in phase.changes]
    copied = all(phase.copied.get(part) == shared and part not in (*phase.trains, *phase.then) for phase in phases)
    return parts[part].start == shared and copied


def _key_faults(method: Method, parts: dict[str, Part], where: str, key: str) -> Iterator[str]:
    anchor, whole = parse_name(key)
    if anchor and anchor not in ANCHORS:
        yield f"{where} names an unknown anchor {anchor!r}; allowed: {', '.join(ANCHORS)}"
    names = members(whole)
    for name in names:
        yield from _member_faults(method, parts, where, anchor, name)
    groups = [module for name in names if isinstance(module := parts[name].module, TensorGroup)]
    if len(names) > 1 and (len(groups) < len(names) or len({id(group.tuner) for group in groups}) > 1):
        yield f"{where} joins {whole!r}, which are no groups of one tuner's tensors"
    if groups and sorted(group.group for group in groups) != sorted(groups[0].tuner.groups):
        all_groups = ", ".join(groups[0].tuner.groups)
        yield f"{where} mixes {whole!r}, which is no whole adapter: that has the groups {all_groups}"


def _member_faults(method: Method, parts: dict[str, Part], where: str, anchor: str, name: str) -> Iterator[str]:
    if name not in parts:
        yield f"{where} mixes an unknown part {name!r}; there are: {', '.join(parts)}"
    if tuner_of(parts[name].module) is None:
        yield f"{where} mixes {name!r}, which is not an adapter"
    if anchor == "received" and parts[name].scope is Scope.PRIVATE:
        yield f"{where} asks for the private part {name!r} as received; private parts are not sent"
    if anchor == "previous" and name not in method.remembers and parts[name].scope is not Scope.FIXED:
        yield f"{where} asks for previous {name!r}, which 'remembers' does not name"
    if anchor == "previous" and parts[name].scope is Scope.PRIVATE:
        yield f"{where} asks for previous {name!r}; use the private part itself"
