"""Score a silo that was not trained: by the most similar silo's model, trained from it, and trained alone.

The similarity of two silos is the mean similarity of the new silo's rows to sampled rows of the existing silo, as for a
text's weight. This reads the vectors of the existing silo's rows and copies its local part. Both are private otherwise,
so a federation with new silos has to agree to it.
"""

from __future__ import annotations

from typing import Any

from silotune.evaluation.federation_scores import current_model_state
from silotune.evaluation.instance_vectors import personalized_state, weigh
from silotune.evaluation.predict import score
from silotune.training.federation import Federation
from silotune.training.silo import Silo, SiloState


def similarity(federation: Federation, new: Silo) -> dict[str, float]:
    """Return silo → mean similarity of the new silo's training rows to its rows, for all silos that trained."""
    similarities = {}
    for silo in federation.silos.values():
        if silo.state is None:
            continue
        state = current_model_state(federation, silo)
        weights = [weigh(federation.context, state, rows) for rows in new.train.values()]
        values = [float(weight.similarities.double().mean()) for weight in weights if weight is not None]
        similarities[silo.name] = sum(values) / len(values)
    return similarities


def join(federation: Federation, new: Silo) -> dict[str, Any]:
    """Return a new silo's entry in `summary.json`: the most similar silo, and three test scores.

    `found` is the score of the similar silo's model, `test` the score after local training from that model, and `alone`
    the score after local training from the initial parts.
    """
    context = federation.context
    similarities = similarity(federation, new)
    nearest = max(sorted(similarities), key=similarities.__getitem__)
    test = new.evaluations[new.name].test
    existing = federation.silos[nearest]
    assert existing.state is not None, "silos that never trained are not compared"

    def after_training(start: SiloState | None) -> float | None:
        joined = Silo(new.name, new.train, {}, start)
        shared = federation.coordinator.shared_of(new.name if start is None else nearest)
        joined.state = SiloState(
            federation.trainer.adapt(joined, shared, federation.config.rounds, from_start=start is None)
        )
        return score(context, personalized_state(context, joined, shared), test)

    return {
        "metric": test.task.metric,
        "most_similar": nearest,
        "similarities": similarities,
        "found": score(context, current_model_state(federation, existing), test),
        "test": after_training(existing.state),
        "alone": after_training(None),
    }
