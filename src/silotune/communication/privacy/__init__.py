"""What noise promises: accountants, budgets, and noise on the coordinator's mean."""

from __future__ import annotations
