"""Operations and memory: against formulas by hand, and against PyTorch's counter around real training."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory_check import measure_step
from silotune.cost import estimate
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.training.local_trainer import LocalTrainer
from silotune.training.silo import Silo

L, D, F, T, C, B = 2, 48, 80, 20, 2, 8  # blocks, width, feed-forward width, tokens, classes, rows of a batch
VOCABULARY, POSITIONS = 100, 64
FORWARD = L * (8 * T * D * D + 4 * T * D * F + 4 * T * T * D)
MLP = 2 * D * D + 2 * D * C


@pytest.fixture
def bert(config_file):
    path = config_file(
        model_type="bert",
        vocab_size=VOCABULARY,
        hidden_size=D,
        num_hidden_layers=L,
        num_attention_heads=4,
        intermediate_size=F,
        max_position_embeddings=POSITIONS,
    )
    return f"backbone={path}"


def counted(method, bert, *words):
    cost = estimate(method, [bert, f"tokens={T}", f"train.batch_size={B}", *words])
    return cost.flops_per_sample_train, cost.flops_per_sample_predict


def bottleneck_views(r, adapters):
    """One view's forward, and its way back: everything behind the first adapter, where nothing lies below."""
    one = 4 * T * D * r
    forward = FORWARD + L * 2 * adapters * one
    above = (L - 1) * (8 * T * D * D + 8 * T * T * D) + L * 4 * T * D * F
    first = adapters * (one + one // 2)  # the first block's first adapters: no gradient to their input
    return forward, above + first + (2 * L - 1) * adapters * 2 * one


def test_full_fine_tuning_goes_back_at_twice_the_cost(bert):
    forward = FORWARD + MLP
    assert counted("fedavg-full", bert) == (3 * forward, forward)


def test_lora_goes_back_through_activations_and_its_own_matrices(bert):
    r = 3
    site = 4 * T * D * r
    forward = FORWARD + L * 2 * site + 2 * D * C
    blocks = (L - 1) * (8 * T * D * D + 4 * T * D * F + 8 * T * T * D + 2 * 2 * site)
    # in the first block nothing trainable lies below query, key and value, and the keys themselves are constant
    first = 2 * T * D * D + 4 * T * D * F + 6 * T * T * D + 2 * (site + site // 2)
    back = blocks + first + 2 * 2 * D * C
    words = ("tuner=lora", f"tuner.r={r}", "head=linear", "method.adapters=1")
    assert counted("fedavg", bert, *words) == (forward + back, forward)


@pytest.mark.parametrize(
    ("method", "embed", "embedding"), [("feddpa-f", "global", 1), ("feddpa-t", "local", 1), ("feddpa-t", "base", 0)]
)
def test_dynamic_weighting_costs_the_forward_that_embeds_the_text(bert, method, embed, embedding):
    """Beside the forward under both LoRAs and the head: another one, under one LoRA or none, without head."""
    sites = L * 2 * 4 * T * D * 8  # of one LoRA of rank 8
    fixed = FORWARD + 2 * sites + 2 * D * C
    words = ("tuner=lora", "head=linear", f"method.embed={embed}")
    train, predict = counted(method, bert, *words)
    assert counted(method, bert, *words, "method.weighting=fixed") == (train, fixed)
    assert predict == fixed + FORWARD + embedding * sites


@pytest.mark.parametrize("adapters", [1, 2])
def test_bottleneck_adapters(bert, adapters):
    forward, back = bottleneck_views(5, adapters)
    words = ("tuner.r=5", f"method.adapters={adapters}")
    assert counted("fedavg", bert, *words) == (forward + back + 3 * MLP, forward + MLP)


def test_fedmcp_is_three_trained_views_a_constant_one_two_heads_and_cka(bert):
    r = 5
    (both, both_back), (alone, alone_back) = bottleneck_views(r, 2), bottleneck_views(r, 1)
    # each HSIC is one product xᵀy (2·D²·n); of CKA(X, Y) all three go back to both sides, of CKA(X, Z) Z is constant
    cka = (6 + 2 + 2 + 2 + 1 + 2) * 2 * D * D
    # the first block's attention, which no adapter has reached yet, is computed once for all four views
    views = both + both_back + 2 * (alone + alone_back) + alone - 3 * (8 * T * D * D + 4 * T * T * D)
    assert counted("fedmcp", bert, f"tuner.r={r}") == (views + 2 * 3 * MLP + cka, both + MLP)
    without = counted("fedmcp", bert, f"tuner.r={r}", "method.mu=0", "method.gamma=0")
    assert without == (both + both_back + 3 * MLP, both + MLP)


def test_a_prompt_makes_the_text_longer(bert):
    tokens = T + 7
    forward = L * (8 * tokens * D * D + 4 * tokens * D * F + 4 * tokens * tokens * D) + 2 * D * C
    back = L * (8 * tokens * D * D + 4 * tokens * D * F + 8 * tokens * tokens * D) + 2 * 2 * D * C
    words = ("tuner=prompt", "tuner.tokens=7", "head=linear", "method.adapters=1")
    assert counted("fedavg", bert, *words) == (forward + back, forward)


def test_llama_forward_by_hand(config_file):
    t, r = 16, 8
    sizes = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "vocab_size": VOCABULARY}
    backbone = config_file(model_type="llama", num_attention_heads=4, **sizes)
    setting = ("tuner=lora", f"tuner.r={r}", "head=lm", "method.adapters=1", f"tokens={t}")
    cost = estimate("fedavg", [f"backbone={backbone}", *setting])
    forward = L * (8 * t * D * D + 6 * t * D * F + 4 * t * t * D + 8 * t * D * r) + 2 * t * D * VOCABULARY
    assert cost.flops_per_sample_predict == forward


@pytest.mark.parametrize(("head", "decoded"), [("linear", 0), ("verbalizer", 2), ("lm", T)])
def test_t5s_decoder_runs_for_heads_over_the_vocabulary(config_file, head, decoded):
    path = config_file(
        model_type="t5",
        vocab_size=VOCABULARY,
        d_model=D,
        d_kv=12,
        d_ff=F,
        num_layers=L,
        num_decoder_layers=L,
        num_heads=4,
    )
    words = ("tuner=prompt", "tuner.tokens=3", "method.adapters=1", f"head={head}")
    encoded = T + 3
    encoder = L * (8 * encoded * D * D + 4 * encoded * D * F + 4 * encoded * encoded * D)
    self_attention = 8 * decoded * D * D + 4 * decoded * decoded * D
    cross = (
        4 * decoded * D * D + 4 * encoded * D * D + 4 * decoded * encoded * D
    )  # keys and values of the encoder's states
    decoder = L * (self_attention + cross + 4 * decoded * D * F) if decoded else 0
    scores = {"linear": 2 * D * C, "verbalizer": 2 * D * C, "lm": 2 * T * D * VOCABULARY}[head]
    assert counted("fedavg", f"backbone={path}", *words)[1] == encoder + decoder + scores


def silo_of(tokens, rows):
    """A silo whose texts are all equally long, so that nothing is padded."""
    task = Task("task", ("no", "yes"))
    ids = torch.randint(5, 60, (rows, tokens), generator=torch.Generator().manual_seed(1)).tolist()
    return Silo("s", {"task": TokenizedRows(task, ids, None, torch.arange(rows) % 2)}, {})


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedavg", ("tuner=lora", "method.adapters=2")),
        ("fedmcp", ("tuner=bottleneck",)),
        pytest.param("moon", ("tuner=bottleneck", "method.adapters=1"), marks=pytest.mark.long),
        ("fedrep", ("tuner=lora", "method.adapters=1")),  # two phases, each with constant parts
        pytest.param("ditto", ("tuner=bottleneck",), marks=pytest.mark.long),
        ("fedprox", ("tuner=prefix", "tuner.tokens=3", "tuner.reparametrise=8", "method.adapters=1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_real_round_does_the_counted_operations(method, words, tiny_federation, backbone_folder):
    training = tiny_federation(method, *words).context
    silo = silo_of(tokens=24, rows=16)  # two batches
    shared = training.initial.shared([silo])
    with FlopCounterMode(display=False) as counter:
        LocalTrainer(training).rounds([silo], shared, 1)[0]
    expected = [f"backbone={backbone_folder('bert')}", "tokens=24", "train.batch_size=8", *words]
    assert estimate(method, expected).flops_per_sample_train * 16 == counter.get_total_flops()


def test_peak_memory_is_the_sum_of_what_a_real_step_holds(tiny_federation, backbone_folder):
    words = ("tuner=lora", "method.adapters=1", "head=linear", "head.pooling=first")
    training = tiny_federation("fedavg", *words).context
    silo = silo_of(tokens=24, rows=8)
    shared = training.initial.shared([silo])
    private = training.state_of(silo).private
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        LocalTrainer(training).rounds([silo], shared, 1)[0]
    weights = {tensor.untyped_storage().data_ptr() for tensor in training.backbone.base.state_dict().values()}
    adapter = sum(tensor.numel() for tensor in shared["global"].values())
    head = sum(tensor.numel() for tensor in private["head"].values())
    leaves = {shape for part in (shared, private) for group in part.values() for shape in map(_shape, group.values())}
    activations = sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in saved.items()
        if pointer not in weights and not (tensor.is_leaf and tensor.requires_grad and _shape(tensor) in leaves)
    )
    backbone = sum(parameter.numel() for parameter in training.backbone.base.parameters())
    # values, gradients and Adam's two moments of what is trained, the received copy of what is shared
    by_hand = 4 * backbone + 4 * (5 * adapter + 4 * head) + activations
    setting = [f"backbone={backbone_folder('bert')}", "tokens=24", "train.batch_size=8", *words]
    cost = estimate("fedavg", setting)
    assert cost.peak_memory_mib * 2**20 == pytest.approx(by_hand, rel=0.01)
    plain = estimate("fedavg", [*setting, "train.optimizer=sgd"])
    assert (cost.peak_memory_mib - plain.peak_memory_mib) * 2**20 == pytest.approx(4 * 2 * (adapter + head))


def test_peak_memory_of_a_language_model_counts_its_words(model_folder, monkeypatch):
    """Of weights and live tensors of a real step; what it adds grows with the words that are scored at a time."""
    folder = str(model_folder("llama"))
    words = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    found = {}
    for at_once in (128, 384):  # of 8 × 48 tokens of answers
        for module in ("silotune.models.heads.lm", "silotune.cost.estimate"):
            monkeypatch.setattr(import_module(module), "SCORES_AT_ONCE", at_once * words)
        found[at_once] = measure_step("fedit", "lora", folder, "cpu", 8, 96, "lm")
        assert 0.8 < found[at_once]["ratio"] < 1.2, found
    growth = [found[384][key] - found[128][key] for key in ("predicted_mib", "measured_mib")]
    assert growth[0] == pytest.approx(3 * 4 * 256 * words / 2**20, abs=0.01)
    assert growth[1] == pytest.approx(growth[0], rel=0.1)


def _shape(tensor):
    return tuple(tensor.shape)
