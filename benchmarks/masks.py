"""What a sum under masks costs: milliseconds of each side, and bytes of each silo, beside Flower's SecAgg+.

`python -m benchmarks masks --silos 20 --numbers 300000` sums random changes in one process, without a network.
Flower's SecAgg+ needs its older interface, so one of its silos is timed by its own functions: keys, shares and masks of
a round, at the same threshold, among all pairs, in numbers of 32 bits, which it sends as 64.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from silotune.communication.masks.agreement import FIRST, Agreement
from silotune.communication.masks.coordinator import made_identities, masked_sum
from silotune.communication.masks.fixed_point import summand
from silotune.communication.masks.silo import STAGES, SiloRound, StageAnswer, Texts


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--numbers", type=int, default=300_000)
    parser.add_argument("--dropped", type=int, default=0, help="silos that drop out before they send their summand")


def measure(silos: int = 20, numbers: int = 300_000, dropped: int = 0) -> dict[str, Any]:
    """Return times and bytes; `ratio` is the bytes that a silo sends over those of its update in float32."""
    ours = _ours(silos, numbers, dropped)
    ratio = ours.pop("ratio")
    return {"silos": silos, "numbers": numbers, "dropped": dropped, **ours, **_flower(silos, numbers), "ratio": ratio}


def _ours(silos: int, numbers: int, dropped: int) -> dict[str, Any]:
    names = [f"s{number:02d}" for number in range(silos)]
    identities, peers = made_identities(names)
    change = torch.randn(numbers)
    began = time.perf_counter()
    summands = {name: summand([("x", change)], 100, 0, name, 1) for name in names}
    rounding = (time.perf_counter() - began) / silos
    agreement = Agreement("", 1, "", "", "", FIRST, numbers + 1, names, peers.fingerprint, peers.threshold)
    here = {
        name: SiloRound(name, identities[name], peers, agreement, summands[name], lambda *_: None) for name in names
    }
    seconds: dict[str, float] = defaultdict(float)

    def ask(stage: str, messages: Mapping[str, Texts]) -> Mapping[str, StageAnswer]:
        senders = names[dropped:] if stage in STAGES[STAGES.index("mask") :] else names
        began = time.perf_counter()
        answers = {name: here[name].answer(stage, texts) for name, texts in messages.items() if name in senders}
        seconds[stage] += (time.perf_counter() - began) / len(answers)
        return answers

    began = time.perf_counter()
    result = masked_sum(agreement, peers.fewest, ask)
    whole = time.perf_counter() - began
    assert torch.equal(result.total, torch.stack([summands[name] for name in result.survivors]).sum(0)), "bit for bit"
    of_silos = sum(seconds[stage] * (silos - dropped * (stage not in ("offer", "share"))) for stage in STAGES)
    upload = max(len(data) for data in result.sent.values())
    report: dict[str, Any] = {"silo: rounding, ms": round(1e3 * rounding, 1)}
    report |= {f"silo: {stage}, ms": round(1e3 * seconds[stage], 1) for stage in STAGES}
    report["silo: all, ms"] = round(1e3 * (sum(seconds.values()) + rounding), 1)
    report["coordinator, ms"] = round(1e3 * (whole - of_silos), 1)
    report["silo sends, bytes"] = upload
    report["silo receives beside the broadcast, bytes"] = max(result.received.values())
    return report | {"ratio": round(upload / (4 * numbers), 3)}


def _flower(silos: int, numbers: int) -> dict[str, Any]:
    """Time the same work with the functions of Flower's SecAgg+, for one silo; its coordinator's part is left out."""
    try:
        from flwr.common.secure_aggregation.crypto.shamir import create_shares
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
        from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
        from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes
    except ImportError as error:
        return {"SecAgg+": f"does not run ({error})"}
    threshold, began = 2 * silos // 3 + 1, time.perf_counter()
    pairs = [generate_key_pairs() for _ in range(silos)]
    keys = (time.perf_counter() - began) / silos
    began = time.perf_counter()
    create_shares(secrets.token_bytes(32), threshold, silos)
    create_shares(private_key_to_bytes(pairs[0][0]), threshold, silos)
    shares = time.perf_counter() - began
    vector, began = np.zeros(numbers, np.int64), time.perf_counter()
    for _, public in pairs:
        vector += pseudo_rand_gen(generate_shared_key(pairs[0][0], public), 1 << 32, [(numbers,)])[0]
    masks = time.perf_counter() - began
    return {
        "SecAgg+ silo: all, ms": round(1e3 * (2 * keys + shares + masks), 1),
        "SecAgg+ silo sends, bytes": 8 * numbers,
    }
