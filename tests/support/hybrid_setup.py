"""Small Hugging Face models, plain training on the batches of all data-parallel ranks, and a Booster policy for
each."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shardwise.shardformer import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardwise.shardformer import layer as col_nn

VOCABULARY, WIDTH, INNER, LENGTH, STEPS, LR, MAX_NORM = 37, 24, 22, 7, 3, 0.02, 0.5


def made(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return a model whose biases and norms differ from their initial values, so that a wrong split of one is
    noticed."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "vocab_size": VOCABULARY}
    if kind == "llama":
        sizes |= {"num_key_value_heads": 2, "attention_bias": True, "use_cache": False, **changes}
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "gpt2":
        own = {"n_embd": WIDTH, "n_layer": 2, "n_head": 6, "n_inner": INNER, "n_positions": 16, "use_cache": False}
        own |= {"vocab_size": VOCABULARY, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **changes}
        model = GPT2LMHeadModel(GPT2Config(**own))
    else:
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **changes}
        model = BertForMaskedLM(BertConfig(**sizes))
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model.to(dtype).train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # a gradient that is zero except for rounding gives a small step
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=LR)


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences with padding at the end, which is masked and has no labels."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (count,), generator=generator)
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        self.items = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def __len__(self) -> int:
        return len(self.items["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.items.items()}


def loss_of(model: Any, inputs: dict[str, Tensor], of_parts: bool) -> Tensor:
    """Return transformers' own loss.

    With ``of_parts`` the loss has no cast of logits to fp32, since a split loss makes none in fp64.
    """
    out = model(**inputs)
    if not of_parts:
        return out.loss
    return functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def plain(
    kind: str, replicas: int, batch: int, of_parts: bool, full: bool = False, **changes: Any
) -> Iterator[tuple[float, float, dict[str, Tensor]]]:
    """Return, by step, the mean of the data-parallel ranks' losses, the norm before clipping, and the parameters.

    With ``full``, padding has labels, too.
    """
    model, texts = made(kind, **changes), Texts(STEPS * replicas * batch)
    if full:
        texts.items["labels"] = texts.items["input_ids"]
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank in range(replicas):  # a DistributedSampler deals rows to the ranks in turn
            rows = [(step * batch + row) * replicas + rank for row in range(batch)]
            inputs = {name: torch.stack([texts[row][name] for row in rows]) for name in texts.items}
            losses.append(loss_of(model, inputs, of_parts) / replicas)
            losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        yield sum(loss.item() for loss in losses), norm.item(), values


Steps = list[tuple[float, float, dict[str, Tensor]]]


@functools.cache
def plain_steps(kind: str, replicas: int, batch: int, of_parts: bool, full: bool = False, **changes: Any) -> Steps:
    """Return :func:`plain`, computed once per process.

    A test calls it and passes the result to its ranks, since each of them would take longer for it than for its own
    part.
    """
    return list(plain(kind, replicas, batch, of_parts, full, **changes))


class LlamaPolicy(Policy):
    """A policy as a user writes it, for a model that has a built-in policy as well."""

    def config_sanity_check(self) -> None:
        pass

    def preprocess(self) -> nn.Module:
        return self.model

    postprocess = preprocess

    def module_policy(self) -> dict[str | type[nn.Module], ModulePolicyDescription]:
        columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
        rows = ["self_attn.o_proj", "mlp.down_proj"]
        layers = [SubModuleReplacementDescription(name, col_nn.Linear1D_Col) for name in columns]
        layers += [SubModuleReplacementDescription(name, col_nn.Linear1D_Row) for name in rows]
        multiple = {"make_vocab_size_divisible_by": self.shard_config.make_vocab_size_divisible_by}
        head = {"gather_output": not self.shard_config.parallel_output, **multiple}
        policy: dict[str | type[nn.Module], ModulePolicyDescription] = {
            "LlamaDecoderLayer": ModulePolicyDescription(sub_module_replacement=layers)
        }
        for key, name, kind, kwargs in (
            ("LlamaModel", "embed_tokens", col_nn.VocabParallelEmbedding1D, multiple),
            ("LlamaForCausalLM", "lm_head", col_nn.VocabParallelLMHead1D, head),
        ):
            description = SubModuleReplacementDescription(name, kind, kwargs)
            self.append_or_create_submodule_replacement(description, policy, key)
        return policy


class GPT2Policy(LlamaPolicy):
    """The same for fused projections, whose sizes the module has in attributes; the vocabulary is not split."""

    def module_policy(self) -> dict[str | type[nn.Module], ModulePolicyDescription]:
        width = self.model.config.hidden_size  # type: ignore[union-attr]
        ranks = self.shard_config.tensor_parallel_size
        sizes = {"attn.split_size": width // ranks, "attn.num_heads": 6 // ranks}
        fused = {"split_sizes": [width] * 3, "seq_parallel_mode": None}
        layers = [
            SubModuleReplacementDescription("attn.c_attn", col_nn.GPT2FusedLinearConv1D_Col, fused),
            SubModuleReplacementDescription("attn.c_proj", col_nn.GPT2FusedLinearConv1D_Row),
            SubModuleReplacementDescription("mlp.c_fc", col_nn.GPT2FusedLinearConv1D_Col, {"split_sizes": [INNER]}),
            SubModuleReplacementDescription("mlp.c_proj", col_nn.GPT2FusedLinearConv1D_Row),
            SubModuleReplacementDescription("attn.resid_dropout", col_nn.DropoutForReplicatedInput),
        ]
        return {"GPT2Block": ModulePolicyDescription(attribute_replacement=sizes, sub_module_replacement=layers)}


POLICIES: dict[str, type[Policy]] = {"llama": LlamaPolicy, "gpt2": GPT2Policy}
