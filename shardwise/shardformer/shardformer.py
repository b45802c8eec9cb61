"""Tensor parallelism without a Booster: shards a model's layers in place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, group

from shardwise.core.base.device import on_device
from shardwise.core.base.validate import check_type
from shardwise.core.comm import GroupMaker, LocalGroup, Members, ranks_of
from shardwise.core.parallel.tensor import Axis, cut_model
from shardwise.plan import TensorPlan
from shardwise.shardformer.model_optimizations import changed_model, kernels_of
from shardwise.shardformer.policies import Policy, PolicyArchitecture
from shardwise.shardformer.shard_config import ShardConfig

NAME = "tensor_parallel_process_group"


class ShardFormer:
    """Shards models over the ranks of a configuration.

    Args:
        shard_config: the ranks and other options.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        check_type("shard_config", shard_config, ShardConfig, "a ShardConfig")
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, list[dict[int, Tensor]]]:
        """Return ``model`` with this rank's shards, and an empty list of parameters that pipeline stages share.

        Every rank must have the same values before. Build the optimizer afterwards. Gradients of replicated parameters
        are equal on all ranks; a program has to compute a norm over all parameters itself. Collective.

        Args:
            model: an unsharded model on the device where it runs.
            policy: defines the sharded layers; ``None``: the built-in rules for the model's classes.

        Raises:
            ValueError: the model's sizes or the policy do not fit; nothing was changed.
            TypeError: a layer has a class that cannot be sharded; nothing was changed.
            NotImplementedError: the policy needs something that is not available.
        """
        config = self.shard_config
        with changed_model(model, kernels_of(config), config.gradient_checkpoint_config):
            if config.tensor_parallel_size > 1:
                plan = TensorPlan(
                    parallel_output=config.parallel_output,
                    vocabulary_multiple=config.make_vocab_size_divisible_by,
                    sequence="split_gather" if config.enable_sequence_parallelism else None,
                )
                if policy is not None:
                    plan = replace(plan, architecture=PolicyArchitecture(policy, plan))
                device = next((param.device for param in model.parameters()), torch.device("cpu"))
                tp_plan = cut_model(model, _axis_over(config, device), plan)
                tp_plan.cut_values()
                tp_plan.install()
        return model, []


def _axis_over(config: ShardConfig, device: torch.device) -> Axis:
    """Return an axis of the ranks of a configuration. Collective over them; it lives as long as the layers sharded over
    it.

    Raises:
        ValueError: this rank is not a member.
    """
    process_group = config.tensor_parallel_process_group
    ranks = ranks_of(NAME, process_group)
    if len(ranks) == 1:
        return Axis(LocalGroup("tensor", device))
    all_ranks: ProcessGroup = group.WORLD  # type: ignore[assignment]
    with on_device(device):
        members = Members(process_group or all_ranks, NAME, "tensor")
        maker = GroupMaker(device, None, members.timeout_s, members)
        axis = Axis(maker.make("tensor", [list(ranks)]), config.fp8_communication)
    vars(axis)["maker"] = maker  # owns the group's communicators
    return axis
