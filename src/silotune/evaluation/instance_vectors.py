"""FedDPA's rows as vectors (`embed`) and texts' weights (`weigh`); vectors are kept with the silo and the run.

The vectors follow from the silo's rows and the parts that embed them, so they are not part of the state: they are
computed when a model predicts, and kept with the silo until one of those parts changes. They are never sent. The silo's
model in a finished run's folder has them, so that it can be opened without the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silotune.core.randomness import derive
from silotune.core.tensors import State, Tensors, digest, flatten
from silotune.data.batching import evaluation_batches
from silotune.data.tokenized import TokenizedRows
from silotune.methods.instance_weighting import INSTANCES, SEED, VECTORS, InstanceWeighting
from silotune.models.forward.mixing import parts_in
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import POOLINGS
from silotune.models.heads.lm import prompt_rows
from silotune.training.context import TrainingContext
from silotune.training.prediction import PredictionContext
from silotune.training.silo import Silo


@dataclass(frozen=True)
class Weights:
    """Weights of texts: `alpha`, shape (texts,); `similarities` and indices of the `sampled` rows, shape (texts, S)."""

    alpha: Tensor
    similarities: Tensor
    sampled: Tensor


def embed(context: PredictionContext, state: State, rows: TokenizedRows) -> Tensor:
    """Embed each row's text, without the answer, under the method's view: shape (rows, hidden), float32, on the CPU."""
    weighting, vectors = context.prediction.weighting, context.vectors
    assert weighting is not None, f"method {context.method_name} does not weigh texts"
    if vectors is None:
        return _embed(context, weighting, state, rows)
    key = id(rows.ids), _made_with(weighting, state)
    if key not in vectors:
        vectors[key] = _embed(context, weighting, state, rows)
    return vectors[key]


@torch.no_grad()
def _embed(context: PredictionContext, weighting: InstanceWeighting, state: State, rows: TokenizedRows) -> Tensor:
    texts = replace(rows, reads=None, targets=None) if rows.task.labeled else prompt_rows(rows)
    mix = context.entries(weighting.view, context.place(state))
    reading = weighting.representation
    program = ViewProgram(context.backbone, [{"": mix}], {reading: POOLINGS[reading]})
    vectors = torch.zeros(len(texts), context.backbone.hidden_size)
    pad = context.backbone.pad_id
    for batch in evaluation_batches(texts, pad, context.backbone.call_cost, context.rows_scored):
        vectors[batch.rows] = program(batch)[""][reading].float().cpu()
    return vectors


@contextmanager
def keeping_vectors(context: PredictionContext) -> Iterator[None]:
    """Embed the same rows once for all models that embed by equal parts; the rows must live as long as the block.

    With FedDPA's defaults these are all silos' models, because the global part embeds.
    """
    context.vectors = {}
    try:
        yield
    finally:
        context.vectors = None


def weigh(context: PredictionContext, state: State, rows: TokenizedRows) -> Weights | None:
    """Weigh rows of any task by their similarity to the silo's own; None if the method does not weight texts.

    The state has `INSTANCES` (see `with_instances`), except of a silo that never trained.
    """
    weighting = context.prediction.weighting
    if weighting is None:
        return None
    instances = state.get(INSTANCES, {})
    if not instances:
        empty = torch.zeros(len(rows), 0)
        return Weights(torch.full((len(rows),), weighting.untrained), empty, empty.long())
    texts = rows.ids if rows.task.labeled else prompt_rows(rows).ids
    sampled = weighting.sample_rows(instances, texts)
    similarities = weighting.similarities(instances, embed(context, state, rows), sampled)
    return Weights(weighting.alpha(similarities), similarities, sampled)


def personalized_state(context: TrainingContext, silo: Silo, shared: State) -> State:
    """Return all parts of a silo's model: shared ones, its private ones, and its instances (`with_instances`)."""
    return with_instances(context, silo, context.model_state(silo, shared))


def with_instances(context: TrainingContext, silo: Silo, state: State) -> State:
    """Add the vectors of the silo's own rows to its model, if the method weights texts.

    A silo that never trained has an untrained local part; without vectors, that part's weight is 0.
    """
    weighting = context.prediction.weighting
    if weighting is None:
        return state
    return state | {INSTANCES: {} if silo.state is None else _instances(context, weighting, silo, state)}


def _instances(context: TrainingContext, weighting: InstanceWeighting, silo: Silo, state: State) -> Tensors:
    made_with = _made_with(weighting, state)
    if silo.instances is not None and silo.instances[0] in (made_with, READ):
        return silo.instances[1]
    rows = [silo.train[task] for task in sorted(silo.train)]
    seed = torch.tensor(derive(context.draw_seed, INSTANCES, silo.name))
    instances = {VECTORS: torch.cat([embed(context, state, task_rows) for task_rows in rows]), SEED: seed}
    silo.instances = (made_with, instances)
    return instances


def _made_with(weighting: InstanceWeighting, state: State) -> str:
    return digest(flatten({name: state[name] for name in parts_in(weighting.view)}))


READ = "read"
"""Takes the digest's place for vectors that were read together with the parts they belong to."""
