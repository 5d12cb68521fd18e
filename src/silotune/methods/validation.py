"""Checks of a method's declarations, before anything runs."""

from __future__ import annotations

from silotune.core.tensors import State
from silotune.errors import InputError
from silotune.methods.base import Method, Phase
from silotune.methods.instance_weighting import INSTANCES, InstanceWeighting
from silotune.methods.parts import Part, Scope
from silotune.models.forward.mixing import ANCHORS, parse_name
from silotune.models.heads import Head
from silotune.models.tuners import Tuner


def check_method(method: Method) -> None:
    """Check parts, phases and prediction against each other.

    Raises:
        ValueError: a part that does not exist or cannot stand there, an unknown anchor, an anchor of a part that has
            none, a private part copied into a shared one or used in a phase of the coordinator, or a phase that no
            silo would ever run.
    """
    parts = method.parts()
    for name in parts:
        if "/" in name or ":" in name:
            raise ValueError(f"method {method.name}: part name {name!r} holds a slash or colon")
        if name == INSTANCES:
            raise ValueError(f"method {method.name}: no part can be called {name!r}; a silo's own texts are")
        if parts[name].start is not None and parts[name].start not in parts:
            raise ValueError(f"method {method.name}: part {name!r} begins as an unknown part {parts[name].start!r}")
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

    A head without tensors may be shared beside other parts: it is the same in all silos.

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
        kind = "head" if empty[0] in heads else "tuner" if isinstance(parts[empty[0]].module, Tuner) else "module"
        raise InputError(
            f"method {method.name}: its shared part {empty[0]!r} has no tensors to send "
            f"({kind} {parts[empty[0]].module.name}); choose another {kind}"
        )


def _check_weighting(method: Method, parts: dict[str, Part], weighting: InstanceWeighting) -> None:
    """Check that instance weighting uses parts of the prediction alone; anchors do not exist after training."""
    for key in (weighting.near, weighting.far, *weighting.view):
        _check_key(method, parts, "the prediction", key)
        if key not in parts:
            raise ValueError(f"method {method.name}: the prediction weights the anchor {key!r}; there is none by then")


def _check_phase(method: Method, parts: dict[str, Part], phase: Phase) -> None:
    where = f"phase {phase.name!r}"
    if phase.skips_first and not method.remembers:
        raise ValueError(
            f"method {method.name}: {where} skips a silo's first participation, which nothing tells from later ones: "
            "'remembers' names no part"
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


def _check_key(method: Method, parts: dict[str, Part], where: str, key: str) -> None:
    anchor, name = parse_name(key)
    if anchor and anchor not in ANCHORS:
        raise ValueError(
            f"method {method.name}: {where} names an unknown anchor {anchor!r}; allowed: {', '.join(ANCHORS)}"
        )
    if name not in parts:
        raise ValueError(f"method {method.name}: {where} mixes an unknown part {name!r}; there are: {', '.join(parts)}")
    if not isinstance(parts[name].module, Tuner):
        raise ValueError(f"method {method.name}: {where} mixes {name!r}, which is no adapter")
    if anchor == "received" and parts[name].scope is Scope.PRIVATE:
        raise ValueError(
            f"method {method.name}: {where} asks for the private part {name!r} as received; it never travels"
        )
    if anchor == "previous" and name not in method.remembers:
        raise ValueError(f"method {method.name}: {where} asks for previous {name!r}, which 'remembers' does not name")
    if anchor == "previous" and parts[name].scope is Scope.PRIVATE:
        raise ValueError(f"method {method.name}: {where} asks for previous {name!r}; a private part is that already")
