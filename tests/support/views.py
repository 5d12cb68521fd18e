"""Views of one silo's batch for tests."""

from __future__ import annotations

from silotune.models.forward.encoding import encode_views
from silotune.models.forward.pooling import POOLINGS
from silotune.models.forward.views import ViewRequest, run_views


def views_of_batch(backbone, batch, mixes, poolings=POOLINGS, head_readings={}):
    """Return each view of a batch by its name."""
    (views,) = run_views(backbone, ViewRequest.of_batch(batch, mixes, poolings, head_readings))
    return views


def view_of_batch(backbone, batch, mix, poolings=POOLINGS, head_readings={}):
    """Return the view of a batch under one mix."""
    return views_of_batch(backbone, batch, {"": mix}, poolings, head_readings)[""]


def encoded_views(backbone, inputs, mixes):
    """Return (states, plan) of one segment of rows by the view's name."""
    return encode_views(backbone, inputs, {name: [mix] for name, mix in mixes.items()})
