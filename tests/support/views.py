"""Views of one silo's batch for tests."""

from __future__ import annotations

import torch

from silotune.data.batching import Batch, MicroBatch, Piece
from silotune.models.forward.view_program import ViewProgram
from silotune.models.forward.views import POOLINGS


def views_of_batch(backbone, batch, mixes, poolings=POOLINGS, head_readings={}):
    return ViewProgram(backbone, [mixes], poolings, lambda task: head_readings)(batch)


def view_of_batch(backbone, batch, mix, poolings=POOLINGS, head_readings={}):
    return views_of_batch(backbone, batch, {"": mix}, poolings, head_readings)[""]


def encoded_views(backbone, inputs, mixes):
    """Return the last states of one silo's rows by the view's name."""
    return encoded_cohort(backbone, [inputs], inputs, [mixes])[0]


def encoded_cohort(backbone, silos, whole, mixes, streams=()):
    """Return, per silo, the last states of its rows by the view's name.

    Args:
        backbone: runs the forwards.
        silos: each silo's inputs alone.
        whole: their inputs behind one another, padded together.
        mixes: per silo, view's name → mix.
        streams: per silo, its random numbers.
    """
    sizes = [len(inputs["input_ids"]) for inputs in silos]
    split = {name: torch.split(tensor, sizes) for name, tensor in whole.items()}
    pieces = [
        Piece(silo, 0, inputs["input_ids"].shape[1], {name: tensors[silo] for name, tensors in split.items()})
        for silo, inputs in enumerate(silos)
    ]
    batches = [Batch(None, torch.arange(size), None, ()) for size in sizes]
    program = ViewProgram(backbone, mixes, {"states": lambda states, inputs: states})
    views = program.run(batches, [MicroBatch(whole, tuple(pieces))], streams)
    return [{name: view["states"] for name, view in own.items()} for own in views]
