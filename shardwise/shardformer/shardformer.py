"""Tensor parallelism without a Booster: a model's layers are cut where they stand, and nothing else is done."""

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
from shardwise.shardformer.changes import changed_model, kernels_of
from shardwise.shardformer.policies import Policy, PolicyArchitecture
from shardwise.shardformer.shard_config import ShardConfig

__all__ = ["ShardFormer"]

NAME = "tensor_parallel_process_group"


class ShardFormer:
    """Cuts models over the ranks of a configuration.

    Args:
        shard_config: over which ranks, and what else.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        check_type("shard_config", shard_config, ShardConfig, "a ShardConfig")
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, list[dict[int, Tensor]]]:
        """``model`` itself, with this rank's parts, and no shared parameters (those of a pipeline's stages).

        Every rank has the same values before. Build the optimizer after it. Gradients of whole parameters are alike on
        all ranks; a norm over all parameters is for the program to put together. Collective.

        Args:
            model: whole, on the device where it runs.
            policy: what is cut; ``None``: what is known of the model's classes.

        Raises:
            ValueError, TypeError: the model cannot be cut so; nothing was changed.
            NotImplementedError: the policy needs what is not there.
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


class _OwnAxis(Axis):
    """With what its group's communicators live as long as."""

    def __init__(self, maker: GroupMaker, ranks: tuple[int, ...], compress: bool) -> None:
        super().__init__(maker.make("tensor", [list(ranks)]), compress)
        self._maker = maker


def _axis_over(config: ShardConfig, device: torch.device) -> Axis:
    """An axis of the ranks of a configuration. Collective over them; it goes with the last layer that is cut over it.

    Raises:
        ValueError: this rank is no member.
    """
    process_group = config.tensor_parallel_process_group
    ranks = ranks_of(NAME, process_group)
    if len(ranks) == 1:
        return Axis(LocalGroup("tensor", device))
    everyone: ProcessGroup = group.WORLD  # type: ignore[assignment]
    with on_device(device):
        members = Members(process_group or everyone, NAME, "tensor")
        return _OwnAxis(GroupMaker(device, None, members.timeout_s, members), ranks, config.fp8_communication)
