"""Base class of optimizers whose update of an element needs its full parameter: a norm, rows, columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.core.base.validate import as_params


def as_computed(value: Tensor) -> Tensor:
    """Convert ``value`` to the dtype in which an update is computed: fp32 for 16-bit values, otherwise its own."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def begun(state: dict[str, Any], names: tuple[str, ...], like: Tensor) -> None:
    """Initialize the step count and the averages with the shape of ``like`` that are missing in ``state``."""
    state.setdefault("step", 0)
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(like)


def check_least(name: str, value: Any, least: float = 0.0, most: float = float("inf")) -> None:
    """Check that ``value`` is a number from ``least`` to ``most``.

    Raises:
        ValueError: ``value`` is not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor) or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: give a number from {least} to {most}")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the result of the closure of ``step()``, run with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def counted(full: dict[str, Any]) -> dict[str, Any]:
    """Convert a state with step counts per group (apex's and ColossalAI's fused optimizers) to counts per parameter.

    Other states are returned as they are. ``full`` is not changed.
    """
    groups = full.get("param_groups") or ()
    if not any("step" in group for group in groups):
        return full
    state, own = dict(full["state"]), []
    for group in groups:
        for number in group["params"]:
            entry = state.get(number)
            if entry and "step" not in entry and group.get("step") is not None:
                state[number] = entry | {"step": int(group["step"])}
        own.append({key: value for key, value in group.items() if key != "step"})
    return {**full, "state": state, "param_groups": own}


def load_counted(
    optimizer: torch.optim.Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    check: Callable[[dict[str, Any]], None] = lambda final: None,
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Call torch's ``load`` with step counts per parameter; return each parameter with its state before torch's casts.

    ``check`` sees the state after the user's own hooks, which may replace it, and before anything is changed.
    """
    seen = [state_dict]

    def last(_optimizer: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
        seen[0] = counted(final)
        check(seen[0])
        return seen[0]

    handle = optimizer.register_load_state_dict_pre_hook(last)
    try:
        load(state_dict)
    finally:
        handle.remove()
    numbers = [number for group in seen[0]["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return zip(params, (seen[0]["state"].get(number) or {} for number in numbers), strict=True)


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Updates each full parameter separately; see ``docs/optim.md`` for the consequences for shards."""

    whole_tensors = True
    counts_by_parameter = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(as_params(params), defaults)

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        """Update one parameter; ``grad`` and ``group`` must not change."""
        raise NotImplementedError(f"{type(self).__name__}._update()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, including one with step counts per group. State of 16-bit parameters stays in fp32.

        Raises:
            ValueError: the groups differ.
        """
        for param, state in load_counted(self, super().load_state_dict, state_dict):
            for key, value in state.items():
                loaded = self.state[param].get(key)
                if isinstance(loaded, Tensor) and loaded.is_floating_point() and as_computed(loaded) is not loaded:
                    self.state[param][key] = as_computed(value).to(loaded.device)  # torch has rounded it

    def _live(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} takes no sparse gradients, as one of shape {tuple(param.shape)} is: "
                        "make the embedding with sparse=False"
                    )
                if param.grad is not None:
                    yield group, param, param.grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the result of ``closure``, which runs first.

        Raises:
            RuntimeError: a gradient is sparse; nothing is updated then.
        """
        loss = loss_of(closure)
        for group, param, grad in list(self._live()):
            if param.numel():
                self._update(group, param, as_computed(grad), self.state[param])
        return loss
