"""``LowLevelZeroOptimizer``: ZeRO-1 and ZeRO-2 for the parameters of an optimizer; and the wrappers of all stages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.colossalai.gemini_models import PRECISIONS, GeminiDDP, GeminiOptimizer, check_groups
from shardwise.compat.arguments import picked
from shardwise.core.base.validate import check_type, refuse
from shardwise.core.base.warnings import warn_user
from shardwise.plan.scaler_arguments import ScalerArguments
from shardwise.session import Session, ShardedOptimizer
from shardwise.zero.fronts import NAMES, OptimizerFront

STAGE = "_colo_zero_stage"  # the published name


class LowLevelZeroOptimizer(OptimizerFront):
    """Shards the state of an optimizer over the ranks, at stage 2 also the gradients.

    The model does not change: its parameters stay replicated.

    Args:
        optimizer: any element-wise torch optimizer; all its parameters have one dtype.
        pg_to_param_list: must be ``None``.
        initial_scale: first loss scale (fp16 only, as the next six).
        clip_grad_norm: clip the global norm of the unscaled gradients to it; 0 is off.
        verbose: report skipped steps with the reason.
        reduce_bucket_size: elements reduced together.
        communication_dtype: dtype of gradient communication; ``None``: the parameters' dtype.
        overlap_communication: reduce gradients during backward.
        partition_grad: stage 2 instead of 1.
        cpu_offload: keep masters, optimizer state and reduced gradients on the host, and update them there.
        dp_process_group: ``None``, or the consecutive ranks that the state is sharded over.
        extra_dp_group: ``None``, or the ranks with the same shard of it.
        forced_dtype: parameters are cast to it first.
        master_weights: keep fp32 copies of 16-bit parameters.
        overlap_allgather: True has no effect, and warns: the next use of a parameter cannot be detected.
        fp8_communication: communicate gradients and updated parameters in 8 bits.
        backward_context: must be ``None``.

    Raises:
        ValueError: parameters of several dtypes, or groups that do not divide all ranks evenly.
        NotImplementedError: ``pg_to_param_list`` or ``backward_context``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pg_to_param_list: Mapping[Any, Any] | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        dp_process_group: dist.ProcessGroup | None = None,
        extra_dp_group: dist.ProcessGroup | None = None,
        forced_dtype: torch.dtype | None = None,
        master_weights: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        backward_context: Any = None,
    ) -> None:
        arguments = dict(locals())
        check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch's kind")
        for name in ("pg_to_param_list", "backward_context"):
            if arguments[name] is not None:
                refuse(
                    name, arguments[name], "leave it None: all parameters are divided over the same ranks, in any pass"
                )
        if overlap_allgather:
            warn_user(
                f"overlap_allgather={overlap_allgather} has no effect: nothing tells when a parameter is used next; "
                "LowLevelZeroPlugin of the Booster, which has the model, can do it"
            )
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = {each.name for each in fields(LowLevelZeroPlugin)} - {"overlap_allgather"}
        plugin = LowLevelZeroPlugin(
            stage=2 if partition_grad else 1,
            precision=_precision(parameters, forced_dtype),
            max_norm=clip_grad_norm,
            reduce_bucket_size_in_m=cast(int, reduce_bucket_size / 2**20),  # fractions are accepted, too
            extra_dp_size=check_groups(dp_process_group, extra_dp_group),
            **{name: value for name, value in arguments.items() if name in names},
        )
        vars(plugin)["names"] = NAMES  # the dataclass is frozen
        boosted, inner = plugin.configure(nn.ParameterList(parameters), optimizer)
        assert isinstance(inner, ShardedOptimizer)
        super().__init__(inner)
        self.session: Session = plugin.session(boosted)
        self._divides = partition_grad

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip reductions of backward passes inside (stage 1).

        Raises:
            RuntimeError: the stage is 2.
        """
        if self._divides:
            raise RuntimeError(
                f"no_sync() with partition_grad={self._divides}: every backward pass divides gradients; accumulate by "
                "calling backward several times before step"
            )
        return self.session.no_sync()

    def _force_wait_all_gather(self) -> None:
        """Do nothing: parameters are gathered when ``step`` returns."""

    def get_param_grad(self, working_param: nn.Parameter) -> torch.Tensor | None:
        """Return the full unscaled gradient of a parameter before clipping, or ``None`` without a gradient. Collective.

        Raises:
            ValueError: the optimizer does not have the parameter.
        """
        for index, each in enumerate(self.session.params):
            if each is working_param:
                grad = self.session.full_gradients().get(self.session.names()[index][0])
                return None if grad is None else grad.to(working_param.dtype)
        raise ValueError(f"a parameter of {tuple(working_param.shape)} is not in {self!r:.60}: give one that is")


def _precision(parameters: list[nn.Parameter], forced: torch.dtype | None) -> str:
    dtypes = {each.dtype for each in parameters} if forced is None else {forced}
    if len(dtypes) != 1 or not dtypes <= set(PRECISIONS):
        raise ValueError(
            f"parameters of {sorted(map(str, dtypes))}: give all the same of {', '.join(map(str, PRECISIONS))}, or "
            "forced_dtype"
        )
    return PRECISIONS[dtypes.pop()]


def zero_model_wrapper(
    model: nn.Module,
    zero_stage: int = 1,
    gemini_config: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> nn.Module:
    """Return the model for :func:`zero_optim_wrapper`: at stage 3 a :class:`GeminiDDP`, else the model itself.

    Args:
        model: a plain torch module.
        zero_stage: 1 shards optimizer state, 2 also gradients, 3 also parameters.
        gemini_config: arguments of GeminiDDP, for stage 3.
        verbose: argument of GeminiDDP.

    Raises:
        ValueError: another stage.
    """
    check_type("model", model, nn.Module, "an nn.Module")
    if zero_stage not in (1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage!r}: give 1, 2 or 3")
    if zero_stage < 3:
        if gemini_config:
            warn_user(f"gemini_config={gemini_config!r:.80} has no effect at zero_stage={zero_stage}")
        wrapped = model
    else:
        config = dict(gemini_config or {})
        config.pop("device", None)  # an argument of an older release: the plugin chooses the rank's own device
        wrapped = GeminiDDP(model, **{"verbose": verbose, **config})
    vars(wrapped)[STAGE] = zero_stage
    return wrapped


def zero_optim_wrapper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    initial_scale: float = 2**16,
    growth_factor: float = 2,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1,
    max_scale: float = 2**32,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    optim_config: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> OptimizerFront:
    """Return the sharded optimizer of a model of :func:`zero_model_wrapper`.

    Args:
        model: the wrapped model.
        optimizer: a plain torch optimizer over the parameters of ``model``.
        initial_scale: first loss scale (fp16 only, as the next six).
        max_norm: clip the global norm of the unscaled gradients to it; 0 is off.
        norm_type: p of the norm; must be 2.0 at stages 1 and 2.
        optim_config: further arguments of LowLevelZeroOptimizer, or at stage 3 of GeminiOptimizer.
        verbose: report skipped steps with the reason.

    Raises:
        ValueError: the model was not wrapped, or another norm.
    """
    check_type("model", model, nn.Module, "what zero_model_wrapper returned")
    check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch's kind")
    stage = vars(model).get(STAGE)
    if stage is None:
        raise ValueError(f"model={type(model).__name__} was not wrapped: give what zero_model_wrapper returned")
    scale = picked(ScalerArguments, locals())
    arguments: dict[str, Any] = {**vars(scale), "verbose": verbose}
    if isinstance(model, GeminiDDP):
        arguments |= {"max_norm": max_norm, "norm_type": norm_type, **(optim_config or {})}
        return GeminiOptimizer(optimizer, model, **arguments)
    if norm_type != 2.0:
        raise ValueError(f"norm_type={norm_type!r} at zero_stage={stage}: give 2.0, or use a plugin of the Booster")
    arguments |= {"clip_grad_norm": max_norm, "partition_grad": stage == 2, **(optim_config or {})}
    return LowLevelZeroOptimizer(optimizer, **arguments)
