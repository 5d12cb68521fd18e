"""Recorded run folders, and how they are put in place and compared.

`tests/fixtures/record.py` recorded them at commit 141778b. Their files hold `@ROOT@` where the recording had a folder
of its machine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional

import silotune

FIXTURES = Path(__file__).parents[1] / "fixtures"
TINY = FIXTURES / "tiny"
"""The backbones and the data of all recordings."""
RUNS = FIXTURES / "runs"
DIGESTS = FIXTURES / "proof" / "digests.json"
ROOT = "@ROOT@"

TEXTS = {
    "alpha": ["the garden was kind", "the soup seemed awful at last", "a river"],
    "beta": [["the garden was kind", "and warm"], ["the soup seemed awful", "a river"]],
    "gamma": [["a song was bright", "surely the train felt grim"]],
    "echo": ["echo sweet and river", "echo warm and train again"],
    "always": ["always bright and soup"],
}
"""Texts of each silo that the recorded models answer."""

_CLASSIFICATION = ("data.tasks=[alpha,beta,gamma]", "data.merge=false", "train.max_length=32", "backbone={root}/bert")
_INSTRUCTIONS = ("data.tasks=echo,always", "train.max_length=64", "train.epochs=1", "backbone={root}/llama")
_COMMON = (
    "aggregation=uniform",
    "precision=fp32",
    "threads=1",
    "rounds=3",
    "train.batch_size=8",
    "data.path={root}/data",
)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fedmcp": ("demo", (*_CLASSIFICATION, "tuner.r=4")),
    "feddpa-t": (
        "feddpa-dataset1",
        (
            *(*_INSTRUCTIONS, "head.beams=1", "head.max_new_tokens=4", "tuner.r=3", "tuner.alpha=5", "train.lr=0.01"),
            *("train.schedule=constant", "train.clip_norm=", "train.weight_decay="),
        ),
    ),
}
"""Method → preset and words of its recorded run."""

SAME = (
    *("method", "rounds", "best_round", "bytes_up", "bytes_down", "sent_parameters", "trainable_parameters"),
    *("tasks", "state_sha256", "shared_sha256"),
)
"""Entries of a resumed run's summary that are recorded; the digests are compared on the recorded machine only."""


def words(method: str, root: Path) -> tuple[str, list[str]]:
    """The preset and the `key=value` words of a method's recorded run, over the backbones and data in `root`."""
    preset, overrides = CASES[method]
    return preset, [f"method={method}", *(word.replace("{root}", str(root)) for word in (*_COMMON, *overrides))]


def put_in_place(target: Path, runs: Path = RUNS) -> Path:
    """Copy recorded run folders, backbones and data to `target`, which replaces `@ROOT@` in their files."""
    for folder in (TINY, runs):
        shutil.copytree(folder, target, dirs_exist_ok=True)
    for path in (*target.rglob("config.yaml"), *target.rglob("summary.json")):
        path.write_text(path.read_text(encoding="utf-8").replace(ROOT, str(target)), encoding="utf-8")
    return target


def predictions(folder: Path) -> dict[str, list[Any]]:
    """What each silo's model in a run folder says to `TEXTS`: its answer, or the probability of every label."""
    run = silotune.load_run(folder)
    outputs: dict[str, list[Any]] = {}
    for silo in run.silos:
        model = run.model(silo)
        texts = [tuple(text) if isinstance(text, list) else text for text in TEXTS[silo]]
        generation = model.task.kind == "generation"
        outputs[silo] = model.write(texts) if generation else [p.probabilities for p in model.predict(texts)]
    return outputs


def with_another_round(folder: Path) -> silotune.Run:
    """Resume the finished run in a folder with one more round than it has."""
    return silotune.run(str(folder / "config.yaml"), "rounds=4", out=folder, resume=True)


def tensors_digest(folder: Path) -> dict[str, str]:
    """Digest over names, shapes, types and bytes of every safetensors file in a folder."""
    digests = {}
    for path in sorted(folder.rglob("*.safetensors")):
        total = hashlib.sha256()
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name).contiguous()
                total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                total.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes(tensor.numpy()))
        digests[path.relative_to(folder).as_posix()] = total.hexdigest()
    return digests


@cache
def probe() -> str:
    """Digest of a few forwards, backwards and decompositions, equal on machines whose kernels give the same bits.

    Which kernel computes a product, and so in which order it sums, depends on the processor and on the version of
    torch. Digests of trained states can be compared only where this one is equal.
    """
    total = hashlib.sha256(torch.__version__.encode())
    for dtype in (torch.float32, torch.float64):
        draws = torch.Generator().manual_seed(0)
        for rows, inner, columns in ((8, 32, 64), (40, 64, 32), (96, 32, 400), (8, 16, 4)):
            left = torch.randn(rows, inner, generator=draws, dtype=dtype).requires_grad_()
            right = torch.randn(inner, columns, generator=draws, dtype=dtype).requires_grad_()
            product = left @ right
            hidden = functional.layer_norm(functional.gelu(product) + functional.silu(product), (columns,))
            heads = hidden.view(1, 2, rows // 2, columns)
            loss = functional.scaled_dot_product_attention(heads, heads, heads).tanh().softmax(-1).log().mean()
            loss.backward()
            factors = torch.linalg.svd(torch.linalg.qr(product.detach())[0])
            for tensor in (product, hidden, loss, left.grad, right.grad, *factors):
                assert tensor is not None
                total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def on_recorded_machine() -> bool:
    """Return whether this machine's kernels round as those of the recording."""
    return probe() == json.loads(DIGESTS.read_text())["probe"]
