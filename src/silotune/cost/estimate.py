"""Estimate parameters, messages and FLOPs of a method on a backbone's shape (`silotune cost`)."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from silotune.communication.messages import Expected
from silotune.communication.uplink import NO_UPLINK, UplinkPipeline, make_pipeline
from silotune.config import Config
from silotune.core.randomness import generator
from silotune.core.tensors import State, count_parameters
from silotune.cost.backbone_shapes import LANGUAGE_MODEL_HEADS, Shape, VocabularyHeadStub, load_shape
from silotune.cost.flops import DECODER_TOKENS, WorkCount, count_work, shape_batch
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.methods import METHODS, Method
from silotune.methods.parts import Part, Scope, names_with
from silotune.models.backbone.device import resolve_device
from silotune.models.backbone.quantization import resolve_quantization, weight_bytes
from silotune.models.heads import Head
from silotune.models.heads.lm import SCORES_AT_ONCE
from silotune.models.tuners import tuner_of
from silotune.runs.build.resolve import make_method, read_config
from silotune.runs.build.validation import check_length
from silotune.training.initial_parts import at_rank

_VALUE_BYTES = {"bf16": 2, "fp16": 2}
"""Precision → bytes of a weight that is not quantized; others have 4."""

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Part → tensor → shape."""


SILO, ROWS = "silo", 1000
"""Silo name and row count in the counted message; a longer name makes the header longer."""

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The safetensors format's names of dtypes, in the order in which it writes tensors; within a dtype, by name."""

OPTIONS = {"silos": 10, "tokens": 128, "labels": 2}
"""Options of the cost command with their defaults: silos per round, tokens per text, labels of the task."""


@dataclass(frozen=True)
class PartCost:
    """One part of a silo's state."""

    part: str
    module: str
    scope: str
    parameters: int


@dataclass(frozen=True)
class Cost:
    """Costs of one silo, of rank `tuner.r`. Percentages are of full fine-tuning of the bare model with its head.

    Args:
        silos: silos per round.
        tokens: tokens per text.
        full_parameters: parameters of the bare model with its head and with all that parts add to it, as the papers
            count.
        bare_parameters: parameters of the bare model with its head.
        trainable_parameters: parameters of the parts that are trained, heads included.
        sent_parameters: parameters of the shared parts that leave a silo.
        adapter_parameters: parameters of the tuners' trained parts.
        head_parameters: parameters of heads and other trained parts.
        trainable_percent: `trainable_parameters` of `bare_parameters`.
        sent_percent: `sent_parameters` of `bare_parameters`.
        assembled_percent: `trainable_parameters` of `full_parameters`, as some papers count.
        message_bytes: bytes of one silo's serialized update, in the kind of round where it is largest; `message_mib`
            in 2²⁰ bytes.
        bytes_up: bytes of all silos' updates in one round, with the ranks of `tuner.ranks`.
        bytes_down: bytes of the broadcasts to all silos in one round, in the same way.
        flops_per_sample_train: one pass over a text through the phases of the kind of round that computes most; see
            `silotune.cost.flops`.
        flops_per_sample_predict: one forward of the personalized model, and the one that weights the text (FedDPA).
        quantization: how the backbone's linear layers are stored.
        backbone_mib: the backbone's weights, with its language-model head if the head reads it: quantized layers with
            their scales, others in `precision` (float32 for `auto`).
        peak_memory_mib: estimate for one training step of `train.batch_size` texts in float32: backbone (quantized
            where it is), parts, received copies, gradients, optimizer state and the activations kept for the backward
            pass; with `head=lm` also its scores of words, as if every token were of an answer.
    """

    method: str
    tuner: str
    head: str
    backbone: str
    silos: int
    tokens: int
    full_parameters: int
    bare_parameters: int
    trainable_parameters: int
    sent_parameters: int
    adapter_parameters: int
    head_parameters: int
    trainable_percent: float
    sent_percent: float
    assembled_percent: float
    message_bytes: int
    message_mib: float
    bytes_up: int
    bytes_down: int
    flops_per_sample_train: int
    flops_per_sample_predict: int
    quantization: str
    backbone_mib: float
    peak_memory_mib: float
    parts: tuple[PartCost, ...]


def estimate(method: str, words: Sequence[str] = (), *, count_flops: bool = True) -> Cost:
    """Estimate the cost of a method on the demo's setting; words are `key=value`, and options of `OPTIONS`.

    Counting operations and memory takes a second or more; without, both are 0.
    """
    options, rest = _split(words)
    config = read_config("demo", [f"method={method}", *rest])
    shape = load_shape(config.backbone.name)
    instance = _method(config, shape)
    if count_flops:
        check_length("tokens", options["tokens"], instance.setting.tuner, shape.backbone)
    if instance.setting.head.task_kind not in ("classification", "generation"):
        raise InputError(f"cost: head={config.head.name} is not counted; head=linear computes nearly the same")
    task = Task("task", tuple(f"label {number}" for number in range(options["labels"])))
    with shape.mode:
        state: State = {
            name: part.module.init(shape.backbone, [task], generator(config.seed, "init", name))
            for name, part in instance.parts().items()
        }
        done, tokens = WorkCount(0, 0, 0, 0), options["tokens"]
        if count_flops:
            decode = {"verbalizer": DECODER_TOKENS, "lm": tokens}.get(config.head.name, 0)
            batch = shape_batch(shape.backbone, task, config.train.batch_size, tokens, decode)
            done = count_work(shape.backbone, instance, state, batch, config.train, config.rounds)
    return _cost(config, shape, instance, state, done, options)


def _split(words: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Separate the cost command's options from the configuration's words."""
    options, rest = dict(OPTIONS), []
    for word in words:
        key, _, value = word.partition("=")
        if key not in OPTIONS:
            rest.append(word)
            continue
        least = 2 if key == "labels" else 1
        if not (value.isascii() and value.isdecimal()) or int(value) < least:
            raise InputError(f"{key}: must be a whole number of at least {least} (got {value!r})")
        options[key] = int(value)
    return options, rest


def _method(config: Config, shape: Shape) -> Method:
    """Make the configured method; a stub without tokenizer replaces heads over the vocabulary."""
    method = make_method(config)
    name = config.head.name
    if method.setting.head.reads_reference:
        raise InputError(f"cost: head={name} is not counted; head=lm counts one of a pair's two answers")
    if name not in LANGUAGE_MODEL_HEADS:
        return method
    if not shape.language_model:
        raise InputError(f"head: {config.backbone.name} has no language model; allowed: mlp, linear")
    setting = dataclasses.replace(method.setting, head=VocabularyHeadStub(shape.backbone, name))
    return METHODS[method.name](setting, method.options)


def _backbone_bytes(shape: Shape, head: str, quantization: str, value_bytes: int) -> int:
    """Return the bytes of the backbone's weights as a run loads them; output embeddings are never quantized."""
    on_top = shape.language_model - shape.parameters if head in LANGUAGE_MODEL_HEADS else 0
    return weight_bytes(shape.backbone.base, quantization, value_bytes) + value_bytes * max(on_top, 0)


def _message_sizes(config: Config, method: Method, state: State) -> tuple[int, int]:
    """Return the bytes of a silo's largest update, of all kinds of rounds, and of its broadcast."""
    shapes = {name: {key: tuple(tensor.shape) for key, tensor in tensors.items()} for name, tensors in state.items()}
    pipeline = make_pipeline(config.uplink, config.seed)
    leaving = [method.sends(number) for number in method.kinds_of_rounds(config.rounds)]
    sizes = [message_sizes(shapes, method.parts(), pipeline, names) for names in leaving]
    up, down = max(up for up, _ in sizes), max(down for _, down in sizes)
    if config.aggregation.secure:  # without what silos tell each other for the masks, a few kilobytes
        counts = [sum(prod(shape) for name in names for shape in shapes[name].values()) for names in leaving]
        up = 8 * (1 + max(counts)) if up else 0
    return up, down


def message_sizes(
    shapes: Shapes,
    parts: Mapping[str, Part],
    uplink: UplinkPipeline = NO_UPLINK,
    leaving: Collection[str] | None = None,
) -> tuple[int, int]:
    """Compute the bytes of one silo's update and of the coordinator's broadcast; both 0 where no part is shared.

    An update holds the `leaving` parts, or all shared ones, and goes through the steps of `uplink`.
    """
    shared = names_with(parts, Scope.SHARED)
    if not any(prod(shape) for name in shared for shape in shapes[name].values()):
        return 0, 0
    update, fields = _expected(shapes, shared if leaving is None else leaving), {"round": 1, "silo": SILO, "rows": ROWS}
    if uplink.names:
        update, fields = uplink.expected(update), fields | {"uplink": uplink.label}
    return _size(update, fields), _size(_expected(shapes, shared), {"round": 1})


def _expected(shapes: Shapes, parts: Collection[str]) -> Expected:
    return Expected({f"{part}/{name}": shape for part in parts for name, shape in shapes[part].items()})


def _size(expected: Expected, fields: Mapping[str, object]) -> int:
    """Compute the bytes of a safetensors file: header length, header padded to 8 bytes, tensors."""
    header: dict[str, object] = {"__metadata__": {"silotune": json.dumps(dict(fields), sort_keys=True)}}
    end = 0
    order = list(_DTYPES)
    for name in sorted(expected.shapes, key=lambda name: (order.index(expected.dtype(name)), name)):
        start, end = end, end + expected.dtype(name).itemsize * prod(expected.shapes[name])
        dtype = _DTYPES[expected.dtype(name)]
        header[name] = {"dtype": dtype, "shape": list(expected.shapes[name]), "data_offsets": [start, end]}
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8 + end


def _traffic(
    config: Config, shape: Shape, method: Method, state: State, silos: int, sizes: tuple[int, int]
) -> tuple[int, int]:
    """Return the bytes of all silos' updates and of all broadcasts in one round; silos of `tuner.ranks` count as such.

    `sizes` are those of a silo that has the run's rank.
    """
    ranks = method.setting.tuner.ranks
    if len(ranks) > silos:
        raise InputError(f"silos: {silos} a round, but tuner.ranks names {len(ranks)}")
    up, down = ((silos - len(ranks)) * size for size in sizes)
    for rank, count in Counter(ranks.values()).items():
        with shape.mode:
            cut = at_rank(state, method.parts(), rank)
        rank_up, rank_down = _message_sizes(config, method, cut)
        up, down = up + count * rank_up, down + count * rank_down
    return up, down


def _cost(config: Config, shape: Shape, method: Method, state: State, work: WorkCount, options: dict[str, int]) -> Cost:
    parts = method.parts()
    sizes = {name: count_parameters(tensors) for name, tensors in state.items()}
    adapters = [name for name, part in parts.items() if tuner_of(part.module) is not None]
    heads = [name for name, part in parts.items() if isinstance(part.module, Head)]
    first_head = sizes[heads[0]] if heads else 0
    head = method.setting.head
    head_name = head.replaced if isinstance(head, VocabularyHeadStub) else head.name
    bare = shape.bare(head_name, first_head)
    backbone_names = {name for name, _ in shape.backbone.base.named_parameters()}
    # A part that replaces or shifts the backbone's own tensors (full, BitFit) adds none to the model.
    added = sum(sizes[name] for name in adapters if not backbone_names.issuperset(state[name]))
    trained = {name: size for name, size in sizes.items() if name in method.changes()}
    trainable = sum(trained.values())
    sent = sum(sizes[name] for name in method.sends())
    others = sum(size for name, size in trained.items() if name not in adapters)
    full = bare + added + others - first_head
    up, down = _message_sizes(config, method, state)
    bytes_up, bytes_down = _traffic(config, shape, method, state, options["silos"], (up, down))
    quantization = resolve_quantization(config.backbone.quantization, resolve_device(config.device))
    scores = 0
    if head_name == "lm":
        words = len(shape.backbone.word_embeddings)
        scores = min(max(SCORES_AT_ONCE, words), config.train.batch_size * options["tokens"] * words)
    score_memory = 3 * 4 * scores  # with their log-softmax and its gradient
    weights = _backbone_bytes(shape, head_name, quantization, 4)
    peak = weights + score_memory + work.training_state + work.saved if work.train else 0
    value_bytes = _VALUE_BYTES.get(config.precision.name, 4)
    return Cost(
        method=method.name,
        tuner=method.setting.tuner.name,
        head=head_name,
        backbone=config.backbone.name,
        silos=options["silos"],
        tokens=options["tokens"],
        full_parameters=full,
        bare_parameters=bare,
        trainable_parameters=trainable,
        sent_parameters=sent,
        adapter_parameters=trainable - others,
        head_parameters=others,
        trainable_percent=100 * trainable / bare,
        sent_percent=100 * sent / bare,
        assembled_percent=100 * trainable / full,
        message_bytes=up,
        message_mib=up / 2**20,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        flops_per_sample_train=work.train,
        flops_per_sample_predict=work.predict,
        quantization=quantization,
        backbone_mib=_backbone_bytes(shape, head_name, quantization, value_bytes) / 2**20,
        peak_memory_mib=peak / 2**20,
        parts=tuple(
            PartCost(name, head_name if name in heads else part.module.name, str(part.scope), sizes[name])
            for name, part in parts.items()
        ),
    )
