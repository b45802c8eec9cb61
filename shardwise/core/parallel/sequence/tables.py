"""Where the sequences of each architecture begin and end: by class name, without importing one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["TABLES", "SequenceBody", "known_sequences", "register_sequence"]


@dataclass(frozen=True)
class SequenceBody:
    """The module in whose forward pass each rank has a part of the sequences: it takes ``input_ids`` or
    ``inputs_embeds`` and ``attention_mask``, asks transformers for masks and attention, and gives
    ``last_hidden_state``.

    Attributes:
        end: the submodule behind which ranks have whole sequences again; ``""``: the body itself.
        positions: where a model that is given no ``position_ids`` takes them from: ``"count"`` (0, 1, 2, ...),
            ``"mask"`` (of what is no padding), or ``"none"``: it takes none.
        packed: positions that begin again are another sequence, which the first does not see.
    """

    end: str = ""
    positions: Literal["count", "mask", "none"] = "count"
    packed: bool = True


_LIKE_LLAMA = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Gemma2", "Cohere", "GPTNeoX")
_LATENT = ("DeepseekV2", "DeepseekV3")

TABLES: dict[str, SequenceBody] = {f"{name}Model": SequenceBody() for name in _LIKE_LLAMA + _LATENT} | {
    "BertModel": SequenceBody(end="encoder", packed=False),
    "BloomModel": SequenceBody(positions="none", packed=False),
    "FalconModel": SequenceBody(packed=False),
    "GPT2Model": SequenceBody(),
    "GPTJModel": SequenceBody(),
    "Gemma3TextModel": SequenceBody(),
    "OPTDecoder": SequenceBody(positions="mask", packed=False),
}
"""By the name of the body's class."""


def known_sequences() -> tuple[str, ...]:
    """Names of the classes, in alphabetical order."""
    return tuple(sorted(TABLES))


def register_sequence(class_name: str, body: SequenceBody) -> None:
    """From here on ranks can share the sequences of models with a module of that class. On every rank."""
    TABLES[class_name] = body
