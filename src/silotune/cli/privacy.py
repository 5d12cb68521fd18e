"""The command `silotune privacy`, which shows what noise on rows costs before a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from silotune.cli.app import BEFORE, app
from silotune.cli.console import JsonOption, console, new_table, say


@app.command(rich_help_panel=BEFORE)
def privacy(
    source: Annotated[str | None, typer.Argument(help="A preset or a YAML file.", metavar="CONFIG")] = None,
    units: Annotated[int | None, typer.Option(min=2, help="Units (rows or persons) of a silo.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε of the whole run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare rates and numbers of noised steps at one ε, and propose the fewest passes with little noise.

    Units, ε and δ are those of CONFIG (privacy.units, .epsilon, .delta) where they are not given.
    """
    from silotune.communication.privacy.accountant import usual_delta
    from silotune.communication.privacy.plan import STEPS, expectation, proposed, step_plans
    from silotune.config.uplink import PrivacyConfig
    from silotune.errors import InputError
    from silotune.runs.build.resolve import read_config

    configured = PrivacyConfig() if source is None else read_config(source).privacy
    units, epsilon = units or configured.units, epsilon or configured.epsilon
    if units is None or epsilon is None or epsilon <= 0:
        raise InputError("privacy: needs the units of a silo and ε above 0; e.g. --units 1000 --epsilon 8")
    delta = configured.delta or usual_delta(units)
    plans = step_plans(epsilon, delta)
    best, head_plan = proposed(plans), proposed([plan for plan in plans if plan.steps == max(STEPS)])
    if as_json:
        rows = [
            asdict(plan)
            | {"passes": plan.passes, "noise": plan.noise, "head_lr": plan.head_lr(units)}
            | {"proposed": plan is best, "proposed_for_head": plan is head_plan}
            for plan in plans
        ]
        typer.echo(json.dumps({"epsilon": epsilon, "delta": delta, "units": units, "plans": rows}, indent=1))
        return
    title = f"ε = {epsilon:g}, δ = {delta:g}, {units:,} units a silo"
    table = new_table(title, ["rate", "steps", "passes", "noise σ of a step", "σ / (rate · √steps)", ""])
    for plan in plans:
        numbers = (f"{plan.rate:g}", str(plan.steps), f"{plan.passes:g}", f"{plan.multiplier:.2f}", f"{plan.noise:.2f}")
        table.add_row(*numbers, "proposed" if plan is best else "for a head" if plan is head_plan else "")
    console.print(table)
    say(f"proposed: privacy.rate={best.rate:g}, {best.steps} noised steps (rounds × train.steps)")
    say(f"noise of the mean gradient: {best.noise / units:.2g} × privacy.clip")
    say(
        f"for a head on vectors that are kept, whose passes cost little: privacy.rate={head_plan.rate:g}, "
        f"{head_plan.steps} steps, method.head_lr={head_plan.head_lr(units):.2g} (privacy.clip=1, head.normalize=3)"
    )
    say(expectation(units, epsilon))
