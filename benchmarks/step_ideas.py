"""What ideas for a faster local step on a CPU would gain, beside the step as it is: one block of MiniLM, one thread.

    python -m benchmarks step-ideas [--tokens 1800] [--repeats 9]

The weights are random and frozen, the products in bf16; a gradient runs back to the block's input, as through a frozen
block above an adapter. Each pair runs in turn, and its ratio is time as it is / time with the idea (above 1: faster).

- residual: the residual stream in bf16 instead of float32. `residual_error` is the relative error of the states after
  six blocks against float32 throughout, with either stream.
- fused_gelu: oneDNN's GELU fused into the product before it. It has no gradient, because the product's result is not
  kept: for blocks below the lowest adapter and for scoring.
- int8: the product with weights and inputs in 8 bits (one scale per output, and one for all inputs, which are unsigned:
  a CPU with VNNI has no fast product of signed ones), quantizing the inputs included; a forward alone. `int8_error` is
  its relative error against the product in bf16.
- first_token: only the first token's queries, products and norms in the last block, for a head that reads it alone;
  `first_token_step` is the ratio of a forward and backward pass of six blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.alternating import alternate, ratio

HIDDEN, INNER, HEADS, BLOCKS, ROW = 384, 1536, 12, 6, 60
"""The shape of all-MiniLM-L6-v2, and the tokens of a row."""


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--tokens", type=int, default=1800, help="tokens of a micro-batch, in rows of 60")
    parser.add_argument("--repeats", type=int, default=9)


def measure(tokens: int = 1800, repeats: int = 9) -> dict[str, Any]:
    """Per idea the ratio of times; and the error of a residual stream in bf16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        blocks = [Block() for _ in range(BLOCKS)]
        states = torch.randn(tokens // ROW, ROW, HIDDEN)
        return {
            "residual": _compared(lambda: _step(blocks, states), lambda: _step(blocks, states.bfloat16()), repeats),
            "residual_error": _errors(blocks, states),
            "fused_gelu": _compared(*_gelu(blocks[0], states), repeats),
            "int8": _compared(*(int8 := _int8(blocks[0], states)), repeats),
            "int8_error": _relative(*(work() for work in int8)),
            "first_token_step": (
                comparison := _compared(lambda: _step(blocks, states), lambda: _step(blocks, states, True), repeats)
            ),
            "ratio": comparison["ratio"],
        }
    finally:
        torch.set_num_threads(threads)


class Block:
    """A frozen block of BERT: attention and feed-forward, each with a residual connection and a norm after it."""

    def __init__(self) -> None:
        def weight(outputs: int, inputs: int) -> Tensor:
            return (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16()

        self.query, self.key, self.value, self.out = (weight(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = weight(INNER, HIDDEN), weight(HIDDEN, INNER)

    def forward(self, states: Tensor, first: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the states after the block, in the dtype of those before; `first`: of the first token alone."""

        def product(inputs: Tensor, weight: Tensor) -> Tensor:
            return functional.linear(inputs.to(dtype), weight.to(dtype))

        def heads(inputs: Tensor) -> Tensor:
            return inputs.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        asking = states[:, :1] if first else states
        key, value = heads(product(states, self.key)), heads(product(states, self.value))
        scores = heads(product(asking, self.query)) @ key.transpose(-1, -2) * (HIDDEN // HEADS) ** -0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        after = _norm(asking + product(mixed, self.out).to(states.dtype))
        inner = functional.gelu(product(after, self.up))
        return _norm(after + product(inner, self.down).to(states.dtype))


def _norm(states: Tensor) -> Tensor:
    """Normalize each token; PyTorch adds up in float32 whatever the dtype of the states."""
    return functional.layer_norm(states, (HIDDEN,))


def _step(blocks: list[Block], states: Tensor, first: bool = False) -> Tensor:
    """A forward pass and the gradient at its input; with `first`, the last block has one token a row."""
    inputs = states.clone().requires_grad_()
    outputs = inputs
    for number, block in enumerate(blocks):
        outputs = block.forward(outputs, first and number == len(blocks) - 1)
    outputs[:, 0].float().square().sum().backward()
    assert inputs.grad is not None, "a gradient reaches the input"
    return inputs.grad


def _errors(blocks: list[Block], states: Tensor) -> dict[str, float]:
    """Relative errors of the last states: products in bf16, with the residual stream in float32 and in bf16."""

    def after(states: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        for block in blocks:
            states = block.forward(states, dtype=dtype)
        return states.double()

    with torch.no_grad():
        exact = after(states, torch.float32)
        results = {"float32": after(states), "bf16": after(states.bfloat16())}
    return {name: _relative(exact, values) for name, values in results.items()}


def _relative(exact: Tensor, value: Tensor) -> float:
    return round(float((value.double() - exact.double()).norm() / exact.double().norm()), 5)


def _gelu(block: Block, states: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The product before GELU and GELU, as they are and fused."""
    inputs = states.bfloat16().flatten(0, 1)

    def fused() -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, block.up, None, "gelu", [None], "none")

    def plain() -> Tensor:
        return functional.gelu(functional.linear(inputs, block.up))

    return plain, fused


def _int8(block: Block, states: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The same product in bf16, and in 8 bits with one scale per tensor for inputs and per output for weights."""
    inputs = states.bfloat16().flatten(0, 1)
    scales = block.up.float().abs().amax(1) / 127
    weight = (block.up.float() / scales[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, list(inputs.shape))
    zeros = torch.zeros(INNER, dtype=torch.int64)

    def int8() -> Tensor:
        wide = inputs.float()
        scale = wide.abs().amax() / 127
        codes = ((wide / scale).round() + 128).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            codes, float(scale), 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )

    return lambda: functional.linear(inputs, block.up), int8


def _compared(plain: Callable[[], object], idea: Callable[[], object], repeats: int) -> dict[str, float]:
    seconds = alternate({"plain": plain, "idea": idea}, repeats, warm_up=2)
    return ratio(seconds["plain"], seconds["idea"])
