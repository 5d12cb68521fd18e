"""Settings of all suites. Their fixtures are those of `tests.support.fixtures`."""

from __future__ import annotations

import gc
import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
gc.disable()  # until the tests are collected: imports make millions of objects, and none of them is garbage


def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures, which takes seconds, but not in the process that only hands out tests to workers."""
    hands_out = not hasattr(config, "workerinput") and getattr(config.option, "dist", "no") != "no"
    if not hands_out or config.option.collectonly:
        config.pluginmanager.import_plugin("tests.support.fixtures")


def pytest_collection_finish() -> None:
    """Collect garbage from here on, seldom, and leave what was imported out of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
