"""Create the optimizer that ``optimizer.type`` names, as a torch optimizer."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.core.base.validate import did_you_mean
from shardwise.core.optim import CPUAdam
from shardwise.core.optim.lamb import BoundedLamb
from shardwise.core.optim.lion import Lion
from shardwise.core.optim.muon import MuonWithAuxAdam
from shardwise.deepspeed.config import Settings
from shardwise.deepspeed.schedules import check_parameters
from shardwise.session import ShardedOptimizer

if TYPE_CHECKING:
    from shardwise.deepspeed.engine import DeepSpeedEngine

_UNAVAILABLE = ("muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam")


def wide_states(settings: Settings) -> bool | None:
    """Return whether Adam's moments are fp32 while masters are 16-bit. ``None`` if masters are not 16-bit."""
    if settings["fp16.enabled"] and settings["fp16.fp16_master_weights_and_grads"]:
        return True
    if settings["bf16.enabled"] and settings["bf16.bf16_master_weights_and_grads"]:
        return not settings["bf16.bf16_optimizer_states"]
    return None


def make_optimizer(
    name: str,
    parameters: Iterable[Any],
    params: dict[str, Any],
    model: nn.Module | None = None,
    wide: bool | None = None,
) -> torch.optim.Optimizer:
    """Return ``Adam``, ``AdamW``, ``Lamb`` or ``Muon`` as in DeepSpeed, ``Adagrad``, ``Lion``, or any of
    ``torch.optim``.

    ``Adam`` is AdamW unless ``adam_w_mode`` is false. The default ``weight_decay`` is 0, with ``torch_adam`` that of
    torch. The names in ``model`` decide ``use_muon`` for parameters that do not have this attribute; ``wide`` is
    :func:`wide_states`.

    Raises:
        ValueError: an unknown name or parameter; the message names the nearest one.
        NotImplementedError: an optimizer of DeepSpeed that torch does not have, or an unsupported option of Adam.
    """
    kind, params = name.lower(), dict(params)
    if "max_grad_norm" in params:
        raise ValueError(f"optimizer.params.max_grad_norm={params['max_grad_norm']!r}: give gradient_clipping instead")
    if kind in _UNAVAILABLE:
        raise NotImplementedError(f"optimizer.type={name!r} is not available; pass an optimizer to initialize instead")
    if kind in ("adam", "adamw"):
        return _adam(kind, parameters, params, wide)
    if kind == "muon":
        _mark_matrices(model)
        return _make_muon(parameters, params)
    own: dict[str, type[torch.optim.Optimizer]] = {"adagrad": torch.optim.Adagrad, "lamb": FusedLamb, "lion": Lion}
    cls: type[torch.optim.Optimizer] = own.get(kind) or _by_name(name)
    if kind in ("lamb", "lion") and "betas" in params:
        params["betas"] = tuple(params["betas"])
    check_parameters("optimizer", cls, params)
    return cls(parameters, **params)


def _by_name(name: str) -> Any:
    known = {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    known.pop("Optimizer", None)
    if name not in known:
        # The sharded optimizer rejects LBFGS and SparseAdam; the others are DeepSpeed's own.
        known = {each: cls for each, cls in known.items() if each not in ("LBFGS", "SparseAdam")}
        known |= {"Lamb": FusedLamb, "Lion": Lion}
        hint = did_you_mean(name, known, f"known: {', '.join(known)}", 0.4)
        raise ValueError(f"optimizer.type={name!r} is not known; {hint}")
    return known[name]


def _adam(kind: str, parameters: Iterable[Any], params: dict[str, Any], wide: bool | None) -> torch.optim.Optimizer:
    mode = params.pop("adam_w_mode", params.pop("adamw_mode", True))
    decoupled = kind == "adamw" or bool(mode)
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW if decoupled else torch.optim.Adam
    wide_states = params.pop("fp32_optimizer_states", None)
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)
        if wide is not None or wide_states is not None:
            cls, params["adamw_mode"] = DeepSpeedCPUAdam, decoupled
            params["fp32_optimizer_states"] = False if wide is False else wide_states is not False
        elif not params.get("bias_correction", True):  # torch always corrects the bias
            cls, params["adam_w_mode"] = FusedAdam, decoupled
        else:
            params.pop("bias_correction", None)
    params.pop("set_grad_none", None)  # gradients are always set to None
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    check_parameters("optimizer", cls, params)
    return cls(parameters, **params)


# ---- Muon: which parameters are matrices, and the param groups of its two parts

APART = ("embed", "lm_head")
"""Substrings of the names of parameters that Adam updates in any shape."""
KEYS = {True: ("lr", "momentum", "weight_decay", "ns_method"), False: ("lr", "betas", "eps", "weight_decay")}
"""Keys of the configuration, by ``use_muon``."""
OWN_RATES = {True: "muon_lr", False: "adam_lr"}


def _mark_matrices(model: nn.Module | None) -> None:
    """Set ``use_muon`` on parameters without it: True for matrices, except embeddings and heads by their names."""
    for name, param in model.named_parameters() if model is not None else ():
        if not hasattr(param, "use_muon"):
            apart = any(text in name.lower() for text in APART)
            param.use_muon = param.dim() >= 2 and not apart  # type: ignore[attr-defined]


def _make_muon(parameters: Iterable[Any], params: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer with the groups ``muon-params`` and ``adam-params``. Empty groups are omitted.

    Raises:
        ValueError: an unknown option (the message names the nearest one), a parameter without ``use_muon``, or a group
            of parameters with its own options.
    """
    known = [*dict.fromkeys([*KEYS[True], *KEYS[False], *OWN_RATES.values()])]
    for name, value in params.items():
        if name not in known:
            hint = did_you_mean(name, known, f"known: {', '.join(known)}")
            raise ValueError(f"optimizer.params.{name}={value!r:.60}: Muon has no such parameter; {hint}")
    trained = [param for param in _flat(parameters) if param.requires_grad]
    unmarked = [tuple(param.shape) for param in trained if not isinstance(getattr(param, "use_muon", None), bool)]
    if unmarked:
        raise ValueError(
            f"optimizer.type='Muon' with parameters of shapes {unmarked[:3]} that have no mark: set param.use_muon to "
            "True or False, or give initialize parameters of its model"
        )
    groups = []
    for use_muon, title in ((True, "muon-params"), (False, "adam-params")):
        mine = [param for param in trained if param.use_muon is use_muon]
        options = {key: params[key] for key in KEYS[use_muon] if key in params}
        if OWN_RATES[use_muon] in params:
            options["lr"] = params[OWN_RATES[use_muon]]
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        if mine:
            groups.append({"params": mine, "use_muon": use_muon, "name": title, **options})
    return MuonWithAuxAdam(groups)


def _flat(parameters: Iterable[Any]) -> list[Any]:
    params: list[Any] = []
    for each in parameters:
        if not isinstance(each, dict):
            params.append(each)
            continue
        options = sorted(set(each) - {"params", "name"})
        if options:
            raise ValueError(
                f"model_parameters has a group with {', '.join(options)}, and Muon makes groups of its own: give "
                "muon_lr, adam_lr and the like in optimizer.params, or parameters without groups"
            )
        params += [each["params"]] if isinstance(each["params"], torch.Tensor) else list(each["params"])
    return params


# ---- DeepSpeed's own optimizers by name and arguments. Each runs wherever its shards are; what offloads them is the


Betas = tuple[float, float]


def _only(cls: type, name: str, value: Any, available: Any, instead: str) -> None:
    if value != available:
        raise NotImplementedError(f"{cls.__name__}({name}={value!r}) is not available; {instead}")


class DeepSpeedCPUAdam(CPUAdam):
    """AdamW, or Adam with ``adamw_mode=False``. Steps are computed in fp32 (fp64 for fp64 parameters) and rounded once.

    Moments are fp32 as well. With ``fp32_optimizer_states=False`` they have the dtype of the updated tensors: of the
    parameters, or of their masters, which are fp32 unless the configuration has 16-bit ones.

    Raises:
        NotImplementedError: ``amsgrad``.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _only(type(self), "amsgrad", amsgrad, False, "use torch.optim.AdamW(amsgrad=True)")
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)
        self.wide_moments = bool(fp32_optimizer_states)

    @property
    def fp32_optimizer_states(self) -> bool:
        """Return True if moments are fp32 for parameters of any dtype."""
        return self.wide_moments


class FusedAdam(CPUAdam):
    """:class:`DeepSpeedCPUAdam` with the arguments of ``deepspeed.ops.adam.FusedAdam`` in their order.

    ``set_grad_none`` has no effect: gradients are always set to None.

    Raises:
        NotImplementedError: ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _only(type(self), "amsgrad", amsgrad, False, "use torch.optim.AdamW(amsgrad=True)")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, bool(adam_w_mode))


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad with DeepSpeed's defaults.

    State has the dtype of the updated tensors (of fp32 masters if they exist) for any ``fp32_optimizer_states``.

    Raises:
        NotImplementedError: ``amsgrad``.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _only(type(self), "amsgrad", amsgrad, False, "leave it False")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """:class:`~shardwise.core.optim.lion.Lion` with DeepSpeed's arguments; its state has the dtype of the updated
    tensors.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """:class:`~shardwise.core.optim.lion.Lion` with DeepSpeed's arguments; ``set_grad_none`` has no effect."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class FusedLamb(BoundedLamb):
    """LAMB on any device with DeepSpeed's arguments. If sharded, one rank has the full parameter.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        bias_correction: correct the bias of both moments.
        betas: decay rates of the moments.
        eps: added to the square root of the second moment, or inside of it.
        eps_inside_sqrt: add ``eps`` inside of the square root.
        weight_decay: decoupled, but part of the ratio of norms.
        max_grad_norm: must be 0: clip with ``gradient_clipping`` of the configuration.
        max_coeff: largest ratio of norms.
        min_coeff: smallest ratio of norms.
        amsgrad: not available.

    Raises:
        RuntimeError: ``amsgrad``.
        ValueError: ``max_grad_norm``, or an invalid number.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"FusedLamb has no AMSGrad variant (amsgrad={amsgrad}): leave it out")
        if max_grad_norm:
            raise ValueError(f"max_grad_norm={max_grad_norm}: give gradient_clipping in the configuration instead")
        bounds = (min_coeff, max_coeff)
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, bounds)


# ---- Additional attributes of DeepSpeed's optimizers, on the sharded optimizer of an engine.


class LossScale:
    """``optimizer.loss_scaler``: the current scale; ``fp16`` of the configuration defines its changes.

    Attributes:
        raise_error_at_min_scale: whether a step that overflows at the lowest scale is an error. It may be set.
    """

    __slots__ = ("_scaler", "raise_error_at_min_scale")

    def __init__(self, scaler: Any) -> None:
        self._scaler, self.raise_error_at_min_scale = scaler, True

    @property
    def loss_scale(self) -> float:
        """Return the factor of losses."""
        return 1.0 if self._scaler is None else float(self._scaler.scale)

    cur_scale = loss_scale

    @property
    def dynamic(self) -> bool:
        """Return True if the scale changes."""
        return self._scaler is not None and bool(self._scaler.dynamic)


class DeepSpeedOptimizer(ShardedOptimizer):
    """The optimizer of a DeepSpeed engine."""

    _of: weakref.ref[DeepSpeedEngine]
    loss_scaler: LossScale

    @property
    def _own(self) -> DeepSpeedEngine:
        engine = self._of()
        if engine is None:
            raise RuntimeError(f"the engine of this {type(self).__name__} was deleted: keep a reference to the engine")
        return engine

    @property
    def cur_scale(self) -> float:
        """Return :attr:`loss_scale`."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return True if the loss scale changes."""
        return self.loss_scaler.dynamic

    @property
    def overflow(self) -> bool:
        """Return True if the last step was skipped. accelerate reads this property."""
        return self.last_step_skipped

    def needs_scaler(self) -> bool:
        """Return True if losses have to be multiplied by a scale."""
        return self.scales_losses

    @property
    def clip_grad(self) -> float:
        """Return the global norm to which the next step clips; 0 means no clipping.

        It may be set to the same value on every rank; see :attr:`ShardedOptimizer.max_norm`.
        """
        return self.max_norm

    @clip_grad.setter
    def clip_grad(self, norm: float) -> None:
        self.max_norm = norm

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the number of backward passes per step; ``engine.set_train_batch_size()`` changes it."""
        return self._own.gradient_accumulation_steps()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`DeepSpeedEngine.offload_states`."""
        self._own.offload_states(*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`DeepSpeedEngine.reload_states`."""
        self._own.reload_states(*args, **kwargs)

    def quantize_nontrainable_params(self) -> None:
        """Do nothing: ``zero_quantized_nontrainable_weights`` of the configuration takes effect in ``initialize``."""


def give_names(engine: DeepSpeedEngine) -> None:
    """Add DeepSpeed's names to the engine's optimizer by a change of the object's class."""
    if engine.optimizer is not None:
        engine.optimizer.__class__ = DeepSpeedOptimizer
        engine.optimizer._of = weakref.ref(engine)
        engine.optimizer.loss_scaler = LossScale(engine.optimizer.scaler)
