"""A dossier says what a run's records hold, names what they do not, and takes nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import yaml

from silotune.core.clock import current_user
from silotune.core.records import Records, check_audit
from silotune.distributed.coordinator.job import RunRegistry
from silotune.distributed.silo.approvals import Approvals
from silotune.distributed.silo.store import SiloStore
from silotune.distributed.silo.withdrawn_rows import withdraw
from silotune.runs.storage.readers import read_summary
from silotune.runs.storage.run_folder import RunFolder
from tests.support.command_line import Silotune
from tests.support.session_rig import coordinated, local_configs


def test_a_dossier_is_filled_from_the_records(tiny_config, tmp_path: Path, silotune: Silotune) -> None:
    config = tiny_config("fedavg", "rounds=1", "train.steps=1", "privacy.unit=row", "privacy.epsilon=4")
    private = {"policy": {"preset": "private"}, "privacy": {"epsilon": 8.0}, "seeded_noise": False}
    configs = local_configs(config, tmp_path / "silos", **private)
    coordinated(config, tmp_path / "run", configs, local=False)
    run = RunRegistry.open(tmp_path / "run").run
    folder = Path(configs["alpha"].folder)
    Approvals(folder).ask(run, "0" * 64, {}, lambda: ["as it was shown"])
    Approvals(folder).decide(run, "approved")
    store = SiloStore(folder)
    trained = store.records.rows("SELECT row FROM used WHERE run = ? AND split = 'train' LIMIT 3", run)
    withdraw(store.records, [row for (row,) in trained])
    RunFolder(tmp_path / "run").event("silo-failed", round=1, silo="beta", reason="not connected | for 9 s")
    unanswered = {"direction": "sent", "node": "1", "run": run, "round": 7, "kind": "score", "numbers": 5, "bytes": 9}
    Records(tmp_path / "run" / "federation").append(unanswered)
    stated = {"purpose": "one | two <script>", "parties": {"alpha": "Hospital A"}, "retention": "5 years"}
    (tmp_path / "about.yaml").write_text(yaml.safe_dump(stated))
    own = configs["alpha"].model_dump(mode="json", exclude_none=True)
    (tmp_path / "silo.yaml").write_text(yaml.safe_dump(own))
    words = ("federation", "dossier", tmp_path / "run", "--about", tmp_path / "about.yaml", "--out", tmp_path / "d.md")
    assert silotune(*words, "--silo", tmp_path / "silo.yaml").code == 0
    text, page = (tmp_path / "d.md").read_text(), (tmp_path / "d.html").read_text()
    summary, (entries, _) = read_summary(tmp_path / "run"), check_audit(tmp_path / "run" / "federation")
    for name in configs:
        came = [entry for entry in entries if entry.get("direction") == "came" and entry.get("silo") == name]
        numbers, size = (sum(entry[key] for entry in came) for key in ("numbers", "bytes"))
        assert re.search(rf"\| {name} \| .* \| global, global_2 \| {numbers} \| {size} \| nothing \| not told \|", text)
        assert f"| {name} | accuracy | not told | not told | not told |" in text
    assert "\n| scores of round 7 | beta | nobody |\n" in text
    assert "| round 1, scores of round 1 | alpha, beta, gamma | alpha, beta, gamma |" in text
    assert f"The run asked for dp-sgd for each row: ε = 4.0 at δ = {summary['privacy']['delta']}" in text
    assert "Not covered: users of a silo's own model." in text
    assert re.search(r"alpha: its ledger has ε = (3\.9|4)\S* for this run; all runs together may spend 8.0", text)
    assert re.search(rf"\* \*\*alpha\*\*: run approved .*; its log: approved \S+ by {current_user()}\. Its file", text)
    assert "this run, or the model with which it began: 3." in text
    assert "    * as it was shown\n" in text
    assert "\n* silo 'beta': not connected \\| for 9 s\n" in text
    assert "* **beta**: not in the coordinator's records." in text
    assert "one \\| two &lt;script>" in text
    assert "<script>" not in page
    assert "<td>Hospital A</td>" in page
    hashes = dict(re.findall(r"\| (\S+) \| `([0-9a-f]{64})` \|", text))
    assert {"config.yaml", "summary.json", "versions.json"} <= hashes.keys()
    for name, digest in hashes.items():
        assert hashlib.sha256((tmp_path / "run" / name).read_bytes()).hexdigest() == digest
    (tmp_path / "about.yaml").write_text("purpose: to try\n")
    refused = silotune(*words)
    assert (refused.code, "about.yaml: lacks parties" in refused.err) == (2, True)
