"""Words that programs import to write and read configurations and checkpoint files, with DeepSpeed's names for them.

Those of configurations are made of the schema: a key's name in capitals is the key, and with ``_DEFAULT`` its default
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardwise.deepspeed.schema import SECTIONS

__all__ = ["CHECKPOINT_WORDS", "CONFIG_WORDS", "OPTIMIZER_WORDS"]

_NOT_DEEPSPEEDS = ("data_parallel_size", "sequence_parallel_size", "disable_python_gc", "use_node_local_storage")


def _of_section(section: str, prefix: str = "") -> dict[str, Any]:
    words: dict[str, Any] = {}
    for name, key in SECTIONS[section].items():
        if name not in _NOT_DEEPSPEEDS:
            words |= {f"{prefix}{name.upper()}": name, f"{prefix}{name.upper()}_DEFAULT": key.default}
    return words


CONFIG_WORDS: Mapping[str, Any] = MappingProxyType(
    {
        **_of_section(""),
        **_of_section("fp16", "FP16_"),
        **_of_section("data_types"),
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
    }
)
"""Of ``runtime.constants``."""

_OPTIMIZERS = {
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
}
OPTIMIZER_WORDS: Mapping[str, Any] = MappingProxyType(
    {
        **_OPTIMIZERS,
        "DEEPSPEED_OPTIMIZERS": sorted(_OPTIMIZERS.values()),
        "TORCH_ADAM_PARAM": "torch_adam",
        "ADAM_W_MODE": "adam_w_mode",
        "ADAM_W_MODE_DEFAULT": True,
    }
)
"""Of ``runtime.config``: what ``optimizer.type`` may be under DeepSpeed. Some are refused here."""

CHECKPOINT_WORDS: Mapping[str, Any] = MappingProxyType(
    {
        **{
            word: word.lower()
            for word in (
                "BASE_OPTIMIZER_STATE",
                "BASE_OPTIMIZER_STATE_STEP",
                "BUFFER_NAMES",
                "CAT_DIM",
                "CLIP_GRAD",
                "DS_VERSION",
                "FP32_FLAT_GROUPS",
                "FP32_GROUPS",
                "FROZEN_PARAM_FRAGMENTS",
                "FROZEN_PARAM_SHAPES",
                "GROUP_PADDINGS",
                "LOSS_SCALER",
                "OPTIMIZER_STATE_DICT",
                "PARAM",
                "PARAM_GROUPS",
                "PARAM_SHAPES",
                "PARAM_SLICE_MAPPINGS",
                "PARTITION_COUNT",
                "SINGLE_PARTITION_OF_FP32_GROUPS",
                "UNIVERSAL_CHECKPOINT_INFO",
                "ZERO_STAGE",
            )
        },
        "FP32_WEIGHT_KEY": "fp32",
        "LAYER_FILE_PREFIX": "layer_",
        "MODEL_FILE_PREFIX": "mp_rank_",
        "MODEL_FILE_SUFFIX": "_model_states.pt",
        "OPTIM_FILE_SUFFIX": "_optim_states.pt",
        "ZERO_FILE_PREFIX": "zero_pp_rank_",
        "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_",
        "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
    }
)
"""Of ``checkpoint.constants``: what DeepSpeed calls its files and what is in them; those written here are others."""


def __getattr__(name: str) -> Any:
    for words in (CONFIG_WORDS, OPTIMIZER_WORDS, CHECKPOINT_WORDS):
        if name in words:
            return words[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
