"""The commands `silotune export`, `silotune push` (of an export to a hub) and `silotune import` (of a LoRA of peft)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silotune.cli.app import RESULTS, app
from silotune.cli.console import say
from silotune.cli.predict import RunArgument, SiloOption, WithoutGuarantee
from silotune.errors import InputError, file_errors, require_unused


@app.command("export", rich_help_panel=RESULTS)
def export_command(
    run: RunArgument,
    silo: SiloOption,
    part: Annotated[
        str, typer.Option(help="global, private, mixed (the silo's whole model as one adapter) or merged.")
    ],
    to: Annotated[Path, typer.Option(help="A new or empty folder.")],
    base: Annotated[str | None, typer.Option(help="The base model's name in the export; the run's by default.")] = None,
    program: Annotated[
        str | None,
        typer.Option("--for", help="vllm, sglang, llama.cpp, ollama (a plain LoRA) or onnx. Default: peft and others."),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="The largest rank of that plain LoRA.")] = None,
    alpha: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="One weight for all texts, of a method that weighs each (FedDPA)."),
    ] = None,
    without_guarantee: WithoutGuarantee = False,
) -> None:
    """Write a silo's adapter in the Hugging Face PEFT layout, or its model with adapters folded into the weights."""
    from silotune.interop.comparison import in_words
    from silotune.interop.export import export
    from silotune.interop.served_lora import SERVERS, server_rank
    from silotune.runs.personal_model import load_model

    require_unused(to, "--to")
    model = load_model(run, silo, precision="fp32", device="cpu")
    exported = export(model, part, to, base, program, rank=rank, alpha=alpha, without_guarantee=without_guarantee)
    say(f"wrote {to}: {exported['part']} of silo {silo}, round {exported['best_round']}; README.md says how to load it")
    if exported["product_error"] is not None:
        say(f"a LoRA of rank {exported['tuner']['r']}, error of its products {exported['product_error']:.2%}")
    if program in SERVERS:
        say(f"the server needs --max-lora-rank {server_rank(exported)}")
    say(in_words(exported["comparison"], exported["layout"]))
    if exported["private"]:
        say(f"it holds parts that never left the silo while training: {', '.join(exported['private'])}")


@app.command("import", rich_help_panel=RESULTS)
def import_command(
    directory: Annotated[Path, typer.Argument(help="A LoRA as peft saves it, or a run folder.", metavar="DIR")],
    to: Annotated[Path | None, typer.Option(help="A new file for `start=`, of a LoRA.")] = None,
    backbone: Annotated[str | None, typer.Option(help="The base model; the one the LoRA names by default.")] = None,
) -> None:
    """Check a LoRA of peft against its base model and write it as a run's starting point (`start=FILE`).

    Of a finished run that has no folder `models`, make that folder: predict, evaluate and export read it.
    """
    if (directory / "summary.json").is_file():
        from silotune.runs.restore import import_run

        if to is not None or backbone is not None:
            raise InputError("--to, --backbone: belong to a LoRA of peft, not to a run folder")
        say(f"wrote {directory / 'models'}: the models of {', '.join(import_run(directory))}")
        return
    if to is None:
        raise InputError("--to: is missing; a LoRA of peft is written to a new file")
    from silotune.models.backbone.loading import load_backbone
    from silotune.models.tuners.start_adapter import HEADS, read_config, read_peft_lora

    if to.exists():
        raise InputError(f"--to {to}: already there; choose another file")
    config = read_config(directory)
    name = backbone or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{directory}/adapter_config.json: names no base model; give it with --backbone")
    adapter = read_peft_lora(directory, load_backbone(name, precision="fp32"))
    with file_errors(f"--to {to}: cannot be written"):
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(adapter.pack())
    say(f"wrote {to}: a LoRA of rank {adapter.r} at {len(adapter.tensors) // 2} modules of {name}")
    if heads := sorted(set(HEADS).intersection(config.get("modules_to_save") or ())):
        say(f"left out: {', '.join(heads)}, as every run trains the heads of its own tasks")
    say(f"begin a run from it with: silotune run … backbone={name} {' '.join(adapter.words)} start={to}")


@app.command(rich_help_panel=RESULTS)
def push(
    directory: Annotated[Path, typer.Argument(help="A folder that `silotune export` wrote.", metavar="DIR")],
    repository: Annotated[str, typer.Argument(help="Its name on the Hugging Face hub.", metavar="OWNER/NAME")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody read it; without, it is private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded, and upload nothing.")] = False,
) -> None:
    """Upload an export to a repository of the Hugging Face hub, which is made if it is not there.

    The token is that of `hf auth login`, or of the variable HF_TOKEN.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    from silotune.core.files import read_json

    try:
        private_parts = read_json(directory / "export.json")["private"]
        ModelCard.load(directory / "README.md")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{directory}: no folder that `silotune export` wrote, or a damaged one ({error})") from error
    if public and private_parts:
        raise InputError(
            f"--public: the export holds {', '.join(private_parts)}, which never left the silo while training; "
            "leave --public out"
        )
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    where = f"the {'public' if public else 'private'} repository {repository}"
    try:
        validate_repo_id(repository)
        if dry_run:
            for file in files:
                say(f"{file.relative_to(directory)}  {file.stat().st_size:,} bytes")
            say(f"would go to {where}")
            return
        api = HfApi()
        api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload by silotune")
    except (OSError, ValueError, HTTPError) as error:
        raise InputError(f"push: {repository} was not written ({str(error).strip().splitlines()[0]})") from error
    say(f"wrote {len(files)} files to {where}: https://huggingface.co/{repository}")
