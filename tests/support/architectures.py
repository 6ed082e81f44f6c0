"""Tiny random models of every architecture, and the families of models that have it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trueline.demo.material import make_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM runs on a CPU
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # far from uniform, so that mistakes show
    "tie_word_embeddings": False,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, **MIXTURE}
PADDED = ("training.packing=false",)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Architecture:
    families: tuple[str, ...]  # rows of docs/models.md
    settings: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # keys that its runs need


ARCHITECTURES = {
    "llama": Architecture(("Llama 3.1", "Llama 3.2", "DeepSeek-R1 distill", "SmolLM2"), {"tie_word_embeddings": True}),
    "qwen2": Architecture(("Qwen2.5",)),
    "qwen3": Architecture(("Qwen3", "Qwen3-Instruct-2507")),
    "qwen3_5_text": Architecture(
        ("Qwen3.5", "Qwen3.6"),
        {
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        PADDED,
    ),
    "mistral": Architecture(("Mistral v0.3", "Mistral Small"), {"sliding_window": None}),
    "gemma2": Architecture(("Gemma 2",), {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3_text": Architecture(("Gemma 3",), {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma4_text": Architecture(
        ("Gemma 4",),
        {
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Architecture(("Phi-3", "Phi-3.5")),
    "deepseek_v3": Architecture(
        ("DeepSeek-V3",),
        {
            **SHARED,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,  # vLLM knows few sizes
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 64,
            "num_key_value_heads": 2,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe": Architecture(("GLM-4.5",), {**SHARED, "n_group": 1, "topk_group": 1}),
    "gpt_oss": Architecture(
        ("gpt-oss",),
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rope_parameters": YARN},
        PADDED,
    ),
    "smollm3": Architecture(("SmolLM3",)),
    "olmo2": Architecture(("OLMo 2",)),
    "lfm2": Architecture(
        ("LFM2",),
        {
            "full_attn_idxs": [1],
            "conv_L_cache": 3,
            "conv_dim": 64,
            "block_dim": 64,
            "block_ff_dim": 96,
            "tie_word_embeddings": True,  # vLLM knows no other
        },
        PADDED,
    ),
    "mixtral": Architecture(("Mixtral",), {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": Architecture(("Qwen3-MoE", "Qwen3-Coder"), {"num_experts": 4, "norm_topk_prob": True, **MIXTURE}),
}


def make_model(folder: Path, kind: str, **changed: Any) -> Path:
    """A random model with the demo's byte tokenizer; biases too, also those of routers, which stay as they are."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    sizes = SIZES | ARCHITECTURES[kind].settings | special | {"pad_token_id": tokenizer.pad_token_id} | changed
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=len(tokenizer), **sizes))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(0.1 * torch.randn_like(buffer))
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
