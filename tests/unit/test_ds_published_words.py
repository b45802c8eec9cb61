"""Words of configurations, schedules and checkpoint files as DeepSpeed publishes them, and what they write."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.config import read_config
from shardwise.deepspeed.config_object import DeepSpeedConfig
from shardwise.deepspeed.optimizers import make_optimizer
from shardwise.deepspeed.schedules import make_schedule
from shardwise.worlds import Here, read_world

PUBLISHED: dict[str, dict[str, Any]] = {
    "runtime.constants": {
        "TRAIN_BATCH_SIZE": "train_batch_size",
        "TRAIN_BATCH_SIZE_DEFAULT": None,
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU": "train_micro_batch_size_per_gpu",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT": None,
        "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "GRADIENT_ACCUMULATION_STEPS_DEFAULT": None,
        "MANAGED_GRADIENT_ACCUMULATION": "managed_gradient_accumulation",
        "MANAGED_GRADIENT_ACCUMULATION_DEFAULT": True,
        "GRADIENT_CLIPPING": "gradient_clipping",
        "GRADIENT_CLIPPING_DEFAULT": 1.0,
        "PRESCALE_GRADIENTS": "prescale_gradients",
        "PRESCALE_GRADIENTS_DEFAULT": False,
        "GRADIENT_PREDIVIDE_FACTOR": "gradient_predivide_factor",
        "GRADIENT_PREDIVIDE_FACTOR_DEFAULT": 1.0,
        "GRADIENT_ALLREDUCE_OP": "gradient_allreduce_op",
        "GRADIENT_ALLREDUCE_OP_DEFAULT": "mean",
        "COMMUNICATION_DATA_TYPE": "communication_data_type",
        "COMMUNICATION_DATA_TYPE_DEFAULT": None,
        "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE": "seq_parallel_communication_data_type",
        "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT": "fp32",
        "DISABLE_ALLGATHER": "disable_allgather",
        "DISABLE_ALLGATHER_DEFAULT": False,
        "DUMP_STATE": "dump_state",
        "DUMP_STATE_DEFAULT": False,
        "STEPS_PER_PRINT": "steps_per_print",
        "STEPS_PER_PRINT_DEFAULT": None,
        "WALL_CLOCK_BREAKDOWN": "wall_clock_breakdown",
        "WALL_CLOCK_BREAKDOWN_DEFAULT": False,
        "MEMORY_BREAKDOWN": "memory_breakdown",
        "MEMORY_BREAKDOWN_DEFAULT": False,
        "ZERO_ALLOW_UNTESTED_OPTIMIZER": "zero_allow_untested_optimizer",
        "ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT": True,
        "ZERO_FORCE_DS_CPU_OPTIMIZER": "zero_force_ds_cpu_optimizer",
        "ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT": False,
        "SPARSE_GRADIENTS": "sparse_gradients",
        "SPARSE_GRADIENTS_DEFAULT": False,
        "GRAPH_HARVESTING": "graph_harvesting",
        "GRAPH_HARVESTING_DEFAULT": False,
        "DATALOADER_DROP_LAST": "dataloader_drop_last",
        "DATALOADER_DROP_LAST_DEFAULT": False,
        "LOG_LEVEL": "log_level",
        "LOG_LEVEL_DEFAULT": None,
        "VOCABULARY_SIZE": "vocabulary_size",
        "VOCABULARY_SIZE_DEFAULT": None,
        "USE_DATA_BEFORE_EXPERT_PARALLELISM": "use_data_before_expert_parallelism",
        "USE_DATA_BEFORE_EXPERT_PARALLELISM_DEFAULT": False,
        "FP16_ENABLED": "enabled",
        "FP16_ENABLED_DEFAULT": False,
        "FP16_AUTO_CAST": "auto_cast",
        "FP16_AUTO_CAST_DEFAULT": False,
        "FP16_LOSS_SCALE": "loss_scale",
        "FP16_LOSS_SCALE_DEFAULT": 0.0,
        "FP16_INITIAL_SCALE_POWER": "initial_scale_power",
        "FP16_INITIAL_SCALE_POWER_DEFAULT": 16,
        "FP16_LOSS_SCALE_WINDOW": "loss_scale_window",
        "FP16_LOSS_SCALE_WINDOW_DEFAULT": 1000,
        "FP16_HYSTERESIS": "hysteresis",
        "FP16_HYSTERESIS_DEFAULT": 2,
        "FP16_CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis",
        "FP16_CONSECUTIVE_HYSTERESIS_DEFAULT": False,
        "FP16_MIN_LOSS_SCALE": "min_loss_scale",
        "FP16_MIN_LOSS_SCALE_DEFAULT": 1.0,
        "FP16_FP16_MASTER_WEIGHTS_AND_GRADS": "fp16_master_weights_and_grads",
        "FP16_FP16_MASTER_WEIGHTS_AND_GRADS_DEFAULT": False,
        "GRAD_ACCUM_DTYPE": "grad_accum_dtype",
        "GRAD_ACCUM_DTYPE_DEFAULT": None,
        "BUFFER_DTYPE": "buffer_dtype",
        "BUFFER_DTYPE_DEFAULT": None,
        "PARAM_DTYPE": "param_dtype",
        "PARAM_DTYPE_DEFAULT": None,
        "KEEP_IN_FP32_MODULES": "keep_in_fp32_modules",
        "KEEP_IN_FP32_MODULES_DEFAULT": "auto",
        "AMP": "amp",
        "BFLOAT16": "bf16",
        "BFLOAT16_OLD": "bfloat16",
        "BFLOAT16_ENABLED": "enabled",
        "BFLOAT16_ENABLED_DEFAULT": False,
        "CHECKPOINT": "checkpoint",
        "CHECKPOINT_TAG_VALIDATION": "tag_validation",
        "DATA_TYPES": "data_types",
        "FP16": "fp16",
        "GRADIENT_ALLREDUCE_OP_MEAN": "mean",
        "GRADIENT_ALLREDUCE_OP_SUM": "sum",
        "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
        "MAX_GRAD_NORM": "max_grad_norm",
        "OPTIMIZER": "optimizer",
        "OPTIMIZER_PARAMS": "params",
        "OPTIMIZER_TYPE_DEFAULT": None,
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_TRAIN": "train",
        "SCHEDULER": "scheduler",
        "SCHEDULER_PARAMS": "params",
        "SCHEDULER_TYPE_DEFAULT": None,
        "TYPE": "type",
    },
    "runtime.config": {
        "ADAGRAD_OPTIMIZER": "adagrad",
        "ADAM_OPTIMIZER": "adam",
        "ADAMW_OPTIMIZER": "adamw",
        "LAMB_OPTIMIZER": "lamb",
        "LION_OPTIMIZER": "lion",
        "MUADAM_OPTIMIZER": "muadam",
        "MUADAMW_OPTIMIZER": "muadamw",
        "MUON_OPTIMIZER": "muon",
        "MUSGD_OPTIMIZER": "musgd",
        "ONEBIT_ADAM_OPTIMIZER": "onebitadam",
        "ONEBIT_LAMB_OPTIMIZER": "onebitlamb",
        "ZERO_ONE_ADAM_OPTIMIZER": "zerooneadam",
        "DEEPSPEED_OPTIMIZERS": [
            "adagrad",
            "adam",
            "adamw",
            "lamb",
            "lion",
            "muadam",
            "muadamw",
            "muon",
            "musgd",
            "onebitadam",
            "onebitlamb",
            "zerooneadam",
        ],
        "TORCH_ADAM_PARAM": "torch_adam",
        "ADAM_W_MODE": "adam_w_mode",
        "ADAM_W_MODE_DEFAULT": True,
    },
    "checkpoint.constants": {
        "BASE_OPTIMIZER_STATE": "base_optimizer_state",
        "BASE_OPTIMIZER_STATE_STEP": "base_optimizer_state_step",
        "BUFFER_NAMES": "buffer_names",
        "CAT_DIM": "cat_dim",
        "CLIP_GRAD": "clip_grad",
        "DS_VERSION": "ds_version",
        "FP32_FLAT_GROUPS": "fp32_flat_groups",
        "FP32_GROUPS": "fp32_groups",
        "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments",
        "FROZEN_PARAM_SHAPES": "frozen_param_shapes",
        "GROUP_PADDINGS": "group_paddings",
        "LOSS_SCALER": "loss_scaler",
        "OPTIMIZER_STATE_DICT": "optimizer_state_dict",
        "PARAM": "param",
        "PARAM_GROUPS": "param_groups",
        "PARAM_SHAPES": "param_shapes",
        "PARAM_SLICE_MAPPINGS": "param_slice_mappings",
        "PARTITION_COUNT": "partition_count",
        "SINGLE_PARTITION_OF_FP32_GROUPS": "single_partition_of_fp32_groups",
        "UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
        "ZERO_STAGE": "zero_stage",
        "FP32_WEIGHT_KEY": "fp32",
        "LAYER_FILE_PREFIX": "layer_",
        "MODEL_FILE_PREFIX": "mp_rank_",
        "MODEL_FILE_SUFFIX": "_model_states.pt",
        "OPTIM_FILE_SUFFIX": "_optim_states.pt",
        "ZERO_FILE_PREFIX": "zero_pp_rank_",
        "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_",
        "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
    },
    "runtime.lr_schedules": {
        "LR_SCHEDULE": "lr_schedule",
        "LR_RANGE_TEST": "LRRangeTest",
        "ONE_CYCLE": "OneCycle",
        "WARMUP_LR": "WarmupLR",
        "WARMUP_DECAY_LR": "WarmupDecayLR",
        "WARMUP_COSINE_LR": "WarmupCosineLR",
        "VALID_LR_SCHEDULES": ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
        "LR_RANGE_TEST_MIN_LR": "lr_range_test_min_lr",
        "LR_RANGE_TEST_STEP_RATE": "lr_range_test_step_rate",
        "LR_RANGE_TEST_STEP_SIZE": "lr_range_test_step_size",
        "LR_RANGE_TEST_STAIRCASE": "lr_range_test_staircase",
        "EDGE_VALUE": "edge_value",
        "MID_VALUE": "mid_value",
        "CYCLE_FIRST_STEP_SIZE": "cycle_first_step_size",
        "CYCLE_FIRST_STAIR_COUNT": "cycle_first_stair_count",
        "CYCLE_SECOND_STEP_SIZE": "cycle_second_step_size",
        "CYCLE_SECOND_STAIR_COUNT": "cycle_second_stair_count",
        "DECAY_STEP_SIZE": "decay_step_size",
        "CYCLE_MIN_LR": "cycle_min_lr",
        "CYCLE_MAX_LR": "cycle_max_lr",
        "DECAY_LR_RATE": "decay_lr_rate",
        "CYCLE_MIN_MOM": "cycle_min_mom",
        "CYCLE_MAX_MOM": "cycle_max_mom",
        "DECAY_MOM_RATE": "decay_mom_rate",
        "WARMUP_MIN_LR": "warmup_min_lr",
        "WARMUP_MAX_LR": "warmup_max_lr",
        "WARMUP_NUM_STEPS": "warmup_num_steps",
        "WARMUP_TYPE": "warmup_type",
        "WARMUP_LOG_RATE": "log",
        "WARMUP_LINEAR_RATE": "linear",
        "WARMUP_MIN_RATIO": "warmup_min_ratio",
        "COS_MIN_RATIO": "cos_min_ratio",
        "TOTAL_NUM_STEPS": "total_num_steps",
    },
}

HOMES = {f"shardwise.deepspeed.{name}" for name in ("config_words", "config_names")}


def words(path: str) -> Any:
    return importlib.import_module(f"shardwise.deepspeed.{path}")


def test_every_word_has_its_published_value() -> None:
    world = read_world("deepspeed")
    for path, table in PUBLISHED.items():
        entries = world.names[path]
        ours = {name for name, entry in entries.items() if isinstance(entry, Here) and entry.module in HOMES}
        assert ours == set(table) and {name: getattr(words(path), name) for name in table} == table
    of_words = {name for _, name, entry in world.entries() if isinstance(entry, Here) and entry.module in HOMES}
    assert of_words == {name for table in PUBLISHED.values() for name in table}


SECTION = {"FP16_": "fp16", "BFLOAT16_": "bf16"}
OF_TYPES = ("GRAD_ACCUM_DTYPE", "BUFFER_DTYPE", "PARAM_DTYPE", "KEEP_IN_FP32_MODULES")
KEY_WORDS = [name.removesuffix("_DEFAULT") for name in PUBLISHED["runtime.constants"] if name.endswith("_DEFAULT")]


@pytest.mark.parametrize("word", [name for name in KEY_WORDS if name not in ("OPTIMIZER_TYPE", "SCHEDULER_TYPE")])
def test_a_word_writes_its_key_and_what_is_absent_has_the_default(word: str) -> None:
    constants = words("runtime.constants")
    key, default = getattr(constants, word), getattr(constants, f"{word}_DEFAULT")
    section = next((name for prefix, name in SECTION.items() if word.startswith(prefix)), "")
    section = "data_types" if word in OF_TYPES else section
    settings = read_config({section: {key: default}} if section else {key: default})
    path = f"{section}.{key}".lstrip(".")
    assert path in {*settings.findings.used, *settings.findings.ignored} and settings[path] == default
    assert read_config({})[path] == default
    with pytest.raises(ValueError, match=f"{path}x=1 is not a key"):
        read_config({section: {f"{key}x": 1}} if section else {f"{key}x": 1})


def test_a_program_writes_its_configuration_in_words() -> None:
    c = words("runtime.constants")
    optimizer = {c.TYPE: words("runtime.config").ADAM_OPTIMIZER, c.OPTIMIZER_PARAMS: {"lr": 0.5}}
    config = DeepSpeedConfig(
        {
            c.TRAIN_BATCH_SIZE: 8,
            c.GRADIENT_ALLREDUCE_OP: c.GRADIENT_ALLREDUCE_OP_SUM,
            c.BFLOAT16_OLD: {c.BFLOAT16_ENABLED: True},
            c.CHECKPOINT: {c.CHECKPOINT_TAG_VALIDATION: "fail", c.LOAD_UNIVERSAL_CHECKPOINT: True},
            c.DATA_TYPES: {c.GRAD_ACCUM_DTYPE: "fp32"},
            c.OPTIMIZER: optimizer,
            c.SCHEDULER: {c.TYPE: "WarmupLR", c.SCHEDULER_PARAMS: {"warmup_num_steps": 7}},
        }
    )
    assert (config.train_batch_size, config.gradient_allreduce_op, config.bfloat16_config.enabled) == (8, "sum", True)
    assert config.checkpoint_tag_validation_fail and config.load_universal_checkpoint
    assert config.grad_accum_dtype is torch.float32 and config.scheduler_params == {"warmup_num_steps": 7}
    assert (config.optimizer_name, config.optimizer_params) == ("adam", {"lr": 0.5})
    without = DeepSpeedConfig({c.TRAIN_BATCH_SIZE: 8})
    assert without.optimizer_name is c.OPTIMIZER_TYPE_DEFAULT and without.scheduler_name is c.SCHEDULER_TYPE_DEFAULT
    assert without.gradient_allreduce_op == c.GRADIENT_ALLREDUCE_OP_MEAN
    assert read_config({c.BFLOAT16: {c.BFLOAT16_ENABLED: True}})["bf16.enabled"]
    with pytest.raises(NotImplementedError, match="amp"):
        read_config({c.AMP: {"enabled": True}})
    with pytest.raises(ValueError, match="gradient_clipping"):
        make_optimizer(optimizer[c.TYPE], [nn.Parameter(torch.ones(1))], {c.MAX_GRAD_NORM: 1.0})


def test_routes_of_data_say_whether_it_is_shuffled() -> None:
    c = words("runtime.constants")
    engine = deepspeed.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 1, "gradient_clipping": 0})[0]
    for route, shuffles in ((c.ROUTE_TRAIN, True), (c.ROUTE_EVAL, False), (c.ROUTE_PREDICT, False)):
        found: Any = engine.deepspeed_io([1, 2, 3], route=route).sampler
        assert found.shuffle is shuffles
    engine.destroy()


MADE = {"ADAM": "AdamW", "ADAMW": "AdamW", "ADAGRAD": "Adagrad", "LAMB": "FusedLamb", "LION": "Lion"}


def test_optimizers_by_their_words() -> None:
    names = words("runtime.config")
    for word in [name for name in PUBLISHED["runtime.config"] if name.endswith("_OPTIMIZER")]:
        name, held = getattr(names, word), [nn.Parameter(torch.ones(1))]
        assert name in names.DEEPSPEED_OPTIMIZERS
        if word.removesuffix("_OPTIMIZER") in MADE:
            found = type(make_optimizer(name, held, {"lr": 0.1})).__name__
            assert found == MADE[word.removesuffix("_OPTIMIZER")]
        else:
            with pytest.raises((ValueError, NotImplementedError), match=f"(?i){name}"):
                make_optimizer(name, held, {"lr": 0.1})
    coupled = make_optimizer(
        "Adam", [nn.Parameter(torch.ones(1))], {names.TORCH_ADAM_PARAM: True, names.ADAM_W_MODE: False}
    )
    assert type(coupled) is torch.optim.Adam and names.ADAM_W_MODE_DEFAULT
    assert type(make_optimizer("Adam", [nn.Parameter(torch.ones(1))], {})) is torch.optim.AdamW


def test_schedules_by_their_words() -> None:
    s = words("runtime.lr_schedules")
    rows: dict[str, tuple[dict[str, Any], list[float]]] = {  # their parameters, and rates before and after two steps
        s.LR_RANGE_TEST: (
            {
                s.LR_RANGE_TEST_MIN_LR: 0.5,
                s.LR_RANGE_TEST_STEP_SIZE: 2,
                s.LR_RANGE_TEST_STEP_RATE: 2.0,
                s.LR_RANGE_TEST_STAIRCASE: True,
            },
            [0.5, 0.5, 1.5],
        ),
        s.ONE_CYCLE: (
            {
                s.CYCLE_MIN_LR: 0.25,
                s.CYCLE_MAX_LR: 0.75,
                s.CYCLE_FIRST_STEP_SIZE: 2,
                s.CYCLE_FIRST_STAIR_COUNT: 0,
                s.CYCLE_SECOND_STEP_SIZE: 2,
                s.CYCLE_SECOND_STAIR_COUNT: 0,
                s.DECAY_STEP_SIZE: 1,
                s.DECAY_LR_RATE: 0.5,
                s.CYCLE_MIN_MOM: 0.8,
                s.CYCLE_MAX_MOM: 0.9,
                s.DECAY_MOM_RATE: 0.1,
            },
            [0.25, 0.5, 0.75],
        ),
        s.WARMUP_LR: (
            {s.WARMUP_MIN_LR: 0.0, s.WARMUP_MAX_LR: 1.0, s.WARMUP_NUM_STEPS: 4, s.WARMUP_TYPE: s.WARMUP_LINEAR_RATE},
            [0.0, 0.0, 0.25],
        ),
        s.WARMUP_DECAY_LR: (
            {s.TOTAL_NUM_STEPS: 10, s.WARMUP_MAX_LR: 1.0, s.WARMUP_NUM_STEPS: 4, s.WARMUP_TYPE: s.WARMUP_LOG_RATE},
            [0.0, 0.0, 0.5],
        ),
        s.WARMUP_COSINE_LR: (
            {
                s.TOTAL_NUM_STEPS: 2,
                s.WARMUP_NUM_STEPS: 2,
                s.WARMUP_MIN_RATIO: 0.5,
                s.COS_MIN_RATIO: 0.1,
                s.WARMUP_TYPE: s.WARMUP_LINEAR_RATE,
            },
            [0.0, 0.5, 0.75],
        ),
    }
    assert list(rows) == s.VALID_LR_SCHEDULES
    for name, (params, expected) in rows.items():
        optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1.0)
        schedule, rates = make_schedule(name, optimizer, params), [optimizer.param_groups[0]["lr"]]
        for _ in range(2):
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx(expected), name


def test_files_of_checkpoints_are_named_by_their_words(tmp_path: Path) -> None:
    c, files = words("checkpoint.constants"), words("checkpoint.utils")
    assert Path(files.get_model_ckpt_name_for_rank("", "00")).name == f"{c.MODEL_FILE_PREFIX}00{c.MODEL_FILE_SUFFIX}"
    assert (
        Path(files.get_layer_ckpt_name_for_rank("", f"{c.LAYER_FILE_PREFIX}03", 1)).name
        == "layer_03-model_01_model_states.pt"
    )
    name = Path(files.get_zero_ckpt_name_for_rank("", 1, 0)).name
    assert name == f"{c.ZERO_FILE_PREFIX}1_mp_rank_00{c.OPTIM_FILE_SUFFIX}"
    for prefix in (c.ZERO_FILE_PREFIX, c.BF16_ZERO_FILE_PREFIX, c.FP16_ZERO_FILE_PREFIX):
        (tmp_path / f"{prefix}0_mp_rank_00{c.OPTIM_FILE_SUFFIX}").touch()
    found = words("utils.zero_to_fp32").get_optim_files(str(tmp_path))
    assert len(found) == 3 and all(each.endswith(c.OPTIM_FILE_SUFFIX) for each in found)
