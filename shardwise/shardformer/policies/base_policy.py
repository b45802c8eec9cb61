"""What a policy says of a model: for each class of modules, which layers in it are cut, and what else changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.shardformer.layer import ParallelModule
from shardwise.shardformer.shard.shard_config import ShardConfig

__all__ = ["ModulePolicyDescription", "ParallelModule", "Policy", "SubModuleReplacementDescription"]

Key = str | type[nn.Module]
Described = dict[Key, "ModulePolicyDescription"]


@dataclass
class SubModuleReplacementDescription:
    """How one layer of a module is cut.

    Attributes:
        suffix: where the layer is, from the module: ``"self_attn.q_proj"``, ``"layers[0].fc"``.
        target_module: one of :mod:`shardwise.shardformer.layer`.
        kwargs: arguments of it.
        ignore_if_not_exist: leave it out where the module has no such layer.
    """

    suffix: str
    target_module: type[ParallelModule]
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """What is done to each module of a class.

    Attributes:
        attribute_replacement: attributes that are others with the parts, by name, with dots.
        param_replacement: refused: parameters stay the model's own; cut layers with ``sub_module_replacement``.
        sub_module_replacement: layers that are cut.
        method_replacement: functions that take the place of methods, by name.
    """

    attribute_replacement: dict[str, Any] | None = None
    param_replacement: list[Callable[[nn.Module], None]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None


class Policy(ABC):
    """Derive from it for a model of your own, and give one to ``HybridParallelPlugin(custom_policy=...)`` or
    :meth:`ShardFormer.optimize`.

    Attributes:
        model: the one at hand, whole.
        shard_config: over how many ranks (``tensor_parallel_size``), and what else was asked for.
        is_causal: for the policy's own use.
    """

    def __init__(self) -> None:
        self.shard_config: ShardConfig | None = None
        self.model: nn.Module | None = None
        self.is_causal: bool | None = None

    def set_model(self, model: nn.Module) -> None:
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """It is looked at by :meth:`config_sanity_check` at once."""
        self.shard_config = shard_config
        self.config_sanity_check()

    @property
    def pipeline_stage_manager(self) -> None:
        """There is no pipeline."""
        return None

    @abstractmethod
    def config_sanity_check(self) -> None:
        """Raise where ``shard_config`` does not go with the model."""

    @abstractmethod
    def preprocess(self) -> nn.Module:
        """Called first. Returns the model, with the modules and parameters that it had."""

    @abstractmethod
    def module_policy(self) -> Described:
        """By class, or by a class's name, what is done to its modules."""

    @abstractmethod
    def postprocess(self) -> nn.Module:
        """Called last. Returns the model, with the modules and parameters that it had: tied weights stay tied."""

    def append_or_create_submodule_replacement(
        self,
        description: SubModuleReplacementDescription | list[SubModuleReplacementDescription],
        policy: Described,
        target_key: Key,
    ) -> Described:
        """Add layers to what ``policy`` says of ``target_key``."""
        added = [description] if isinstance(description, SubModuleReplacementDescription) else list(description)
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        entry.sub_module_replacement = [*(entry.sub_module_replacement or []), *added]
        return policy

    def append_or_create_method_replacement(
        self, description: dict[str, Callable[..., Any]], policy: Described, target_key: Key
    ) -> Described:
        """Add methods to what ``policy`` says of ``target_key``."""
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        entry.method_replacement = {**(entry.method_replacement or {}), **description}
        return policy

    def get_held_layers(self) -> list[nn.Module]:
        """Of a stage of a pipeline. Nothing asks for it yet."""
        raise NotImplementedError(f"{type(self).__name__}.get_held_layers: a model is in one piece here; call it never")

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        """Parameters that stages share: none."""
        return []

    def tie_weight_check(self) -> bool:
        """Whether the model's input and output embeddings are one parameter."""
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())  # type: ignore[union-attr, operator]
        return all(end is not None for end in ends) and ends[0].weight is ends[1].weight
