"""The public names of silotune: federated parameter-efficient fine-tuning of language models across data silos.

Everything in `__all__` is public. Other names may move in a minor release.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from silotune.errors import InputError, SilotuneError
from silotune.version import __version__

if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
    # OpenMP's idle threads spin for milliseconds by default and take the cores from the threads that they wait for. A
    # sixtieth of GNU's default is enough for the gap between two operations of a step; with 0 a step takes a fifth
    # longer. OpenMP reads this when torch is imported, here and in processes that this one starts.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = "5000"

if TYPE_CHECKING:
    from silotune.aggregation import register_aggregation
    from silotune.communication.uplink import register_codec
    from silotune.config import Config
    from silotune.core.workers import Workers
    from silotune.data.kinds import Kind, Prediction, register_kind
    from silotune.lab.compare import ComparisonResult, Report, compare, report
    from silotune.lab.partition import PartitionResult, partition
    from silotune.lab.sweep import SweepResult, sweep
    from silotune.lab.transfer import TransferResult, transfer
    from silotune.methods import (
        Method,
        MethodOptions,
        Part,
        Phase,
        Step,
        fixed,
        frozen,
        previous,
        private,
        received,
        register_method,
        shared,
    )
    from silotune.models.heads import Head, register_head
    from silotune.models.tuners import Tuner, TunerOptions, register_tuner
    from silotune.runs.build.resolve import read_config
    from silotune.runs.callbacks import Callback, RoundEnd
    from silotune.runs.callbacks.trackers import CsvLog, MLflow, TensorBoard, WandB
    from silotune.runs.evaluation import Evaluation, evaluate
    from silotune.runs.personal_model import PersonalModel, load_model
    from silotune.runs.run import run
    from silotune.runs.run_result import Run, load_run

__all__ = [
    "Callback",
    "ComparisonResult",
    "Config",
    "CsvLog",
    "Evaluation",
    "Head",
    "InputError",
    "Kind",
    "MLflow",
    "Method",
    "MethodOptions",
    "Part",
    "PartitionResult",
    "PersonalModel",
    "Phase",
    "Prediction",
    "Report",
    "RoundEnd",
    "Run",
    "SilotuneError",
    "Step",
    "SweepResult",
    "TensorBoard",
    "TransferResult",
    "Tuner",
    "TunerOptions",
    "WandB",
    "Workers",
    "__version__",
    "compare",
    "evaluate",
    "fixed",
    "frozen",
    "load_model",
    "load_run",
    "partition",
    "previous",
    "private",
    "read_config",
    "received",
    "register_aggregation",
    "register_codec",
    "register_head",
    "register_kind",
    "register_method",
    "register_tuner",
    "report",
    "run",
    "shared",
    "sweep",
    "transfer",
]

_METHOD_CLASSES = ("Method", "MethodOptions", "Part", "Phase", "Step")
_METHOD_FUNCTIONS = ("fixed", "frozen", "previous", "private", "received", "register_method", "shared")

_MODULES = {
    **dict.fromkeys((*_METHOD_CLASSES, *_METHOD_FUNCTIONS), "silotune.methods"),
    **dict.fromkeys(("Tuner", "TunerOptions", "register_tuner"), "silotune.models.tuners"),
    **dict.fromkeys(("Head", "register_head"), "silotune.models.heads"),
    **dict.fromkeys(("Kind", "Prediction", "register_kind"), "silotune.data.kinds"),
    **dict.fromkeys(("PersonalModel", "load_model"), "silotune.runs.personal_model"),
    **dict.fromkeys(("Callback", "RoundEnd"), "silotune.runs.callbacks"),
    **dict.fromkeys(("CsvLog", "MLflow", "TensorBoard", "WandB"), "silotune.runs.callbacks.trackers"),
    "Config": "silotune.config",
    **dict.fromkeys(("Run", "load_run"), "silotune.runs.run_result"),
    **dict.fromkeys(("ComparisonResult", "Report", "compare", "report"), "silotune.lab.compare"),
    **dict.fromkeys(("Evaluation", "evaluate"), "silotune.runs.evaluation"),
    **dict.fromkeys(("PartitionResult", "partition"), "silotune.lab.partition"),
    **dict.fromkeys(("SweepResult", "sweep"), "silotune.lab.sweep"),
    **dict.fromkeys(("TransferResult", "transfer"), "silotune.lab.transfer"),
    "Workers": "silotune.core.workers",
    "read_config": "silotune.runs.build.resolve",
    "register_aggregation": "silotune.aggregation",
    "register_codec": "silotune.communication.uplink",
    "run": "silotune.runs.run",
}
"""Public name → the module that it is imported from on first use: importing torch takes seconds."""

if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module 'silotune' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
