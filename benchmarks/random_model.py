"""Qwen2 shapes with random weights, for benchmarks that need a model's size and not its knowledge."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from trueline.demo.material import make_tokenizer

SHAPES = {
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256},
}


def make_model(folder: Path, shape: str, kind: type[PreTrainedModel] = Qwen2ForCausalLM) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=1024 if shape == "tiny" else 151936,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **({} if kind is Qwen2ForCausalLM else {"num_labels": 1}),
    )
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
