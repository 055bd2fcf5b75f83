"""What tests of the tools share, and which of them the gate runs: the others are nightly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import conformance

# Of these files all tests: they read text and records. Of the others those named, each with its first case.
WHOLE = {
    "test_gate_changes.py",
    "test_parse.py",
    "test_planted_record.py",
    "test_results.py",
    "test_sass.py",
}
NAMED = {
    "test_blame.py": "test_the_first_wrong_instruction_is_blamed_on_our_line",
    "test_conformance.py": "test_a_row_per_kernel test_bad_input",
    "test_conformance_cudnn.py": "test_a_false_accept_is_counted",
    "test_conformance_executed.py": "test_a_row_per_case_and_a_line_per_architecture test_bad_input",
    "test_conformance_flash.py": "test_bad_input",
    "test_emulated_flash_attn.py": "test_functions_have_the_recorded_signatures "
    "test_numbers_are_the_definitions test_installed_is_found_and_leaves_nothing",
    "test_emulated_flash_attn_parts.py": "test_dropout_is_replayed_from_its_state test_refusals",
    "test_faults.py": "test_faults test_a_fault_names_what_an_engineer_looks_for",
    "test_flash_ask.py": "test_an_assert_is_a_refusal_with_its_words_and_its_line",
    "test_flash_native.py": "test_an_operator_runs_its_function_on_meta_and_differentiates",
    "test_flash_launch.py": "test_it_goes_wrong",
    "test_gate.py": "test_compiles_into_tensor_core_code_that_fits_and_spills_nothing test_faults_in_words "
    "test_launches_carry_exactly_the_arguments_of_their_kernels",
    "test_grid.py": "test_every_two_features_stand_together_in_a_case_of_few",
    "test_hidden_rows.py": "test_they_are_those_of_math test_compiled_calls_have_them_too",
    "test_instructions.py": "test_integers test_floats test_shuffles",
    "test_kernels.py": "test_decode_over_pages",
    "test_loops.py": "test_heads_are_shared_where_the_grid_leaves_processors_idle",
    "test_matrix.py": "test_mma test_ldmatrix",
    "test_mbarriers.py": "test_who_waits_sees_what_those_did_that_arrived",
    "test_planted.py": "test_what_is_planted_instead_of_a_statement",
    "test_ptx_launch.py": "test_arguments_are_the_parameters_of_turings_ptx",
    "test_tensor_copies.py": "test_a_tile_arrives_as_it_is_described",
    "test_transformers_families.py": "test_a_mask_that_is_looked_at_is_the_one_that_was_seen "
    "test_scores_and_keys_that_a_model_adds test_a_family_agrees_with_its_eager_code",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """What is not of the gate is slow."""
    seen = set()
    for item in items:
        file = item.path.name
        if Path(__file__).parent not in item.path.parents or file in WHOLE:
            continue
        test = item.nodeid.rpartition("::")[2].partition("[")[0]
        first = item.get_closest_marker("slow") is None and (file, test) not in seen
        if first and test in NAMED.get(file, "").split():
            seen.add((file, test))
        else:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal of whoever runs the tests exports."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys):
    """``code, out, err = run("--execute --arch 80")``: conformance.py with these words."""

    def call(line: str | list[str]) -> tuple[int, str, str]:
        code = conformance.main(line.split() if isinstance(line, str) else line)
        return (code, *capsys.readouterr())

    return call
