"""``GeminiDDP`` and ``GeminiOptimizer``, which share the arguments of GeminiPlugin."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster.plugin import GeminiPlugin
from shardwise.compat.arguments import names_of
from shardwise.core.base.validate import check_type, did_you_mean
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import ranks_of
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.optim import HybridAdam
from shardwise.plan.scaler_arguments import PublishedDefault
from shardwise.session import Session, ShardedOptimizer
from shardwise.zero.fronts import NAMES, ModelFront, OptimizerFront

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def check_groups(shard: dist.ProcessGroup | None, replicate: dist.ProcessGroup | None) -> int:
    """Return the number of replicas of the model that a program's process groups define.

    Args:
        shard: the ranks that the model is sharded over; ``None``: all.
        replicate: the ranks with the same shard; ``None``: this one.

    Raises:
        ValueError: this rank is not a member of a group, or the ranks of ``shard`` are not consecutive.
    """
    if shard is None and replicate is None:
        return 1
    world, ranks = ranks_of("group", None), ranks_of("the group that shards", shard)
    replicas = 1 if replicate is None else len(ranks_of("the group of replicas", replicate))
    start = ranks[0]
    consecutive = ranks == tuple(range(start, start + len(ranks))) and start % len(ranks) == 0
    if not consecutive or len(ranks) * replicas != len(world):
        raise ValueError(
            f"a group of ranks {list(ranks)} in {replicas} copies among {len(world)} ranks: give groups of "
            "neighbors that cover all ranks, such as ProcessGroupMesh(copies, ranks).get_group_along_axis(1)"
        )
    return replicas


class GeminiDDP(ModelFront):
    """A model in chunks with the arguments of :class:`shardwise.booster.plugin.GeminiPlugin`.

    For training create a :class:`GeminiOptimizer` before the first forward pass. A model that is used before or without
    an optimizer is sharded at that point.

    Args:
        module: the plain model, with values or under lazy initialization.
        chunk_init_device: no effect: chunks are allocated where the placement keeps them.
        scatter_after_inference: False has no effect, and warns: ``shard_param_frac`` decides what stays gathered.
        mixed_precision: ``torch.float16``, ``torch.bfloat16`` or (an extension) ``torch.float32``.
        zero_group: ``None``, or the consecutive ranks that one replica is sharded over.
        extra_dp_group: ``None``, or the ranks with the same shard of other replicas.

    Raises:
        TypeError, ValueError, NotImplementedError: see GeminiPlugin; also if groups do not divide all ranks evenly.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk_config_dict: Mapping[int, Mapping[str, Any]] | None = None,
        chunk_init_device: torch.device | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        scatter_after_inference: bool = True,
        mixed_precision: torch.dtype = torch.float16,
        zero_group: dist.ProcessGroup | None = None,
        memstats: MemStats | None = None,
        master_weights: bool = True,
        extra_dp_group: dist.ProcessGroup | None = None,
        verbose: bool = False,
        enable_async_reduce: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
    ) -> None:
        values = dict(locals())
        check_type("module", module, nn.Module, "an nn.Module")
        super().__init__()
        if mixed_precision not in PRECISIONS:
            raise ValueError(f"mixed_precision={mixed_precision!r}: give one of {', '.join(map(str, PRECISIONS))}")
        if not scatter_after_inference:
            warn_user(
                f"scatter_after_inference={scatter_after_inference} has no effect: shard_param_frac says what stays "
                "gathered, after every pass"
            )
        arguments = {name: values[name] for name in set(names_of(GeminiPlugin)) & values.keys() - {"chunk_init_device"}}
        self.plugin = GeminiPlugin(
            **arguments,
            precision=PRECISIONS[mixed_precision],
            extra_dp_size=check_groups(zero_group, extra_dp_group),
        )
        self.module = module

    # ---- the session

    def attach(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> ShardedOptimizer:
        """Shard the model with its optimizer. Collective.

        Args:
            optimizer: a plain torch optimizer.
            arguments: GeminiPlugin's arguments of the loss scale and clipping, and ``gpu_margin_mem_ratio``.

        Raises:
            RuntimeError: the model has an optimizer already.
        """
        plugin = dataclasses.replace(self.plugin, **arguments)
        self._drop_session()
        vars(plugin)["_mesh"] = self.plugin.mesh()
        self.plugin = plugin
        session = self._session = self._build(optimizer)
        return session.optimizer

    def _build(self, optimizer: torch.optim.Optimizer | None = None) -> Session:
        vars(self.plugin)["names"] = NAMES  # the dataclass is frozen
        return self.plugin.session(self.plugin.configure(self.module, optimizer)[0])

    # ---- state

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the user's module."""
        return self.module

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        only_rank_0: bool = True,
    ) -> dict[str, Any]:
        """Return the full state on the host under the module's own names, in fp32 if there are masters. Collective.

        Args:
            destination: entries are added to it.
            prefix: prefix of every name.
            keep_vars: must be False.
            only_rank_0: return an empty state on other ranks.
        """
        return super().state_dict(destination, prefix, keep_vars, only_rank_0)


class GeminiOptimizer(OptimizerFront):
    """The optimizer of a :class:`GeminiDDP`: a plain optimizer whose parameters and state are sharded with the model.

    Args:
        optim: any element-wise torch optimizer over the model's parameters.
        module: the model.
        gpu_margin_mem_ratio: see GeminiPlugin; used only with ``placement_policy="auto"``.
        initial_scale: first loss scale (fp16 only, as the next six). The default means 2**16; an explicit 2**32 is
            used.
        max_norm: clip the global norm of the unscaled gradients to it; 0 is off.
        norm_type: p of the norm.
        tp_group: must be ``None``.
        params_info: must be ``None``.
        verbose: report skipped steps with the reason.
        defaults: none; options of ``optim`` belong to ``optim``.

    Raises:
        TypeError: ``module`` is not a GeminiDDP, or an unknown argument.
        RuntimeError: the model has an optimizer already.
        NotImplementedError: ``tp_group`` or ``params_info``.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        module: GeminiDDP,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = PublishedDefault(2**32),
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_group: dist.ProcessGroup | None = None,
        params_info: Any = None,
        verbose: bool = False,
        **defaults: Any,
    ) -> None:
        values = dict(locals())
        if not isinstance(module, GeminiDDP):
            raise TypeError(f"module={module!r:.80}: give a GeminiDDP")
        for name, value in defaults.items():
            hint = did_you_mean(name, OPTIMIZER_ARGUMENTS, f"give options of the {type(optim).__name__} to that")
            raise TypeError(f"{name}={value!r:.80} is no argument of GeminiOptimizer; {hint}")
        if tp_group is not None or params_info is not None:
            raise NotImplementedError(
                f"tp_group={tp_group!r:.40}, params_info={params_info!r:.40}: leave them None; GeminiPlugin(tp_size=) "
                "of the Booster cuts layers"
            )
        arguments = {name: values[name] for name in set(names_of(GeminiPlugin)) & values.keys() - {"verbose"}}
        super().__init__(module.attach(optim, verbose=verbose or module.plugin.verbose, **arguments))
        self.module = module


OPTIMIZER_ARGUMENTS = tuple(inspect.signature(GeminiOptimizer).parameters)[2:-1]
"""Arguments of GeminiOptimizer after optimizer and model."""


class GeminiAdamOptimizer(GeminiOptimizer):
    """A :class:`GeminiOptimizer` around a HybridAdam over all parameters.

    Args:
        model: a :class:`GeminiDDP`.
        defaults: arguments of GeminiOptimizer, and of HybridAdam.

    Raises:
        TypeError: ``model`` is not a GeminiDDP, or an unknown argument.
    """

    def __init__(self, model: GeminiDDP, **defaults: Any) -> None:
        check_type("model", model, GeminiDDP, "a GeminiDDP")
        adam = HybridAdam(model.parameters(), **{k: v for k, v in defaults.items() if k not in OPTIMIZER_ARGUMENTS})
        super().__init__(adam, model, **{k: v for k, v in defaults.items() if k in OPTIMIZER_ARGUMENTS})
