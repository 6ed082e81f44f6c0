"""Shapes of published models, for plans without the model itself."""

from typing import Any

from trueline.config.base import ConfigError

PAPER = "shape:"  # prefix of model.path: a name of this table, or a model of which only config.json is read

ATTENTION_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
KEYS = (*ATTENTION_KEYS, "intermediate_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings")

# From published files config.json: SmolLM2, Llama 3.1 (8b, 70b, 405b) and 3.2 (1b, 3b), Qwen 2.5 (Instruct) and 3.
SHAPES = {
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True, 8192),
    "llama-1b": (2048, 16, 32, 8, 64, 8192, 128256, True, 131072),
    "llama-3b": (3072, 28, 24, 8, 128, 8192, 128256, True, 131072),
    "llama-8b": (4096, 32, 32, 8, 128, 14336, 128256, False, 131072),
    "llama-70b": (8192, 80, 64, 8, 128, 28672, 128256, False, 131072),
    "llama-405b": (16384, 126, 128, 8, 128, 53248, 128256, False, 131072),
    "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 128, 8960, 151936, True, 32768),
    "qwen2.5-3b": (2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    "qwen2.5-7b": (3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
    "qwen2.5-14b": (5120, 48, 40, 8, 128, 13824, 152064, False, 32768),
    "qwen2.5-32b": (5120, 64, 40, 8, 128, 27648, 152064, False, 32768),
    "qwen2.5-72b": (8192, 80, 64, 8, 128, 29568, 152064, False, 32768),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
    "qwen3-32b": (5120, 64, 64, 8, 128, 25600, 151936, False, 40960),
}


KINDS = {"smollm2": "llama", "llama": "llama", "qwen2.5": "qwen2", "qwen3": "qwen3"}  # model_type by family


def shape_settings(name: str) -> dict[str, Any]:
    """Return a shape of the table as keys of config.json."""
    if name not in SHAPES:
        raise ConfigError(f"--model-shape {name} is unknown: choose from {', '.join(SHAPES)}, or use --model FOLDER")
    return dict(zip(KEYS, SHAPES[name], strict=True)) | {"model_type": KINDS[name.partition("-")[0]]}
