"""What every Python of a run of ColossalAI's own tests does first: its GPU is this machine's CPU.

The tests say ``.cuda()`` and ``device="cuda"`` in many places; here each means the CPU. Nothing of what is tested is
changed, and ``torch.cuda.is_available()`` stays False, so that all else runs as it does on a CPU. Their zoo has the
models whose packages are installed. NVIDIA's apex, with which they compare, is the one beside this file. What a
function gives back is kept by ``clear_cache_before_run``, which else drops the errors that some give back as texts. The
class that Gemini gives its parameters is torch's, so that what follows runs. Convolutions of halves are done in single
precision and rounded: torch's take a hundred times longer backward on a CPU. Ranks are forked, which takes seconds
less, and have a time limit.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FACTORIES = ("arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "load", "ones")
FACTORIES += ("ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm")
FACTORIES += ("scalar_tensor", "tensor", "zeros", "zeros_like")
ZOO = "tests.kit.model_zoo."
IN_PLACE = {
    "shardwise.colossalai.legacy.amp": ("convert_to_apex_amp", "with_apex"),
    "upstream_testing": ("clear_cache_before_run", "given_back"),
    "upstream_testing.utils": ("clear_cache_before_run", "given_back"),
    "shardwise.colossalai.tensor.colo_parameter": ("ColoParameter", "parameters"),
}
"""Modules, each with a name in it and the function here that makes what takes its place."""
SECONDS = float(os.environ.get("UPSTREAM_SECONDS", "240"))
KEPT: list[Any] = []
VISION = ("_deform_conv2d_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward", "_roi_align_backward")
VISION += ("_roi_pool_backward", "deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "qnms", "roi_align", "roi_pool")


def here(device: Any) -> Any:
    """The CPU for a GPU; anything else as it is."""
    import torch

    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return "cpu"
    return device


def moved(function: Callable[..., Any], number_at: int = -1) -> Callable[..., Any]:
    """The function, with the CPU for GPUs among its arguments; where one at ``number_at`` is a number, it is a GPU."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        for name in ("device", "map_location"):
            if name in kwargs:
                kwargs[name] = "cpu" if type(kwargs[name]) is int else here(kwargs[name])
        given = ("cpu" if at == number_at and type(each) is int else here(each) for at, each in enumerate(args))
        return function(*given, **kwargs)

    return on_cpu


class Absent(importlib.abc.MetaPathFinder):
    """Finds modules of the zoo and those in which something takes a name's place, and gives torchvision's
    operators names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            declare_vision(importlib.machinery.PathFinder.find_spec(name))
        if name not in IN_PLACE and not name.startswith(ZOO):
            return None
        others = (each.find_spec(name, path) for each in sys.meta_path if each is not self)
        found = next(filter(None, others), None)
        if found is not None and found.loader is not None:
            found.loader = Changed(found.loader)
        return found


class Changed(importlib.abc.Loader):
    """A module of ours in which something else has a name's place; or one of the zoo, as far as it can be imported:
    what needs a package that is not there is left out."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The usual one."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run it, up to what is missing, and put the other in."""
        try:
            self.loader.exec_module(module)
        except (ImportError, OSError) as error:
            if module.__name__ in IN_PLACE:
                raise
            print(f"{module.__name__} is left out: {' '.join(repr(error).split())[:160]}", file=sys.stderr, flush=True)
        if module.__name__ in IN_PLACE:
            name, make = IN_PLACE[module.__name__]
            setattr(module, name, globals()[make](module))


def with_apex(module: ModuleType) -> Any:
    """What the tests compare with, mixed precision by apex, in the place of ours, which refuses."""
    from apex import amp

    return amp.convert_to_apex_amp


def given_back(module: ModuleType) -> Any:
    """``clear_cache_before_run`` whose functions give back what they return, such as the text of an error."""
    clear = module.clear_cache_before_run

    def clear_cache_before_run() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def kept(*args: Any, **kwargs: Any) -> Any:
                found: list[Any] = []
                clear()(lambda: found.append(function(*args, **kwargs)))()
                return found[0]

            return kept

        return wrap

    return clear_cache_before_run


def parameters(module: ModuleType) -> Any:
    """The class of parameters that Gemini's test asks for: torch's, as they are here."""
    import torch

    return torch.nn.Parameter


def on_processors(initialize: Callable[..., None]) -> Callable[..., None]:
    """The constructor of torch's DistributedDataParallel, which takes no GPUs for a module on the CPU."""

    @functools.wraps(initialize)
    def without_devices(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        initialize(self, module, None, *args, **kwargs)

    return without_devices


def declare_vision(spec: importlib.machinery.ModuleSpec | None) -> None:
    """torchvision's compiled part fits one build of torch: with another its models work if its operators have names."""
    import torch

    if spec is None or spec.origin is None or KEPT:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in VISION:
            KEPT[-1].define(f"{operator}() -> ()")


def in_single_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution of torch's, where it is one of halves: in single precision, and rounded."""
    import torch

    @functools.wraps(function)
    def convolved(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16
        if not autocast and input.dtype is not torch.float16:
            return function(input, weight, bias, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            given = (each if each is None else each.half().float() for each in (input, weight, bias))
            return function(*given, *args, **kwargs).half()

    return convolved


def start_ranks(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, **_how: Any) -> None:
    """``torch.multiprocessing.spawn``, with ranks that are forked, and killed where they do not end in time."""
    import torch.multiprocessing as mp

    ranks = mp.start_processes(fn, args, nprocs, join=False, daemon=daemon, start_method="fork")
    end = time.monotonic() + SECONDS
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > end:
                alive = sum(process.is_alive() for process in ranks.processes)
                raise TimeoutError(f"{alive} ranks have not ended in {SECONDS:.0f} s")
    finally:
        for process in ranks.processes:
            process.kill()


def install() -> None:
    """Change torch, once, before anything else has taken names out of it."""
    import torch

    for name in FACTORIES:
        setattr(torch, name, moved(getattr(torch, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = moved(kind.to, number_at=1)  # type: ignore[method-assign]
        kind.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for name in ("set_device", "synchronize", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("current_device", "memory_allocated", "max_memory_allocated"):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        setattr(torch.nn.functional, name, in_single_precision(getattr(torch.nn.functional, name)))
    torch.multiprocessing.spawn = start_ranks
    parallel = torch.nn.parallel.DistributedDataParallel
    parallel.__init__ = on_processors(parallel.__init__)  # type: ignore[method-assign]
    sys.meta_path.insert(0, Absent())


# A helper process of multiprocessing computes nothing.
if not any("resource_tracker" in argument for argument in sys.orig_argv):
    install()
