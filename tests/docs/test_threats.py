"""Every cell of the table in docs/threats.md has tests behind it, and every such test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = {
    "eavesdropper": (
        "test_three_silos_with_minilm",
        "test_three_silos_with_minilm test_only_the_node_api_passes_and_only_for_admitted_keys",
        "test_three_silos_with_minilm",
    ),
    "stranger": (
        "test_only_the_node_api_passes_and_only_for_admitted_keys test_the_endpoint_refuses_all_but_its_request",
        "test_only_the_node_api_passes_and_only_for_admitted_keys test_one_of_many_wins_a_token",
        "test_three_silos_with_minilm test_the_proxy_admits_only_the_addresses_that_it_names",
    ),
    "curious coordinator": (
        "test_a_silo_shares_only_what_it_agreed_to",
        "test_what_a_silo_hands_to_flower test_a_run_beyond_a_cap_is_refused_by_its_key",
        "test_a_silo_that_wants_noise_answers_no_run_without "
        "test_a_run_ends_with_the_bits_of_one_process_and_nothing_else_leaves "
        "test_parts_that_an_operator_does_not_let_go_stay",
    ),
    "malicious coordinator": (
        "test_three_silos_from_nothing",
        "test_an_unseen_run_waits_and_learns_nothing test_requests_beyond_a_cap_are_refused_after_any_restart "
        "test_a_full_disk_ends_training_and_tests_before_they_begin test_the_order_is_the_silos_own "
        "test_where_all_wait_for_replies_a_new_one_is_closed test_an_update_that_is_not_finite_does_not_leave "
        "test_seeds_do_not_tell_the_splits test_refusals_do_not_fill_the_disk "
        "test_noise_that_the_coordinator_knows_is_refused test_three_silos_from_nothing",
        "test_caps_stand_above_an_agreed_configuration test_what_is_approved_beforehand_does_not_wait "
        "test_a_rewound_state_does_not_rewind_the_count",
    ),
    "malicious silo": (
        "test_without_the_key_the_update_is_taken test_an_upload_that_never_ends_delays_no_other_reply",
        "test_malformed_answers_are_refused_and_the_round_goes_on test_a_stranger_is_not_let_in",
        "test_over_flower_the_same_update_is_held_back test_defenses test_a_silo_has_one_key_until_it_is_expelled",
    ),
    "other silos together": (
        "test_two_of_three_silos_subtract_their_updates_from_the_mean",
        "test_one_silo_alone_has_the_sum_of_the_others",
        "test_central_noise_stands_before_what_they_subtract",
    ),
    "other users": (
        "test_other_users_reach_what_listens_on_loopback test_metrics_of_a_coordinator",
        "test_three_silos_from_nothing",
        "test_the_rule_of_the_page_keeps_other_users_out "
        "test_compose_keeps_rows_from_the_network_and_the_superlink_from_everybody",
    ),
}
"""Party → the names of tests, or of their files, of what it can do, what it cannot, and of the defense.

What a coordinator learns of rows is measured by `python -m benchmarks leakage`.
"""

LEARNS = {
    "the coordinator": (
        "test_what_a_silo_hands_to_flower",
        "test_a_federation_in_which_only_noised_parts_leave test_reasons_that_follow_from_rows_stay "
        "test_what_leaves_depends_on_rows_through_noised_gradients_alone",
    ),
    "other silos": (
        "test_two_of_three_silos_subtract_their_updates_from_the_mean",
        "test_what_leaves_depends_on_rows_through_noised_gradients_alone",
    ),
    "users of a silo's own model": (
        "test_without_noise_or_canaries_the_page_says_so",
        "test_a_silo_measures_its_model_where_it_let_canaries_in",
    ),
    "an eavesdropper": (
        "test_three_silos_with_minilm",
        "test_three_silos_with_minilm",
    ),
}
"""Who → the tests of what they learn without noise on rows, and with it: the table in docs/privacy.md."""


def first_cells(page: str, row: str, after: str = "") -> list[str]:
    """The first cells of the rows of a page's table that begins with the words `after`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(row, text[text.index(after) :].split("\n\n", 1)[0] if after else text, re.MULTILINE)


def test_who_learns_what_has_its_tests() -> None:
    assert first_cells("privacy.md", r"^\| ([a-z][^|]*?) \|", "| who | without noise")[1:] == [*LEARNS]


def test_every_party_of_the_page_has_its_tests() -> None:
    rows = first_cells("threats.md", r"^\| (\*\*.*?)(?: \| .*)\|$")
    parties = [re.sub(r"\*\*|:.*| on the network| with network access| of these machines", "", row) for row in rows]
    assert parties == [*TESTS]


def test_every_test_exists() -> None:
    files = [*(ROOT / "tests").rglob("test_*.py")]
    present = {path.stem for path in files}
    present.update(*(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE) for path in files))
    cells = [cell.split() for row in [*TESTS.values(), *LEARNS.values()] for cell in row]
    assert all(cells)
    assert {name for cell in cells for name in cell} <= present
