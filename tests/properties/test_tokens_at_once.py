"""`train.tokens_at_once`: no graph holds more tokens, and gradients are those of the whole batch, for every method.

The reference takes the same micro-batches in one graph, so that dropout draws the same numbers.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from silotune.core.randomness import Stream
from silotune.core.tensors import digest, flatten
from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.methods.ditto import Ditto
from silotune.methods.parts import Scope
from silotune.methods.step import mean_over_rows
from silotune.models.heads import HEADS
from silotune.runs.build.builder import build
from silotune.runs.build.model import BackboneRequirements
from silotune.runs.build.resolve import make_method
from silotune.training.phase_batches import check_rows, token_limit
from silotune.training.silo import SiloState
from silotune.training.step_gradients import StepGradients
from tests.support.device_rig import config_of, skip_refused
from tests.support.method_cases import KINDS_OF_METHODS
from tests.support.numeric_rig import parts_in_double
from tests.support.preferences import write_kinds

COMMON = (
    *("precision=fp32", "threads=1", "data.merge=false", "rounds=1", "per_method={}"),
    *("train.batch_size=8", "train.optimizer=sgd", "train.lr=0.1", "train.steps=1", "train.max_length=48"),
)
DROPOUT = ("tuner=lora", "tuner.dropout=0.3")
P_TUNING = ("tuner=p-tuning", "method.adapters=1")
ROWS_AT_LEAST = 2
"""Rows of the longest text for which a step's graph has room."""


class Tally:
    """Tokens of the graphs that are alive."""

    def __init__(self):
        self.alive = self.most = self.forwards = 0

    def add(self, tokens):
        self.alive, self.forwards = self.alive + tokens, self.forwards + 1
        self.most = max(self.most, self.alive)

    def remove(self, tokens):
        self.alive -= tokens


class Held:
    """A saved tensor; it dies with its graph."""

    def __init__(self, tensor):
        self.tensor = tensor


class Mark(torch.autograd.Function):
    """Changes nothing and saves its input in the graph."""

    @staticmethod
    def forward(ctx, states):
        ctx.save_for_backward(states)
        return states.view_as(states)

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors  # noqa: B018  (read as other operations read theirs)
        return gradient


@contextmanager
def counted(backbone):
    """Count the tokens of all living graphs of the backbone while the block runs, virtual ones included."""
    tally, base = Tally(), backbone.base
    stacks = [base.encoder, base.decoder] if base.config.is_encoder_decoder else [base]

    def after(module, args, kwargs, output):
        states = output.last_hidden_state
        if not (torch.is_grad_enabled() and states.requires_grad):
            return
        mask = kwargs.get("attention_mask")
        tokens = len(states) * max(states.shape[1], 0 if mask is None else mask.shape[1])

        def pack(tensor):
            held = Held(tensor)
            tally.add(tokens)
            weakref.finalize(held, tally.remove, tokens)
            return held

        with saved_tensors_hooks(pack, lambda held: held.tensor):
            output.last_hidden_state = Mark.apply(states)

    handles = [stack.register_forward_hook(after, with_kwargs=True) for stack in stacks]
    yield tally
    for handle in handles:
        handle.remove()
    assert tally.alive == 0


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_kinds(tmp_path_factory.mktemp("steps"), {"train": 11, "validation": 2, "test": 3})


@pytest.fixture
def make(data, tmp_path_factory, monkeypatch):
    """`make(method, head, *words)` → a federation of two silos in float64."""
    parts_in_double(monkeypatch)
    models = tmp_path_factory.getbasetemp() / "models of steps"

    def federation(method, head, *words, family=None, refused=False):
        config = config_of(method, head, [*COMMON, *words], data, models, family)
        try:
            made = build(config, BackboneRequirements.of(config, make_method(config)).load())
        except InputError as refusal:
            if refused:
                raise
            skip_refused(method, head, refusal)
        made.backbone.model.double()
        return made

    return federation


def least(context, silos):
    """The number of tokens that `ROWS_AT_LEAST` of the longest rows hold."""
    context.tokens_at_once = 2**40
    limits = [(token_limit(context, phase, [silo]), silo) for phase in context.phases for silo in silos]
    return max(
        ROWS_AT_LEAST * limit.views * (rows.longest + limit.beside)
        for limit, silo in limits
        for rows in silo.train.values()
    )


def trained(federation, together):
    """Rounds (two where anchors are remembered), final phases, server step; returns states and logged numbers."""
    context, trainer = federation.context, federation.trainer
    silos = [*federation.silos.values()]
    for silo in silos:
        silo.state = None
    shared, results = context.initial.shared(silos), []
    for number in (1, 2) if context.method.remembers else (1,):
        for group in [silos] if together else [[silo] for silo in silos]:
            found = trainer.rounds(group, shared, number)
            for silo, result in zip(group, found, strict=True):
                private = {n: result.state[n] for n, part in context.parts.items() if part.scope is Scope.PRIVATE}
                silo.state = SiloState(private, result.memory)
            results += found
        shared = {name: results[-1].state[name] for name in shared}
    results += trainer.finals(silos, shared, 3)
    if federation.server is not None:
        results.append(trainer.server_step(federation.server, shared, 3))
    tensors = [flatten(result.state) for result in results]
    unlike = {"seconds"}
    return tensors, [{n: v for n, v in result.metrics.items() if n not in unlike} for result in results]


def compare(federation, monkeypatch, *, together=False, more_than_bound=True):
    """Compare training under a bound with training whose graphs hold whole batches, over the same micro-batches."""
    silos = [*federation.silos.values(), *([federation.server] if federation.server else [])]
    bound = federation.context.tokens_at_once = least(federation.context, silos)
    check_rows(federation.context, silos)
    with counted(federation.backbone) as tally:
        tensors, numbers = trained(federation, together)
    assert tally.most <= bound
    with monkeypatch.context() as patch, counted(federation.backbone) as whole:
        patch.setattr(StepGradients, "add", StepGradients.whole_batch)
        expected, expected_numbers = trained(federation, together)
    if more_than_bound and federation.context.phases:
        assert whole.most > bound
    torch.testing.assert_close(tensors, expected, rtol=0, atol=1e-10)
    for found, own in zip(numbers, expected_numbers, strict=True):
        assert found == pytest.approx(own, abs=1e-9)


MORE = {
    "gradient checkpointing": ("fedmcp", "mlp", *DROPOUT, "train.gradient_checkpointing=true"),
    "gradient checkpointing, one pass": ("feddpa-t", "lm", *DROPOUT, "train.gradient_checkpointing=true"),
    "full fine-tuning in several views": ("fedmcp", "mlp", "tuner=full"),
    "tied vocabulary that is trained": ("fedmcp", "verbalizer", "tuner=full"),
    "p-tuning and a contrast": ("moon", "verbalizer", *P_TUNING),
    "dropout of the backbone": ("fedmcp", "mlp", "train.dropout=own"),
    "one rate of dropout, checkpointed": ("moon", "mlp", "train.dropout=0.3", "train.gradient_checkpointing=true"),
    "dropout beside vectors that are folded": ("moon", "verbalizer", *P_TUNING, "train.dropout=0.3"),
    "class weights and smoothing": ("fedmcp", "mlp", "train.class_weights=balanced", "train.label_smoothing=0.2"),
    "smoothed words": ("feddpa-t", "lm", "train.label_smoothing=0.2"),
    "prefixes": ("fedmcp", "mlp", "tuner=prefix"),
    "constant views from a cache": ("moon", "mlp", "train.steps=4"),
    "even batches": ("moon", "mlp", "train.batches=even", "train.batch_size=7", "train.steps=4"),
    "activations from a cache": ("fedmcp", "mlp", "cache=frozen-prefix", "train.steps=4"),
}
FAMILIES = {
    "t5 verbalizer": ("moon", "verbalizer", "t5"),
    "t5 lm": ("fedavg", "lm", "t5"),
    "gpt2": ("moon", "mlp", "gpt2"),
}


@pytest.mark.long
@pytest.mark.parametrize("words", MORE.values(), ids=MORE)
def test_other_tuners_and_caches(make, words, monkeypatch):
    compare(make(*words), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("method", "head", "family"), FAMILIES.values(), ids=FAMILIES)
def test_other_families(make, method, head, family, monkeypatch):
    compare(make(method, head, *DROPOUT, family=family), monkeypatch)


AGAIN = (*DROPOUT, "train.gradient_checkpointing=true")


@pytest.mark.parametrize(
    ("method", "head", "words"),
    [
        *(("fedmcp", "mlp", AGAIN), ("feddpa-t", "lm", DROPOUT)),
        *(pytest.param("fedmcp", "mlp", words, marks=pytest.mark.long) for words in (DROPOUT, ())),
        *(pytest.param("feddpa-t", "lm", words, marks=pytest.mark.long) for words in ((), AGAIN)),
        *(pytest.param("fedit", "dpo", words, marks=pytest.mark.long) for words in (DROPOUT, (), AGAIN)),
    ],
    ids=str,
)
def test_cohorts(make, method, head, words, monkeypatch):
    compare(make(method, head, "tuner=lora", *words), monkeypatch, together=True)


def test_numbers_that_are_not_replayed_are_seen(make, monkeypatch):
    """The suite can fail: without the same dropout in the second pass, gradients are others."""
    federation = make("fedmcp", "mlp", *DROPOUT)
    drawn = []

    def other(self, seed, *purpose):
        drawn.append(purpose)
        stream_init(self, seed, *purpose, len(drawn))

    stream_init = Stream.__init__
    monkeypatch.setattr(Stream, "__init__", other)
    with pytest.raises(AssertionError):
        compare(federation, monkeypatch)


def test_a_bound_with_room_for_the_batch_gives_the_same_bits(make):
    federation = make("fedmcp", "mlp", *DROPOUT)
    expected, _ = trained(federation, together=False)
    federation.context.tokens_at_once = 2**20
    found, _ = trained(federation, together=False)
    assert [digest(tensors) for tensors in found] == [digest(tensors) for tensors in expected]


@pytest.mark.parametrize("bound", [None, True])
def test_a_loss_of_no_part_is_an_error_also_in_pieces(make, monkeypatch, bound):
    monkeypatch.setattr(Ditto, "global_loss", mean_over_rows(lambda self, step: torch.zeros(())))
    federation = make("ditto", "mlp", *DROPOUT)
    federation.context.tokens_at_once = bound and least(federation.context, [*federation.silos.values()])
    with pytest.raises(RuntimeError, match="does not require grad"):
        trained(federation, together=False)


def test_a_row_that_is_too_long_is_refused_before_training(make):
    federation = make("fedmcp", "mlp", *DROPOUT)
    silos = [*federation.silos.values()]
    longest = max(rows.longest for silo in silos for rows in silo.train.values())
    federation.context.tokens_at_once = 3 * longest  # three views have a gradient
    check_rows(federation.context, silos)
    with pytest.raises(InputError, match=f"a row of {federation.context.train.max_length} tokens"):
        check_rows(federation.context, silos, noised=True)
    federation.context.tokens_at_once -= 1
    with pytest.raises(InputError, match=rf"tokens_at_once=.*{longest} tokens in 3 views.*at least {3 * longest}"):
        check_rows(federation.context, silos)


def test_a_run_refuses_such_a_row(make, data):
    with pytest.raises(InputError, match="tokens_at_once=4"):
        make("fedavg", "mlp", "train.tokens_at_once=4", refused=True)


def words_of(method):
    """LoRA with dropout, where the method brings no tuner of its own."""
    return () if "tuner" in METHODS[method].defaults and METHODS[method].defaults["tuner"] != "lora" else DROPOUT


SHORT = [(name, METHODS[name].defaults.get("head", "mlp")) for name in (*KINDS_OF_METHODS, "fedprompt")]
SHORT += [("moon", "lm")]
"""Each kind of method, and one with a verbalizer, under the head that it brings; a mean over tokens with one over rows.
"""
CASES = [
    pytest.param(*pair, marks=[] if pair in SHORT else [pytest.mark.long]) for pair in itertools.product(METHODS, HEADS)
]


@pytest.mark.parametrize(("method", "head"), CASES)
def test_gradients_are_the_whole_batchs_and_no_graph_holds_more(make, method, head, monkeypatch):
    steps = "train.steps=4" if METHODS[method].centralized else "train.steps=1"  # a batch may hold a task's last rows
    compare(make(method, head, *words_of(method), steps), monkeypatch)
