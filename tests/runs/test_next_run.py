"""A run that starts from a finished one has all its parts, shared and private; what does not fit is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from silotune.core.tensors import digest, flatten
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state
from silotune.runs.build.builder import build, run_warnings
from silotune.runs.run import run
from silotune.runs.run_result import load_run

SHORT = ("rounds=1", "train.steps=1")


def models(federation) -> dict[str, str]:
    """Silo → digest of its model, without parts that every run draws anew."""
    drawn = {name for name, part in federation.context.parts.items() if part.redrawn}
    states = {silo: current_model_state(federation, silos) for silo, silos in federation.silos.items()}
    return {
        silo: digest(flatten({name: tensors for name, tensors in state.items() if name not in drawn}))
        for silo, state in states.items()
    }


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedmcp", ()),
        ("ffa-lora", ("tuner=lora",)),
        ("flora", ("tuner=lora",)),
        ("centralised", ()),
    ],
)
def test_it_begins_with_the_parts_of_the_last_model(tiny_config, tmp_path: Path, method: str, words) -> None:
    ran = run(tiny_config(method, *SHORT, *words), out=tmp_path / "one", progress=False)
    before = models(ran.federation)
    assert models(build(tiny_config(method, *SHORT, *words, f"start={tmp_path / 'one'}"))) == before
    assert models(build(tiny_config(method, *SHORT, *words))) != before


def test_it_is_resumed_and_opened_as_any_other(tiny_config, tmp_path: Path) -> None:
    run(tiny_config("fedmcp", *SHORT), out=tmp_path / "one", progress=False)
    config = tiny_config("fedmcp", *SHORT, "sampling.count=1", "data.tasks=[alpha,beta]", f"start={tmp_path / 'one'}")
    then = models(run(config, out=tmp_path / "two", progress=False).federation)
    run(config, out=tmp_path / "two", resume=True, progress=False)
    path = tmp_path / "one" / "models" / "alpha" / "model.safetensors"
    path.write_bytes((tmp_path / "one" / "models" / "beta" / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match="began from other models than"):
        run(config, out=tmp_path / "two", resume=True, progress=False)
    shutil.rmtree(tmp_path / "one")
    assert models(load_run(tmp_path / "two").federation) == then

    newer = tiny_config("fedmcp", *SHORT, f"start={tmp_path / 'two'}")
    lines: list[str] = []
    build(newer, look=lambda silos, context, _: lines.extend(run_warnings(newer, silos, context)))
    words = f"silo 'gamma': not in start={tmp_path / 'two'}; its private parts begin untrained"
    assert [line for line in lines if "start=" in line] == [words]


def test_what_means_something_else_is_refused(tiny_config, tmp_path: Path) -> None:
    words = (*SHORT, "tuner=lora", f"start={tmp_path / 'one'}")
    run(tiny_config("ffa-lora", *words[:-1]), out=tmp_path / "one", progress=False)
    for more, said in (
        (["seed=2"], "was trained with seed=1, this run has 2"),
        (["tuner.alpha=3"], r"was trained with tuner.alpha=16.0, this run has 3.0"),
        (["tuner=bottleneck", "method=fedavg"], "was trained with tuner=lora, this run has bottleneck"),
        (["head.pooling=first"], "was trained with head.pooling=mean, this run has first"),
        (["method=fedmcp"], "allowed: a run of the same method, tuner, head and labels"),
        (["data.tasks=[alpha]", "data.labels=[good,bad]", "data.task=alpha"], "the labels of 'alpha' are good, bad"),
    ):
        with pytest.raises(InputError, match=said):
            build(tiny_config("ffa-lora", *words, *more))
