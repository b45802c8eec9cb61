"""Small versions of transformers' architectures: a model, batches and a loss of each model type that can be built
offline.

A configuration has its defaults except for sizes, which are recognized by their names, and randomness, which is off.
Not every type can be built in this way (some need other packages, fixed sizes or inputs of their own): ``case_of``
raises for those, and :data:`TYPES` has the others (if their plain training has no NaN, as Swiftformer's has at this
size).
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import ModelCase

WIDTH, HEADS, VOCABULARY, LENGTH, IMAGE, PATCH, ROWS = 32, 4, 41, 6, 32, 8, 2
LARGEST = 2_000_000
"""Maximum number of parameters; a larger model has a size whose name is not known."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "width", "embedding_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "d_embed", "projection_dim", "hidden_dim", "conv_dim_", "emb_dim"), WIDTH),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "text_hidden_size", "out_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "mlp_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "inner_dim", "num_neurons", "intermediate_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers", "layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads", "num_mem_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "v_head_dim", "qk_nope_head_dim", "d_head"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "kv_channels", "global_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions"), 64),
    **dict.fromkeys(("max_target_positions", "max_sequence_length", "seq_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("image_size",), IMAGE),
    **dict.fromkeys(("patch_size",), PATCH),
    **dict.fromkeys(("state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("num_mel_bins", "feature_size"), 16),
    **dict.fromkeys(("num_conv_pos_embeddings", "num_conv_pos_embedding_groups", "codevector_dim"), 16),
    "num_labels": 3,
    "hidden_size_per_layer_input": 8,
    "time_step_rank": 4,
    "first_k_dense_replace": 1,
    "sliding_window": 4,
    "attention_window": 4,
}
LISTS = {
    **dict.fromkeys(("hidden_sizes", "conv_dim", "embed_dims", "dims", "out_channels", "neck_hidden_sizes"), 16),
    **dict.fromkeys(("depths", "layer_depths", "num_layers", "num_conv_layers", "blocks"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("tdnn_dim", "encoder_hidden_sizes", "fusion_hidden_sizes", "feature_maps"), 16),
}
"""The same for configurations with a size per stage."""
RANDOM = ("drop", "noise", "jitter", "mask_time_prob", "mask_feature_prob", "layerdrop")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id")
AUTO = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "IMAGE_TEXT_TO_TEXT",
)
"""Auto classes of tasks that are tried first, in this order; otherwise the base model is used."""

_NAMES = """
    afmoe aimv2 aimv2_vision_model albert altclip apertus arcee aria_text bamba bart beam beit bert bert-generation
    big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small blip bloom camembert chinese_clip
    chinese_clip_vision_model clip clip_text_model clip_vision_model clipseg cohere cohere2 cohere2_moe convbert
    convnext convnextv2 cosmos3_edge_text ctrl cwm data2vec-audio data2vec-text data2vec-vision deberta deberta-v2
    deepseek_v4 deit diffllama dinov2 dinov2_with_registers dinov3_convnext distilbert doge dpr electra
    embedding_gemma2_text ernie ernie4_5 ernie4_5_moe eurobert evolla exaone4 exaone_moe falcon falcon_mamba
    flaubert flava flex_olmo flint fnet focalnet gemma gemma2 gemma3_text gemma4_text gemma4_unified_text git glm
    glm4 glm4_moe glmasr_encoder glpn gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss
    gradium_phonon_tts granite granite_docling_text granite_docling_vision granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared gte helium higgs_audio_v2 hrm_text hubert hy_v3 hyperclovax ibert
    idefics3_vision ijepa imagegpt inkling_text internlm3 internvl_vision iquestcoder jais2 jamba jetmoe
    jina_embeddings_v3 kolibri1 kosmos-2.5 laguna layoutlm led lfm2 lfm3 llama llama4_text longformer longt5 m2m_100
    mamba marian maskformer-swin mbart megatron-bert mellum metaclip_2 mimo_v2_flash minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral mlcd mlcd_vision_model mllama
    mobilebert mobilevit modernbert modernbert-decoder molmo2_text moonshine moshi moss_transcribe_diarize_audio
    mpnet mpt mt5 muse_glimmer_text mvp nanochat nemotron_h nllb-moe nomic_bert nystromformer olmo olmo2 olmo3
    olmo_hybrid olmoe openai-gpt openai_privacy_filter opt owlv2 owlvit pegasus pegasus_x persimmon phi phi3 phimoe
    pixio pixtral plbart pocket_tts poolformer prophetnet pvt pvt_v2 qianfan_ocr_vision qwen2 qwen2_audio_encoder
    qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text regnet
    rembert resnet roberta roberta-prelayernorm roformer rwkv sam3_lite_text_text_model sam3_vit_model
    sam_hq_vision_model sam_vision_model seamless_m4t seamless_m4t_v2 seed_oss segformer sew sew-d siglip
    siglip_vision_model smollm3 smolvlm_vision solar_open speecht5 splinter squeezebert stablelm starcoder2
    swin2sr swinv2 switch_transformers t5 tapas tipsv2 tipsv2_text_model tipsv2_vision_model ultrabert
    umt5 unispeech unispeech-sat vaultgemma visual_bert vit vit_msn vitdet voxtral_encoder voxtral_realtime_encoder
    wav2vec2 wav2vec2-conformer wavlm whisper xlm xlm-roberta xlm-roberta-xl xlnet yolos yoso zaya
"""
TYPES = tuple(_NAMES.split())
"""Types that can be built small in this way, with transformers 5.23."""


def _shrink(config: Any) -> None:
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value)
        elif name in TOKENS and isinstance(value, int):
            setattr(config, name, 1 + TOKENS.index(name))
        elif isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(config, name, 0.0)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, SIZES[name]))
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            setattr(config, name, (list(dict.fromkeys(value)) * 2)[:2])
        elif name in LISTS and isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
            setattr(config, name, type(value)(LISTS[name] for _ in value))


def _config(kind: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    _shrink(config)
    config.use_cache = False
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the other ones have no fp64
    return config


def _class_of(kind: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in AUTO]
    names = next(each[kind] for each in (*mappings, modeling_auto.MODEL_MAPPING_NAMES) if kind in each)
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _make(kind: str) -> nn.Module:
    """Build it with random weights and nothing random in forward."""
    with warnings.catch_warnings(action="ignore"):
        kind_class, config = _class_of(kind), _config(kind)
        with torch.device("meta"):
            count = sum(p.numel() for p in kind_class(config).parameters())
        if count > LARGEST:
            raise ValueError(f"{kind} has {count} parameters with the sizes that are known, more than {LARGEST}")
        model: nn.Module = kind_class(_config(kind))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.train = lambda mode=True, self=module: self  # type: ignore[method-assign,assignment]
    return model


def _inputs(kind: str, wanted: tuple[str, ...], generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def tokens() -> Tensor:
        return torch.randint(8, VOCABULARY, (ROWS, LENGTH), generator=generator)

    makers: dict[str, Callable[[], Tensor]] = {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "pixel_values": lambda: floats(ROWS, 3, IMAGE, IMAGE),
        "input_values": lambda: floats(ROWS, 1600),
        "input_features": lambda: floats(ROWS, 16, 128),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


def _outputs(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.requires_grad and value.numel():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _outputs(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _outputs(item)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the mean of a function of every floating output, whose gradient varies along the last dimension."""
    out = model(**batch)
    found = list(_outputs(dict(out) if hasattr(out, "keys") else out))
    phases = [torch.arange(value.shape[-1] if value.dim() else 1) for value in found]
    waves = [torch.sin(value.double() + phase).mean() for value, phase in zip(found, phases, strict=True)]
    return torch.stack(waves).sum()


@functools.cache
def case_of(kind: str) -> ModelCase:
    """Return the case of a model type."""
    wanted = tuple(inspect.signature(_class_of(kind).forward).parameters)

    def build(dtype: torch.dtype) -> nn.Module:
        model = _make(kind).to(dtype)
        for module in model.modules():
            if "dtype" in vars(module):  # a router that casts itself to that dtype in its forward pass
                module.dtype = dtype
        return model

    def inputs(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        return _inputs(kind, wanted, generator, dtype)

    return ModelCase(kind, build, inputs, loss_of, f"{kind} of transformers")
