"""Tables, figures and pages about finished runs, and the view of a running one; the lowest package of `experiments`."""

from __future__ import annotations
