"""The session of a LightningModule, which outlives a run of the Trainer, and the mesh that sessions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.base.torch_internals import point
from shardwise.core.base.validate import Names
from shardwise.core.base.warnings import warn_user
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.plan.precision import HALF_DTYPES
from shardwise.session import Session, build

_KEY = "_shardwise_live"
OF_TRAINER = Names("trainer.strategy.session.module", "self.optimizers().step()", "trainer.save_checkpoint(path)")
OF_FABRIC = Names("fabric.strategy.session.module", "step() of what fabric.setup returned", "fabric.save(path, state)")
"""What error messages call the sharded objects."""
_MESHES: dict[tuple[Any, ...], Mesh] = {}


class Live:
    """A module that is currently sharded.

    Attributes:
        session: the session of the model.
        module: the user's module.
    """

    def __init__(self, session: Session, module: nn.Module, dtypes: dict[str, torch.dtype], rounded: bool) -> None:
        self.session, self.module, self._dtypes, self._rounded = session, module, dtypes, rounded
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.session} on {self.session.mesh.size} ranks cannot be copied or pickled; save it instead"
        )

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Undo changes that hooks make to the modules inside; see :meth:`put_back`."""
        self.remember()
        yield
        self.put_back()

    def remember(self) -> None:
        """Record the modules and parameters for :meth:`put_back`."""
        # dict.items reads without gathering a sharded parameter.
        tables: list[dict[str, Any]] = []
        for inner in self.module.modules():
            tables += [inner._modules, inner._parameters]
        self._before = [(table, dict(dict.items(table))) for table in tables]

    def put_back(self) -> None:
        """Undo what a hook replaced since :meth:`remember`, with a warning: the sharded modules stay.

        Lightning calls ``configure_model`` before every run, so hooks may build modules again.
        """
        replaced, before = False, self._before
        self._before = []
        for table, then in before:
            if list(table) != list(then) or any(dict.get(table, name) is not value for name, value in then.items()):
                replaced = True
                for name in [name for name in table if name not in then]:
                    del table[name]
                dict.update(table, then)
        if replaced:
            warn_user(
                f"a hook of {type(self.module).__name__} built modules again that are already sharded. The sharded "
                "ones are kept; build only what is still None in the hook"
            )

    def unshard(self) -> None:
        """Give the module full parameters on the host, from the fp32 masters if there are any. Collective."""
        if self._rounded and self.session.mesh.is_rank0:
            dtype = self.session.plan.precision.param_dtype
            warn_user(
                f"{type(self.module).__name__} was sharded without an optimizer, so its weights were rounded to "
                f"{dtype} and no fp32 copy was kept. Train first, evaluate a copy, or load the weights (ckpt_path)"
            )
        self.session.unshard()
        for name, buffer in self.module.named_buffers():
            point(buffer, buffer.detach().to("cpu", self._dtypes.get(name, buffer.dtype)))
        self._widen()
        self.module.__dict__.pop(_KEY, None)

    def _widen(self) -> None:
        """Cast parameters without masters back to their own dtypes; tied parameters stay tied."""
        wide: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for name, param in self.module.named_parameters():
            own = self._dtypes.get(name, param.dtype)
            if not param.is_floating_point() or torch.promote_types(own, param.dtype) == param.dtype:
                continue
            narrow = param.detach()
            storage = narrow.untyped_storage()
            key = storage.data_ptr(), own
            if key not in wide:
                wide[key] = narrow.new_empty(0).set_(storage).to(own)
            point(param, wide[key].as_strided(narrow.shape, narrow.stride(), narrow.storage_offset()))

    def fits(self, plan: Plan, device: torch.device) -> bool:
        """Return whether a run under ``plan`` without new optimizers can use this session."""
        mesh = self.session.mesh
        return self.session.plan == plan and mesh.device == device and mesh is _MESHES.get(_mesh_key(plan, device))


@contextmanager
def scaled_pass(session: Session, loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return a context for one backward pass of the engine. It yields ``loss`` times the loss scale."""
    scale = session.optimizer.loss_scale if session.optimizers else 1.0
    with session.backward_pass(scale):
        yield loss if scale == 1.0 else (loss.float() if loss.dtype in HALF_DTYPES else loss) * scale


def live_session(module: nn.Module | None) -> Live | None:
    """Return the session of ``module``, made by any strategy, or ``None``."""
    return None if module is None else module.__dict__.get(_KEY)


def shard(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, device: torch.device, names: Names
) -> Live:
    """Shard ``module`` in place. Collective."""
    tensors = [*module.named_buffers(), *module.named_parameters()]
    dtypes = {name: each.dtype for name, each in tensors if each.is_floating_point()}
    rounded = not optimizers and _rounds(module, plan)
    live = Live(build(module, optimizers, plan, mesh_for(plan, device), names=names), module, dtypes, rounded)
    module.__dict__[_KEY] = live
    return live


# [Note: Weights without an optimizer]
# fp32 masters exist only for parameters that an optimizer trains. A run that only evaluates keeps its weights in the
# compute dtype alone, to save memory. A later fit would start from the rounded weights, so unshard() warns.
def _rounds(module: nn.Module, plan: Plan) -> bool:
    """Return whether trainable fp32 weights are rounded without a master copy."""
    narrow = plan.precision.param_dtype
    if narrow not in HALF_DTYPES or not plan.precision.master_weights:
        return False
    return any(param.requires_grad and param.dtype in (torch.float32, torch.float64) for param in module.parameters())


def _mesh_key(plan: Plan, device: torch.device) -> tuple[Any, ...]:
    world = id(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    return world, plan.mesh, plan.comm, device


def mesh_for(plan: Plan, device: torch.device) -> Mesh:
    """Return the process's mesh for this division of the ranks. Collective at its first use."""
    key = _mesh_key(plan, device)
    if key not in _MESHES:
        for stale in [k for k in _MESHES if k[0] != key[0]]:  # its process group is gone
            del _MESHES[stale]
        _MESHES[key] = Mesh.create(plan.mesh, device, plan.comm)
    return _MESHES[key]
