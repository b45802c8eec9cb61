"""GaLore (arXiv 2403.03507): moments of a matrix's gradient in the space of its largest singular vectors.

Groups with a ``rank`` are projected, and hold matrices only; :func:`get_galore_param_groups` makes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checked import as_kind
from shardwise.optim.factored import Adafactor, adafactor_update
from shardwise.optim.whole_tensors import WholeTensorOptimizer, as_computed, begun, check_least

__all__ = ["GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit", "get_galore_param_groups"]

DEFAULTS = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
"""Of a group with a rank; from the paper."""
PROJECTIONS = ("std", "reverse_std", "left", "right", "full")
NOT_DECAYED = ("bias", "LayerNorm.weight")


def get_galore_param_groups(
    model: nn.Module,
    weight_decay: float,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
) -> list[dict[str, Any]]:
    """Three groups: matrices, which are projected; other parameters; biases and norms, without decay."""
    as_kind("model", model, nn.Module, "an nn.Module")
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        undecayed = any(part in name for part in NOT_DECAYED)
        (plain if undecayed else matrices if param.dim() == 2 else others).append(param)
    projected = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}
    return [
        {"params": matrices, **projected, "weight_decay": weight_decay},
        {"params": others, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


class _Projected(WholeTensorOptimizer):
    """Groups with a rank are checked, and their gradients projected."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with a ``rank`` it may have ``update_proj_gap``, ``scale`` and ``proj_type``.

        Raises:
            ValueError: one of these is out of its range, or the group has a rank and a parameter that is no matrix.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if "rank" not in group:
            return
        try:
            for name, value in DEFAULTS.items():
                group.setdefault(name, value)
            for name in ("rank", "update_proj_gap"):
                if not isinstance(group[name], int) or isinstance(group[name], bool) or group[name] < 1:
                    raise ValueError(f"{name}={group[name]!r} in a group: give a number >= 1")
            if group["proj_type"] not in PROJECTIONS:
                raise ValueError(f"proj_type={group['proj_type']!r}: give one of {', '.join(PROJECTIONS)}")
            strange = [tuple(param.shape) for param in group["params"] if param.dim() != 2]
            if strange:
                raise ValueError(
                    f"a group with rank={group['rank']} has parameters of shapes {strange}: only matrices can be "
                    "projected; see get_galore_param_groups"
                )
        except ValueError:
            self.param_groups.pop()
            raise

    def _project(self, group: dict[str, Any], grad: Tensor, state: dict[str, Any]) -> Tensor:
        """The gradient in the space of its largest singular vectors, which are found anew every so many steps."""
        if "rank" not in group:
            return grad
        left, right = _sides(group["proj_type"], grad)
        if not state or state["step"] % group["update_proj_gap"] == 0:
            u, _, v = torch.linalg.svd(grad, full_matrices=False)
            if left:
                state[left] = u[:, : group["rank"]].contiguous()
            if right:
                state[right] = v[: group["rank"]].contiguous()
        low = state[left].t() @ grad if left else grad
        return low @ state[right].t() if right else low

    def _project_back(self, group: dict[str, Any], low: Tensor, state: dict[str, Any], like: Tensor) -> Tensor:
        if "rank" not in group:
            return low
        left, right = _sides(group["proj_type"], like)
        full: Tensor = state[left] @ low if left else low
        full = full @ state[right] if right else full
        return full * float(group["scale"])


def _sides(kind: str, grad: Tensor) -> tuple[str, str]:
    """Under which keys the state has what multiplies ``grad`` from the left and from the right; empty: nothing does.

    The keys do not tell the side, so that all matrices of a group have the same.
    """
    if kind == "full":
        return "projection", "projection_right"
    tall = grad.shape[0] >= grad.shape[1]
    left = kind == "left" or (kind == "std" and not tall) or (kind == "reverse_std" and tall)
    return ("projection", "") if left else ("", "projection")


class GaLoreAdamW(_Projected):
    """AdamW on projected gradients, with galore_torch's arguments: ``eps`` is beside the uncorrected root.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: of the moments.
        eps: beside the root of the second one.
        weight_decay: decoupled, after the update.
        correct_bias: of both moments.
        no_deprecation_warning: changes nothing; there is none.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_least(name, value)
        for number, beta in enumerate(betas):
            check_least(f"betas[{number}]", beta, 0.0, 1 - 1e-15)
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, {"lr": lr, **options})

    def _eps(self, group: dict[str, Any], _second: float) -> Any:
        return group["eps"]

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        low = self._project(group, grad, state)
        begun(state, ("exp_avg", "exp_avg_sq"), low)
        (beta1, beta2), lr = group["betas"], group["lr"]
        state["step"] += 1
        state["exp_avg"].lerp_(low, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(low, low, value=1 - beta2)
        first, second = 1.0, 1.0
        if group.get("correct_bias", True):
            first, second = 1 - beta1 ** state["step"], math.sqrt(1 - beta2 ** state["step"])
        direction = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(self._eps(group, second))
        weight = as_computed(param) - lr * second / first * self._project_back(group, direction, state, grad)
        param.copy_(weight * (1 - lr * group["weight_decay"]))


class GaLoreAdamW8bit(GaLoreAdamW):
    """GaLore with ColossalAI's arguments, and moments of 32 bits (``nbits=32``); those of 8 are not available.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: of the moments.
        eps: beside the root of the second one, corrected as torch's AdamW.
        weight_decay: decoupled, after the update.
        nbits: 32.
        min_8bit_size, block_wise: of 8 bits; they change nothing.
        percentile_clipping: 100.
        is_paged: False; ``placement_policy`` and its like say where state is.
        args: None.

    Raises:
        NotImplementedError: one of these is another.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: Any = None,
    ) -> None:
        given = {"nbits": nbits, "percentile_clipping": percentile_clipping, "is_paged": is_paged, "args": args}
        known = {"nbits": 32, "percentile_clipping": 100, "is_paged": False, "args": None}
        for name, value in given.items():
            if value != known[name]:
                raise NotImplementedError(
                    f"{name}={value!r}: moments in 8 bits need bitsandbytes' GPU kernels and blocks of flat memory, "
                    f"which shards do not keep; give {name}={known[name]!r} (GaLore's projection saves the most), "
                    "or offload state"
                )
        super().__init__(params, lr, betas, eps, weight_decay)

    def _eps(self, group: dict[str, Any], second: float) -> Any:
        return group["eps"] * second


class GaLoreAdafactor(_Projected, Adafactor):
    """:class:`~shardwise.optim.factored.Adafactor` on projected gradients."""

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        weight = as_computed(param)
        update, lr = adafactor_update(group, state, self._project(group, grad, state), weight)
        update = self._project_back(group, update, state, grad)
        param.copy_(weight - group["weight_decay"] * lr * weight - update)
