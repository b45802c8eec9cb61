"""The Adam family under its published names: CPUAdam, HybridAdam, FusedAdam.

All three are ordinary torch optimizers for parameters on any devices and of any floating dtypes. 16-bit parameters have
fp32 moments, are updated in fp32 and rounded once. The names and arguments are those of ColossalAI
(``colossalai.nn.optimizer``); ``docs/optim.md`` documents their sources and differences.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.core.base.torch_internals import add_each
from shardwise.core.base.validate import as_params, did_you_mean, fraction, number
from shardwise.core.base.warnings import warn_user
from shardwise.core.memory.host import HostArena
from shardwise.core.optim.adam_tiles import AdamRule, AdamSlot, AdamTiles, moment_dtype
from shardwise.core.optim.disk_moments import OffloadedMoments
from shardwise.core.optim.whole_tensors import load_counted, loss_of

MOMENTS = ("exp_avg", "exp_avg_sq")
NOT_HERE = {
    "amsgrad": "there is no AMSGrad variant: use torch.optim.AdamW for it",
    "capturable": "the learning rate is read as a number, so a step cannot be captured in a CUDA graph; leave it out",
    "differentiable": "updates are made in place; leave it out",
}
"""Options of torch's parameter groups that would change the update; ``foreach`` and ``fused`` only choose a kernel."""
OPTIONS = ("maximize", "foreach", "fused", *NOT_HERE)


def _check_numbers(lr: float | Tensor, betas: Sequence[float], eps: float, weight_decay: float) -> None:
    rate = float(lr) if isinstance(lr, Tensor) else lr
    number("lr", rate, "[0, inf)", "a learning rate >= 0 and finite (maximize=True in a group goes up)")
    if len(betas) != 2:
        raise ValueError(f"betas={betas}: give two numbers in [0, 1)")
    for beta in betas:
        number("betas", float(beta) if isinstance(beta, Tensor) else beta, "[0, 1)", "two numbers in [0, 1)")
    number("eps", eps, "[0, inf)")
    number("weight_decay", weight_decay, "[0, inf)")


def _scale_of(div_scale: float) -> float:
    if div_scale == -1:
        return 1.0
    if not 0.0 < div_scale < math.inf:
        raise ValueError(f"div_scale={div_scale} cannot divide gradients; use a positive number, or -1 for none")
    return 1.0 / div_scale


class _Adam(torch.optim.Optimizer):
    """Base class of the three. ``state[p]`` has ``step`` (0-dim fp32), ``exp_avg`` and ``exp_avg_sq`` (shape of p)."""

    state_keys: ClassVar[tuple[str, ...]] = ("step", *MOMENTS)
    """Keys of the state that a step creates."""
    counts_by_parameter = True
    num_fp32_shards_per_param = 4
    """fp32 values per parameter element with master parameters: master, gradient and two moments."""
    wide_moments: bool = True
    """Moments of 16-bit parameters are in fp32; otherwise they are rounded to the parameter's dtype after each step."""
    _copied: tuple[str, ...] = ("adamw_mode", "wide_moments", "nvme_offload_fraction", "nvme_offload_dir")

    def __init__(
        self, params: Any, defaults: dict[str, Any], adamw_mode: bool, offload: tuple[float, str | None]
    ) -> None:
        share, folder = offload
        _check_numbers(defaults["lr"], defaults["betas"], defaults["eps"], defaults["weight_decay"])
        fraction("nvme_offload_fraction", share)
        self.adamw_mode = bool(adamw_mode)
        self.nvme_offload_fraction, self.nvme_offload_dir = float(share), folder
        self._tiles = AdamTiles()
        self._offload: OffloadedMoments | None = None
        super().__init__(as_params(params), defaults)
        if self.nvme_offload_fraction > 0.0:
            self._offload = OffloadedMoments(self.nvme_offload_fraction, folder)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with its own options.

        ``maximize`` has the meaning of torch, and may differ between groups. ``foreach`` and ``fused`` have no effect,
        since there is one kernel per type of device.

        Raises:
            ValueError: a number is out of range, a parameter is complex, or the group has ``amsgrad``, ``capturable``
                or ``differentiable``.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_numbers(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for option in (name for name in NOT_HERE if group.get(name)):
                raise ValueError(f"{option}={group[option]} in a group of {type(self).__name__}: {NOT_HERE[option]}")
            for param in group["params"]:
                if not param.is_floating_point():
                    raise ValueError(
                        f"{type(self).__name__} takes floating parameters, not one of {param.dtype} and shape "
                        f"{tuple(param.shape)}; pass torch.view_as_real of complex ones"
                    )
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None, div_scale: float) -> Any:
        scale = _scale_of(div_scale)
        loss = loss_of(closure)
        # All groups are checked before any parameter changes, so that an invalid gradient leaves no partial update.
        live = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for params in live:
            for param in params:
                self._check_gradient(param)
        if self._offload is not None:
            self._check_no_dtensors()
            self._offload.place([p for group in self.param_groups for p in group["params"]])
            live = self._step_offloaded(self._offload, live, scale)
        for group, params in zip(self.param_groups, live, strict=True):
            self._step_group(params, self._rule(group), scale)
        return loss

    def _check_gradient(self, param: Tensor) -> None:
        gradient = param.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not take {gradient.layout} gradients (of a parameter of shape "
                f"{tuple(param.shape)}): make the embedding with sparse=False, or use torch.optim.SparseAdam for it"
            )

    def _check_no_dtensors(self) -> None:
        """Check that parameters are not DTensors, since moments on a disk belong to full parameters."""
        if any(isinstance(param, DTensor) for group in self.param_groups for param in group["params"]):
            raise RuntimeError(
                f"nvme_offload_fraction={self.nvme_offload_fraction} with parameters that fully_shard divides: "
                "leave it 0 there, or shard the model by a plan, which offloads divided moments"
            )

    def _rule(self, group: dict[str, Any]) -> AdamRule:
        beta1, beta2 = group["betas"]
        return AdamRule(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.adamw_mode,
            bias_correction=bool(group["bias_correction"]),
            maximize=bool(group.get("maximize", False)),
        )

    def _moment_dtype(self, param: Tensor) -> torch.dtype:
        return moment_dtype(param) if self.wide_moments else param.dtype

    def _step_group(self, params: list[Tensor], rule: AdamRule, scale: float) -> None:
        states = [self._state_of(param) for param in params]
        _count_step([state["step"] for state in states])
        slots = []
        for param, state in zip(params, states, strict=True):
            gradient = param.grad
            if gradient is not None:
                own = (_own(param), _own(gradient, param), _own(state["exp_avg"]), _own(state["exp_avg_sq"]))
                slots.append(AdamSlot(*own, state["step"]))
        self._tiles.update(slots, rule, scale)

    def _step_offloaded(self, offload: OffloadedMoments, live: list[list[Tensor]], scale: float) -> list[list[Tensor]]:
        """Step the parameters of ``live`` (by group) whose moments are in the store, and return the others.

        All or none: the new values stay in copies until the new moments are stored.
        """
        every = [param for group in self.param_groups for param in group["params"]]
        offload.reserve([param for param in every if param.requires_grad or param.grad is not None])
        rules = [self._rule(group) for group in self.param_groups]
        offloaded = [(p, rule) for params, rule in zip(live, rules, strict=True) for p in params if offload.holds(p)]
        # One block, which is returned to the system after the step; many would fragment the allocator.
        copies = HostArena(sum(HostArena.rounded(param.nbytes) for param, _ in offloaded), pin_for=None)
        new: list[tuple[Tensor, Tensor]] = []
        gradient = torch.empty(0, device="cpu")
        with contextlib.closing(offload.stream([param for param, _ in offloaded])) as pieces:
            for piece in pieces:
                param, rule = offloaded[piece.index]
                if piece.start == 0:
                    new.append((copies.take(param.numel(), param.dtype), self._next_count(param)))
                    new[-1][0].view(param.shape).copy_(param)
                    gradient = _flat_gradient(param)
                if not self.state.get(param):
                    # Moments in the store belong to a state that was dropped.
                    piece.moments.zero_()
                values, count = new[-1]
                part = slice(piece.start, piece.end)
                exp_avg, exp_avg_sq = piece.moments
                self._tiles.update([AdamSlot(values[part], gradient[part], exp_avg, exp_avg_sq, count)], rule, scale)
        for (param, _), (values, count) in zip(offloaded, new, strict=True):
            param.copy_(values.view(param.shape))
            self._state_of(param)["step"].copy_(count)
        return [[param for param in params if not offload.holds(param)] for params in live]

    def _next_count(self, param: Tensor) -> Tensor:
        """Return the step count of the current step in a new tensor, without creating a state."""
        if not self.state.get(param):
            return torch.ones((), dtype=torch.float32, device="cpu")
        step: Tensor = self._state_of(param)["step"]
        return step + 1

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """Return the state of one parameter. The state is created on first use, and the format of a loaded state is
        fixed."""
        state: dict[str, Any] = self.state[param]
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor):
            # ColossalAI stores a plain number.
            state["step"] = torch.tensor(float(step), device=param.device)
        elif step.device != param.device or step.dtype != torch.float32:
            state["step"] = step.to(param.device, torch.float32)
        if self._offload is not None and self._offload.holds(param):
            return state
        dtype = self._moment_dtype(param)
        for key in MOMENTS:
            have = state.get(key)
            if have is None:
                state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            elif have.dtype != dtype:
                state[key] = have.to(dtype)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does. All offloaded moments are read into host memory.

        Raises:
            DiskError: they could not be read. Nothing changes.
        """
        packed = super().state_dict()
        if self._offload is None:
            return packed
        numbers = [n for group in packed["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, param in zip(numbers, params, strict=True):
            if packed["state"].get(index) and self._offload.holds(param):
                exp_avg, exp_avg_sq = self._offload.read(param)
                # Make a new dict, since the present one is the live state.
                packed["state"][index] = packed["state"][index] | {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of these optimizers, of ``torch.optim.Adam`` or ``AdamW``, or of ColossalAI's optimizers.

        Moments keep their precision, also for 16-bit parameters. ``adamw_mode`` does not change; a state with the other
        kind of weight decay is loaded with a warning.

        Raises:
            ValueError: the groups differ, or the state is of the AMSGrad variant.
            DiskError: offloaded moments could not be stored. The previous state is kept.
        """
        before = self.state, self.param_groups
        try:
            loaded = dict(load_counted(self, super().load_state_dict, state_dict, self._check_variant))
            self._drop_torchs_mode()
            self._take_moments(loaded)
        except BaseException:
            self.state, self.param_groups = before
            raise

    def _check_variant(self, full: dict[str, Any]) -> None:
        if any(group.get("amsgrad") for group in full["param_groups"]):
            raise ValueError(
                f"the state has amsgrad={[g.get('amsgrad') for g in full['param_groups']]}, and "
                f"{type(self).__name__} has no AMSGrad variant; load it into torch.optim.AdamW"
            )

    def _drop_torchs_mode(self) -> None:
        """Remove torch's group option for decoupled weight decay, which is ``adamw_mode`` here."""
        modes = [group.pop("decoupled_weight_decay", self.adamw_mode) for group in self.param_groups]
        other = [g["weight_decay"] for g, mode in zip(self.param_groups, modes, strict=True) if mode != self.adamw_mode]
        if any(other):
            warn_user(
                f"the state was made with decoupled_weight_decay={not self.adamw_mode} and weight_decay={other}, and "
                f"this {type(self).__name__} goes on with adamw_mode={self.adamw_mode}: make it with "
                f"adamw_mode={not self.adamw_mode} to continue in the same way"
            )

    @torch.no_grad()
    def _take_moments(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Undo torch's cast of the moments to the parameter's dtype, and move offloaded ones to the store."""
        if self._offload is not None:
            self._offload.place(list(states))
        moving: list[tuple[Tensor, dict[str, Any]]] = []
        for param, state in states.items():
            if not state:
                continue
            for key in MOMENTS:
                if key in state and self.state[param][key].dtype != self._moment_dtype(param):
                    self.state[param][key] = state[key].to(param.device, self._moment_dtype(param))
            if self._offload is not None and self._offload.holds(param):
                moving.append((param, self._state_of(param)))
        if self._offload is not None:
            self._offload.write([(param, [own.get(key) for key in MOMENTS]) for param, own in moving])
        for _, own in moving:
            for key in MOMENTS:
                own.pop(key, None)

    def take_offload(self) -> tuple[float, str | None]:
        """Return ``(nvme_offload_fraction, nvme_offload_dir)`` for an engine that places state, and end our offloading.

        Moments in the store are first read back to host memory.

        Raises:
            DiskError: they could not be read. Nothing changes, and the call can be repeated.
        """
        fraction_and_folder = self.nvme_offload_fraction, self.nvme_offload_dir
        if self._offload is not None:
            offloaded = [param for param, state in self.state.items() if state and self._offload.holds(param)]
            # Read all before using any, so that a failed read changes nothing.
            for param, moments in [(param, self._offload.read(param)) for param in offloaded]:
                self.state[param].update(zip(MOMENTS, moments, strict=True))
            self._offload.close()
            self._offload = None
        self.nvme_offload_fraction = 0.0
        return fraction_and_folder

    def __getstate__(self) -> dict[str, Any]:
        if self._offload is not None:
            raise TypeError(
                f"a {type(self).__name__} with nvme_offload_fraction={self.nvme_offload_fraction} cannot be copied or "
                "pickled; copy its state_dict()"
            )
        return super().__getstate__() | {key: getattr(self, key) for key in self._copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has neither of these, and a state of torch.optim has no bias_correction.
        self.__dict__.setdefault("_tiles", AdamTiles())
        self.__dict__.setdefault("_offload", None)
        for group in self.param_groups:
            group.setdefault("bias_correction", self.defaults["bias_correction"])


def _count_step(steps: list[Tensor]) -> None:
    """Add 1 to every step count, in one call for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for step in steps:
        by_device.setdefault(step.device, []).append(step)
    for device, several in by_device.items():
        # CUDA requires the number on the device of the counts.
        add_each(several, torch.ones((), device=device))


def _own(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the local shard of a DTensor (with the placements of ``like``); other tensors are returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor) and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def _flat_gradient(param: Tensor) -> Tensor:
    gradient = param.grad
    assert gradient is not None
    return gradient.contiguous().view(-1)


class CPUAdam(_Adam):
    """Adam and AdamW for parameters on the host. Parameters on a GPU are updated on the GPU.

    Args:
        model_params: parameters, or dicts of parameter groups.
        lr: learning rate of groups without one of their own.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient (AdamW) or L2, see ``adamw_mode``.
        adamw_mode: decoupled weight decay; ``False``: L2, added to the gradient.
        nvme_offload_fraction: fraction of the moments of host parameters that is on disk between steps, in units of
            full parameters. ``state_dict`` reads them back.
        nvme_offload_dir: directory of the files; ``None``: the system's temporary directory.

    Raises:
        ValueError: a number is out of range.
        DiskError: no file can be created in ``nvme_offload_dir``.

    Examples:
        >>> from shardwise.nn.optimizer import CPUAdam
        >>> optimizer = CPUAdam(model.parameters(), lr=1e-3)
        >>> session = shardwise.shard(model, optimizer, stage=2, offload="host")
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        options = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        offload = nvme_offload_fraction, nvme_offload_dir
        super().__init__(model_params, {"lr": lr, **options}, adamw_mode, offload)

    def step(self, closure: Callable[[], Any] | None = None, div_scale: float = -1) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and returns it; run with gradients enabled.
            div_scale: divide gradients by this number in the update, without changing ``.grad``; -1: no division.

        Returns:
            The result of ``closure``.

        Raises:
            ValueError: ``div_scale`` is neither positive nor -1.
            RuntimeError: a gradient is sparse; nothing is updated.
            DiskError: offloaded moments could not be read or stored. Parameters and state are those before the step,
                which can be repeated.
        """
        return self._step(closure, div_scale)


class HybridAdam(CPUAdam):
    """Adam and AdamW for a model with parameters on the host, on GPUs, or on both.

    Args:
        model_params: parameters, or dicts of parameter groups.
        lr: learning rate of groups without one of their own.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient (AdamW) or L2, see ``adamw_mode``.
        adamw_mode: decoupled weight decay; ``False``: L2, added to the gradient.
        nvme_offload_fraction: fraction of the moments of host parameters that is on disk between steps, in units of
            full parameters. ``state_dict`` reads them back.
        nvme_offload_dir: directory of the files; ``None``: the system's temporary directory.
        defaults: default options of parameter groups; see :meth:`CPUAdam.add_param_group`.

    Raises:
        ValueError: a number is out of range, or an option is not supported.
        TypeError: an option does not exist.

    Examples:
        >>> from shardwise.nn.optimizer import HybridAdam
        >>> optimizer = HybridAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> session = shardwise.shard(model, optimizer, stage=3, offload="host")
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ) -> None:
        for name, value in defaults.items():
            if name not in OPTIONS:
                known = [*OPTIONS, "lr", "betas", "eps", "weight_decay"]
                hint = did_you_mean(name, known, f"known: {', '.join(OPTIONS)}")
                raise TypeError(f"{name}={value!r} is no option of HybridAdam; {hint}")
            if value and name in NOT_HERE:
                raise ValueError(f"{name}={value} of HybridAdam: {NOT_HERE[name]}")
        offload = nvme_offload_fraction, nvme_offload_dir
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode, *offload)
        self.defaults.update(defaults)
        for group in self.param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)


class FusedAdam(_Adam):
    """Adam and AdamW for parameters on a GPU. Parameters on the host are updated on the host.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate of groups without one of their own.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominator.
        adamw_mode: decoupled weight decay; ``False``: L2, added to the gradient.
        weight_decay: decoupled from the gradient (AdamW) or L2, see ``adamw_mode``.
        amsgrad: must be ``False``: there is no AMSGrad.
        set_grad_none: default of ``zero_grad()``: set gradients to None (``True``) or to zero.

    Raises:
        ValueError: a number is out of range.
        RuntimeError: ``amsgrad`` is True.

    Examples:
        >>> from shardwise.nn.optimizer import FusedAdam
        >>> session = shardwise.shard(model, FusedAdam(model.parameters(), lr=1e-3), stage=2)
    """

    _copied = (*_Adam._copied, "set_grad_none")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"FusedAdam has no AMSGrad variant (amsgrad={amsgrad}): use torch.optim.AdamW for it")
        options = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **options}, adamw_mode, (0.0, None))
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set all gradients to None or to zero. ``set_to_none=None`` is the argument ``set_grad_none``.

        Args:
            set_to_none: None or zero; ``None`` is the constructor's ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Iterable[Tensor] | None = None,
        output_params: Iterable[Tensor] | None = None,
        scale: float | None = None,
        grad_norms: Iterable[float] | None = None,
        div_scale: float = -1,
    ) -> Any:
        """Update every parameter that has a gradient, as :meth:`CPUAdam.step`.

        Args:
            closure: recomputes the loss and returns it; run with gradients enabled.
            grads: must be ``None``: gradients are read from the parameters.
            output_params: must be ``None``: parameters are updated in place.
            scale: must be ``None``: give ``div_scale``.
            grad_norms: must be ``None``: clip gradients before the step.
            div_scale: divide gradients by this number in the update, without changing ``.grad``; -1: no division.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: ``grads``, ``output_params``, ``scale`` or ``grad_norms`` is given; they exist only for this
                error.
        """
        removed = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        names = [name for name, value in removed.items() if value is not None]
        if names:
            raise RuntimeError(f"FusedAdam.step no longer takes {names}: gradients are read from the parameters")
        return self._step(closure, div_scale)
