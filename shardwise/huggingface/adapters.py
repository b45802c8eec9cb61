"""peft's own loading of an adapter into a model that is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from shardwise.session import Session

__all__ = ["asks_prompts", "loads_adapters"]


def _is_peft(model: nn.Module) -> bool:
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def _has_prompts(model: Any) -> bool:
    return _is_peft(model) and any(config.is_prompt_learning for config in model.peft_config.values())


def asks_prompts(session: Session) -> AbstractContextManager[None]:
    """Around peft's saving, which asks modules of prompts for their values, whatever state it is given."""
    model: Any = session.model
    return session.gathered(model.prompt_encoder.parameters()) if _has_prompts(model) else nullcontext()


# [Note: Adapters into shards]
# peft asks its model for the names of a state, puts an adapter's tensors under them, and has the model load what came
# of it. Both are answered by the sharded model meanwhile: nothing is gathered, whatever the base model needs, and fp32
# masters get the file's own values. Two things are otherwise. Prompts are loaded into their own module, which is given
# them whole. And peft would make 16-bit adapters fp32 afterwards, of which the plan decides here.
@contextmanager
def loads_adapters(session: Session) -> Iterator[nn.Module]:
    """Inside, ``load_adapter`` of the session's model loads into shards and masters. Every rank enters.

    Gives the module that loads: of peft's models the own one; for others nothing changes.
    """
    model: Any = session.model
    if not _is_peft(model):
        yield session.module
        return
    answers: dict[str, Any] = {"load_adapter": partial(model.load_adapter, autocast_adapter_dtype=False)}
    if _has_prompts(model):
        with session.module.gathered(write_back=True), _answered(model, answers):
            yield model
        return
    outline, own = session.module.state_layout(), model.state_dict

    def state_dict(**how: Any) -> dict[str, Any]:
        # With arguments it is the sharded model itself that asks.
        found: dict[str, Any] = own(**how) if how else dict(outline)
        return found

    answers |= {"state_dict": state_dict, "load_state_dict": session.module.load_state_dict}
    with _answered(model, answers):
        yield model


@contextmanager
def _answered(model: nn.Module, answers: dict[str, Any]) -> Iterator[None]:
    """The methods of ``model`` are these."""
    before = {name: model.__dict__[name] for name in answers if name in model.__dict__}
    model.__dict__.update(answers)
    try:
        yield
    finally:
        for name in answers:
            del model.__dict__[name]
        model.__dict__.update(before)
