"""FedPrompt (Zhao et al. 2023): federated prompt tuning; only the soft prompt is trained and sent."""

from __future__ import annotations

from silotune.methods.fedavg import FedAvg


class FedPrompt(FedAvg):
    """Split aggregation: the prompt P travels, the language model F stays frozen; weights n_k / N_t (eq. 3).

    Twenty soft tokens before the template "{text} is {mask}."; the frozen language-model head scores the label words.
    """

    name = "fedprompt"
    paper = "Zhao et al. 2023, FedPrompt: Communication-Efficient and Privacy-Preserving Prompt Tuning in FL"
    defaults = {"tuner": "prompt", "tuner.tokens": 20, "head": "verbalizer", "aggregation": "samples"}
