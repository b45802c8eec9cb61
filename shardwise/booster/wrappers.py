"""The objects that ``boost`` returns: wrappers for torch's own sharding, and the engine's objects with more methods.

A boosted model has ``unwrap()``, ``module`` and a full, collective ``state_dict``/``load_state_dict``; a boosted
optimizer has ``backward``, ``backward_by_grad``, ``clip_grad_by_norm``, ``clip_grad_by_value`` and ``get_grad_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_value_, get_total_norm

from shardwise.core.base.module_wrapper import ModeOfModule, attribute_of
from shardwise.core.base.validate import check_tensor
from shardwise.core.optim.state_form import check_full_state
from shardwise.late_session import OptimizerFacade
from shardwise.session import Session, ShardedModule, ShardedOptimizer


class ModelWrapper(ModeOfModule):
    """A wrapper of ``module``. Other attributes are those of the user's module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the user's module without any wrapper. A peft module is returned for both values of
        ``unwrap_peft``."""
        return self.module.unwrap() if isinstance(self.module, ModelWrapper) else self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not reduce gradients; subclasses override it."""
        return self.module.no_sync() if isinstance(self.module, ModelWrapper) else nullcontext()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module under its own names."""
        inner = self.module if isinstance(self.module, ModelWrapper) else self.unwrap()
        return inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors under the user's module's own names."""
        inner = self.module if isinstance(self.module, ModelWrapper) else self.unwrap()
        return inner.load_state_dict(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return attribute_of(self.unwrap(), name, self)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's module of a boosted model, or a plain model itself."""
    unwrap = getattr(model, "unwrap", None)
    plain: nn.Module = model if unwrap is None else unwrap()
    return plain


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the user's optimizer without the wrappers of this module."""
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.optim
    return optimizer


# [Note: Shards away from their mesh]
# Offloaded parameters, gradients and state are on the host, but their mesh is one of GPUs, and an NCCL group cannot
# communicate CPU tensors. Therefore tensors are moved to the mesh's device before any communication. Torch functions
# that communicate implicitly are avoided: the norm of several shards, and moving the norm of a single one.
def _total_norm(gradients: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    # Sharded and full gradients cannot be mixed in one torch call, so each kind has its own norm.
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        kind: Any = isinstance(gradient, DTensor)
        if isinstance(gradient, DTensor) and gradient.device.type != gradient.device_mesh.device_type:
            kind = gradient.device_mesh, gradient.placements
        kinds.setdefault(kind, []).append(gradient)
    norms: list[torch.Tensor] = []
    for kind, grads in kinds.items():
        of = [_norms_on_mesh(grads, norm_type)] if isinstance(kind, tuple) else grads
        norm = get_total_norm(of, norm_type, error_if_nonfinite)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(norm.to(norms[0].device) if norms else norm)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0, device="cpu")


def _norms_on_mesh(gradients: Sequence[Any], norm_type: float) -> DTensor:
    """Return ``[ranks' shards]``, the norms of gradients with the same placement, on the mesh's device."""
    mesh, placements = gradients[0].device_mesh, gradients[0].placements
    shards = [gradient.to_local() for gradient in gradients]
    # torch raises an error for the infinity norm of an empty tensor.
    norms = [torch.linalg.vector_norm(x, norm_type) if x.numel() else x.new_zeros(()) for x in shards]
    along = [place if place.is_replicate() else Shard(0) for place in placements]
    return DTensor.from_local(torch.stack(norms).to(mesh.device_type), mesh, along)


def check_state(optimizer: torch.optim.Optimizer, full: Mapping[str, Any]) -> None:
    """Check that ``optimizer`` can load a ``state_dict()``.

    Raises:
        ValueError: the state has groups of other sizes, or is of another optimizer class.
    """
    if isinstance(optimizer, OptimizerWrapper):
        return  # it has its own checks
    theirs, own = full["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in own]:
        raise ValueError(
            f"the state has param groups of {[len(g['params']) for g in theirs]} parameters, this optimizer of "
            f"{[len(g['params']) for g in own]}; load it into an optimizer with the same groups"
        )
    check_full_state(optimizer, full, [[param.shape for param in group["params"]] for group in own])


class OptimizerWrapper(OptimizerFacade):
    """A torch optimizer with the methods of a boosted one."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        super().__init__(optim)
        self._grad_norm: float | None = None
        self._norm_type = 2.0

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the user's optimizer."""
        return unwrap_optimizer(self)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all groups in order."""
        return parameters_of(self.optim)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run ``loss.backward()``, with the loss scale if there is one."""
        check_tensor("loss", loss, "a scalar tensor that was computed from the model's outputs (not loss.item())")
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Run the backward pass from ``tensor`` with the gradient ``grad`` of its shape."""
        torch.autograd.backward(tensor, grad)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``."""
        clip_grad_value_(self._with_gradients(), clip_value)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the global p-norm of all gradients to ``max_norm``, and return the norm before clipping."""
        gradients = self._gradients()
        norm = _total_norm(gradients, norm_type, error_if_nonfinite)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
        self._grad_norm, self._norm_type = float(norm), norm_type
        return norm

    def get_grad_norm(self, norm_type: float | None = None) -> float | None:
        """Return the unscaled norm of the last ``clip_grad_by_norm``; ``None`` before the first.

        Raises:
            ValueError: ``norm_type`` is not that of the last ``clip_grad_by_norm``.
        """
        if self._grad_norm is not None and norm_type not in (None, self._norm_type):
            raise ValueError(
                f"norm_type={norm_type}: the last clip_grad_by_norm computed the norm of p={self._norm_type:g}; call "
                f"clip_grad_by_norm(..., norm_type={norm_type}) first"
            )
        return self._grad_norm

    def _with_gradients(self) -> list[torch.Tensor]:
        return [parameter for parameter in parameters_of(self.optim) if parameter.grad is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in parameters_of(self.optim) if parameter.grad is not None]

    def _all_zero(self) -> bool:
        """Return True if all gradients are zero, or there are none. Collective if gradients are ``DTensor``."""
        return bool(_total_norm(self._gradients(), math.inf, error_if_nonfinite=False) == 0)  # NaN is not zero

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of another optimizer class, or its groups have other sizes.
        """
        check_state(self.optim, state_dict)
        super().load_state_dict(state_dict)


class BoostedModule(ShardedModule):
    """A sharded model that a Booster returned."""

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the user's module. A peft module is returned for both values of ``unwrap_peft``."""
        return super().unwrap()

    def _force_wait_all_gather(self) -> None:
        """Wait for gathers; programs call this before ``unwrap().state_dict()``. See
        :meth:`ShardedModule.wait_for_gathers`.
        """
        self.wait_for_gathers()


class BoostedOptimizer(ShardedOptimizer):
    """A sharded optimizer that a Booster returned."""

    @property
    def optim(self) -> torch.optim.Optimizer:
        """Return the user's optimizer."""
        return self.optimizer

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters in the groups, in order."""
        return [param for group in self.param_groups for param in group["params"]]


def give_names(session: Session) -> None:
    """Add these methods to the model and the optimizers of a session, which stay the same objects."""
    session.module.__class__ = BoostedModule
    for optimizer in session.optimizers:
        optimizer.__class__ = BoostedOptimizer
