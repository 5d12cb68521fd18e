"""Differential privacy: clipping, noise, accountants and budgets."""

from __future__ import annotations
