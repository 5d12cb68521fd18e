"""Define the interface of tuners: create a part's tensors, change the forward pass, merge and export parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from silotune.config.section import Options
from silotune.core.tensors import Tensors
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.segments import Segments


@dataclass(frozen=True, eq=False)
class TokenWeight:
    """The weight `softmax(G·x)[index]` of a token, where x is the input of a target module, and G its matrix.

    Args:
        tensors: `{module}.mixer.weight` of shape (parts of the mix, in), for every target module.
        index: the part's row of G.
    """

    tensors: Tensors
    index: int

    def at(self, module: str, x: Tensor) -> Tensor:
        """Return the weight of every token of x (rows, tokens, in), shape (rows, tokens, 1)."""
        scores = nn.functional.linear(x, self.tensors[f"{module}.mixer.weight"].to(x.device, x.dtype))
        return scores.softmax(-1)[..., self.index : self.index + 1]


Weight = float | Tensor
"""The weight of a part in a mix: one number, or a tensor of shape (rows,) for one weight per row."""


class TunerOptions(Options):
    """Options common to all tuners; each tuner extends it by its own."""


@dataclass(frozen=True)
class WeightedTensors:
    """A part's tensors and its weight in one mix; `tokens`, if given, weighs each token instead of `weight`."""

    tensors: Tensors
    weight: Weight
    tokens: TokenWeight | None = None


@dataclass(frozen=True)
class MergedAdapter:
    """One adapter as exports hold it.

    Args:
        tensors: the tuner's tensors after `Tuner.effective`, float32, on the CPU.
        options: the tuner's options, with the rank or width that `tensors` have.
    """

    tensors: Tensors
    options: dict[str, Any]


class Tuner(ABC):
    """A kind of parameter-efficient fine-tuning, e.g. LoRA. It knows the backbone's modules and nothing of methods.

    A tuner that adds a trained vector to the last layer's output::

        @register_tuner
        class Shift(Tuner):
            name = "shift"

            def init(self, backbone, tasks, generator):
                return {"shift": torch.zeros(backbone.hidden_size)}

            def act(self, backbone, mix, plan):
                last = backbone.architecture.modules("feedforward_output", backbone.blocks - 1)[0]
                weights = [torch.as_tensor(part.weight) for part in mix]  # numbers, or one per row
                plan.outputs[last].append(
                    lambda x, y: y + sum(per_row(w, y) * part.tensors["shift"] for w, part in zip(weights, mix))
                )

    `init` and `act` are required. The methods from `merge` on serve exports and imports. A tuner overrides those that
    it supports; the defaults refuse, or leave the tuner out of the export.
    """

    name: ClassVar[str]
    Options: ClassVar[type[TunerOptions]] = TunerOptions
    trains_backbone: ClassVar[bool] = False
    """Whether a part holds the backbone's own weights (full fine-tuning), which must then be kept in float32."""

    soft_prompt: ClassVar[bool] = False
    """Whether a part is vectors among the text's embeddings, which a template may position."""

    module_tensors: ClassVar[tuple[str, ...]] = ()
    """Names of one target module's tensors, e.g. `lora_A.weight`; a tensor is called `<module>.<name>`."""

    example: ClassVar[Mapping[str, Any]] = {}
    """Options that suit a model a few dozen numbers wide, for tests and examples."""
    weighs_tokens: ClassVar[bool] = False
    """Whether every token may have a weight of its own in a mix (`TokenWeight`)."""
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Group → names of its tensors among `module_tensors`; a method may give each group a scope of its own."""

    def __init__(self, options: TunerOptions | None = None) -> None:
        self.options = options or self.Options()

    @property
    def rank(self) -> int | None:
        """The rank of the shared adapters; None: the tuner has none, or one for all silos."""
        return None

    @property
    def ranks(self) -> Mapping[str, int]:
        """The ranks of silos whose adapters have another rank than the tuner's, by silo; see `at_rank`."""
        return {}

    def at_rank(self, tensors: Tensors, rank: int) -> Tensors:
        """Return an adapter with the first `rank` of its directions; all of it where the tuner has no ranks.

        Args:
            tensors: all of an adapter's tensors, or those of one of its groups.
            rank: at most the adapter's.
        """
        return tensors

    def options_of(self, tensors: Tensors) -> dict[str, Any]:
        """Return the options with which an adapter is exported, with the rank or width that its tensors have."""
        return self.options.model_dump(mode="json")

    @abstractmethod
    def init(self, backbone: Backbone, tasks: Iterable[Task], generator: torch.Generator) -> Tensors:
        """Create a part's tensors before training: float32, on the CPU."""

    def select(self, tensors: Tensors) -> Tensors:
        """Return those tensors of an initial adapter (configuration key `start`) that a part of this tuner starts with.

        A part for which there are none starts as `init` makes it.
        """
        return tensors

    @abstractmethod
    def act(self, backbone: Backbone, mix: Sequence[WeightedTensors], plan: ForwardPlan) -> None:
        """Write the effect of a mix of parts into `plan`. Parts of weight 0 are absent from `mix`.

        It is called for every batch, or once if the tuner declares `plan_holds`.
        """

    def act_on_segments(
        self, backbone: Backbone, mix: Sequence[WeightedTensors], segments: Segments, plan: ForwardPlan
    ) -> bool:
        """Act as `act` does, for a cohort: rows of several silos are concatenated, one segment per silo.

        Tensors in `mix` have shape (segments, …), and weights are numbers; `segments` says which rows belong to which
        silo.

        Returns:
            False if the tuner does not support it; nothing was written then, and `act` runs once per segment.
        """
        return False

    def reparametrize(self, tensors: Tensors) -> Tensors:
        """Compute the tensors that act on the backbone from the trained ones, e.g. P-tuning's prompt from its network.

        An exported part has these tensors. `act` accepts both forms; calling this once per batch saves work if the
        batch runs in micro-batches.
        """
        return tensors

    def effective(self, backbone: Backbone, tensors: Tensors) -> Tensors:
        """Compute the tensors that act on this backbone, for tuners that read its weights; else `reparametrize`.

        It is called where `reparametrize` would be, and `act` accepts its result, too.
        """
        return self.reparametrize(tensors)

    @property
    def starts_in_weights(self) -> bool:
        """Whether a part starts as a component of the backbone's weights, which is subtracted (PiSSA)."""
        return False

    def rate_factor(self, name: str) -> float:
        """Return the factor of the learning rate for a tensor of this name (LoRA+)."""
        return 1.0

    @property
    def draws(self) -> bool:
        """Whether a training forward draws random numbers, as dropout does."""
        return False

    @property
    def plan_holds(self) -> bool:
        """Whether `act` and `effective` compute nothing: one plan, which reads the tensors, then serves all batches."""
        return False

    @property
    def virtual_tokens(self) -> int:
        """The number of positions that the tuner's virtual tokens take before the text."""
        return 0

    def mixes_rows(self, backbone: Backbone) -> bool:
        """Return whether rows of one forward may have different mixes on this backbone."""
        return backbone.known_architecture is None or backbone.known_architecture.allows_row_weights

    def merge(self, mix: Sequence[WeightedTensors]) -> MergedAdapter:
        """Express a mix of several parts as one adapter that computes the same.

        Args:
            mix: parts as `MergedAdapter.tensors`, with numbers as weights.
        """
        raise InputError(f"export: several adapters of tuner={self.name} cannot be merged into one")

    def weight_delta(self, adapter: MergedAdapter, module: str, layer: nn.Module) -> Tensors:
        """Compute the change of one target module, for folding an adapter into the backbone's weights.

        `layer` is the target module with its pretrained weights.

        Returns:
            Changes in float64 by parameter name: `weight` of shape (out, in) on every backbone, `bias` of shape (out,).
        """
        raise InputError(f"export: tuner={self.name} cannot be folded into weights")

    def peft_config(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> dict[str, Any] | None:
        """Return the fields of peft's `adapter_config.json` that are particular to this tuner, with `peft_type`.

        `task_type` is peft's word for the base model's kind, e.g. `SEQ_2_SEQ_LM`.

        Returns:
            The fields; None if peft has no such tuner.
        """
        return None

    def peft_tensors(self, backbone: Backbone, adapter: MergedAdapter, task_type: str) -> Tensors:
        """Rename an adapter's tensors as peft saves them; arguments as `peft_config`, which is called before."""
        model = backbone.model
        inside = "" if model.base_model is model else f"{model.base_model_prefix}."
        return {f"base_model.model.{inside}{name}": tensor for name, tensor in adapter.tensors.items()}

    def native_config(self, adapter: MergedAdapter) -> dict[str, Any] | None:
        """Fields of `silotune_adapter.json`, the layout for tuners that peft does not have (docs/export.md).

        Returns:
            `computes`, the formula of a target module's output y, and numbers such as a width; None if the tuner
            has no such layout. The tensors are those of `module_tensors`.
        """
        return None

    def read_initial(self, source: str, backbone: Backbone) -> Tensors:
        """Read the tensors with which all adapters of a run start (configuration key `start`)."""
        raise InputError(f"start: {source} cannot be read for tuner={self.name}")

    def pack_initial(self, tensors: Tensors) -> bytes:
        """Serialize tensors so that `read_initial` reads them from a file."""
        raise InputError(f"start: tuner={self.name} has no file format for it")

    @classmethod
    def implements(cls, method: str) -> bool:
        """Whether the tuner overrides an optional method, e.g. `implements("weight_delta")`."""
        return getattr(cls, method) is not getattr(Tuner, method)

    def target_modules(self, tensors: Tensors) -> list[str]:
        """List the modules after which tensors are named, in the tensors' order."""
        endings = tuple(f".{name}" for name in self.module_tensors)
        modules = (name.removesuffix(ending) for name in tensors for ending in endings if name.endswith(ending))
        return list(dict.fromkeys(modules))


def per_row(weight: Weight, like: Tensor) -> Weight:
    """Return a weight of a mix ready to multiply `like`, shape (rows, tokens, …), with its type and device.

    A weight of shape (rows,) is reshaped. Shapes () (a learned number for all rows) and (rows, tokens, 1) (one weight
    per token) already fit, and a plain number is returned as it is.
    """
    if not isinstance(weight, Tensor):
        return weight
    if weight.dim() in (0, like.dim()):
        return weight.to(like.device, like.dtype)
    if like.dim() < 3 or len(like) != len(weight):
        raise InputError(
            f"mix: weights differ by row ({len(weight)} rows), but a module's output of shape {tuple(like.shape)} "
            "does not; on this backbone every mix needs its own forward"
        )
    return weight.to(like.device, like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


def scalar_weights(mix: Sequence[WeightedTensors]) -> list[float] | None:
    """Return the weights if all are numbers, None if one is a tensor or differs by token."""
    numbers = [part.weight for part in mix if part.tokens is None and not isinstance(part.weight, Tensor)]
    return numbers if len(numbers) == len(mix) else None


def weighted_sum(mix: Sequence[WeightedTensors], names: Iterable[str] | None = None) -> Tensors:
    """Compute `Σ weight · tensor` for each name; all tensors of the parts by default."""
    return {
        name: torch.stack([part.weight * part.tensors[name] for part in mix]).sum(0) for name in names or mix[0].tensors
    }
