"""FlowerTune's presets over small files of the challenges' columns: silos, draws, prompts, and a round."""

from __future__ import annotations

import json

import pytest

from silotune import read_config
from silotune.data.loading import load_silos
from silotune.data.templates import InstructionTemplate
from silotune.runs.run import run
from tests.support.language_models import folder_of

CHALLENGES = {
    "general": (20, 2, "Add."),
    "finance": (50, 5, "Add.\nOne and {}"),
    "medical": (20, 2, "One and {}"),
    "code": (10, 2, "Add.\nOne and {}"),
}
"""Challenge → silos, silos of a round, and what of a row stands in its prompt."""

SMALL = (
    "backbone.quantization=none train.max_length=150 train.steps=1 train.batch_size=2 rounds=1 precision=fp32 "
    "data.test_rows=4 head.max_new_tokens=2"
)


@pytest.mark.parametrize("name", CHALLENGES)
def test_a_round_of_a_challenge(name, tmp_path):
    silos, drawn, prompt = CHALLENGES[name]
    rows = [{"instruction": "Add.", "input": f"One and {n}", "output": str(n + 1)} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*SMALL.split(), f"backbone={folder_of('llama', tmp_path)}", f"silos.all.path={tmp_path}/rows.jsonl"]
    config = read_config(f"flowertune-{name}", words)
    assert (config.tuner.r, config.tuner.alpha, config.sampling.fraction) == (32, 64, drawn / silos)
    assert len(run(config, out=tmp_path / "run", progress=False).summary["silos"]) == silos
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert len([event for event in events if event["event"] == "silo"]) == drawn
    row = next(iter(load_silos(config)[0].splits.train))
    assert InstructionTemplate(config.head.template)(row.texts).endswith(
        f"### Instruction:\n{prompt.format(int(row.answer) - 1)}\n### Response: "
    )
