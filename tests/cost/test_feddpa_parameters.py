"""FedDPA's Table 12: what one silo sends on LLaMA-7B's shapes."""

from __future__ import annotations

import pytest

from silotune.cost import estimate

LORA = 32 * 2 * 2 * 4096 * 8  # blocks; query and value; A and B; width; rank


@pytest.mark.parametrize(("method", "trained"), [("fedit", 1), ("fedlora", 2), ("feddpa-f", 2), ("feddpa-t", 2)])
def test_table_12(method, trained):
    cost = estimate(method, ["backbone=shape:llama-7b"], count_flops=False)
    assert cost.sent_parameters == LORA == 4_194_304
    assert cost.trainable_parameters == cost.adapter_parameters == trained * LORA
    assert f"{cost.sent_percent:.2f}" == "0.06"
    assert f"{cost.sent_parameters / 1e6:.1f}" == "4.2"
