"""What a script registers itself works in its process; what does not fit together is refused."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import silotune
from silotune import (
    InputError,
    Part,
    Phase,
    private,
    register_aggregation,
    register_codec,
    register_head,
    register_method,
)
from silotune.communication.uplink import make_pipeline
from silotune.config.registries import Registry
from silotune.config.uplink import UplinkConfig
from silotune.data.kinds import Classification
from silotune.data.rows import Row
from silotune.data.tasks import Task, metric_range
from silotune.evaluation.baselines import _fit_and_score
from silotune.interop.export import _reader
from silotune.methods import GLOBAL, HEAD, PredictionMix, Scalar, Scope, Supervised, copies, shared
from silotune.methods.step import AT_WORK
from silotune.models.heads import Head
from silotune.models.tuners import TUNERS, Tuner, TunerOptions
from silotune.runs.scores import baseline_titles

pytestmark = pytest.mark.usefixtures("fresh_registries")


class Late(Supervised):
    """FedAvg, registered after everything is imported."""

    name = "late"
    paper = "none"
    defaults: ClassVar = {"tuner": "lora", "tuner.r": 3, "rounds": 1}
    scope = Scope.SHARED
    adapter_name = GLOBAL


class Empty(Tuner):
    """Has no tensors."""

    name = "empty"
    Options = TunerOptions

    def init(self, backbone, tasks, generator):
        return {}

    def act(self, backbone, mix, plan):
        pass


class Fixed(Head):
    """Has no tensors either."""

    name = "fixed"
    has_tensors = False

    def init(self, backbone, tasks, generator):
        return {}

    def logits(self, tensors, view, task):
        return view["mean"][:, : len(task.labels)]


class HeadAlone(Supervised):
    """Shares its head alone."""

    name = "head-alone"

    def parts(self):
        return {GLOBAL: private(self.setting.tuner), HEAD: shared(self.setting.head)}

    def phases(self):
        return [Phase("train", trains=(GLOBAL,), views={"full": {GLOBAL: 1}}, loss=self.loss)]

    def prediction(self):
        return PredictionMix({GLOBAL: 1})


def tiny(tiny_config, *words: str) -> silotune.Config:
    return tiny_config("fedavg", "train.steps=1", *words)


def test_a_method_registered_late_runs_with_its_defaults(tiny_config, tmp_path) -> None:
    assert register_method(Late) is Late
    config = tiny(tiny_config, "method=late")
    assert (config.tuner.name, config.tuner.options["r"]) == ("lora", 3)
    finished = silotune.run(config, out=tmp_path / "run")
    assert finished.summary["method"] == "late"
    assert silotune.load_run(tmp_path / "run").summary == finished.summary


def test_a_shared_part_without_tensors_is_refused(tiny_config, tmp_path) -> None:
    silotune.register_tuner(Empty)
    register_head(Fixed)
    register_method(HeadAlone)
    for words, line in (
        (
            ("tuner=empty",),
            "method fedavg: its shared part 'global' has no tensors to send (tuner empty); choose another tuner",
        ),
        (
            ("method=head-alone", "head=fixed"),
            "method head-alone: its shared part 'head' has no tensors to send (head fixed); choose another head",
        ),
    ):
        with pytest.raises(InputError) as error:
            silotune.run(tiny(tiny_config, *words), out=tmp_path / "run")
        assert str(error.value) == line
    silotune.run(tiny(tiny_config, "head=fixed", "head.scope=shared", "rounds=1"), out=tmp_path / "shared")


def test_a_private_tuner_without_tensors_is_refused(tiny_config, tmp_path) -> None:
    silotune.register_tuner(Empty)
    with pytest.raises(InputError) as error:
        silotune.run(tiny(tiny_config, "method=local", "tuner=empty"), out=tmp_path / "run")
    part = "its private part 'private' has no tensors to train (tuner empty); choose another tuner"
    assert str(error.value) == f"method local: {part}"


MISTAKES = {
    "a method's function asks for the view 'fulll'; there are full": {"loss": lambda self, step: step.logits("fulll")},
    "the loss of phase 'train' returns float; allowed: a tensor of shape ()": {"loss": lambda self, step: 1.0},
    "the loss of phase 'train' returns a tensor of shape (": {"loss": lambda self, step: step.logits("full")},
    "phase 'count' sets part 'count' to int; allowed: value () torch.float32": {"made": lambda work: 3},
    "phase 'count' sets part 'count' to value () torch.int64; allowed: value () torch.float32": {
        "made": lambda work: {"value": torch.tensor(work.steps["train"])}
    },
    "asks for the number of steps of phase 'training'; there are train": {"made": lambda work: work.steps["training"]},
    "part 'count': its aggregation returns NoneType; allowed: name → tensor": {"server": lambda updates, server: None},
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_in_a_method_is_one_line(line, tiny_config, tmp_path) -> None:
    own = MISTAKES[line]

    class Mistaken(Late):
        name = "mistaken"
        loss = own.get("loss", Late.loss)

        def parts(self):
            return {**super().parts(), "count": shared(Scalar(0.0), aggregation=own.get("server"))}

        def phases(self):
            made = own.get("made", lambda work: {"value": torch.tensor(float(work.steps["train"]))})
            return [*super().phases(), copies("count", {"count": lambda state, received: made(AT_WORK.get())})]

    register_method(Mistaken)
    with pytest.raises(InputError) as error:
        silotune.run(tiny(tiny_config, "method=mistaken"), out=tmp_path / "run")
    assert line in str(error.value)


class Steps(Classification):
    """Labels in an order, with an output for each step from one to the next."""

    name = "steps"
    metrics = ("balance",)
    signed = ("balance",)
    baselines = {"median": "median label"}

    def outputs(self, task):
        return len(task.labels) - 1

    def scores(self, task, outputs, targets, drawn=None):
        return {"balance": (100 * ((outputs > 0).sum(1) - targets).double().mean(0, keepdim=True)).numpy()}

    def constant_outputs(self, task, targets):
        return (torch.arange(self.outputs(task)) < targets.median()).double().expand(len(targets), -1)

    def predictions(self, task, outputs):
        return []


def test_a_kind_whose_outputs_are_no_logits_of_labels_has_its_own_constant_and_no_export() -> None:
    silotune.register_kind(Steps)
    task = Task("t", ("low", "mid", "high"), "balance", "steps")
    rows = [Row((f"text {number}",), label) for number, label in enumerate((0, 2, 2, 2))]
    assert _fit_and_score(task, rows, rows[:2], None) == {"median": 100.0}
    assert baseline_titles()["median"] == "median label"
    assert metric_range("balance") == (-100, 100)
    with pytest.raises(InputError, match="export: no way from outputs to answers of kind 'steps'"):
        _reader(task)


@pytest.mark.parametrize("scope", ["shared", None, shared])
def test_a_part_whose_scope_is_no_scope_is_refused(scope) -> None:
    with pytest.raises(InputError) as error:
        Part(TUNERS["lora"](), scope)
    line = f"part of LoRA: its scope must be Scope.SHARED, Scope.PRIVATE or Scope.FIXED (got {scope!r}); shared(module)"
    assert str(error.value).startswith(line)


def test_aggregations_and_codecs_as_functions_and_decorators(tiny_config, tmp_path) -> None:
    @register_aggregation("first")
    def first(updates):
        return next(iter(updates)).tensors

    assert register_aggregation("first-again", first) is first

    @register_codec("negated")
    class Negated:
        draws = False

        def layout(self, shape):
            return {"": (shape, torch.float32)}

        def encode(self, tensor, uniform=None):
            return {"": -tensor.float()}

        def decode(self, written, shape):
            return -written[""]

    found = {
        words: silotune.run(tiny(tiny_config, *words, "rounds=1"), out=tmp_path / str(number)).summary
        for number, words in enumerate(
            (("aggregation=first",), ("aggregation=first-again",), ("aggregation=first", "uplink=negated"), ())
        )
    }
    digests = [summary["shared_sha256"] for summary in found.values()]
    assert digests[0] == digests[1] != digests[3]
    assert digests[2] != digests[3]


def test_names_are_unique() -> None:
    register_method(Late)
    assert register_method(Late) is Late
    for register, thing, line in (
        (register_method, type("Other", (Late,), {}), "method 'late': there is one of this name already"),
        (register_method, type("Other", (Late,), {"name": "fedavg"}), "method 'fedavg': there is one of this name"),
        (register_method, type("Other", (Late,), {"name": "a/b"}), "method 'a/b': cannot be a name; allowed: letters"),
        (register_method, TUNERS["lora"], "method 'lora': must be a subclass of Method (got <class"),
        (silotune.register_tuner, type("Other", (TUNERS["lora"],), {}), "tuner 'lora': there is one of this name"),
        (register_head, Late, "head 'late': must be a subclass of Head"),
        (lambda thing: register_aggregation("krum", thing), len, "aggregation 'krum': there is one of this name"),
        (lambda thing: register_codec("int8", thing), Late, "codec 'int8': there is one of this name"),
    ):
        with pytest.raises(InputError) as error:
            register(thing)
        assert str(error.value).startswith(line)


def test_what_is_no_plug_in_is_refused_in_a_line() -> None:
    late, nameless = Late.__new__(Late), type("Nameless", (Supervised,), {})
    unfinished = type("Unfinished", (silotune.Method,), {"name": "unfinished", "parts": lambda self: {}})
    loose = type("Loose", (Late,), {"name": "loose", "Options": type("Options", (), {"factor": 1.0})})
    for register, line in (
        (lambda: register_method(late), f"method 'late': must be a subclass of Method (got {late!r})"),
        (lambda: register_method(nameless), f"method {nameless!r}: has no name; set its attribute 'name'"),
        (lambda: register_method("late"), "method 'late': must be a subclass of Method (got 'late')"),
        (lambda: register_method(unfinished), "method 'unfinished': class Unfinished does not define phases, predict"),
        (lambda: register_method(loose), "method 'loose': its Options must be a subclass of pydantic's BaseModel (got"),
        (lambda: register_head(Fixed()), "head 'fixed': must be a subclass of Head (got <"),
        (lambda: register_aggregation("five", 5), "aggregation 'five': must be a function of updates, or a class"),
        (lambda: register_aggregation(len), "aggregation <built-in function len>: give its name first, as in register"),
        (lambda: register_codec(Late), f"codec {Late!r}: give its name first, as in register_codec('name')"),
        (lambda: register_codec("len", len), "codec 'len': must be a class with the methods of Codec (got <built-in"),
        (lambda: register_codec("late", Late), "codec 'late': class Late does not define layout, encode, decode, dr"),
    ):
        with pytest.raises(InputError) as error:
            register()
        assert str(error.value).startswith(line)


def test_a_registry_is_a_mapping() -> None:
    registry: Registry[int] = Registry("thing", home="json", reserved=("known",))
    registry.built_in = {"color": 1}
    registry.register("late", 2)
    assert dict(registry) == {"color": 1, "late": 2}
    assert list(registry.names) == ["known", "color", "late"]
    assert "known" not in registry
    with pytest.raises(InputError, match=r"unknown thing 'lat' \(did you mean 'late'\?\); allowed: color, known, late"):
        registry.find("lat")
    with pytest.raises(KeyError):
        registry["lat"]


def test_noise_before_a_registered_codec_does_not_depend_on_the_process() -> None:
    """A codec's own `repr` may hold an address; its name and options stand for it."""

    class Plain:
        draws = False

        layout = encode = decode = staticmethod(print)

    register_codec("plain", Plain)
    made = [make_pipeline(UplinkConfig(name="clip,laplace,plain"), 1, b"0123456789abcdef") for _ in range(2)]
    assert made[0].codec is not made[1].codec
    assert made[0].noise_key == made[1].noise_key
    assert made[0].noise_key.endswith("'plain {}')")
