"""Every cell of the table in docs/threats.md has tests behind it, and every such test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "eavesdropper": (
        ["tests/distributed/test_namespaces.py::test_three_silos_with_minilm"],
        [
            "tests/distributed/test_namespaces.py::test_three_silos_with_minilm",
            "tests/distributed/test_security_processes.py::test_only_the_node_api_passes_and_only_for_admitted_keys",
        ],
        ["tests/distributed/test_namespaces.py::test_three_silos_with_minilm"],
    ),
    "stranger": (
        [
            "tests/distributed/test_security_processes.py::test_only_the_node_api_passes_and_only_for_admitted_keys",
            "tests/distributed/test_enrollment.py::test_the_endpoint_refuses_all_but_its_request",
        ],
        [
            "tests/distributed/test_security_processes.py::test_only_the_node_api_passes_and_only_for_admitted_keys",
            "tests/distributed/test_enrollment.py::test_one_of_many_wins_a_token",
        ],
        [
            "tests/distributed/test_namespaces.py::test_three_silos_with_minilm",
            "tests/distributed/test_security_processes.py::test_the_proxy_admits_only_the_addresses_that_it_names",
        ],
    ),
    "curious coordinator": (
        ["tests/distributed/test_shares.py::test_a_silo_shares_only_what_it_agreed_to"],
        [
            "tests/distributed/test_security_messages.py::test_what_a_silo_hands_to_flower",
            "tests/distributed/test_policy.py::test_a_run_beyond_a_cap_is_refused_by_its_key",
        ],
        [
            "tests/distributed/test_privacy_ledger.py::test_a_silo_that_wants_noise_answers_no_run_without",
            "tests/distributed/test_masked_runs.py::test_a_run_ends_with_the_bits_of_one_process_and_nothing_else_leaves",
            "tests/distributed/test_shares.py::test_parts_that_an_operator_does_not_let_go_stay",
        ],
    ),
    "malicious coordinator": (
        ["tests/distributed/test_from_nothing.py::test_three_silos_from_nothing"],
        [
            "tests/distributed/test_approval.py::test_an_unseen_run_waits_and_learns_nothing",
            "tests/distributed/test_policy.py::test_requests_beyond_a_cap_are_refused_after_any_restart",
            "tests/distributed/test_policy.py::test_a_full_disk_ends_training_and_tests_before_they_begin",
            "tests/distributed/test_secret_order.py::test_the_order_is_the_silos_own",
            "tests/distributed/test_worker_connections.py::test_where_all_wait_for_replies_a_new_one_is_closed",
            "tests/distributed/test_policy.py::test_an_update_that_is_not_finite_does_not_leave",
            "tests/distributed/test_secret_order.py::test_seeds_do_not_tell_the_splits",
            "tests/distributed/test_audit.py::test_refusals_do_not_fill_the_disk",
            "tests/distributed/test_privacy_ledger.py::test_noise_that_the_coordinator_knows_is_refused",
            "tests/distributed/test_from_nothing.py::test_three_silos_from_nothing",
        ],
        [
            "tests/distributed/test_policy.py::test_caps_stand_above_an_agreed_configuration",
            "tests/distributed/test_approval.py::test_what_is_approved_beforehand_does_not_wait",
            "tests/distributed/test_privacy_ledger.py::test_a_rewound_state_does_not_rewind_the_count",
        ],
    ),
    "malicious silo": (
        [
            "tests/properties/test_outliers.py::test_without_the_key_the_update_is_taken",
            "tests/distributed/test_link.py::test_an_upload_that_never_ends_delays_no_other_reply",
        ],
        [
            "tests/distributed/test_malformed_over_flower.py::test_malformed_answers_are_refused_and_the_round_goes_on",
            "tests/distributed/test_handshake.py::test_a_stranger_is_not_let_in",
        ],
        [
            "tests/properties/test_outliers.py::test_over_flower_the_same_update_is_held_back",
            "tests/properties/test_defenses.py",
            "tests/distributed/test_deployment.py::test_a_silo_has_one_key_until_it_is_expelled",
        ],
    ),
    "other silos together": (
        ["tests/distributed/test_what_silos_learn.py::test_two_of_three_silos_subtract_their_updates_from_the_mean"],
        ["tests/distributed/test_what_silos_learn.py::test_one_silo_alone_has_the_sum_of_the_others"],
        ["tests/distributed/test_what_silos_learn.py::test_central_noise_stands_before_what_they_subtract"],
    ),
    "other users": (
        [
            "tests/distributed/test_loopback_ports.py::test_other_users_reach_what_listens_on_loopback",
            "tests/distributed/test_seen_from_outside.py::test_metrics_of_a_coordinator",
        ],
        ["tests/distributed/test_from_nothing.py::test_three_silos_from_nothing"],
        [
            "tests/distributed/test_loopback_ports.py::test_the_rule_of_the_page_keeps_other_users_out",
            "tests/distributed/test_deployment.py::test_compose_keeps_rows_from_the_network_and_the_superlink_from_everybody",
        ],
    ),
}
"""Party → the tests of what it can do, what it cannot, and of the defense.

What a coordinator learns of rows is measured by `python -m benchmarks leakage`.
"""

LEARNS: dict[str, tuple[list[str], list[str]]] = {
    "the coordinator": (
        ["tests/distributed/test_security_messages.py::test_what_a_silo_hands_to_flower"],
        [
            "tests/distributed/test_row_ledger.py::test_a_federation_in_which_only_noised_parts_leave",
            "tests/distributed/test_row_ledger.py::test_reasons_that_follow_from_rows_stay",
            "tests/properties/test_row_privacy.py::test_what_leaves_depends_on_rows_through_noised_gradients_alone",
        ],
    ),
    "other silos": (
        ["tests/distributed/test_what_silos_learn.py::test_two_of_three_silos_subtract_their_updates_from_the_mean"],
        ["tests/properties/test_row_privacy.py::test_what_leaves_depends_on_rows_through_noised_gradients_alone"],
    ),
    "users of a silo's own model": (
        ["tests/evaluation/test_release.py::test_without_noise_or_canaries_the_page_says_so"],
        ["tests/distributed/test_row_ledger.py::test_a_silo_measures_its_model_where_it_let_canaries_in"],
    ),
    "an eavesdropper": (
        ["tests/distributed/test_namespaces.py::test_three_silos_with_minilm"],
        ["tests/distributed/test_namespaces.py::test_three_silos_with_minilm"],
    ),
}
"""Who → the tests of what they learn without noise on rows, and with it: the table in docs/privacy.md."""


def test_who_learns_what_has_its_tests() -> None:
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    table = page.split("| who | without noise", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"^\| ([a-z][^|]*?) \|", table, re.MULTILINE) == [*LEARNS]


def test_every_party_of_the_page_has_its_tests() -> None:
    page = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\*\*.*?)(?: \| .*)\|$", page, re.MULTILINE)
    parties = [re.sub(r"\*\*|:.*| on the network| with network access| of these machines", "", row) for row in rows]
    assert parties == [*TESTS]


def test_every_test_exists() -> None:
    for cells in [*TESTS.values(), *LEARNS.values()]:
        for named in cells:
            assert named
            for test in named:
                file, _, name = test.partition("::")
                assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), test
