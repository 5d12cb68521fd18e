"""Pretrain a small LLaMA-shaped model on text that is made here, for trying generative methods without a real model.

    python -m benchmarks.pretrain_llama --minutes 25 --threads 2 --out FOLDER
    silotune run feddpa-dataset1 backbone=FOLDER data.path=…

`FOLDER` becomes a plain Hugging Face folder: a byte-level tokenizer, `model.safetensors`, and `pretraining.json` with
the probes. Killed at any time, the same command goes on. The weights follow from seed, shape and number of steps (on
one kind of machine, at one number of threads): `--minutes` only decides how many steps there are, and the number of
steps in `pretraining.json`, given as `--steps`, makes the same weights again. The learning rate rises, stays, and falls
to zero in the last fifth.

Rows whose text begins with a zero hash are held out: for the loss, and for probes that are answered by silotune's own
generation. Copies and options are right where the answer is written exactly.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.small_llama import (
    PROBES,
    Shape,
    encode,
    make_model,
    make_tokenizer,
    pieces,
    probes,
    rows_of,
    weighted_loss,
)
from silotune.models.backbone.device import resolve_precision

RATE, WARM_UP, BETAS, DECAY, CLIP = 2e-3, 100, (0.9, 0.95), 0.05, 1.0


@dataclass
class Progress:
    """Where training is: steps done, their tokens, seconds used, and the step from which the learning rate falls."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    falls_from: int | None = None

    @property
    def steps(self) -> int | None:
        """How many there will be, where that is known: the fall takes a fifth of them."""
        return None if self.falls_from is None else self.falls_from + max(self.falls_from // 4, 1)

    def rate(self) -> float:
        """The learning rate of the next step."""
        rising = RATE * min((self.step + 1) / WARM_UP, 1)
        if self.falls_from is None or self.steps is None or self.step < self.falls_from:
            return rising
        return rising * (self.steps - self.step) / (self.steps - self.falls_from)


Tell = Callable[[str], None]


class Pretraining:
    """One run over its folder.

    Args:
        out: where the model will be; holds `training/` until it is done.
        seed: of everything.
        shape: of the model.
        steps: how many, or
        minutes: how long, all interruptions taken out.
        tell: called with lines about how it goes.
        save_every: seconds between saved states.
    """

    def __init__(
        self,
        out: Path,
        seed: int,
        shape: Shape,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        tell: Tell = print,
        save_every: float = 60,
    ) -> None:
        self.out, self.seed, self.shape, self.tell = out, seed, shape, tell
        self._minutes, self._save_every = minutes, save_every
        self._state = out / "training" / "state.safetensors"
        self._is = json.dumps({"seed": seed, **asdict(shape), "threads": torch.get_num_threads()})
        self.precision = resolve_precision("auto")
        self.tokenizer = make_tokenizer(seed, shape)
        self.model = make_model(seed, shape, self.tokenizer).to("cuda" if torch.cuda.is_available() else "cpu").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
        self.progress = Progress()
        if steps is not None:
            self.progress.falls_from = max(steps - max(steps // 5, 1), 0)
        self._load()

    def run(self) -> None:
        """All steps that are left."""
        progress, saved = self.progress, time.monotonic()
        begun = saved - progress.seconds
        while progress.steps is None or progress.step < progress.steps:
            loss = self._step()
            now = time.monotonic()
            progress.seconds = now - begun
            late = self._minutes is not None and progress.seconds > 0.8 * 60 * self._minutes
            if late and progress.falls_from is None and progress.step % 4 == 0:
                progress.falls_from = progress.step
            if progress.step % 50 == 0 or progress.step == progress.steps:
                speed = progress.tokens / max(progress.seconds, 1e-9)
                of = f" of {progress.steps}" if progress.steps else ""
                self.tell(f"step {progress.step}{of}: loss {loss:.3f}, {speed:.0f} tokens/s, {progress.seconds:.0f} s")
            if now - saved >= self._save_every:
                self._save()
                saved = time.monotonic()

    def _step(self) -> float:
        progress, shape = self.progress, self.shape
        stream, rows, tokens = rows_of(self.seed, "rows", progress.step), [], 0
        while tokens < shape.tokens:
            more = encode(self.tokenizer, [next(stream) for _ in range(16)])
            rows += [row for row in more if len(row.ids) <= shape.positions]
            tokens = sum(len(row.ids) for row in rows)
        total = sum(sum(row.weights[1:]) for row in rows)
        self.optimizer.param_groups[0]["lr"] = progress.rate()
        loss = 0.0
        for group in pieces(rows, shape.at_once):
            summed, _ = weighted_loss(self.model, group, self.precision)
            (summed / total).backward()
            loss += float(summed.detach()) / total
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step, progress.tokens = progress.step + 1, progress.tokens + tokens
        return loss

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model/{name}"] = parameter.detach().cpu()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}/{name}"] = value.detach().cpu()
        self._state.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._state.with_suffix(".tmp")
        fields = {"is": self._is, "progress": json.dumps(asdict(self.progress))}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=fields)
        temporary.replace(self._state)

    def _load(self) -> None:
        if not self._state.exists():
            return
        with safe_open(self._state, "pt") as file:
            fields = file.metadata()
            if fields["is"] != self._is:
                raise SystemExit(f"{self._state}: of {fields['is']}, not of {self._is}; choose another --out")
            falls_from = self.progress.falls_from
            self.progress = Progress(**json.loads(fields["progress"]))
            if falls_from is not None and falls_from != self.progress.falls_from:
                raise SystemExit(f"{self._state}: of another number of steps; choose another --out")
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(file.get_tensor(f"model/{name}"))
                    keys = ("step", "exp_avg", "exp_avg_sq")
                    tensors = {key: file.get_tensor(f"{key}/{name}") for key in keys}
                    moved = {key: tensors[key].to(parameter.device) for key in keys[1:]}
                    self.optimizer.state[parameter] = {"step": tensors["step"], **moved}
        self.tell(f"goes on after step {self.progress.step}")

    def finish(self) -> None:
        """The model and its tokenizer, in the folder."""
        self.model.eval().cpu().save_pretrained(self.out)
        self.tokenizer.save_pretrained(self.out)
        shutil.rmtree(self._state.parent, ignore_errors=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrain_llama", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the model")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="how long to train")
    length.add_argument("--steps", type=int, help="how many steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--probes", type=int, default=PROBES, help="rows of each probe")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"of the model ({value})")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if (arguments.out / "pretraining.json").exists():
        print(f"{arguments.out}: finished")
        print((arguments.out / "pretraining.json").read_text())
        return 0
    shape = Shape(**{name: getattr(arguments, name) for name in asdict(Shape())})
    training = Pretraining(arguments.out, arguments.seed, shape, steps=arguments.steps, minutes=arguments.minutes)
    numbers = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{numbers / 1e6:.2f} M parameters, {training.precision}, {arguments.threads} threads", flush=True)
    training.tell = lambda line: print(line, flush=True)
    training.run()
    training.finish()
    progress = training.progress
    result = {
        "seed": arguments.seed,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        "parameters": numbers,
        "precision": training.precision,
        "threads": arguments.threads,
        "shape": asdict(shape),
        "held_out": probes(arguments.out, arguments.seed, arguments.probes),
    }
    text = json.dumps(result, indent=1)
    (arguments.out / "pretraining.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
