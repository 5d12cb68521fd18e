"""After a federation every party has a model that opens: a silo its own, the coordinator what is shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.runs.storage.readers import read_summary
from tests.support.command_line import Silotune
from tests.support.session_rig import ALL, coordinated, local_configs


@pytest.mark.usefixtures("no_figure_files")
@pytest.mark.parametrize(("method", "share"), [("fedmcp", ALL), ("fedavg", [])])
def test_a_silo_predicts_and_the_coordinator_reports(
    method: str, share: list[str], tiny_config, tmp_path: Path, silotune: Silotune
) -> None:
    """A model that began with the seed must not pass for a silo's: its private parts are elsewhere."""
    config, out = tiny_config(method, "rounds=1", "train.steps=1"), tmp_path / "run"
    coordinated(config, out, local_configs(config, tmp_path / "silos", share=share), local=False)

    (folder,) = (path.parent for path in (tmp_path / "silos/checkpoints/silos/alpha").glob("*/models"))
    answer = silotune("predict", folder, "--silo", "alpha", "--text", "the garden was lovely")
    assert (answer.code, answer.err) == (0, "")
    assert '"label"' in answer.out

    assert read_summary(out)["engine"] == "flower"
    assert silotune("report", out, "--out", tmp_path / "report").code == 0
    assert (out / "models" / "shared" / "shared.safetensors").is_file()
    refused = silotune("predict", out, "--silo", "alpha", "--text", "the garden was lovely")
    refused.refusal("coordinator's folder", "private parts are in the silos' own folders")
