"""FedMCP (Zhao et al. 2024): a shared and a private adapter, kept apart by a CKA contrast of their views."""

from __future__ import annotations

from typing import Literal, cast

from pydantic import Field
from torch import Tensor

from silotune.methods import (
    GLOBAL,
    HEAD_GLOBAL,
    PRIVATE,
    SIMILARITIES,
    Method,
    MethodOptions,
    Mix,
    Part,
    Phase,
    PredictionMix,
    Step,
    mean_over_rows,
    private,
    received,
    shared,
)

FULL: Mix = {GLOBAL: 0.5, PRIVATE: 0.5}  # section IV-B


class FedMCPOptions(MethodOptions):
    """The options of FedMCP."""

    gamma: float = Field(default=0.5, ge=0, le=1, description="weight of eq. 8's backbone loss")
    mu: float = Field(default=0.05, ge=0, description="weight of eq. 8's contrastive loss")
    similarity: Literal["cka", "cka-unbiased", "cosine"] = Field(
        default="cka",
        description="similarity of representations (Figure 4); over few rows the usual CKA is near 1 for any two, "
        "`cka-unbiased` is not",
    )
    representation: Literal["mean", "first"] = Field(
        default="mean", description="pooling of the compared states (Figure 5)"
    )
    private_view: Literal["alone", "full"] = Field(
        default="alone", description="Y in eq. 5: the private adapter alone, or the full model"
    )


class FedMCP(Method):
    """FedMCP by its Algorithm 1 and eqs. 3-9; the global adapter is sent, and the heads if they are shared."""

    name = "fedmcp"
    paper = "Zhao et al. 2024, FedMCP: Parameter-Efficient Federated Learning with Model-Contrastive Personalization"
    Options = FedMCPOptions
    defaults = {"aggregation": "uniform"}  # Algorithm 1, line 6

    def parts(self) -> dict[str, Part]:
        """Return two adapters at the same target modules, and a head for each of the two models (section IV-B)."""
        adapter = self.setting.tuner
        return {
            GLOBAL: shared(adapter),
            PRIVATE: private(adapter),
            "head_full": self.head(),
            HEAD_GLOBAL: self.head(),
        }

    def phases(self) -> list[Phase]:
        """One phase that trains all parts together (eq. 9), without the views that the options switch off."""
        options = self._options
        views: dict[str, Mix] = {"full": FULL}
        if options.gamma > 0 or options.mu > 0:
            views["global"] = {GLOBAL: 1}
        if options.mu > 0:
            views["received"] = {received(GLOBAL): 1}
            if options.private_view == "alone":
                views["private"] = {PRIVATE: 1}
        by_row = options.mu == 0 or options.similarity == "cosine"  # CKA compares the rows of a batch
        loss = self.loss_by_row if by_row else self.loss
        return [Phase("train", trains=tuple(self.parts()), views=views, loss=loss)]

    def loss(self, step: Step) -> Tensor:
        """Return `(1 − γ)·L_a + γ·L_b + μ·L_c` (eq. 8)."""
        options = self._options
        loss_a = step.cross_entropy("full", "head_full")  # eq. 3
        step.log(full=loss_a)
        total = (1 - options.gamma) * loss_a
        if options.gamma > 0:
            loss_b = step.cross_entropy("global", HEAD_GLOBAL)  # eq. 4
            step.log(backbone=loss_b)
            total = total + options.gamma * loss_b
        if options.mu > 0:
            loss_c = self._contrast(step)
            step.log(contrastive=loss_c)
            total = total + options.mu * loss_c
        return total

    @mean_over_rows
    def loss_by_row(self, step: Step) -> Tensor:
        """Return the same loss, marked as a mean over rows."""
        return self.loss(step)

    def _contrast(self, step: Step) -> Tensor:
        """Return `Sim(X, Y) − Sim(X, Z)` (eq. 5): away from the private adapter, toward the averaged global one."""
        options = self._options
        alike = SIMILARITIES[options.similarity]
        own_private = "private" if options.private_view == "alone" else "full"
        x, y, z = (step.views[view][options.representation] for view in ("global", own_private, "received"))
        to_private, to_received = alike(x, y), alike(x, z)
        step.log(similarity_private=to_private, similarity_received=to_received)
        return to_private - to_received

    def prediction(self) -> PredictionMix:
        """Predict with the full model and its head."""
        return PredictionMix(FULL, "head_full")

    @property
    def _options(self) -> FedMCPOptions:
        return cast(FedMCPOptions, self.options)
