"""The memory trace of one step of any plain module, outside of training: ``trace_memory``.

One real forward and backward pass (and optimizer step) is run and undone. With a new optimizer, an additional step
comes first, since it has no state before. Model data (parameters, buffers, gradients, optimizer state) is recognized by
its storages.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.core.base.device import runtime
from shardwise.core.memory.trace.stats import NO_UNIT, MemoryRecorder, MemStats, Phase
from shardwise.core.memory.trace.tracker import Tracker, make_tracker, sizes_of

STEP = "optimizer step"
Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


def trace_memory(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    capacity_bytes: int | None = None,
) -> MemStats:
    """Run a training step of ``model`` and return its memory trace.

    There is a moment before each module with parameters of its own or without children (in forward and backward), when
    a gradient is complete, at the loss, and around the optimizer's step. If nothing requires a gradient, only the
    forward pass is run. The batch is not model data.

    Args:
        model: a model on one device, in its current mode. On the meta device nothing is computed, and the trace has the
            bytes that a real device would need. Each condition on values, such as ``if mask.all()``, counts as true.
        batch: a tensor, a tuple or list of arguments, or a dict of keyword arguments; with ``loss``, its argument.
        loss: computes a scalar from model and batch. Default: the output's ``loss``, or the sum of the means of all
            floating-point tensors in the output.
        optimizer: stepped at the end, if given. If it has no state, an untraced step comes first, so that the trace is
            that of a later step with state.
        capacity_bytes: capacity of the device. Default: that of a CUDA device; no limit for other devices.

    Returns:
        The trace of the step, with the bytes at each moment.

    Parameters, buffers, gradients, optimizer state, random state and hooks are restored afterwards, also after an
    error. Other changes by the forward pass (a counter in an attribute) remain.

    Raises:
        ValueError: a lazy module is not initialized, or the loss is not a scalar.
        TypeError: the loss is not a tensor.

    Examples:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(1024, 1024)
        >>> stats = shardwise.trace_memory(model, torch.empty(8, 1024, device="meta"), capacity_bytes=2**30)
        >>> shardwise.size_text(stats.peak_model_bytes)
        '8.01 MiB'
    """
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} is not initialized yet (a lazy module); run the model once before tracing it")
    device = _device_of(model, batch)
    if capacity_bytes is None and device.type == "cuda":
        capacity_bytes = runtime().total_bytes(device)
    with contextlib.ExitStack() as undo:
        hidden = _keep(model, batch, optimizer, device, undo)
        if optimizer is not None and not optimizer.state:
            with make_tracker(device, int):
                _first_step(model, batch, loss or _default_loss, optimizer)
        run = _Run(model, batch, device, optimizer, hidden)
        run.recorder.capacity_bytes = capacity_bytes
        undo.callback(run.remove_hooks)
        run.add_hooks()
        return run.step(loss or _default_loss)


def _first_step(model: nn.Module, batch: Batch, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
    value = _scalar(loss(model, batch))
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for tensor in (*model.parameters(), *_tensors(batch), *(p for g in optimizer.param_groups for p in g["params"])):
        if tensor.is_leaf:
            tensor.grad = None


def _scalar(value: Any) -> Tensor:
    """Return the result of a loss function after checking it.

    Raises:
        TypeError, ValueError: the value is not a scalar tensor.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"loss gave {value!r}, a {type(value).__name__}: return a scalar tensor")
    if value.requires_grad and value.numel() != 1:
        raise ValueError(f"loss has the shape {tuple(value.shape)}: return a scalar")
    return value


def storage_bytes(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    """Return the bytes of the tensors' storages on ``device``, counting each storage once."""
    return sum(sizes_of(each for each in tensors if each is not None and each.device == device).values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, each.name) for each in fields(value)])


def _device_of(model: nn.Module, batch: Batch) -> torch.device:
    tensors = [*model.parameters(), *model.buffers(), *_tensors(batch)]
    return tensors[0].device if tensors else torch.device("cpu")


def _call(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _default_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = _call(model, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    parts = [x for x in _tensors(output) if x.is_floating_point()]
    if not parts:
        raise TypeError(f"the model returned no floating tensor ({type(output).__name__}): give loss=...")
    return sum((part.mean() for part in parts[1:]), start=parts[0].mean())


def _keep(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    undo: contextlib.ExitStack,
) -> int:
    """Register the restoration of everything, and return the bytes that the copies take on ``device``."""
    cuda = [device] if device.type == "cuda" else []
    undo.enter_context(torch.random.fork_rng(devices=cuda))
    undo.callback(random.setstate, random.getstate())
    stepped = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    leaves = list({id(t): t for t in (*model.parameters(), *stepped, *_tensors(batch)) if t.is_leaf}.values())
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    undo.callback(_restore_gradients, gradients)
    _restore_gradients([(leaf, None) for leaf in leaves])
    # Copies are on the host: on the device, they would be part of the measurement.
    buffers = [(m, n, b, _host_copy(b)) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    undo.callback(_restore_buffers, buffers)
    if optimizer is not None:
        values = [(p, _host_copy(p)) for p in {id(p): p for p in (*model.parameters(), *stepped)}.values()]
        groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        state = {p: {k: (v, _host_copy(v)) for k, v in s.items()} for p, s in optimizer.state.items()}
        undo.callback(_restore_optimizer, optimizer, groups, state, values)
    return storage_bytes((gradient for _, gradient in gradients), device)


def _host_copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value if value.is_meta else value.detach().to("cpu", copy=True)


def _put_back(tensor: Tensor, value: Tensor) -> None:
    if tensor is not value:
        with torch.no_grad():
            tensor.copy_(value)


def _restore_gradients(gradients: list[tuple[Tensor, Tensor | None]]) -> None:
    for leaf, gradient in gradients:
        leaf.grad = gradient


def _restore_buffers(buffers: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for module, name, buffer, value in buffers:
        _put_back(buffer, value)
        module._buffers[name] = buffer


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: dict[Any, dict[str, tuple[Any, Any]]],
    values: list[tuple[Tensor, Tensor]],
) -> None:
    for parameter, value in values:
        _put_back(parameter, value)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
    for parameter in list(optimizer.state):
        if parameter not in state:
            del optimizer.state[parameter]
    for parameter, entries in state.items():
        for tensor, value in entries.values():
            if isinstance(tensor, Tensor):
                _put_back(tensor, value)
        optimizer.state[parameter] = {k: t if isinstance(t, Tensor) else v for k, (t, v) in entries.items()}


class _Run:
    """A traced step: hooks that report moments, and the bytes of model data by kind."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None,
        hidden_bytes: int,
    ) -> None:
        self.model, self.batch, self.device, self.optimizer = model, batch, device, optimizer
        self.hidden_bytes = hidden_bytes
        self.phase: Phase = "forward"
        self.kinds: dict[str, int] = {}
        self._gradients: dict[int, dict[int, int]] = {}
        self._handles: list[RemovableHandle] = []
        parameters, buffers = list(model.parameters()), list(model.buffers())
        state = list(self._state_tensors())
        inputs = list(_tensors(batch))
        self._set("parameters", storage_bytes(parameters, device))
        everything = storage_bytes([*parameters, *buffers], device)
        self._set("buffers", everything - self.kinds.get("parameters", 0))
        self._set("optimizer state", storage_bytes(state, device))
        # The allocator counts the batch already; the tensor tracker does not, as the batch was created before.
        self.batch_bytes = storage_bytes([*parameters, *buffers, *inputs], device) - everything
        self.tracker: Tracker = make_tracker(device, lambda: sum(self.kinds.values()) + self.hidden_bytes)
        for tensor in (*parameters, *buffers, *state):
            self.tracker.exclude(tensor)
        self.recorder = MemoryRecorder(self, device=str(device))

    def take_peak(self) -> int:
        """Return the tracker's peak for the recorder, plus the batch if the tracker cannot count it."""
        return self.tracker.take_peak() + (0 if self.device.type == "cuda" else self.batch_bytes)

    def _set(self, kind: str, size_bytes: int) -> None:
        if size_bytes or kind in self.kinds:
            self.kinds[kind] = size_bytes

    def _state_tensors(self) -> Iterator[Tensor]:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return (tensor for state in states for tensor in _tensors(state))

    def moment(self, unit: int, name: str) -> None:
        """Record a moment with the model data in ``kinds``."""
        self.recorder.moment(unit, name, self.phase, sum(self.kinds.values()), self.kinds)

    def add_hooks(self) -> None:
        """Add the hooks that report moments."""
        owners: dict[int, tuple[int, str]] = {}
        for unit, (name, module) in enumerate(self.model.named_modules()):
            own = list(module.parameters(recurse=False))
            shown = name or type(module).__name__
            self.recorder.gathered_bytes[unit] = storage_bytes(own, self.device)
            for parameter in own:
                owners.setdefault(id(parameter), (unit, shown))
            if own or module is self.model or not any(True for _ in module.children()):
                self._hook(module, unit, shown)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                complete = partial(self._gradient_complete, *owners[id(parameter)])
                handle = parameter.register_post_accumulate_grad_hook(complete)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _hook(self, module: nn.Module, unit: int, name: str) -> None:
        def before(module: nn.Module, arguments: Any) -> None:
            self.moment(unit, name)

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            # Hook the graph's nodes, since backward hooks of a module forbid in-place operations on the output. With
            # several outputs, the first that backward reaches counts.
            pending = [True]

            def reached(gradients: Any) -> None:
                if pending:
                    pending.clear()
                    self.moment(unit, name)

            nodes = {tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None}
            self._handles.extend(node.register_prehook(reached) for node in nodes)
            if module is self.model:
                self.moment(NO_UNIT, "loss")

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def _gradient_complete(self, unit: int, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.device != self.device:
            return
        self._gradients[id(parameter)] = sizes_of([gradient])
        # The interval that ends now has the gradient in its peak; remove the gradient from the count only afterwards.
        self.recorder.end_interval()
        # Several gradients may share a storage (``torch.cat`` of parameters returns views of its gradient).
        sizes = {key: size for of_one in self._gradients.values() for key, size in of_one.items()}
        self._set("gradients", sum(sizes.values()))
        self.tracker.exclude(gradient)
        self.moment(unit, name)

    def step(self, loss: Loss) -> MemStats:
        """Run the step and return its trace."""
        with self.tracker:
            value = _scalar(loss(self.model, self.batch))
            if value.requires_grad:
                self.phase = "backward"
                self.moment(NO_UNIT, "loss")
                value.backward()  # type: ignore[no-untyped-call]
            del value
            if self.optimizer is not None:
                self._optimizer_step(self.optimizer)
            return self.recorder.finish()

    def _optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.phase = "step"
        self.moment(NO_UNIT, STEP)
        optimizer.step()
        self.recorder.end_interval()
        for tensor in self._state_tensors():
            self.tracker.exclude(tensor)
        self._set("optimizer state", storage_bytes(self._state_tensors(), self.device))
        self.moment(NO_UNIT, "after the step")

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
