"""New silos (FedDPA, appendix C.1): one that joins after the last round begins as the most similar existing silo.

How similar a silo is: the mean over the new silo's rows of their similarity to rows of that silo, drawn as for a text's
weight. This looks at the silo's rows' vectors and copies its local part: both are private elsewhere, so a federation
that wants newcomers has to agree to it.
"""

from __future__ import annotations

from typing import Any

from silotune.evaluation.instance_vectors import personalized_state, weigh
from silotune.evaluation.predict import score
from silotune.evaluation.scores import state_of
from silotune.training.federation import Federation
from silotune.training.silo import Silo, SiloState


def similarity(federation: Federation, new: Silo) -> dict[str, float]:
    """Silo that trained → mean similarity of the new silo's training rows to its rows."""
    found = {}
    for silo in federation.silos.values():
        if silo.state is None:
            continue
        state = state_of(federation, silo)
        weights = [weigh(federation.context, state, rows) for rows in new.train.values()]
        values = [float(one.similarities.double().mean()) for one in weights if one is not None]
        found[silo.name] = sum(values) / len(values)
    return found


def join(federation: Federation, new: Silo) -> dict[str, Any]:
    """What `summary.json` says of a new silo: whom it is like, and its test score three times.

    `found`: with the similar silo's model as it is; `test`: after local training from there; `alone`: after local
    training from where every silo began.
    """
    context, shared = federation.context, federation.coordinator.shared
    similarities = similarity(federation, new)
    nearest = max(sorted(similarities), key=similarities.__getitem__)
    test = new.evaluations[new.name].test
    existing = federation.silos[nearest]
    assert existing.state is not None, "silos that never trained are not compared"

    def after_training(start: SiloState | None) -> float | None:
        joined = Silo(new.name, new.train, {}, start)
        joined.state = SiloState(
            federation.trainer.adapt(joined, shared, federation.config.rounds, from_start=start is None)
        )
        return score(context, personalized_state(context, joined, shared), test)

    return {
        "metric": test.task.metric,
        "most_similar": nearest,
        "similarities": similarities,
        "found": score(context, state_of(federation, existing), test),
        "test": after_training(existing.state),
        "alone": after_training(None),
    }
