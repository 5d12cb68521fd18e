"""FedAvg and the methods that are FedAvg of one tuner, or of a body under a private head.

Silos train the shared parts on their data, and the coordinator averages their updates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from pydantic import Field

from silotune.methods import GLOBAL, HEAD, Phase, Scope, Supervised, SupervisedOptions

_FEDPETUNING = (
    "Zhang et al. 2023, FedPETuning: When Federated Learning Meets the PEFT Methods of Pre-trained Language Models"
)


class FedAvg(Supervised):
    """FedAvg of adapters, FedMCP's "FedAvg (PEFT)". `aggregation` says whether silos are weighed equally or by rows."""

    name = "fedavg"
    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data"
    scope = Scope.SHARED
    adapter_name = GLOBAL


class FedAvgFull(FedAvg):
    """FedAvg of all weights, FedMCP's "FedAvg (Full FT)"."""

    name = "fedavg-full"
    defaults = {"tuner": "full"}


class FedAP(FedAvg):
    """One shared bottleneck adapter."""

    name = "fedap"
    paper = _FEDPETUNING
    defaults = {"tuner": "bottleneck"}


class FedLR(FedAvg):
    """One shared LoRA of rank 16 on query and value (589,824 parameters on RoBERTa-base)."""

    name = "fedlr"
    paper = _FEDPETUNING
    defaults = {"tuner": "lora", "tuner.r": 16}


class FedPrompt(FedAvg):
    """Split aggregation: the prompt P travels, the language model F stays frozen; weights n_k / N_t (eq. 3).

    Twenty soft tokens before the template "{text} is {mask}."; the frozen language-model head scores the label words.
    """

    name = "fedprompt"
    paper = "Zhao et al. 2023, FedPrompt: Communication-Efficient and Privacy-Preserving Prompt Tuning in FL"
    defaults = {"tuner": "prompt", "tuner.tokens": 20, "head": "verbalizer", "aggregation": "samples"}


class FedAvgServerOptions(SupervisedOptions):
    """The options of FedAvg with a phase at the coordinator."""

    server_epochs: int = Field(default=1, ge=1, description="E_g, the coordinator's passes over its labeled rows")


class FedAvgServer(FedAvg):
    """FedAvg whose coordinator trains what it averaged on labeled rows of its own, by FedFAME's eq. 5.

    The difference from FedFAME is what labels in the silos add.
    """

    name = "fedavg-server"
    paper = "upper baseline of FedFAME: silos train on labels, the coordinator on its own labeled rows"
    Options = FedAvgServerOptions
    head_scope = Scope.SHARED  # the coordinator trains it, too

    def server_phases(self) -> list[Phase]:
        """What the silos train in a round, on the coordinator's rows: the head alone in rounds of heads."""
        epochs = cast(FedAvgServerOptions, self.options).server_epochs
        return [replace(phase, name=f"server-{phase.name}", epochs=epochs) for phase in self.local_phases()]


class FedPer(FedAvg):
    """FedAvg whose head never leaves the silo, whatever the setting's head scope."""

    name = "fedper"
    paper = "Arivazhagan et al. 2019, Federated Learning with Personalization Layers"
    head_scope = Scope.PRIVATE


class FedRepOptions(SupervisedOptions):
    """The options of FedRep."""

    head_epochs: int = Field(
        default=1, ge=1, description="passes that train the head, before those for the body (`train.epochs`)"
    )


class FedRep(FedPer):
    """FedRep: train the personal head with the body fixed, then the body with the head fixed (Algorithm 1).

    Loss and prediction are those of every method with one head (`silotune.methods.supervised`).
    """

    name = "fedrep"
    paper = "Collins et al. 2021, Exploiting Shared Representations for Personalized Federated Learning"
    Options = FedRepOptions

    def phases(self) -> list[Phase]:
        """Two phases: the head, then the body."""
        head_epochs = cast(FedRepOptions, self.options).head_epochs
        return [
            Phase("head", trains=(HEAD,), views={"full": self.mix}, loss=self.loss, epochs=head_epochs),
            Phase("body", trains=tuple(self.adapters), views={"full": self.mix}, loss=self.loss),
        ]
