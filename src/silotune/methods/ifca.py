"""IFCA (Ghosh et al. 2020): several groups of silos, a model for each; a silo takes the model with the least loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from pydantic import Field, field_validator
from torch import Tensor
from typing_extensions import override

from silotune.aggregation import SiloAggregation, Update, by_samples
from silotune.errors import InputError
from silotune.methods import (
    GLOBAL,
    HEAD,
    MethodOptions,
    OneModel,
    Part,
    Phase,
    Scope,
    State,
    Step,
    Table,
    Tensors,
    copies,
    gather,
    mean_over_rows,
    private,
    shared,
)

LOSSES, CHOICE = "losses", "choice"


def of_group(name: str, further: int, groups: int) -> str:
    """Return the part, or "part/tensor" name, that lies so many groups after this one, the last before the first."""
    part, slash, tensor = name.partition("/")
    base, _, group = part.partition("-")
    place = (int(group or 0) + further) % groups
    return f"{base}-{place}{slash}{tensor}" if place else f"{base}{slash}{tensor}"


class GroupMeans(SiloAggregation):
    """The mean by rows of the silos of each group, which silos choose; a group without updates stays as it is.

    The coordinator has the groups in their order. A silo receives its own as `global` and `head`, and the others, from
    the next one on, as `global-1` and so on; it says how many groups further it went. So silos send one model, predict
    with that of their group, and receive each model once.
    """

    name = "ifca"
    reads = CHOICE

    @override
    def aggregate(self, updates: Iterable[Update], before: Tensors) -> Tensors:
        """Aggregate when the last update has arrived; all are kept until then."""
        count, members = groups_in(before), defaultdict[int, list[Update]](list)
        groups = {silo: int(group) for silo, group in self.state.items()}
        for update in updates:
            group = (groups.get(update.silo, 0) + round(update.score or 0)) % count
            groups[update.silo] = group
            members[group].append(update)
        self.state = {silo: torch.tensor(group) for silo, group in sorted(groups.items())}
        self.report = {"groups": dict(sorted(groups.items()))}
        means = {group: by_samples(of_it) for group, of_it in members.items()}
        return {of_group(name, group, count): mean for group, each in means.items() for name, mean in each.items()}

    @override
    def issued(self, shared: Tensors, silo: str) -> Tensors:
        group, count = int(self.state.get(silo, 0)), groups_in(shared)
        return {name: shared[of_group(name, group, count)] for name in shared}


def groups_in(shared: Tensors) -> int:
    """Return how many groups have parts among these tensors."""
    return 1 + max(int(name.partition("/")[0].partition("-")[2] or 0) for name in shared)


class IFCAOptions(MethodOptions):
    """The options of IFCA."""

    groups: int = Field(default=2, ge=2, le=64, description="k, the number of groups of silos")

    @field_validator("head_rounds")
    @classmethod
    def _no_head_rounds(cls, rounds: int) -> int:
        if rounds:
            raise ValueError("the heads of all groups would become one mean; leave it out")
        return rounds


class IFCA(OneModel):
    """IFCA by Algorithm 1, with averaged models: `j_k = argmin_j F_k(w_j)` over the silo's training rows.

    The choice is the silo's own and falls anew in each round, before it trains; its place alone leaves, as the number
    `choice`. The silo then trains and sends w_{j_k}; `GroupMeans` does the rest. Groups begin with unlike draws of the
    head, since adapters that begin as nothing are all alike: the paper, too, rests on a good start, and tries several.
    Adapter and head are shared, so that a group is a whole model.
    """

    name = "ifca"
    paper = "Ghosh et al. 2020, An Efficient Framework for Clustered Federated Learning"
    Options = IFCAOptions
    head_scope = Scope.SHARED  # heads are what tells groups apart
    defaults = {"aggregation": "ifca"}
    aggregations = ("ifca",)
    kinds = ("classification", "regression", "multilabel", "entities")
    mix = {GLOBAL: 1}

    @property
    def groups(self) -> int:
        """The number of groups, k."""
        return cast(IFCAOptions, self.options).groups

    def parts(self) -> dict[str, Part]:
        """Return each group's adapter and head, the silo's own first, and the losses by which it chooses."""
        if not self.setting.head.has_tensors:
            raise InputError(f"method {self.name}: groups begin with unlike heads; allowed: head=linear, mlp, entities")
        parts = {}
        for group in range(self.groups):
            parts[of_group(GLOBAL, group, self.groups)] = shared(self.setting.tuner)
            parts[of_group(HEAD, group, self.groups)] = self.head()
        return {**parts, LOSSES: private(Table(sums=(self.groups,)))}

    def phases(self) -> list[Phase]:
        """A pass over the silo's rows with every group's model, the choice, and training."""
        views = {f"group {group}": {of_group(GLOBAL, group, self.groups): 1} for group in range(self.groups)}
        return [
            gather("judge", views, {LOSSES: self.judged}, start={LOSSES: no_losses}),
            copies("choose", {part: partial(chosen, part) for part in (GLOBAL, HEAD)}),
            Phase("train", trains=(GLOBAL, HEAD), views={"full": self.mix}, loss=self.loss),
        ]

    def judged(self, step: Step) -> Tensors:
        """Return the sums of each group's loss over this batch and the ones before."""
        losses = [
            step.cross_entropy(f"group {group}", of_group(HEAD, group, self.groups)) for group in range(self.groups)
        ]
        sums = step.state[LOSSES]["sums"]
        return {"sums": sums + len(step.batch) * torch.stack(losses).to(sums)}

    @mean_over_rows
    def loss(self, step: Step) -> Tensor:
        """Return the cross-entropy of the chosen group's model; log the choice."""
        step.log(choice=step.state[LOSSES]["sums"].argmin())
        return step.cross_entropy("full")


def no_losses(state: State, received: State) -> Tensors:
    """Return sums before the first batch."""
    return {"sums": torch.zeros_like(state[LOSSES]["sums"])}


def chosen(part: str, state: State, received: State) -> Tensors:
    """Return the adapter or head of the group with the least loss; of equal ones the silo's own or the next."""
    sums = state[LOSSES]["sums"]
    models = [received[of_group(part, group, len(sums))] for group in range(len(sums))]
    place = sums.argmin().unsqueeze(0)  # as a tensor, which a device need not send back
    return {name: torch.stack([each[name] for each in models]).index_select(0, place)[0] for name in models[0]}
