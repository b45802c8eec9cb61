"""Where the layers of each architecture are, and what comes before them: by class name, without importing one."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["TABLES", "Body", "known_bodies", "register_body"]


@dataclass(frozen=True)
class Body:
    """The module whose forward pass runs the layers, one behind the other, and what else it has.

    What is named neither here nor on the way to the layers comes after them, as does all of the model that is outside
    of the body: it belongs to the last stage, and is an error where it is called before the layers.

    Attributes:
        layers: its list of layers.
        tokens: what it calls first, with the inputs: there later stages take what the stage before has sent.
        zeros: what it adds to that (positions): nothing in later stages.
        before: what it puts that through (dropout, a norm): later stages leave it as it came.
        everywhere: what every stage calls (rotary embeddings; outside of the body what is done to inputs, by its name
            in the model); it may hold no trainable parameters.
        tuples: a layer returns a tuple whose first is the hidden state.
    """

    layers: str = "layers"
    tokens: str = "embed_tokens"
    zeros: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    tuples: bool = False


_ROTARY = Body(everywhere=("rotary_emb", "rotary_emb_local"))
_LLAMA_LIKE = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Gemma2", "Cohere")

TABLES: dict[str, Body] = {f"{name}Model": _ROTARY for name in _LLAMA_LIKE} | {
    "DeepseekV2Model": _ROTARY,
    "DeepseekV3Model": _ROTARY,
    "Gemma3TextModel": _ROTARY,
    "BertModel": Body(layers="encoder.layer", tokens="embeddings"),
    "BloomModel": Body(layers="h", tokens="word_embeddings", before=("word_embeddings_layernorm",), tuples=True),
    "FalconModel": Body(layers="h", tokens="word_embeddings", everywhere=("rotary_emb",), tuples=True),
    "GPT2Model": Body(layers="h", tokens="wte", zeros=("wpe",), before=("drop",)),
    "GPTJModel": Body(layers="h", tokens="wte", before=("drop",), tuples=True),
    "GPTNeoXModel": replace(_ROTARY, tokens="embed_in", before=("emb_dropout",)),
    "OPTDecoder": Body(zeros=("embed_positions",), before=("project_in",)),
}
"""By the name of the body's class."""


def known_bodies() -> tuple[str, ...]:
    """Names of the classes, in alphabetical order."""
    return tuple(sorted(TABLES))


def register_body(class_name: str, body: Body) -> None:
    """From here on models with a module of that class can be divided into stages. On every rank."""
    TABLES[class_name] = body
