"""After a federation every party has a model that opens: a silo its own, the coordinator what is shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.distributed.coordinator.coordinate import coordinate
from silotune.distributed.silo.session import Session
from tests.support.command_line import Silotune
from tests.support.session_rig import DirectLink, job, local_configs


@pytest.mark.parametrize(("method", "more"), [("fedmcp", {}), ("fedavg", {}), ("fedavg", {"share": []})])
def test_a_silo_predicts_and_the_coordinator_reports(
    method: str, more: dict[str, object], tiny_config, tmp_path: Path, silotune: Silotune
) -> None:
    config, out = tiny_config(method, "rounds=1"), tmp_path / "run"
    configs = {
        name: own.model_copy(update={"folder": str(tmp_path / "silos" / name), **more})
        for name, own in local_configs(config, out).items()
    }
    coordinate(
        job(config, out, configs, local=False),
        DirectLink({n: Session(own).answer for n, own in enumerate(configs.values())}),
    )

    (folder,) = (path.parent for path in (tmp_path / "silos" / "alpha").glob("*/models"))
    answer = silotune("predict", folder, "--silo", "alpha", "--text", "the garden was lovely")
    assert (answer.code, answer.err) == (0, "")
    assert '"label"' in answer.out

    assert silotune("report", out, "--out", tmp_path / "report").code == 0
    assert (out / "models" / "shared" / "shared.safetensors").is_file()
    refused = silotune("predict", out, "--silo", "alpha", "--text", "the garden was lovely")
    assert refused.code == 2
    assert "private parts are in the silos' own folders" in refused.err
