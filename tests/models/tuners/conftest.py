"""Finished runs, shared by the tests of this folder."""

from tests.support.small_runs import runs

__all__ = ["runs"]
