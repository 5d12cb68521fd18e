"""A method whose declarations do not fit together is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from silotune.errors import InputError
from silotune.methods import METHODS, Method, Setting
from silotune.methods.base import PredictionMix
from silotune.methods.fdlora import FUSION
from silotune.methods.fedmatch import FedMatch
from silotune.methods.instance_weighting import INSTANCES
from silotune.methods.lora_factors import A, B
from silotune.methods.parts import GLOBAL, HEAD, PRIVATE, Part, Scope
from silotune.methods.phase import Phase, copies
from silotune.methods.step import head_tensors
from silotune.methods.validation import check_method, check_shared
from silotune.models.forward.mixing import frozen, joined, previous, received
from silotune.models.heads import HEADS
from silotune.models.tuners import TUNERS, TensorGroup, Tuner


def setting(tuner: str = "bottleneck") -> Setting:
    return Setting(TUNERS[tuner](), HEADS["mlp"]())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_fits_together(name: str) -> None:
    check_method(METHODS[name](setting((METHODS[name].tuners or ("bottleneck",))[0])))


@pytest.mark.parametrize("name", METHODS)
def test_a_part_that_stands_alone_in_a_mix_stands_there_whole(name: str) -> None:
    method = METHODS[name](setting((METHODS[name].tuners or ("bottleneck",))[0]))
    prediction = method.prediction()
    mixes = [prediction.mix, *(view for phase in method.phases() for view in phase.views.values())]
    mixes += [prediction.head] if isinstance(prediction.head, dict) else []
    for mix in mixes:
        if len(mix) == 1:
            assert {*mix.values()} == {1}


def test_fdlora_begins_its_fusion_with_equal_weights() -> None:
    parts = METHODS["fdlora"](setting("lora")).parts()
    assert {parts[name].module.start for name in FUSION} == {0.5}


def test_a_mix_of_heads_reads_what_was_received() -> None:
    own, theirs = {"head": {"out.bias": torch.tensor([1.0, 2.0])}}, {"head": {"out.bias": torch.tensor([4.0, 8.0])}}
    found = head_tensors({"head": 0.25, received("head"): 0.5}, own, theirs)
    assert found["out.bias"].tolist() == [2.25, 4.5]


def variant(**changes: object) -> FedMatch:
    """FedMatch with one phase changed."""

    class Variant(FedMatch):
        name = "variant"

        def phases(self) -> list[Phase]:
            fields = {"trains": (GLOBAL,), "views": {"full": {GLOBAL: 1.0}}, "loss": self.loss, **changes}
            return [Phase("train", **fields)]

    return Variant(setting())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"trains": ("globl",)}, "unknown part 'globl'"),
        ({"views": {"full": {"recieved:global": 1}}}, "unknown anchor 'recieved'"),
        ({"views": {"full": {received("globl"): 1}}}, "unknown part 'globl'"),
        ({"views": {"full": {received(PRIVATE): 1}}}, "private parts are not sent"),
        ({"views": {"full": {previous(GLOBAL): 1}}}, "'remembers' does not name"),
        ({"start": {GLOBAL: PRIVATE}}, "copies the private part 'private' into the shared 'global'"),
        ({"start": {PRIVATE: "head_2"}}, "unknown part 'head_2'"),
        ({"skips_first": True}, "skips a silo's first participation, but 'remembers' names no part"),
        ({"views": {"full": {HEAD: 1}}}, "mixes 'head', which is not an adapter"),
        ({"also_first": True}, "changes a shared part in rounds that depend on the silo"),
    ],
)
def test_a_slip_is_refused_by_name(changes: dict, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        check_method(variant(**changes))


def with_parts(method: str, more: Callable[[Tuner], dict[str, Part]]) -> dict[str, object]:
    """Members of a method that has further parts, or others of the same name."""
    return {"parts": lambda self: METHODS[method].parts(self) | more(self.setting.tuner)}


def predicts(*mix: object, **head: object) -> dict[str, object]:
    """Members of a method that predicts otherwise."""
    return {"prediction": lambda self: PredictionMix(*mix, **head)}


def weighing_an_anchor(self: Method) -> PredictionMix:
    whole = METHODS["feddpa-t"].prediction(self)
    return replace(whole, weighting=replace(whole.weighting, view={received(GLOBAL): 1}))


OTHER_B = with_parts("fedsa-lora", lambda _: {B: Part(TensorGroup(TUNERS["lora"](), "B"), Scope.PRIVATE)})
LINEAR_TOO = with_parts("fedmatch", lambda _: {"linear": Part(HEADS["linear"](), Scope.PRIVATE)})
RESERVED = with_parts("fedmatch", lambda tuner: {INSTANCES: Part(tuner, Scope.PRIVATE)})
ALIKE = with_parts("fedmatch", lambda tuner: {PRIVATE: Part(tuner, Scope.SHARED, alike=True)})
ORPHAN = with_parts("fedmatch", lambda tuner: {PRIVATE: Part(tuner, Scope.PRIVATE, start="globl")})


@pytest.mark.parametrize(
    ("method", "members", "complaint"),
    [
        ("fedmatch", predicts({"globl": 1}), "unknown part 'globl'"),
        ("fedmatch", predicts({GLOBAL: 1}, head=GLOBAL), "unknown head 'global'"),
        ("fedmatch", RESERVED, f"the part name '{INSTANCES}' is reserved"),
        ("fedmatch", ALIKE, "'private' is not private, so that it begins equal in all silos anyway"),
        ("fedmatch", ORPHAN, "'private' starts from an unknown part 'globl'"),
        (
            "fedmatch",
            LINEAR_TOO | predicts({GLOBAL: 1}, head={HEAD: 0.5, "linear": 0.5}),
            "heads of several kinds",
        ),
        ("fedsa-lora", OTHER_B, "which are no groups of one tuner's tensors"),
        ("fedsa-lora", predicts({A: 1}), "mixes 'lora_A', which is no whole adapter: that has the groups"),
        ("feddpa-t", {"prediction": weighing_an_anchor}, f"weighs the anchor '{received(GLOBAL)}'"),
    ],
)
def test_what_does_not_fit_a_method_is_refused(method: str, members: dict[str, object], complaint: str) -> None:
    tuner = (METHODS[method].tuners or ("bottleneck",))[0]
    made = type("Variant", (METHODS[method],), {"name": "variant", **members})
    with pytest.raises(InputError, match=complaint):
        check_method(made(setting("lora" if method == "feddpa-t" else tuner)))


class Kept(FedMatch):
    """A shared part that goes on from the silo's copy of what it sent; `moves` changes the copy otherwise."""

    name = "kept"
    moves = False

    def parts(self) -> dict[str, Part]:
        return super().parts() | {PRIVATE: Part(self.setting.tuner, Scope.PRIVATE, start=GLOBAL)}

    def phases(self) -> list[Phase]:
        trains = (GLOBAL, PRIVATE) if self.moves else (GLOBAL,)
        views = {"full": {GLOBAL: 1.0}}
        return [Phase("train", trains, views, self.loss, start={GLOBAL: PRIVATE}), copies("keep", {PRIVATE: GLOBAL})]


def test_a_shared_part_may_go_on_from_the_silos_copy_of_it_and_from_nothing_else(monkeypatch) -> None:
    check_method(Kept(setting()))
    monkeypatch.setattr(Kept, "moves", True)
    with pytest.raises(InputError, match="copies the private part 'private' into the shared 'global'"):
        check_method(Kept(setting()))


def test_what_is_allowed_passes() -> None:
    alike = with_parts("fedmatch", lambda tuner: {PRIVATE: Part(tuner, Scope.PRIVATE, alike=True)})
    check_method(type("Variant", (FedMatch,), {"name": "variant", **alike})(setting()))
    check_method(variant(views={"full": {received(GLOBAL): 1, frozen(PRIVATE): 1}}, start={PRIVATE: GLOBAL}))


def test_views_that_are_called_the_same_are_the_same_but_for_what_was_received() -> None:
    views = {"full": {GLOBAL: 1.0}, "anchor": {received(GLOBAL): 1.0}}
    check_method(variant(views=views, same_at_start={"anchor": "full"}))
    views["anchor"] = {received(GLOBAL): 0.5}
    with pytest.raises(InputError, match="calls the views 'anchor' and 'full' the same at its start"):
        check_method(variant(views=views, same_at_start={"anchor": "full"}))


def test_parts_of_unlike_tuners_are_not_joined() -> None:
    with pytest.raises(InputError, match="joins 'global\\+private', which are no groups of one tuner's tensors"):
        check_method(variant(views={"full": {joined(GLOBAL, PRIVATE): 1}}))


def test_a_round_sends_what_its_phases_change_and_the_last_phases_send_nothing() -> None:
    rolora = METHODS["rolora"](setting("lora"))
    assert (rolora.sends(1), rolora.sends(2), rolora.sends()) == ([B], [A], [A, B])
    assert variant(when="end").sends() == []


def test_kinds_of_rounds_are_named_by_their_first() -> None:
    assert METHODS["rolora"](setting("lora")).kinds_of_rounds(5) == {1: 3, 2: 2}
    assert METHODS["rolora"](setting("lora")).kinds_of_rounds(1) == {1: 1}
    assert METHODS["fedavg"](setting()).kinds_of_rounds(5) == {1: 5}


def test_a_prediction_without_weights_of_texts_has_one_mix() -> None:
    weighed = METHODS["feddpa-t"](Setting(TUNERS["lora"](), HEADS["lm"]())).prediction()
    plain = METHODS["fedavg"](setting()).prediction()
    alpha = torch.tensor([0.25, 1.0])
    assert weighed.mixed() == weighed.mix
    assert plain.mixed(alpha) == plain.mix
    mixed = weighed.mixed(alpha)
    assert mixed[weighed.weighting.local_part].tolist() == [0.25, 1.0]
    assert mixed[weighed.weighting.global_part].tolist() == [0.75, 0.0]


def test_a_loss_is_a_mean_over_rows_only_where_it_says_so() -> None:
    assert Phase("plain", (GLOBAL,), {}, lambda step: torch.zeros(())).by_row is False
    assert all(phase.by_row for phase in METHODS["fedavg"](setting()).phases())


def test_a_head_without_tensors_may_be_shared_beside_one_with_tensors() -> None:
    class TwoHeads(FedMatch):
        name = "two-heads"

        def parts(self) -> dict[str, Part]:
            return {HEAD: Part(HEADS["mlp"](), Scope.SHARED), "words": Part(HEADS["lm"](), Scope.SHARED)}

    check_shared(TwoHeads(setting()), {HEAD: {"out.weight": torch.zeros(2, 2)}, "words": {}})


@pytest.mark.parametrize(
    ("name", "views"),
    [("fedavg", 1), ("fedmcp", 3), ("moon", 1), ("fedmatch", 1), ("fedalt", 1), ("pfedme", 1), ("apfl", 2)],
)
def test_views_that_have_a_graph_at_once(name: str, views: int) -> None:
    """Full, global and private model in FedMCP, whose received one is an anchor; APFL's shared and mixed model."""
    method = METHODS[name](setting((METHODS[name].tuners or ("bottleneck",))[0]))
    assert max(phase.views_with_gradient for phase in method.phases()) == views
