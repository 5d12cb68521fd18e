"""The command `silotune cost`: parameters, message sizes, FLOPs and memory of a method, computed from shapes.

`silotune parts` is in `cli/catalog.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from silotune.cli.app import BEFORE, app
from silotune.cli.console import JsonOption, Overrides, console, new_table


@app.command(rich_help_panel=BEFORE)
def cost(
    method: Annotated[str, typer.Argument(metavar="METHOD")], overrides: Overrides = None, as_json: JsonOption = False
) -> None:
    """Print a method's cost on a backbone's shape; no weights are needed.

    backbone: shape:bert-base, shape:roberta-base, shape:t5-base, shape:llama-7b, the path of a config.json, default, a
    local folder or a hub id. Further keys: silos (per round, 10), tokens (per text, 128), labels (2). Tuner and head
    are those of the demo's setting by default.
    """
    from silotune.cost import estimate

    estimated = estimate(method, overrides or [])
    if as_json:
        typer.echo(json.dumps(asdict(estimated), indent=1))
        return
    title = f"{estimated.method} on {estimated.backbone}: {estimated.tuner}, head {estimated.head}"
    table = new_table(title, ["what one silo has"], [""])
    for part in estimated.parts:
        table.add_row(f"part {part.part!r} ({part.module}, {part.scope})", f"{part.parameters:,}")
    table.add_section()
    reference = "of full fine-tuning"
    table.add_row("model assembled, parameters", f"{estimated.full_parameters:,}")
    table.add_row("trained parameters", f"{estimated.trainable_parameters:,}")
    table.add_row(reference, f"{estimated.trainable_percent:.4f} %")
    table.add_row("sent parameters", f"{estimated.sent_parameters:,}")
    table.add_row(reference, f"{estimated.sent_percent:.4f} %")
    table.add_section()
    table.add_row("one message", f"{estimated.message_mib:.3f} MiB ({estimated.message_bytes:,} bytes)")
    table.add_row(f"{estimated.silos} silos, up, one round", f"{estimated.bytes_up:,} bytes")
    table.add_row(f"{estimated.silos} silos, down, one round", f"{estimated.bytes_down:,} bytes")
    table.add_section()
    table.add_row(
        f"training, a text of {estimated.tokens} tokens", f"{estimated.flops_per_sample_train / 1e9:,.2f} GFLOP"
    )
    table.add_row(
        f"prediction, a text of {estimated.tokens} tokens", f"{estimated.flops_per_sample_predict / 1e9:,.2f} GFLOP"
    )
    stored = "" if estimated.quantization == "none" else f", {estimated.quantization}"
    table.add_row(f"weights of the backbone{stored}", f"{estimated.backbone_mib:,.0f} MiB")
    table.add_row("peak memory of training, float32 (estimate)", f"{estimated.peak_memory_mib:,.0f} MiB")
    console.print(table)
