"""`check_method` compares a method's parts, phases and prediction; `check_shared`, `check_private`: have tensors."""

from __future__ import annotations

from silotune.core.tensors import State
from silotune.errors import InputError
from silotune.methods.base import Method, Phase
from silotune.methods.instance_weighting import INSTANCES, InstanceWeighting
from silotune.methods.parts import Part, Scope
from silotune.models.forward.mixing import ANCHORS, parse_name, received
from silotune.models.heads import Head
from silotune.models.tuners import Tuner


def check_method(method: Method) -> None:
    """Check parts, phases and prediction against each other.

    Raises:
        ValueError: if a name is no part or no anchor, a part cannot be used where it is named, a private part is copied
            into a shared one or used by a phase of the coordinator, or no silo would ever run a phase.
    """
    parts = method.parts()
    for name in parts:
        if "/" in name or ":" in name:
            raise ValueError(f"method {method.name}: part name {name!r} holds a slash or colon")
        if name == INSTANCES:
            raise ValueError(
                f"method {method.name}: the part name {name!r} is reserved for the vectors of a silo's rows"
            )
        if parts[name].start is not None and parts[name].start not in parts:
            raise ValueError(f"method {method.name}: part {name!r} starts from an unknown part {parts[name].start!r}")
    for phase in (*method.phases(), *method.server_phases()):
        _check_phase(method, parts, phase)
    for phase in method.server_phases():
        used = {
            *phase.trains,
            *phase.start.values(),
            *(parse_name(key)[1] for mix in phase.views.values() for key in mix),
        }
        private = sorted(name for name in used if parts[name].scope is Scope.PRIVATE)
        if private:
            raise ValueError(
                f"method {method.name}: the server phase {phase.name!r} uses the private part {private[0]!r}"
            )
    prediction = method.prediction()
    for key in prediction.mix:
        _check_key(method, parts, "the prediction", key)
    if prediction.head not in parts or not isinstance(parts[prediction.head].module, Head):
        raise ValueError(f"method {method.name}: the prediction names an unknown head {prediction.head!r}")
    if prediction.weighting is not None:
        _check_weighting(method, parts, prediction.weighting)


def check_shared(method: Method, shared: State) -> None:
    """Check that every shared part has tensors.

    A head without tensors may be shared beside parts with tensors, because it is the same in all silos.

    Args:
        method: the method.
        shared: the initial tensors of its shared parts.

    Raises:
        InputError: naming the part without tensors.
    """
    parts = method.parts()
    heads = {name: module for name in shared if isinstance(module := parts[name].module, Head)}
    empty = [name for name, tensors in shared.items() if not tensors and name not in heads]
    if not empty and len(heads) == len(shared) and not any(head.has_tensors for head in heads.values()):
        empty = list(heads)
    if empty:
        raise _has_no_tensors(method, empty[0], "send")


def check_private(method: Method, private: State) -> None:
    """Check that every private tuner has tensors; a private head may have none.

    Args:
        method: the method.
        private: the initial tensors of its private parts.

    Raises:
        InputError: naming the part without tensors.
    """
    parts = method.parts()
    for name, tensors in private.items():
        if not tensors and isinstance(parts[name].module, Tuner):
            raise _has_no_tensors(method, name, "train")


def _has_no_tensors(method: Method, name: str, purpose: str) -> InputError:
    part = method.parts()[name]
    kind = "head" if isinstance(part.module, Head) else "tuner" if isinstance(part.module, Tuner) else "module"
    return InputError(
        f"method {method.name}: its {part.scope} part {name!r} has no tensors to {purpose} "
        f"({kind} {part.module.name}); choose another {kind}"
    )


def _check_weighting(method: Method, parts: dict[str, Part], weighting: InstanceWeighting) -> None:
    """Check that instance weighting uses parts of the prediction alone; anchors do not exist after training."""
    for key in (weighting.local_part, weighting.global_part, *weighting.view):
        _check_key(method, parts, "the prediction", key)
        if key not in parts:
            raise ValueError(
                f"method {method.name}: the prediction weighs the anchor {key!r}; anchors exist in training only"
            )


def _check_phase(method: Method, parts: dict[str, Part], phase: Phase) -> None:
    where = f"phase {phase.name!r}"
    if phase.skips_first and not method.remembers:
        raise ValueError(
            f"method {method.name}: {where} skips a silo's first participation, but 'remembers' names no part, so "
            "no silo can tell it from later ones"
        )
    for name in (*phase.trains, *phase.start, *phase.start.values(), *method.remembers):
        if name not in parts:
            raise ValueError(
                f"method {method.name}: {where} names an unknown part {name!r}; there are: {', '.join(parts)}"
            )
    for target, source in phase.start.items():
        if parts[target].scope is Scope.SHARED and parts[source].scope is Scope.PRIVATE:
            raise ValueError(
                f"method {method.name}: {where} copies the private part {source!r} into the shared {target!r}"
            )
    for mix in phase.views.values():
        for key in mix:
            _check_key(method, parts, where, key)
    for anchor, view in phase.same_at_start.items():
        own = phase.views.get(view, {})
        if not own or phase.views.get(anchor) != {received(name): weight for name, weight in own.items()}:
            raise ValueError(
                f"method {method.name}: {where} calls the views {anchor!r} and {view!r} the same at its start, but the "
                "first is not the second with received parts"
            )


def _check_key(method: Method, parts: dict[str, Part], where: str, key: str) -> None:
    anchor, name = parse_name(key)
    if anchor and anchor not in ANCHORS:
        raise ValueError(
            f"method {method.name}: {where} names an unknown anchor {anchor!r}; allowed: {', '.join(ANCHORS)}"
        )
    if name not in parts:
        raise ValueError(f"method {method.name}: {where} mixes an unknown part {name!r}; there are: {', '.join(parts)}")
    if not isinstance(parts[name].module, Tuner):
        raise ValueError(f"method {method.name}: {where} mixes {name!r}, which is not an adapter")
    if anchor == "received" and parts[name].scope is Scope.PRIVATE:
        raise ValueError(
            f"method {method.name}: {where} asks for the private part {name!r} as received; private parts are not sent"
        )
    if anchor == "previous" and name not in method.remembers:
        raise ValueError(f"method {method.name}: {where} asks for previous {name!r}, which 'remembers' does not name")
    if anchor == "previous" and parts[name].scope is Scope.PRIVATE:
        raise ValueError(f"method {method.name}: {where} asks for previous {name!r}; use the private part itself")
