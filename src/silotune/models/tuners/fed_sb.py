"""Fed-SB: a small matrix is trained between fixed bases, equal in all silos, so that means are exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from silotune.core.randomness import generator as derived_generator
from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.base import Tuner
from silotune.models.tuners.lora import Factors, LoRA, principal_factors
from silotune.models.tuners.target_modules import TargetModuleOptions, layer_widths

MIDDLE = "middle.weight"


class FedSBOptions(TargetModuleOptions):
    """The options of Fed-SB."""

    r: int = Field(default=32, ge=1, description="the rank; a target module has r² numbers")
    alpha: float = Field(default=32, gt=0, description="the scale is alpha / r")
    dropout: float = Field(default=0, ge=0, lt=1, description="dropout of A's input in training")
    bases: Literal["svd", "random"] = Field(
        default="svd", description="B and A: the weight's largest singular vectors, or random orthonormal ones"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of random bases, which are equal in all silos")
    sites: tuple[str, ...] = Field(
        default=("query", "value"), description="linear layers of each block, or patterns of names"
    )

    @property
    def standard_alpha(self) -> float:
        """See `LoRAOptions.standard_alpha`."""
        return self.alpha

    @property
    def scale(self) -> float:
        """The factor of B·R·A."""
        return self.alpha / self.r


class FedSB(LoRA):
    """Adds `scale·B·R·A·x` to a linear layer's output, where R alone is trained and sent (Singhal et al. 2025).

    Each target module has `middle.weight` (r, r), which starts at 0. B (out, r) and A (r, in) have orthonormal columns
    and rows; a part does not hold them. In the paper they are singular vectors of a first gradient; here of the weight,
    because a gradient would be computed from rows. What acts, and is exported, is the LoRA of B·R and A.
    """

    name = "fed-sb"
    Options = FedSBOptions  # type: ignore[assignment]
    example = {"r": 3, "alpha": 5, "bases": "random"}
    module_tensors: ClassVar[tuple[str, ...]] = (MIDDLE,)
    groups = {}
    rank = None  # type: ignore[assignment]
    ranks: Mapping[str, int] = {}
    starts_in_weights = plan_holds = False
    rate_factor = Tuner.rate_factor
    read_initial, pack_initial = Tuner.read_initial, Tuner.pack_initial

    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """See `Tuner.init`."""
        for module in (modules := self._find_modules(backbone)):
            self._bases(backbone, module, torch.zeros(()))  # refuses a rank that the module does not have
        return {f"{module}.{MIDDLE}": torch.zeros(self._options.r, self._options.r) for module in modules}

    @override
    def _find_modules(self, backbone: Backbone) -> list[str]:
        return self._options.modules(backbone, self.name)

    @override
    def target_modules(self, tensors: Tensors) -> list[str]:
        """Return the names of the modules that a part, or the LoRA that `effective` makes of it, changes."""
        endings = tuple(f".{name}" for name in (MIDDLE, LoRA.module_tensors[0]))
        return [name.removesuffix(ending) for name in tensors for ending in endings if name.endswith(ending)]

    @override
    def effective(self, backbone: Backbone, tensors: Tensors) -> Tensors:
        """Return the LoRA of A and B·R."""
        if not any(name.endswith(MIDDLE) for name in tensors):
            return tensors
        acting: Tensors = {}
        for module in self.target_modules(tensors):
            acting[f"{module}.lora_A.weight"], b = self._bases(backbone, module, tensors[f"{module}.{MIDDLE}"])
            with torch.enable_grad():  # what trains says so also in a pass without graph
                acting[f"{module}.lora_B.weight"] = self._up(tensors, module, b)
        return acting

    def _up(self, tensors: Tensors, module: str, b: Tensor) -> Tensor:
        """Return the acting LoRA's B, shape (out, r), from the basis B."""
        return b @ tensors[f"{module}.{MIDDLE}"]

    def _bases(self, backbone: Backbone, module: str, like: Tensor) -> Factors:
        """Return A (r, in) and B (out, r) of a module, with dtype and device of `like`."""
        rank, bases, seed = self._options.r, self._options.bases, self._options.seed

        def made() -> Factors:
            widths = layer_widths(backbone.module(module))
            if rank > min(widths):
                raise InputError(
                    f"tuner.r: {rank} directions of {module}, which has {min(widths)}; allowed: up to that"
                )
            if bases == "svd":
                a, b = principal_factors(backbone, module, rank, like.device, "bases=svd")
                a, b = torch.nn.functional.normalize(a), torch.nn.functional.normalize(b, dim=0)
            else:
                draws = derived_generator(seed, "bases", module)
                a, b = (orthonormal(width, rank, draws) for width in widths)
                a = a.T
            return a.to(like), b.to(like)

        return backbone.constant((FedSB.name, bases, seed, rank, module, like.device, like.dtype), made)

    @property
    def _options(self) -> FedSBOptions:  # type: ignore[override]
        return cast(FedSBOptions, self.options)


def orthonormal(rows: int, columns: int, draws: torch.Generator) -> Tensor:
    """Draw a matrix with orthonormal columns, whose signs do not depend on the library of linear algebra."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, generator=draws, dtype=torch.float64))
    signed: Tensor = q * r.diagonal().sign()
    return signed
