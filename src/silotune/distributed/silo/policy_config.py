"""`PolicyConfig`, the section `policy` of `silo.yaml`, and its presets `partners`, `hospital` and `lab`.

Three presets, of which the operator's own keys change what they name:

- `partners` (the default): parties that trust one another's intentions, not every configuration.
- `hospital`: a coordinator bound by contract alone; only noised changes leave.
- `lab`: no limit, for rehearsals and for rows that anybody may read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from silotune.config.section import Section
from silotune.errors import unknown_name_error


def _amount(given: object) -> object:
    """Accept a count of numbers, or a percentage of the backbone's parameters."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    if isinstance(given, str) and re.fullmatch(r"\d+(\.\d+)?%", given):
        return given
    raise ValueError(f"must be a whole number, or a share of the backbone such as 3% (got {given!r})")


Amount = Annotated[int | str | None, BeforeValidator(_amount)]
"""A count of numbers, a share of the backbone's parameters (`3%`), or None: no limit."""

Count = Annotated[int | None, Field(ge=0)]

Bound = Annotated[float | None, Field(ge=0)]

Names = list[str] | Literal["any"]

_METHODS = ["local", "fedavg", "fedprox", "fedap", "fedlr", "moon", "fedrep", "fedper", "fedmatch", "ditto", "fedmcp"]
_METHODS += ["fedfame", "fedprompt", "fedit", "fedlora", "feddpa-f", "feddpa-t", "apfl", "fdlora"]
# Not pfedme: θ is pulled to w in every step and forgets earlier ones, and w follows it, so that an update may tell the
# last batches alone (`proximal` bounds it where an operator allows the method). Not fedalt: a silo's own LoRA leaves,
# and other silos may receive it as it is.

_PARTNERS: dict[str, Any] = {
    "methods": _METHODS,
    "tuners": ["bottleneck", "lora", "dora", "vera", "prefix", "prompt", "p-tuning", "bitfit", "ia3"],
    "heads": ["mlp", "linear", "verbalizer", "lm", "dpo"],
    "keys": [],
    "prompts": False,
    "noise": False,
    "epsilon_per_round": 16.0,
    "delta_per_round": 1e-5,
    "numbers_per_round": "3%",
    "numbers_in_all": "1000%",
    "private_numbers": "100%",
    "shapes": [],
    "train_rows": 50,
    "scored_rows": 20,
    "score_digits": 1,
    "score_noise": 1.0,
    "batch_size": 8,
    "batches": "even",
    "max_length": 32,
    "row_steps": 256,
    "effective_rows": 5,
    "withheld": 3,
    "withheld_in_all": 10,
    "skipped_steps": 0,
    "row_order": "secret",
    "partial_passes": False,
    "row_sets": 20,
    "row_difference": 10,
    "lr": 0.01,
    "weight_decay": 0.1,
    "proximal": 0.001,
    "dropout": 0.5,
    "drift": 1.0,
    "epochs": 20,
    "steps": 10_000,
    "tokens": 50_000_000,
    "step_tokens": 131_072,
    "seconds": 3600,
    "memory_mib": 16_384,
    "disk_mib": 4096,
    "disk_mib_in_all": 65_536,
    "rounds": 200,
    "rounds_in_all": 2000,
    "requests_per_round": 3,
    "scores": 500,
    "scores_in_all": 5000,
    "waiting": 10,
}

_HOSPITAL: dict[str, Any] = {
    "noise": True,
    "epsilon_per_round": 8.0,
    "numbers_per_round": "1%",
    "numbers_in_all": "200%",
    "train_rows": 200,
    "scored_rows": 50,
    "score_digits": 0,
    "score_noise": 2.0,
    "batch_size": 16,
    "row_steps": 2000,
    "row_sets": 5,
    "row_difference": 20,
    "drift": 0.5,
    "epochs": 10,
    "steps": 5000,
    "rounds": 100,
    "rounds_in_all": 500,
    "requests_per_round": 2,
    "scores": 250,
    "scores_in_all": 1000,
}

_LAB: dict[str, Any] = {
    **dict.fromkeys(_PARTNERS),
    **dict.fromkeys(("methods", "tuners", "heads", "keys", "shapes"), "any"),
    **dict.fromkeys(
        ("train_rows", "scored_rows", "batch_size", "max_length", "row_steps", "row_difference", "effective_rows"), 0
    ),
    "prompts": True,
    "noise": False,
    "score_noise": 0.0,
    "batches": "any",
    "row_order": "seed",
    "partial_passes": True,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "partners": _PARTNERS,
    "hospital": {**_PARTNERS, **_HOSPITAL},
    "lab": _LAB,
}
"""Preset → its values."""


class PolicyConfig(Section):
    """What a silo answers. Limits are numbers; `null` is no limit. Unset keys have the preset's values.

    Args:
        preset: `partners`, `hospital` or `lab`; `policy: lab` is short for `policy: {preset: lab}`.
        methods: ids of the methods, or `any`.
        tuners: names of the tuners, or `any`.
        heads: names of the heads, or `any`.
        keys: keys of a configuration that may differ from their defaults though the policy cannot judge them, or `any`.
        prompts: whether the coordinator may choose templates and label words.
        noise: whether only noised changes may leave.
        epsilon_per_round: largest ε of one noised change.
        delta_per_round: largest δ of one noised change (Gaussian): at δ = 0.9 any ε needs hardly any noise.
        numbers_per_round: most numbers in one message, as a number or as a share of the backbone (`3%`).
        numbers_in_all: most numbers in all messages of all runs.
        private_numbers: most numbers in the parts that stay at the silo, as a number or as a share of the backbone.
        shapes: shapes of tensors that may leave although a matrix of the backbone has them; or `any`.
        train_rows: fewest rows in the training split.
        scored_rows: fewest rows in a split whose scores are shared.
        score_digits: decimal digits of a score in percent, and one less than those of a loss; none is finer than what
            one row of the split can change.
        score_noise: noise of a score, in rows of the split (the scale of a Laplace distribution): without it a score
            tells whether a guessed row is among those of the split, and its label.
        batch_size: fewest rows in an optimizer step.
        batches: `even`: only `train.batches=even` is answered, as a last batch of one row would weigh as much as a
            whole one; or `any`.
        max_length: fewest tokens at which rows may be cut.
        row_steps: fewest rows × steps behind an update: different rows that it has seen, times optimizer steps.
        effective_rows: fewest rows behind an update without noise, each counted by how strongly it pulls at the model.
        withheld: most requests of a run whose update is withheld because of that, or whose work ends in an error (it
            diverges, takes too long, …): then the silo leaves the run.
        withheld_in_all: the same of all runs; then the silo answers none, until its operator raises the limit.
        skipped_steps: most steps that float16 may skip in an update without noise: it lacks the rows of one batch.
        row_order: `secret`: order of rows and dropout are drawn from a key of the silo's own (`order.key`), and the
            passes of all rounds have the same orders; `seed`: they are those of the same run in one process, and the
            coordinator knows them.
        partial_passes: whether `train.steps` may be set: updates of many rounds, each without a few rows, tell these.
        row_sets: most different choices of training rows in all runs.
        row_difference: fewest rows in which two different choices of rows must differ.
        lr: largest learning rate.
        weight_decay: largest weight decay: a large one undoes all steps of an update but the last.
        proximal: largest product of learning rate and weight of a proximal term (FedProx, FedIT), the share of an
            update that each later step undoes: at 1 the last step alone is left, above 2 the first outgrows the others.
        dropout: largest dropout of the backbone and of tuners: near 1 it leaves a few rows, which the seed chooses.
        drift: largest distance of a number in a broadcast from the value with which the run starts.
        epochs: most passes over the rows in a phase.
        steps: most optimizer steps of one request.
        tokens: most tokens of one request.
        step_tokens: most tokens of one optimizer step.
        seconds: most seconds of one request.
        memory_mib: most memory of the worker's process, in MiB.
        disk_mib: most MiB of a run's files at the silo: states, replies, predictions.
        disk_mib_in_all: most MiB of the files of all runs.
        rounds: most rounds of a run.
        rounds_in_all: most local rounds of all runs.
        requests_per_round: most different requests for one round, e.g. with other broadcasts.
        scores: most score requests of a run.
        scores_in_all: most score requests of all runs.
        waiting: most runs that wait for approval.
    """

    preset: Literal["partners", "hospital", "lab"] = "partners"
    methods: Names
    tuners: Names
    heads: Names
    keys: Names
    prompts: bool
    noise: bool
    epsilon_per_round: Bound
    delta_per_round: Bound
    numbers_per_round: Amount
    numbers_in_all: Amount
    private_numbers: Amount
    shapes: list[list[int]] | Literal["any"]
    train_rows: Annotated[int, Field(ge=0)]
    scored_rows: Annotated[int, Field(ge=0)]
    score_digits: Annotated[int | None, Field(ge=0, le=9)]
    score_noise: Annotated[float, Field(ge=0)]
    batch_size: Annotated[int, Field(ge=0)]
    batches: Literal["even", "any"]
    max_length: Annotated[int, Field(ge=0)]
    row_steps: Annotated[int, Field(ge=0)]
    effective_rows: Annotated[float, Field(ge=0)]
    withheld: Count
    withheld_in_all: Count
    skipped_steps: Count
    row_order: Literal["secret", "seed"]
    partial_passes: bool
    row_sets: Count
    row_difference: Annotated[int, Field(ge=0)]
    lr: Bound
    weight_decay: Bound
    proximal: Bound
    dropout: Bound
    drift: Bound
    epochs: Count
    steps: Count
    tokens: Count
    step_tokens: Count
    seconds: Bound
    memory_mib: Count
    disk_mib: Count
    disk_mib_in_all: Count
    rounds: Count
    rounds_in_all: Count
    requests_per_round: Count
    scores: Count
    scores_in_all: Count
    waiting: Count

    @classmethod
    def of(cls, preset: str = "partners") -> PolicyConfig:
        """Return a preset's policy."""
        return cls.model_validate(preset)

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """Fill in the preset's values."""
        given = {"preset": given} if isinstance(given, str) else given
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "partners")
        if name not in PRESETS:
            raise ValueError(str(unknown_name_error("policy", name, PRESETS)))
        return {**PRESETS[name], **given, "preset": name}


def most(amount: int | str | None, backbone: int) -> int | None:
    """Return a limit as a count of numbers.

    Args:
        amount: a number, or a share such as `3%`.
        backbone: how many parameters the backbone has.
    """
    if isinstance(amount, str):
        return int(float(amount.rstrip("%")) / 100 * backbone)
    return amount
