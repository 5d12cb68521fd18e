"""A LoRA as a GGUF file: llama.cpp's names, order of rows and metadata, with the run's numbers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from silotune.interop.export import export
from silotune.interop.selection import select
from silotune.interop.served_lora import FAMILIES
from silotune.models.tuners.lora import options_of

SITES = "query,key,value,attention_output,feedforward_input,feedforward_gate,feedforward_output"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the order in which llama.cpp's Llama has the rows of queries and keys."""
    width = len(rows) // heads
    order = [head * width + 2 * place + half for head in range(heads) for half in (0, 1) for place in range(width // 2)]
    return rows[order]


def field(reader: gguf.GGUFReader, key: str):
    found = reader.get_field(key)
    assert found is not None, key
    return found.contents()


@pytest.mark.parametrize(("program", "scaling"), [("llama.cpp", "rslora"), ("ollama", "standard")])
def test_the_file_holds_the_runs_matrices(runs, tmp_path, program, scaling):
    run = runs.generation("llama", "causal", "lora", f"tuner.sites={SITES}", f"tuner.scaling={scaling}")
    model = run.model("east")
    about = export(model, "global", tmp_path / "out", "base.gguf", program)
    reader = gguf.GGUFReader(tmp_path / "out" / "adapter.gguf")
    assert field(reader, "general.type") == "adapter"
    assert field(reader, "general.architecture") == "llama"
    assert field(reader, "adapter.type") == "lora"
    trained = select(model, "global").adapter
    assert field(reader, "adapter.lora.alpha") == pytest.approx(options_of(trained).standard_alpha)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(found) == len(trained.tensors) == 2 * 7 * 3
    for layer in range(3):
        for module, name in NAMES.items():
            a, b = (found[f"blk.{layer}.{name}.weight.lora_{which}"] for which in "ab")
            assert a.shape[0] == b.shape[1] == about["tuner"]["r"]
            b = in_halves(b, HEADS[module]) if module in HEADS else b
            for which, data in (("A", a), ("B", b)):
                torch.testing.assert_close(
                    torch.tensor(data), trained.tensors[f"layers.{layer}.{module}.lora_{which}.weight"], rtol=0, atol=0
                )
    modelfile = tmp_path / "out" / "Modelfile"
    assert modelfile.exists() is (program == "ollama")
    if program == "ollama":
        assert modelfile.read_text() == "FROM base.gguf\nADAPTER ./adapter.gguf\n"
    assert "adapter.gguf" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "standalone.py").exists()


def test_the_names_of_families_are_those_of_gguf() -> None:
    assert {family.architecture for family in FAMILIES.values()} <= {*gguf.MODEL_ARCH_NAMES.values()}
