"""What was wrong or refused in the old strategies, and the test that would notice if it came back."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

FAULTS: dict[str, tuple[str, ...]] = {
    # DeepSpeedStrategy
    "the user's config dict was changed, and a second strategy of it failed (19891)": (
        "test_a_dict_is_never_changed_and_serves_a_second_strategy",
        "test_a_config_is_never_changed_completed_from_trainer_and_found_by_precedence",
    ),
    "a stage or device that does not exist was accepted": ("test_wrong_arguments_are_errors_at_once",),
    "unknown keys at the top of a config were ignored": ("test_unknown_keys_are_errors_that_name_the_nearest",),
    "auto values stopped the run or stayed as text": ("test_auto_values_are_resolved_from_trainer",),
    "the micro-batch size stayed 1 where validation came first": (
        "test_the_batch_size_is_known_when_validation_came_first",
    ),
    "a loader without a batch sampler was an AttributeError": (
        "test_throughput_and_times_are_logged_whatever_the_loader",
    ),
    "thread_count had no effect": ("test_thread_count_is_not_dead",),
    "contiguous checkpointing asked for a number of layers that nobody could give": (
        "test_activation_checkpointing_arguments_change_no_bit",
    ),
    "bf16 in the config and fp16 in the Trainer were both enabled": ("test_fp16_and_bf16_together_are_a_clear_error",),
    "offloading needed an optimizer of DeepSpeed's own": ("test_offloading_to_host_and_disk_changes_no_bit",),
    "left-over batches of an epoch were lost or kept, by stage": (
        "test_equals_stock_ddp",
        "test_left_over_batches_of_accumulation_are_stepped_alike_at_every_stage",
    ),
    "schedules were longer than the training": ("test_a_schedule_is_as_long_as_the_training",),
    "a resumed run differed at accumulation 3": (
        "test_a_resumed_run_equals_a_straight_one_bit_for_bit",
        "test_a_run_resumed_within_an_epoch_goes_on_bit_for_bit",
    ),
    "accumulation could not change during a run": ("test_as_stock_ddp",),
    "saving after test was broken, and evaluation made a second engine (15247, 17523, 18971)": (
        "test_save_after_test_and_after_evaluation_alone",
        "test_saving_after_test_and_one_engine_for_all_of_a_run",
    ),
    "on_save_checkpoint saw a sharded state": ("test_hooks_see_whole_shapes_and_keep_what_they_add",),
    "missing names of a full state were collected and never raised": (
        "test_load_full_weights_raises_for_missing_unexpected_and_wrongly_shaped_entries",
        "test_missing_names_are_an_error_unless_loading_is_not_strict",
    ),
    "another number of ranks could not load (19585)": ("test_another_number_of_ranks",),
    "one optimizer, clipping by norm only, an own backward ignored, compiled modules refused": (
        "test_as_stock_ddp",
        "test_clipping_by_value_and_with_accumulation",
    ),
    "mixed was taken for autocast (15168, 18016)": ("test_bf16_is_really_bf16",),
    # DDPFullyShardedStrategy
    "bf16 trained in fp32": ("test_bf16_is_really_bf16", "test_precision"),
    "each rank clipped by its own norm (13339, 19235)": (
        "test_equals_stock_ddp",
        "test_clipping_uses_the_global_gradient",
    ),
    "clipping by norm was refused with fp16": ("test_an_overflow_skips_the_step_whatever_clips",),
    "rank 0's part of the optimizer state was saved alone": ("test_a_resumed_run_equals_a_straight_one_bit_for_bit",),
    "one model could not be fitted twice": ("test_as_stock_ddp",),
    "flatten_parameters=False failed always": ("test_equals_stock_ddp",),
    "a hook that builds the model ran again before the next run, and weights were restored around it": (
        "test_models_built_in_a_hook",
        "test_a_hook_that_builds_again_does_not_lose_the_training",
    ),
    "the name fsdp is not free": ("test_names",),
    # ColossalAIStrategy
    "chunk_size and enable_distributed_storage were stored and never used": (
        "test_chunk_arguments_have_effects",
        "test_storage_and_placement_have_effects",
        "test_each_argument_changes_the_plan",
    ),
    "use_chunk=False was refused, and a min_chunk_size below 1 MiB became 0": ("test_chunk_arguments_have_effects",),
    "any clipping failed, and accumulation was refused": ("test_equals_stock_ddp",),
    "evaluation before training was refused": ("test_as_stock_ddp",),
    "reduce gave its result to rank 0 only": ("test_reduce_gives_its_result_to_every_rank",),
    "ranks decided differently when to stop": (
        "test_decisions_reach_every_rank",
        "test_early_stopping_of_one_rank_stops_all",
    ),
    "all_gather refused sync_grads": ("test_all_gather_concatenates_and_lets_gradients_through",),
    "Lightning 2 calls optimizer_step without an index": (
        "test_optimizer_step_takes_the_arguments_of_lightning_1_and_2",
    ),
    # every strategy that Lightning does not know by class
    "classes in a checkpoint were loaded, or not, without the user's word": (
        "test_what_is_no_data_is_refused_or_left_out",
        "test_a_checkpoint_cannot_name_other_classes",
    ),
    "weight averaging saw shards": ("test_weight_averaging_is_right_or_refused", "test_refused_callbacks"),
    "the model summary counted shards": ("test_model_summary_counts_whole_parameters",),
    "evaluation under inference mode left tensors that training could not use": (
        "test_training_goes_on_after_inference_mode",
    ),
    "spawned training left the main process' model as it was": ("test_every_launcher_gives_the_same_weights",),
    "one namespace's strategy was refused by the other's Trainer": ("test_packages_have_classes_of_their_own",),
    "toggled optimizers went on collecting gradients": ("test_as_stock_ddp",),
}


@cache
def _names() -> frozenset[str]:
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return frozenset(found)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_has_a_regression_test(fault: str) -> None:
    assert set(FAULTS[fault]) <= _names()
