"""FairScale's table of names: every entry resolves, or refuses when it is used; published signatures."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
from shardwise.fairscale.nn import auto_wrap, config_auto_wrap_policy, enable_wrap
from torch import nn

from shardwise import fairscale
from shardwise.fairscale import WORLD
from shardwise.port.known import worlds
from shardwise.worlds import Absent, Here, NotHere

HERE = [(path, name) for path, name, entry in WORLD.entries() if isinstance(entry, Here) and path]
ABSENT = [(path, name) for path, name, entry in WORLD.entries() if isinstance(entry, Absent)]
PUBLISHED = {
    "nn:FullyShardedDataParallel": (
        "module, process_group=None, process_group_reduce_scatter=None, reshard_after_forward=True, "
        "disable_reshard_on_root=True, mixed_precision=False, fp32_reduce_scatter=False, flatten_parameters=True, "
        "move_params_to_cpu=False, compute_dtype=None, buffer_dtype=None, move_grads_to_cpu=None, bucket_cap_mb=25, "
        "compute_device=None, no_broadcast_optim_state=False, state_dict_device=None, clear_autocast_cache=False, "
        "force_input_to_fp32=False, verbose=False, cpu_offload=False, state_dict_on_rank_0_only=False, "
        "gradient_predivide_factor=None, allow_reset_parameters=False"
    ),
    "optim:OSS": (
        "params, optim=<class 'torch.optim.sgd.SGD'>, group=None, broadcast_buffer_size=-1, broadcast_fp16=False, "
        "force_broadcast_object=False, **default"
    ),
    "nn.data_parallel:ShardedDataParallel": (
        "module, sharded_optimizer, process_group=None, broadcast_buffers=True, sync_models_at_startup=True, "
        "reduce_buffer_size=8388608, auto_refresh_trainable=True, reduce_fp16=False, "
        "warn_on_trainable_params_changed=True"
    ),
    "optim.grad_scaler:ShardedGradScaler": (
        "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True, "
        "process_group=None"
    ),
    "nn:checkpoint_wrapper": "module, offload_to_cpu=False",
    "nn:auto_wrap": "module, auto_wrap_policy=None, **kwargs",
    "nn:enable_wrap": "auto_wrap_policy=None, **wrapper_kwargs",
    "nn:wrap": "module, **wrap_overrides",
}


def named(path: str, name: str) -> object:
    return getattr(import_module(f"shardwise.fairscale.{path}"), name)


@pytest.mark.parametrize(("path", "name"), HERE)
def test_a_name_that_works(path: str, name: str) -> None:
    found = named(path, name)
    assert callable(found)
    assert getattr(found, "__name__", "") == name


@pytest.mark.parametrize(("path", "name"), ABSENT)
def test_a_name_that_refuses(path: str, name: str) -> None:
    """It can be imported, and says what to do when it is called."""
    chosen = "Anything" if name == "*" else name
    found = named(path, chosen)
    assert not isinstance(3, found)  # type: ignore[arg-type]
    with pytest.raises(NotHere, match=f"^fairscale.{path}.{chosen}: ".replace(".", r"\.")):
        found()  # type: ignore[operator]


@pytest.mark.parametrize("place", PUBLISHED)
def test_published_signatures(place: str) -> None:
    signature = inspect.signature(named(*place.split(":")))  # type: ignore[arg-type]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({PUBLISHED[place]})"


def test_a_function_and_a_module_of_one_name() -> None:
    """``fairscale.nn.wrap`` is both: the function to who takes it from ``nn``, the module to who imports it."""
    module = import_module("shardwise.fairscale.nn.wrap")
    nn = import_module("shardwise.fairscale.nn")
    assert nn.wrap is module.wrap is import_module("shardwise.fairscale.wrapping").wrap


def test_programs_can_be_ported() -> None:
    assert WORLD in worlds()
    for place, said in WORLD.arguments.items():
        assert said.keys() <= inspect.signature(named(*place.split(":"))).parameters.keys()  # type: ignore[arg-type]


def test_the_version_is_that_of_the_names() -> None:
    assert fairscale.__version__ == WORLD.version


def test_modules_may_say_how_they_are_wrapped() -> None:
    """And those that say nothing are not."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module, **kwargs: object) -> None:
            super().__init__()
            self.module, self.given = module, kwargs

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].wrapper_config = {"bucket_cap_mb": 3}  # type: ignore[assignment]
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=Wrapper, bucket_cap_mb=1, verbose=True):
        wrapped = auto_wrap(model)
    assert wrapped is model and isinstance(model[0], nn.Linear)
    assert isinstance(model[1], Wrapper) and model[1].given == {"bucket_cap_mb": 3, "verbose": True}
