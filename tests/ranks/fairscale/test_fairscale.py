"""FairScale's wrappers in programs as its documentation writes them, against plain PyTorch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sets import full
from shardwise.fairscale.nn import FullyShardedDataParallel as FSDP
from shardwise.fairscale.nn import auto_wrap, checkpoint_wrapper, default_auto_wrap_policy, enable_wrap, wrap
from shardwise.fairscale.nn.data_parallel import ShardedDataParallel, get_fsdp_instances
from shardwise.fairscale.optim.grad_scaler import ShardedGradScaler
from shardwise.fairscale.optim.oss import OSS
from torch import Tensor, nn

from shardwise.testing import run_ranks

EXACT = 1e-11


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.up(inputs).tanh())


class Net(nn.Module):
    def __init__(self, plain: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block().to(dtype), Block().to(dtype)])
        self.head = nn.Linear(6, 3).to(dtype)
        if not plain:
            self.blocks[0], self.head = wrap(self.blocks[0]), wrap(self.head)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        output: Tensor = self.head(inputs)
        return output


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    made = torch.randn(4, 9, generator=generator, dtype=torch.float64).to(dtype)
    return made[:, :6], made[:, 6:]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, eps=1e-3)


def error(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(given[0]).to(given[1].dtype), given[1])


def plain(steps: int, clip: float | None = None, start: int = 0, model: Any = None, optimizer: Any = None) -> Any:
    model = Net() if model is None else model
    optimizer = adam(model.parameters()) if optimizer is None else optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    norm, ranks = torch.tensor(0.0), dist.get_world_size()
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for micro in (0, 1):
                (error(model, batch(rank, 2 * step + micro)) / (2 * ranks)).backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return model, optimizer, norm


def train(model: Any, optimizer: Any, steps: int, clip: float | None = None, start: int = 0) -> Tensor:
    """Accumulation under ``no_sync``, plain ``loss.backward()`` and ``optimizer.step()``."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    norm = torch.tensor(0.0)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        with model.no_sync():
            (error(model, batch(dist.get_rank(), 2 * step)) / 2).backward()
        (error(model, batch(dist.get_rank(), 2 * step + 1)) / 2).backward()
        if clip is not None:
            norm = model.clip_grad_norm_(clip) if isinstance(model, FSDP) else optimizer.clip_grad_norm(clip)
        optimizer.step()
        schedule.step()
    return norm


def same(state: dict[str, Tensor], model: nn.Module, most: float = EXACT) -> None:
    expected = model.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert float((value - expected[name]).abs().max()) <= most, name


def nested(**options: Any) -> Any:
    """Wrapped in each way that there is: ``wrap`` in the constructor, ``auto_wrap``, and the class itself."""
    with enable_wrap(wrapper_cls=FSDP, **options):
        first = FSDP(Net(plain=False), **options)
        policy = lambda module, recurse, unwrapped_params, module_is_root: default_auto_wrap_policy(  # noqa: E731
            module, recurse, unwrapped_params, module_is_root, min_num_params=60
        )
        second = FSDP(auto_wrap(Net(), auto_wrap_policy=policy), **options)
    third = FSDP(Net(), **options)
    assert [len(get_fsdp_instances(each)) for each in (first, second, third)] == [3, 5, 1]
    return first, second, third


def fully_sharded(options: dict[str, Any], ways: list[int]) -> None:
    """Every way to wrap, with an optimizer made afterwards; states, summoned parameters, and going on from a state."""
    expected, oracle, norm = plain(3, clip=0.05)
    made = nested(**options)
    for model in (made[way] for way in ways):
        optimizer = adam(model.parameters())
        found = train(model, optimizer, 3, clip=0.05)
        assert abs(float(found) - float(norm)) <= EXACT
        same(model.state_dict(), expected)
        with model.summon_full_params(volatile=True):
            whole = dict(model.named_parameters())
            assert list(whole) == [name for name, _ in expected.named_parameters()]
            same({name: param.detach() for name, param in whole.items()}, expected)
        gathered = model.gather_full_optim_state_dict(optimizer)
        assert (gathered is None) == (dist.get_rank() > 0)
        state = optimizer.state_dict()
        assert gathered is None or gathered.keys() == state.keys()
        for index, entries in oracle.state_dict()["state"].items():
            assert float((state["state"][index]["exp_avg"] - entries["exp_avg"]).abs().max()) <= EXACT
        # Another wrapper goes on from there, from whole states and from the ranks' parts.
        other = nested()[0]
        again = adam(other.parameters())
        other.load_state_dict(model.state_dict())
        again.load_state_dict(other.get_shard_from_optim_state_dict(state))
        again.param_groups[0]["lr"] = 0.05
        with other.summon_full_params(), torch.no_grad():
            for param in other.parameters():
                param.mul_(2.0)
        same(other.state_dict(), _doubled(expected))
        other.load_local_state_dict(model.local_state_dict())
        train(other, again, 1, start=3)
        further = copy.deepcopy(expected)
        optim = adam(further.parameters())
        optim.load_state_dict(copy.deepcopy(oracle.state_dict()))
        optim.param_groups[0]["lr"] = 0.05
        same(other.state_dict(), plain(1, start=3, model=further, optimizer=optim)[0])
        other.close()
        model.close()


def own_buffers() -> None:
    """Running statistics are each rank's own, in its part of the state and back, as plain BatchNorm has them there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()  # noqa: E731
    torch.manual_seed(3)
    plain_model = made()
    model = FSDP(copy.deepcopy(plain_model))
    for step in range(2):  # without updates: what a rank has seen is all that its statistics follow from
        with torch.no_grad():
            model(batch(rank, step)[0])
            plain_model(batch(rank, step)[0])
    same(model.state_dict(), plain_model)
    part = model.local_state_dict()
    assert torch.equal(part["1.running_mean"], model.module[1].running_mean) and part["1.running_mean"].shape == (6,)
    assert part["0.weight"].shape == (-(-36 // ranks),)
    others = FSDP(made())
    adam(others.parameters())
    assert not any(others.load_local_state_dict(part))
    for each in (others, model):
        each.load_local_state_dict(part)
        same(each.state_dict(), plain_model)
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, (part, model.local_metadata_dict(), plain_model.state_dict()))
    whole = FSDP.consolidate_shard_weights([each[0] for each in parts], [each[1] for each in parts])
    assert whole.keys() == plain_model.state_dict().keys()
    assert all(float((value - parts[0][2][name]).abs().max()) <= EXACT for name, value in whole.items())
    others.close()
    model.close()


def loaded_before_the_optimizer() -> None:
    """Masters are loaded as they were saved, whether the optimizer is made before or after: the same bits later."""
    made = lambda: FSDP(Net(dtype=torch.float32), mixed_precision=True, compute_dtype=torch.bfloat16)  # noqa: E731
    model = made()
    optimizer = adam(model.parameters())
    train(model, optimizer, 2)
    state, moments = model.state_dict(), optimizer.state_dict()
    part = model.local_state_dict()
    assert not torch.equal(state["head.weight"], state["head.weight"].bfloat16().float())
    train(model, optimizer, 2, start=2)
    expected = model.state_dict()
    for early, local in ((True, False), (False, False), (False, True)):
        other = made()
        optim = adam(other.parameters()) if early else None
        with torch.no_grad():
            for param in other.module.parameters():
                param.zero_()
        found = other.load_local_state_dict(part) if local else other.load_state_dict(state)
        assert found.missing_keys == found.unexpected_keys == []
        optim = adam(other.parameters()) if optim is None else optim
        optim.load_state_dict(copy.deepcopy(moments))
        train(other, optim, 2, start=2)
        assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items()), (early, local)
        other.close()
    model.close()
    other = made()
    with pytest.raises(RuntimeError, match=r"missing \['head.bias'\]"):
        other.load_state_dict({name: value for name, value in state.items() if name != "head.bias"})
    same({name: param.detach() for name, param in other.named_parameters()}, Net(dtype=torch.float32), 0.0)
    other.load_state_dict(state)
    with torch.no_grad():
        other(batch(0, 0, torch.float32)[0])
    adam_of_late = adam(other.parameters())
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="Net was used before there was an optimizer.*became torch.bfloat16"):
            train(other, adam_of_late, 1)
    else:
        train(other, adam_of_late, 1)
    other.close()


def summoned() -> None:
    """What a wrapper inside has is all that its block gathers."""
    outer, _, _ = nested()
    expected, names = Net(), [name for name, _ in Net().named_parameters()]
    optimizer = adam(outer.parameters())
    inner = [each for each in get_fsdp_instances(outer) if each is not outer]
    own = [{id(param) for param in each.parameters()} for each in inner]
    shown = lambda: {id(param) for param in outer.parameters() if not bool(param.isnan().any())}  # noqa: E731
    rest = {id(param) for param in outer.parameters()} - own[0] - own[1]
    with outer.summon_full_params(volatile=True):
        pass
    assert not shown()
    with outer.summon_full_params(recurse=False, volatile=True):
        assert shown() == rest
    with inner[0].summon_full_params(), torch.no_grad():
        assert shown() == own[0]
        assert inner[0].state_dict().keys() == inner[0].module.state_dict().keys()
        for param in inner[0].parameters():
            param.mul_(2.0)
        with inner[1].summon_full_params(volatile=True):
            assert shown() == own[0] | own[1]
            for param in inner[1].parameters():
                param.mul_(3.0)  # dropped
            with inner[0].summon_full_params(volatile=True):
                assert shown() == own[0] | own[1]
        assert shown() == own[0]
        with outer.summon_full_params(volatile=True):
            assert shown() == own[0] | own[1] | rest
        whole = inner[1].state_dict()  # gathered for it, as outside
    assert not shown()
    doubled = {name for name, param in outer.named_parameters() if id(param) in own[0]}
    assert doubled and len(doubled) < len(names)
    with torch.no_grad():
        for name, param in expected.named_parameters():
            param.mul_(2.0 if name in doubled else 1.0)
    same(outer.state_dict(), expected, 0.0)
    assert whole and all(torch.equal(value, inner[1].state_dict()[name]) for name, value in whole.items())
    train(outer, optimizer, 1)
    outer.close()


@torch.no_grad()
def _doubled(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for param in model.parameters():
        param.mul_(2.0)
    return model


def what_else() -> None:
    """Inner states, consolidated parts, evaluation before an optimizer, ``apply``, and calls that cannot go."""
    model = nested()[0]
    with torch.no_grad():
        before = model(batch(0, 0)[0])
    assert float((before - Net()(batch(0, 0)[0]).detach()).abs().max()) <= EXACT
    optimizer = adam(model.parameters())
    train(model, optimizer, 2)
    expected = plain(2)[0]
    same(model.state_dict(), expected)
    same(model.blocks[0].state_dict(), expected.blocks[0])
    assert list(model.state_dict(prefix="a.")) == [f"a.{name}" for name in expected.state_dict()]
    with pytest.raises(ValueError, match=r"state_dict\(keep_vars=True\)"):
        model.state_dict(keep_vars=True)
    for call in (model.state_dict, model.local_state_dict):
        with pytest.raises(TypeError, match="perfix"):
            call(perfix="a.")
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (model.local_state_dict(), model.local_metadata_dict()))
    same(FSDP.consolidate_shard_weights([p for p, _ in parts], [m for _, m in parts]), expected)
    if len(parts) > 1:
        with pytest.raises(ValueError, match=r"parts of ranks \[1\] of 2"):
            FSDP.consolidate_shard_weights([parts[1][0]], [parts[1][1]])

    def zeros(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    model.apply(zeros)
    expected.apply(zeros)
    same(model.state_dict(), expected)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(1.0\) of a wrapped Block inside the model"):
        model.blocks[0].clip_grad_norm_(1.0)
    for recipient in (0, dist.get_world_size() - 1, None):
        full = model.gather_full_optim_state_dict(optimizer, recipient_rank=recipient)
        assert (full is not None) == (recipient in (None, dist.get_rank()))
        if full is not None:
            oracle = plain(2)[1].state_dict()["state"]
            for index, entries in oracle.items():
                assert float((full["state"][index]["exp_avg"] - entries["exp_avg"]).abs().max()) <= EXACT
    with pytest.raises(ValueError, match="recipient_rank=7: give a rank of"):
        model.gather_full_optim_state_dict(optimizer, recipient_rank=7)
    with pytest.raises(ValueError, match="SGD is not an optimizer of this model"):
        model.gather_full_optim_state_dict(torch.optim.SGD(Net().parameters()))
    with pytest.raises(ValueError, match="mixed_precision=True of the wrapped Linear, and False of the wrapper around"):
        FSDP(nn.Sequential(FSDP(nn.Linear(2, 2), mixed_precision=True)))
    with pytest.raises(ValueError, match="requires mixed_precision=True"):
        FSDP(nn.Linear(2, 2), fp32_reduce_scatter=True)
    model.close()


def sharded_ddp() -> None:
    """OSS with ShardedDataParallel: gradients, states and buffers; one and two optimizers."""
    expected, oracle, norm = plain(3, clip=0.05)
    model = Net()
    optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-3)
    with pytest.raises(RuntimeError, match=r"OSS\(AdamW\) is not sharded yet"):
        optimizer.step()
    model = ShardedDataParallel(model, optimizer)
    found = train(model, optimizer, 3, clip=0.05)
    assert abs(float(found) - float(norm)) <= 1e-6
    same(model.state_dict(), expected)
    with pytest.raises(NotImplementedError, match=r"step\(clip=0.1\) of OSS\(AdamW\).*in param_groups"):
        optimizer.step(clip=0.1)
    with pytest.raises(RuntimeError, match="was not consolidated on this rank"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(recipient_rank=0)
    if dist.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        for index, entries in oracle.state_dict()["state"].items():
            assert float((state[index]["exp_avg_sq"] - entries["exp_avg_sq"]).abs().max()) <= EXACT
    again = Net()
    more = OSS(again.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-3)
    again = ShardedDataParallel(again, [more])
    more.load_state_dict(optimizer.state_dict(all_ranks=True))
    again.load_state_dict(model.state_dict())
    more.param_groups[0]["lr"] = oracle.param_groups[0]["lr"] = 0.05
    train(again, more, 1, start=3)
    same(again.state_dict(), plain(1, start=3, model=expected, optimizer=oracle)[0])
    model.close()
    again.close()
    # Rank 0's buffers are everybody's where passes train.
    norms = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    wrapped = ShardedDataParallel(norms, OSS(norms.parameters(), lr=0.1))
    with torch.no_grad():
        norms[1].running_mean.fill_(float(dist.get_rank()))
    wrapped.eval()(torch.zeros(2, 6))
    assert float(norms[1].running_mean[0]) == dist.get_rank()
    norms[1].momentum = 0.0
    wrapped.train()(torch.zeros(2, 6))
    assert float(norms[1].running_mean[0]) == 0.0
    norms[0].bias.requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"requires_grad of 0.bias changed"):
        wrapped.refresh_trainable()
    norms[0].bias.requires_grad_(True)
    wrapped.close()
    with pytest.raises(TypeError, match="give an OSS"):
        ShardedDataParallel(Net(), adam(Net().parameters()))  # type: ignore[arg-type]


def scaled() -> None:
    """fp16 under ShardedGradScaler: overflows are skipped by every rank, and steps are those of fp32 within fp16."""
    model = FSDP(Net(dtype=torch.float32), mixed_precision=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(init_scale=2.0**30, growth_interval=2)
    expected = Net(dtype=torch.float32)
    oracle = torch.optim.SGD(expected.parameters(), lr=0.1)
    taken, skipped, ranks = 0, 0, dist.get_world_size()
    while taken < 3:
        optimizer.zero_grad()
        loss = error(model, batch(dist.get_rank(), taken, torch.float32))
        assert model.head(torch.ones(1, 6).half()).dtype is torch.float16
        before = model.state_dict()["head.weight"].clone()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < scale:
            assert torch.equal(before, model.state_dict()["head.weight"])
            skipped += 1
            continue
        oracle.zero_grad()
        for rank in range(ranks):
            (error(expected, batch(rank, taken, torch.float32)) / ranks).backward()
        other = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        assert abs(float(norm) - float(other)) < 1e-2 * float(other)
        oracle.step()
        taken += 1
    assert skipped > 3
    assert model.state_dict()["head.weight"].dtype is torch.float32
    same(model.state_dict(), expected, 3e-3)
    again = ShardedGradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == scaler.get_scale() and again.state_dict() == scaler.state_dict()
    with pytest.raises(ValueError, match="SGD belongs to no sharded model"):
        again.step(torch.optim.SGD(Net().parameters(), lr=0.1))
    model.close()


def recomputed() -> None:
    """``checkpoint_wrapper``: the same gradients, dropout and running statistics, with and without a host copy."""
    for offload in (False, True):
        results = []
        for wrapped in (False, True):
            torch.manual_seed(5)
            inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh()).double()
            calls: list[int] = []
            inner[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
            model = FSDP(
                nn.Sequential(checkpoint_wrapper(inner, offload) if wrapped else inner, nn.Linear(6, 3).double())
            )
            optimizer = adam(model.parameters())
            torch.manual_seed(6)
            for step in range(2):
                optimizer.zero_grad()
                error(model, batch(dist.get_rank(), step)).backward()
                optimizer.step()
            assert len(calls) == (4 if wrapped else 2)
            results.append(model.state_dict())
            model.close()
        assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


ON_HOST, UNFLATTENED = {"move_params_to_cpu": True}, {"flatten_parameters": False, "reshard_after_forward": False}


@pytest.mark.parametrize(
    ("ranks", "options", "ways"),
    [
        (2, {}, [1]),
        *full((2, {}, [0, 2]), (2, ON_HOST, [0]), (2, UNFLATTENED, [0])),
        *full((1, {}, [0, 1, 2]), (1, ON_HOST, [0]), (1, UNFLATTENED, [0])),
    ],
    ids=str,
)
def test_wrapped_models_equal_plain_pytorch(ranks: int, options: dict[str, Any], ways: list[int]) -> None:
    """Weights, states and norms within 1e-11 of one process, wrapped in each way that there is."""
    run_ranks(ranks, fully_sharded, options, ways)


@pytest.mark.parametrize(
    ("ranks", "run"),
    [
        *((2, what_else), (2, sharded_ddp), (2, scaled), (1, recomputed)),
        *full((1, what_else), (1, sharded_ddp), (1, scaled), (2, recomputed)),
    ],
)
def test_programs_equal_plain_pytorch(ranks: int, run: Callable[[], None]) -> None:
    run_ranks(ranks, run)


def test_masters_are_loaded_before_there_is_an_optimizer() -> None:
    run_ranks(2, loaded_before_the_optimizer)


def test_a_rank_keeps_its_own_buffers() -> None:
    run_ranks(2, own_buffers)


def test_wrappers_inside_gather_their_own() -> None:
    run_ranks(2, summoned)
