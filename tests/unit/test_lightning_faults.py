"""What was wrong or refused in the old strategies and around them, and the tests that would notice if it came back.

A test is named by its file (without ``test_lightning_``), itself, and the case that matters where it has several. All
of them are in the full set.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sets import campaign, full

TESTS = Path(__file__).resolve().parent.parent

DEEPSPEED: dict[str, tuple[str, ...]] = {
    "the user's config dict was changed, and a second strategy of it failed (19891)": (
        "deepspeed_config::test_a_dict_is_never_changed_and_serves_a_second_strategy",
        "deepspeed::test_a_config_is_never_changed_completed_from_trainer_and_found_by_precedence",
    ),
    "gradient_accumulation_steps in a config was refused whatever it said (12299, 19891)": (
        "deepspeed_config::test_accumulation_of_the_config_has_to_be_trainers",
        "deepspeed::test_contradictions_are_clear_errors_and_the_norm_of_a_config_wins",
    ),
    "a stage, device or bucket size that does not exist was accepted": (
        "deepspeed_config::test_wrong_arguments_are_errors_at_once",
    ),
    "offload_parameters below stage 3 had no effect, silently": (
        "deepspeed_config::test_arguments_that_mean_nothing_are_named",
    ),
    "a path on no disk was accepted, and failed when it was written": (
        "deepspeed_config::test_wrong_arguments_are_errors_at_once",
        "regressions::test_a_disk_that_cannot_be_written_is_an_error_on_every_rank_and_the_model_stays",
    ),
    "unknown keys at the top of a config were ignored": (
        "deepspeed_config::test_unknown_keys_are_errors_that_name_the_nearest",
    ),
    "auto values stopped the run or stayed as text": ("deepspeed_config::test_auto_values_are_resolved_from_trainer",),
    "the micro-batch size stayed 1 where validation came first": (
        "trainer::test_the_batch_size_is_known_when_validation_came_first",
    ),
    "a loader without a batch sampler, or a sampler without a size, was an AttributeError": (
        "deepspeed::test_progress_is_logged_whatever_the_loader",
        "deepspeed_config::test_a_loader_may_not_show_its_batch_size",
    ),
    "thread_count had no effect": ("deepspeed_config::test_thread_count_is_not_dead",),
    "bf16 in the config and fp16 in the Trainer were both enabled": (
        "deepspeed_config::test_fp16_and_bf16_together_are_a_clear_error[bf16-16-mixed]",
    ),
    "offloading needed an optimizer of DeepSpeed's own": (
        "deepspeed::test_offloading_to_host_and_disk_changes_no_bit",
    ),
    "left-over batches of an epoch were lost or kept, by stage": (
        "parity::test_equals_stock_ddp[deepspeed_1-accumulate_3]",
        "parity::test_equals_stock_ddp[deepspeed_2-accumulate_3]",
        "parity::test_equals_stock_ddp[deepspeed_3-accumulate_3]",
    ),
    "schedules were longer than the training": ("trainer::test_a_schedule_is_as_long_as_the_training[deepspeed_2]",),
    "a resumed run differed at accumulation 3": (
        "checkpoints::test_a_resumed_run_equals_a_straight_one_bit_for_bit[deepspeed_2-3-32-true]",
        "checkpoints::test_a_run_resumed_within_an_epoch_goes_on_bit_for_bit[deepspeed_3]",
    ),
    "accumulation could not change during a run": ("trainer::test_as_stock_ddp[deepspeed_3-accumulation_changes]",),
    "the clipping hook ran for every batch of an accumulation": (
        "regressions::test_the_clipping_hook_runs_once_a_step",
    ),
    "an own backward or an own clipping was ignored": (
        "trainer::test_as_stock_ddp[deepspeed_3-own_backward]",
        "trainer::test_as_stock_ddp[deepspeed_3-own_clipping]",
    ),
    "one optimizer and one schedule": (
        "trainer::test_as_stock_ddp[deepspeed_3-two_optimizers_by_hand]",
        "regressions::test_several_optimizers_with_a_schedule_each[deepspeed_3]",
    ),
    "clipping by value was refused": (
        "parity::test_equals_stock_ddp[deepspeed_3-clip_value]",
        "parity::test_equals_stock_ddp[deepspeed_1-accumulate_3_clip_norm]",
    ),
    "a training_step that returns None was refused": (
        "skipping::test_a_training_step_may_return_none_on_one_device[deepspeed_1]",
    ),
    "compiled modules were refused": ("trainer::test_as_stock_ddp[deepspeed_3-compiled]",),
    "GPUs were required": ("parity::test_equals_stock_ddp[deepspeed_0-accumulate_3_clip_norm]",),
    "saving after test was broken, and evaluation made a second engine (15247, 17523, 18971)": (
        "checkpoints::test_save_after_test_and_after_evaluation_alone[deepspeed_3]",
        "deepspeed_saving::test_saving_after_test_and_one_engine_for_all_of_a_run",
    ),
    "evaluation removed the hooks of modules": ("regressions::test_hooks_of_modules_survive_evaluation[deepspeed_3]",),
    "on_save_checkpoint saw a sharded state": (
        "checkpoints::test_hooks_see_whole_shapes_and_keep_what_they_add[deepspeed_3]",
    ),
    "missing names of a full state were collected and never raised": (
        "deepspeed_saving::test_load_full_weights_raises_for_missing_unexpected_and_wrongly_shaped_entries",
        "checkpoints::test_missing_names_are_an_error_unless_loading_is_not_strict[deepspeed_3]",
    ),
    "another number of ranks could not load (19585)": ("checkpoints::test_another_number_of_ranks[deepspeed_3]",),
    "mixed was taken for autocast (15168, 18016)": ("parity::test_bf16_is_really_bf16[deepspeed_3-bf16-mixed]",),
    "init_module(empty_init=False) was refused at stage 3": ("flags::test_init_module[deepspeed_3]",),
}

FULLY_SHARDED: dict[str, tuple[str, ...]] = {
    "bf16 trained in fp32": (
        "parity::test_bf16_is_really_bf16[fully_sharded-bf16-mixed]",
        "fully_sharded::test_precision",
    ),
    "each rank clipped by its own norm (13339, 19235)": (
        "parity::test_equals_stock_ddp[fully_sharded-clip_norm]",
        "parity::test_equals_stock_ddp[fully_sharded-clip_norm]",
    ),
    "clipping by norm was refused with fp16": (
        "fully_sharded::test_an_overflow_skips_the_step_whatever_clips[norm]",
        "fully_sharded::test_precision",
    ),
    "rank 0's part of the optimizer state was saved alone": (
        "checkpoints::test_a_resumed_run_equals_a_straight_one_bit_for_bit[fully_sharded-3-32-true]",
    ),
    "one model could not be fitted twice": ("fully_sharded::test_every_entry_point",),
    "flatten_parameters=False failed always": (
        "fully_sharded::test_weights_equal_those_of_ddp[plain]",
        "fully_sharded::test_parameters_that_are_not_flattened_travel_alone",
    ),
    "cpu_offload needed fp16": ("fully_sharded::test_weights_equal_those_of_ddp[plain]",),
    "optimizers took parameters of trainer.model alone": (
        "regressions::test_optimizers_take_parameters_from_the_trainers_model_and_from_the_modules[fully_sharded]",
    ),
    "a hook that builds the model ran again before the next run, and weights were restored around it": (
        "trainer::test_models_built_in_a_hook",
        "trainer::test_a_hook_that_builds_again_does_not_lose_the_training",
    ),
    "a layer that on_load_checkpoint builds again was never sharded": (
        "regressions::test_layers_built_again_while_loading_do_not_lose_the_training",
    ),
    "the name fsdp is not free": ("classes::test_names",),
}

COLOSSALAI: dict[str, tuple[str, ...]] = {
    "chunk_size and enable_distributed_storage were stored and never used": (
        "colossalai::test_chunk_arguments_have_effects",
        "colossalai::test_storage_and_placement_have_effects",
        "colossalai_arguments::test_each_argument_changes_the_plan",
    ),
    "use_chunk=False was refused, and a min_chunk_size below 1 MiB became 0": (
        "colossalai::test_chunk_arguments_have_effects",
    ),
    "any clipping failed": (
        "parity::test_equals_stock_ddp[colossalai-clip_norm]",
        "parity::test_equals_stock_ddp[colossalai-clip_value]",
    ),
    "accumulation was refused": (
        "parity::test_equals_stock_ddp[colossalai-accumulate_3]",
        "trainer::test_as_stock_ddp[colossalai-accumulation_changes]",
    ),
    "16 bits and GPUs were required": (
        "parity::test_equals_stock_ddp[colossalai-accumulate_1]",
        "colossalai::test_64_true_trains_in_fp64",
    ),
    "an own backward was ignored": ("trainer::test_as_stock_ddp[colossalai-own_backward]",),
    "one optimizer, of two classes": ("trainer::test_as_stock_ddp[colossalai-two_optimizers_by_hand]",),
    "a training_step that returns None was refused": (
        "skipping::test_a_training_step_may_return_none_on_one_device[colossalai]",
    ),
    "models had to be built in configure_sharded_model (16824)": (
        "parity::test_equals_stock_ddp[colossalai-accumulate_1]",
        "trainer::test_models_built_in_a_hook",
    ),
    "evaluation before training was refused": (
        "trainer::test_as_stock_ddp[colossalai-evaluated_first]",
        "colossalai::test_auto_places_by_the_trace_of_a_first_step_even_after_validation",
    ),
    "reduce gave its result to rank 0 only": ("colossalai::test_reduce_gives_its_result_to_every_rank",),
    "ranks decided differently when to stop": (
        "trainer::test_decisions_reach_every_rank[colossalai]",
        "trainer::test_early_stopping_of_one_rank_stops_all[colossalai]",
    ),
    "all_gather refused sync_grads": ("colossalai::test_all_gather_concatenates_and_lets_gradients_through",),
    "Lightning 2 calls optimizer_step without an index": (
        "colossalai::test_optimizer_step_takes_the_arguments_of_lightning_1_and_2",
    ),
    "Lightning 2 loads a model with strict=": (
        "checkpoints::test_missing_names_are_an_error_unless_loading_is_not_strict[colossalai]",
    ),
    "rank 0's part of the optimizer state was saved alone": (
        "checkpoints::test_a_resumed_run_equals_a_straight_one_bit_for_bit[colossalai-3-32-true]",
    ),
    "the loss scale was not restored": ("saving::test_random_numbers_and_loss_scale_are_restored",),
}

AROUND: dict[str, tuple[str, ...]] = {
    "classes in a checkpoint were loaded, or not, without the user's word": (
        "entries::test_what_is_no_data_is_refused_or_left_out",
        "entries::test_a_checkpoint_cannot_name_other_classes",
        "regressions::test_a_file_with_classes_says_how_to_allow_them",
    ),
    "weight averaging and finetuning callbacks saw shards": (
        "trainer::test_weight_averaging_is_right_or_refused",
        "classes::test_refused_callbacks",
    ),
    "the model summary counted shards": ("flags::test_model_summary_counts_whole_parameters",),
    "throughput was compared with what fp32 can do": (
        "flags::test_throughput_is_measured_against_what_the_dtype_can_do",
    ),
    "evaluation under inference mode left tensors that training could not use": (
        "fully_sharded::test_training_goes_on_after_inference_mode",
    ),
    "spawned training left the main process' model as it was": (
        "launchers::test_popen_spawn_and_torchruns_agent_give_the_same_weights",
    ),
    "one namespace's strategy was refused by the other's Trainer": (
        "classes::test_packages_have_classes_of_their_own",
        "colossalai::test_by_name_under_both_packages",
        "fully_sharded::test_the_other_package",
        "deepspeed::test_under_pytorch_lightning",
    ),
    "built-in names were taken without being asked": ("classes::test_built_in_names_are_taken_over_on_request_only",),
    "toggled optimizers went on collecting gradients": (
        "trainer::test_as_stock_ddp[colossalai-two_optimizers_by_hand]",
    ),
}

FAULTS = [
    (of, fault, test)
    for of, faults in (
        ("deepspeed", DEEPSPEED),
        ("fully sharded", FULLY_SHARDED),
        ("colossalai", COLOSSALAI),
        ("lightning", AROUND),
    )
    for fault, tests in faults.items()
    for test in tests
]


def _test(file: str, name: str) -> Callable[..., Any]:
    found = [*TESTS.rglob(f"test_lightning_{file}.py")] or [*TESTS.rglob(f"test_{file}.py")]
    assert len(found) == 1, f"{file}: {found}"
    folder = str(found[0].parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    test: Callable[..., Any] = getattr(importlib.import_module(found[0].stem), name)
    return test


def _cases(mark: pytest.Mark) -> Iterator[str]:
    names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
    for index, each in enumerate(mark.args[1]):
        if isinstance(each, type(pytest.param())):
            values = () if any(one.name == "campaign" for one in each.marks) else each.values
        else:
            values = each if len(names) > 1 else (each,)
        if values:
            named = zip(names, values, strict=True)
            yield "-".join(str(v) if isinstance(v, (str, int, float)) else f"{name}{index}" for name, v in named)


def in_full_set(test: Callable[..., Any]) -> set[str]:
    """The cases that run without ``-m campaign``, as pytest names them; one without a name where there are none."""
    of_file = getattr(sys.modules[test.__module__], "pytestmark", [])
    marks: list[pytest.Mark] = [*getattr(test, "pytestmark", [])]
    marks += [each.mark for each in (of_file if isinstance(of_file, list) else [of_file])]
    if any(mark.name == "campaign" for mark in marks):
        return set()
    found = {""}
    for mark in marks:
        if mark.name == "parametrize":
            found = {"-".join(filter(None, (left, right))) for left in found for right in _cases(mark)}
    return found


@pytest.mark.parametrize(("of", "fault", "test"), FAULTS, ids=[test for _, _, test in FAULTS])
def test_the_fault_has_a_test_in_the_full_set(of: str, fault: str, test: str) -> None:
    parts = re.fullmatch(r"(\w+)::(\w+)(?:\[(.+)\])?", test)
    assert parts is not None, test
    file, name, case = parts.groups()
    cases = in_full_set(_test(file, name))
    assert case in cases if case else cases, f"{of}, {fault}: {sorted(cases)}"


@pytest.mark.parametrize("left", [1, *full(3), *campaign(2)])
@pytest.mark.parametrize(("a", "b"), [("x", {}), *campaign(("y", 2))])
def test_the_cases_are_those_of_pytest(a: str, b: Any, left: int, request: pytest.FixtureRequest) -> None:
    """What is said above of a test's cases is what pytest runs."""
    if "campaign" not in request.config.getoption("markexpr"):
        cases = in_full_set(test_the_cases_are_those_of_pytest)
        assert cases == {"x-b0-1", "x-b0-3"}
        assert request.node.name in {f"test_the_cases_are_those_of_pytest[{case}]" for case in cases}
