"""``ops.op_builder``: by which programs ask what of DeepSpeed's compiled parts there is.

Nothing is compiled here. A builder is compatible where what its kernel does in DeepSpeed is done here without one: a
program that asks before it names FusedAdam or a disk in its configuration gets the answer that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardwise.worlds import NotHere

__all__ = ["ALL_OPS", "BUILDERS", "COMPATIBLE", "OpBuilder"]


class OpBuilder:
    """One compiled part.

    Attributes:
        NAME: by which ``deepspeed.ops.__compatible_ops__`` knows it.
        BUILD_VAR: the variable of the environment by which DeepSpeed is told to build it; not read.
    """

    NAME = ""
    BUILD_VAR = ""
    _instead = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    def absolute_name(self) -> str:
        """Where DeepSpeed keeps it."""
        return f"deepspeed.ops.{self.NAME}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether what it is for can be used here.

        Args:
            verbose: also leave the reason in ``error_log``.
        """
        found = bool(_WORKS.get(self.NAME))
        self.error_log = None if found or not verbose else self._why()
        return found

    def load(self, verbose: bool = True) -> Any:
        """Not available.

        Raises:
            NotHere: what to use instead of the compiled functions.
        """
        raise NotHere(f"deepspeed.ops.op_builder.{type(self).__name__}.load(): {self._why()}")

    def _why(self) -> str:
        return f"nothing is compiled here; {_WORKS.get(self.NAME) or 'what it is for is not available'}"


_WORKS = {
    "async_io": "offload_optimizer and offload_param with device nvme need no extension",
    "cpu_adagrad": "make a DeepSpeedCPUAdagrad",
    "cpu_adam": "make a DeepSpeedCPUAdam",
    "cpu_lion": "make a DeepSpeedCPULion",
    "fused_adam": "make a FusedAdam",
    "fused_lion": "make a FusedLion",
}
_NAMES = {
    "AsyncIOBuilder": "async_io",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "SparseAttnBuilder": "sparse_attn",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
BUILDERS: Mapping[str, type[OpBuilder]] = MappingProxyType(
    {
        name: type(
            name, (OpBuilder,), {"NAME": short, "BUILD_VAR": f"DS_BUILD_{short.upper()}", "__module__": __name__}
        )
        for name, short in _NAMES.items()
    }
)
"""Every builder's class, by its name in DeepSpeed."""

COMPATIBLE: Mapping[str, bool] = MappingProxyType({short: short in _WORKS for short in _NAMES.values()})
"""``ops.__compatible_ops__``: whether what each is for can be used here."""


ALL_OPS: Mapping[str, OpBuilder] = MappingProxyType({each.NAME: each() for each in BUILDERS.values()})
"""One of each, by what it is called."""


def __getattr__(name: str) -> Any:
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
