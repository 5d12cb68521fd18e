"""Open a finished run, or one silo's model of it, without reading its rows."""

from __future__ import annotations

from pathlib import Path

from silotune.models.backbone.backbone import Backbone
from silotune.runs.personal_model import PersonalModel, check_has_models, model_folder
from silotune.runs.run_result import Run
from silotune.runs.storage.readers import read_summary


def load_run(
    folder: str | Path, backbone: Backbone | None = None, precision: str | None = None, device: str = "auto"
) -> Run:
    """Open a finished run at its best round: its summary, and every silo's personalized model.

    Args:
        folder: the run folder.
        backbone: the run's backbone, if it is loaded already.
        precision: load the backbone in this precision instead of the run's.
        device: load it onto this device, as the key `device`; the run's own may be missing here.
    """
    path = Path(folder)
    summary = read_summary(path)
    check_has_models(path, summary)
    return Run(path, summary, None, backbone, precision, device)


def load_model(
    folder: str | Path,
    silo: str,
    backbone: Backbone | None = None,
    precision: str | None = None,
    device: str = "auto",
) -> PersonalModel:
    """Open one silo's personalized model of a finished run; the files of other silos are not opened.

    Args:
        folder: the run folder.
        silo: the silo's name.
        backbone: the run's backbone, if it is loaded already.
        precision: load the backbone in this precision instead of the run's.
        device: load it onto this device, as the key `device`; the run's own may be missing here.
    """
    return PersonalModel.open(model_folder(Path(folder), silo), backbone, precision, device)
