"""Loads and runs an export without silotune (`load`, `attach`); the file is copied into every export.

It needs torch, transformers and safetensors, peft for a folder with `adapter_config.json`, and the library that
quantizes the base model (bitsandbytes or torchao) if `export.json` has a `quantization`; but not silotune.

    python standalone.py [--base FOLDER] "a text" ["another text" …]   # one JSON line each; pairs: a tab between them

    from standalone import load
    model = load(".", base="the base model's name or folder")
    model.predict(["a text"])                  # [{"label": …, "probabilities": {…}}]; or "value", "spans", "vector"
    states, mask = model.states(["a text"])    # last layer's states of the text's tokens (rows, tokens, hidden)

For an adapter in silotune's own layout on a base model that is loaded already: `attach(model, folder)`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Text = str | tuple[str, str]

Hook = Callable[[nn.Module, Any, Tensor], Tensor]

_PROMPTS = ("PROMPT_TUNING", "P_TUNING")

CLASSIFIERS = ("mlp", "linear")
"""Kinds of heads that read a pooled state."""

TENSOR_HEADS = (*CLASSIFIERS, "entities", "retrieval")
"""Kinds of heads that `logits` computes."""

_ROWS = 64
"""Texts in one forward."""


def load(folder: str | Path, base: str | Path | None = None) -> Model:
    """Load an export folder.

    Args:
        folder: with `export.json`.
        base: the base model's folder or name; by default the name in `export.json`.

    Raises:
        OSError: the base model is not there, and cannot be fetched; or a file of the export is damaged.
    """
    import transformers

    folder = Path(folder)
    about = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    _check_files(folder, about.get("files", {}))
    source = folder if about["layout"] == "weights" else base or about["base_model"]
    more: dict[str, Any] = {}
    if about.get("quantization"):
        from transformers.quantizers.auto import AutoQuantizationConfig

        more["quantization_config"] = AutoQuantizationConfig.from_dict(about["quantization"])
    head = json.loads((folder / "head.json").read_text(encoding="utf-8"))
    if about["base_class"] == "AutoModelForTokenClassification":
        more["id2label"] = dict(enumerate(head["tags"]))
    kind = getattr(transformers, about["base_class"])
    try:
        model = kind.from_pretrained(source, dtype=torch.float32, use_safetensors=True, **more)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise OSError(f"base model {str(source)!r}: {reason} Give its folder: load(folder, base=FOLDER)") from None
    return opened(model, folder, about["layout"])


def _check_files(folder: Path, files: dict[str, str]) -> None:
    for name, sha256 in files.items():
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise OSError(f"{folder / name}: damaged (its sha256 is not the recorded one); copy the folder anew")


def opened(model: Any, folder: Path, layout: str) -> Model:
    """Put an export's adapter into its base model, in place, and return both with the head."""
    import transformers

    peft_config = prompt = None
    handles: list[Any] = []
    if layout == "silotune":
        handles = attach(model, folder)
    elif layout == "peft":
        peft_config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if peft_config["peft_type"] not in _PROMPTS:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder))
        else:
            prompt = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
            prompt = prompt[: peft_config["num_virtual_tokens"]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    head = json.loads((folder / "head.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "head.safetensors") if (folder / "head.safetensors").exists() else {}
    return Model(model.eval(), tokenizer, head, tensors, peft_config, prompt, handles)


def attach(model: Any, folder: str | Path) -> list[Any]:
    """Apply an adapter in silotune's own layout to a model, in place, by forward hooks.

    Returns:
        The hooks' handles.

    Raises:
        ValueError: where the files do not belong together or to this model, or `KINDS` lacks the adapter's kind.
    """
    config = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    if (config.get("format"), config.get("version")) != ("silotune-model", 1) or "adapter" not in config:
        raise ValueError(f"not an export of silotune, version 1: {config.get('format')} {config.get('version')}")
    _check_files(Path(folder), config.get("files") or {})
    kind, adapter_config = config["tuner"]["name"], config["adapter"]
    if kind not in KINDS:
        raise ValueError(
            f"no loader for kind {kind!r} (it computes {adapter_config['computes']}); known: {list(KINDS)}"
        )
    names, make_hook = KINDS[kind]
    stored = load_file(Path(folder) / "model.safetensors")
    tensors = {name.removeprefix("adapter/"): stored[name] for name in stored if name.startswith("adapter/")}
    expected = {f"{module}.{name}" for module in adapter_config["modules"] for name in names}
    if expected != set(tensors):
        raise ValueError(f"tensors and modules differ: {sorted(expected ^ set(tensors))[:3]}")
    base, handles = model.base_model, []
    for module_name in adapter_config["modules"]:
        module = base.get_submodule(module_name)
        device = next(module.parameters()).device
        adapter = [tensors[f"{module_name}.{name}"].to(device) for name in names]
        width = getattr(module, "out_features", None) or getattr(module, "nf", None) or len(module.bias)
        if {adapter[-1].shape[0], adapter[0].shape[-1]} != {width}:
            raise ValueError(f"{module_name}: the adapter's width is not the {width} of this model")
        handles.append(module.register_forward_hook(make_hook(*adapter)))
    return handles


def _bottleneck(down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Hook:
    def hook(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        hidden = nn.functional.gelu(nn.functional.linear(y, down.to(y.dtype), down_bias.to(y.dtype)))
        return y + nn.functional.linear(hidden, up.to(y.dtype), up_bias.to(y.dtype))

    return hook


def _offset(bias: Tensor) -> Hook:
    def hook(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        return y + bias.to(y.dtype)

    return hook


KINDS: dict[str, tuple[tuple[str, ...], Callable[..., Hook]]] = {
    "bottleneck": (("down.weight", "down.bias", "up.weight", "up.bias"), _bottleneck),
    "bitfit": (("bias",), _offset),
}
"""Kind of adapter → the names of a module's tensors, and the function that makes its forward hook from them.

Add an entry to load the kind of a tuner from outside silotune.
"""


class Model:
    """A loaded export.

    Args:
        prompt: virtual tokens of shape (tokens, hidden), for an adapter that is a soft prompt.
        handles: of the forward hooks that are the adapter.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        head: dict[str, Any],
        head_tensors: dict[str, Tensor],
        peft_config: dict[str, Any] | None = None,
        prompt: Tensor | None = None,
        handles: Sequence[Any] = (),
    ) -> None:
        self.model, self.tokenizer, self.head, self.head_tensors = model, tokenizer, head, head_tensors
        self.handles = handles
        self._peft, self._prompt = peft_config, prompt

    def encode(self, texts: Sequence[Text]) -> dict[str, Any]:
        """Tokenize texts or pairs: ids, mask and, if the tokenizer has them, segments, padded on the right.

        Where long texts are read in windows (`window_overlap` in `head.json`), each window is a row.
        """
        return _inputs(self._tokens(texts))

    def _tokens(self, texts: Sequence[Text]) -> Any:
        rows = [(text,) if isinstance(text, str) else text for text in texts]
        columns = [[normalize("NFC", text) for text in column] for column in zip(*rows, strict=True)]  # as it trained
        cut = window_words(self.head)
        if self.tokenizer.pad_token is None:  # it is masked
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        return self.tokenizer(*columns, **cut, padding=True, padding_side="right", return_tensors="pt")

    def states(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Compute the last layer's states of the texts' tokens, shape (rows, tokens, hidden), and their mask."""
        return self._states(self.encode(texts))

    @torch.no_grad()
    def _states(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        mask = inputs["attention_mask"]
        model = self.model
        if self._peft is not None and self._prompt is None:
            model = self.model.get_base_model()  # LoRA and (IA)³ sit inside it
        base = model.base_model
        body = base.encoder if base.config.is_encoder_decoder else base
        if base.config.is_encoder_decoder:
            inputs.pop("token_type_ids", None)
        virtual = 0
        if self._prompt is not None:
            virtual = len(self._prompt)
            embedded = body.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat([self._prompt.expand(len(mask), -1, -1), embedded], 1)
            inputs["attention_mask"] = torch.cat([mask.new_ones(len(mask), virtual), mask], 1)
            if "token_type_ids" in inputs:  # peft's own forward drops them
                types = inputs["token_type_ids"]
                inputs["token_type_ids"] = torch.cat([types.new_zeros(len(mask), virtual), types], 1)
        elif self._peft is not None and self._peft["peft_type"] == "PREFIX_TUNING":
            inputs["past_key_values"] = self.model.get_prompt(len(mask))
            ones = mask.new_ones(len(mask), self._peft["num_virtual_tokens"])
            inputs["attention_mask"] = torch.cat([ones, mask], 1)
        return body(**inputs).last_hidden_state[:, virtual:], mask

    @torch.no_grad()
    def logits(self, texts: Sequence[Text]) -> Tensor:
        """Compute a head's raw outputs, shape (texts, outputs), or (texts, tokens, tags) where it marks spans.

        Tokens of windows lie behind one another, window by window.

        Of a head for retrieval these are the texts' vectors, shape (rows, hidden).

        An output is a logit of a class or label; in regression it is the predicted number.

        Raises:
            NotImplementedError: the head has no tensors.
        """
        if self.head["kind"] not in TENSOR_HEADS:
            raise NotImplementedError(f"a head of kind {self.head['kind']!r} is described in head.json")
        logits = []
        for start in range(0, len(texts), _ROWS):
            tokens = self._tokens(texts[start : start + _ROWS])
            own = head_logits(*self._states(_inputs(tokens)), self.head, self.head_tensors)
            logits.append(of_texts(own, tokens))
        if self.head["kind"] == "entities":
            most = max(own.shape[1] for own in logits)
            logits = [nn.functional.pad(own, (0, 0, 0, most - own.shape[1])) for own in logits]
        return torch.cat(logits)

    def predict(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        """Predict the label of each text (or pair of texts), with the probabilities of all labels.

        For a task of numbers a row has `value`; for one of several labels `labels`, those above ½, and `probabilities`;
        for one of entities `spans` (`start`, `end`, `label`) with places in the text in NFC.
        """
        logits, kind = self.logits(texts), self.head.get("task_kind", "classification")
        if kind == "entities":
            return [self._spans(text, tags) for text, tags in zip(texts, logits.argmax(-1).tolist(), strict=True)]
        if kind == "retrieval":
            return [{"vector": vector} for vector in logits.tolist()]
        if kind == "regression":
            return [{"value": value} for value in logits[:, 0].tolist()]
        rows = (torch.sigmoid(logits) if kind == "multilabel" else torch.softmax(logits, -1)).tolist()
        if kind == "multilabel":
            chances = [dict(zip(self.head["labels"], row, strict=True)) for row in rows]
            return [{"labels": [label for label in row if row[label] > 0.5], "probabilities": row} for row in chances]
        by_label = [dict(zip(self.head["labels"], row, strict=True)) for row in rows]
        return [{"label": max(row, key=row.__getitem__), "probabilities": row} for row in by_label]

    def _spans(self, text: Text, tags: Sequence[int]) -> dict[str, Any]:
        """Return the spans of a text whose tokens have these tags; a word of the tokenizer has its first token's.

        Of several windows that is the one with most tokens on the word's side with fewer.
        """
        words: dict[int, tuple[int, int, int, int]] = {}  # its characters, tokens beside it, and its token
        before = 0
        for window in self.tokenizer(normalize("NFC", str(text)), **window_words(self.head)).encodings:
            for word in dict.fromkeys(word for word in window.word_ids if word is not None):
                place, (start, end) = window.word_to_tokens(word)[0], window.word_to_chars(word)
                room = min(place, len(window.ids) - 1 - place)
                first, last, most, _ = words.get(word, (start, end, -1, 0))
                if start == first and room > most:  # a window that begins within a word has not its first token
                    words[word] = start, max(end, last), room, before + place
            before += len(window.ids)
        spans: list[dict[str, Any]] = []
        inside = ""
        for start, end, _, place in words.values():
            letter, _, label = self.head["tags"][tags[place]].partition("-")
            if letter == "I" and inside == label:
                spans[-1]["end"] = end
            elif label:
                spans.append({"start": start, "end": end, "label": label})
            inside = label
        return {"spans": spans}


def _inputs(tokens: Any) -> dict[str, Any]:
    return {name: tokens[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in tokens}


def window_words(head: dict[str, Any]) -> dict[str, Any]:
    """Return how the tokenizer of a head cuts texts: to windows, or at its length."""
    windows = {"stride": head["window_overlap"], "return_overflowing_tokens": True} if "window_overlap" in head else {}
    return {"truncation": True, "max_length": head["max_length"], **windows}


def of_texts(logits: Tensor, tokens: Any) -> Tensor:
    """Return each text's logits from its windows': their mean, or those of tokens behind one another, padded."""
    if "overflow_to_sample_mapping" not in tokens:
        return logits
    owners, mask = (torch.as_tensor(tokens[name]) for name in ("overflow_to_sample_mapping", "attention_mask"))
    windows = [owners == text for text in range(int(owners[-1]) + 1)]
    if logits.ndim == 2:
        return torch.stack([logits[own].mean(0) for own in windows])
    return nn.utils.rnn.pad_sequence([logits[own][mask[own] == 1] for own in windows], batch_first=True)


def head_logits(states: Tensor, mask: Tensor, head: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """Compute a head's logits of states (rows, tokens, hidden), padded on the right, as `Model.logits` returns them."""
    if head["kind"] == "entities":
        return nn.functional.linear(states, tensors["out.weight"], tensors["out.bias"])
    if head["pooling"] == "mean":
        weights = mask.unsqueeze(-1).to(states.dtype)
        pooled = (states * weights).sum(1) / weights.sum(1)
    elif head["pooling"] == "last":
        pooled = states[torch.arange(len(states)), mask.sum(1) - 1]
    else:
        pooled = states[:, 0]
    if head.get("normalize") is not None:
        pooled = head["normalize"] * nn.functional.normalize(pooled, dim=-1)
    if head["kind"] == "retrieval":
        return nn.functional.normalize(pooled, dim=-1)
    if head["kind"] == "mlp":
        pooled = torch.tanh(nn.functional.linear(pooled, tensors["dense.weight"], tensors["dense.bias"]))
    return nn.functional.linear(pooled, tensors["out.weight"], tensors["out.bias"])


def _main() -> None:
    parser = argparse.ArgumentParser(description="Predict with the export in this folder: one JSON line for each text.")
    parser.add_argument("--base", metavar="FOLDER", help="the base model; by default the name in export.json")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text, or a pair with a tab between the two")
    words = parser.parse_args()
    inputs: list[Any] = [tuple(text.split("\t")) if "\t" in text else text for text in words.texts]
    if not inputs:
        return
    try:
        model = load(Path(__file__).parent, words.base)
    except OSError as error:
        sys.exit(str(error).replace("load(folder, base=FOLDER)", "--base FOLDER"))
    for text, answer in zip(inputs, model.predict(inputs), strict=True):
        print(json.dumps({"text": text, **answer}, ensure_ascii=False))


if __name__ == "__main__":
    _main()
