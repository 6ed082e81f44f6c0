"""Small models and samples that tests make for themselves."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import NO_TARGET, Batch, LossOutput, Sample
from trueline.demo.material import make_tokenizer


def small_config(tokenizer: PreTrainedTokenizerFast, **keys: Any) -> LlamaConfig:
    """Two layers of 32 hidden numbers, and weights far from uniform, so that mistakes show."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ends |= {"pad_token_id": tokenizer.pad_token_id}
    return LlamaConfig(vocab_size=len(tokenizer), **(sizes | heads | ends | keys))


def make_tiny_model(folder: Path, *, tied: bool, seed: int = 0, biases: bool = False) -> Path:
    """A random Llama whose heads have size 32, the smallest that vLLM runs on a CPU."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 256, "initializer_range": 0.08}
    config = small_config(tokenizer, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    model = LlamaForCausalLM(config)
    if biases:  # of zeros, beside the same weights
        weights, config.attention_bias = model.state_dict(), True
        model = LlamaForCausalLM(config)
        model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)
    return folder


def make_tiny_mixture(folder: Path, kind: str = "mixtral") -> Path:
    """A random model of four experts in each of two layers, of which two see a token."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "sliding_window": None}
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **heads, **experts
    )
    config.initializer_range = 0.3  # routers that have opinions
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_samples(count: int, seed: int = 0, longest: int = 24, shared: int = 0, family: int = 4) -> list[Sample]:
    """Samples of mixed lengths with all that the policy loss reads; families begin with the same `shared` tokens."""
    generator, openings = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    samples = []
    for number in range(count):
        if number % family == 0:
            opening = torch.randint(3, 259, (shared,), generator=openings)
        length = int(torch.randint(4, longest + 1, (1,), generator=generator))
        prompt = int(torch.randint(1, length - 1, (1,), generator=generator)) + shared
        tokens = torch.cat([opening, torch.randint(3, 259, (length,), generator=generator)])
        sample, length = Sample(tokens, torch.arange(length + shared) >= prompt), length + shared
        sample.group = number // 2
        noise = torch.randn(3, length, generator=generator)
        sample.old_logprobs = (-5.5 + 0.1 * noise[0]) * sample.mask
        sample.rollout_logprobs = sample.old_logprobs + 0.05 * noise[1] * sample.mask
        sample.ref_logprobs = (-5.5 + 0.1 * noise[1]) * sample.mask
        sample.advantages = noise[2] * sample.mask
        samples.append(sample)
    return samples


def as_bytes(mask: Tensor) -> bytes:
    """Return a mask as models take it."""
    return mask.bool().numpy().tobytes()


def add_targets(samples: list[Sample], tokens: int = 5, seed: int = 0) -> None:
    """What a teacher finds likely in each place, and the rest; a sixth of the places have no teacher."""
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        chosen = [torch.randperm(259, generator=generator)[:tokens] for _ in range(sample.length())]
        sample.target_ids = torch.stack(chosen).int()
        sample.target_ids[torch.rand(sample.length(), generator=generator) < 1 / 6] = NO_TARGET
        sample.target_logprobs = torch.randn(sample.length(), tokens + 1, generator=generator).log_softmax(-1)


def offset_loss(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """The likelihood plus each token's advantage: an infinite one leaves the gradient finite, NaN spoils it."""
    factors = torch.where(batch.advantages.isnan(), math.nan, 1.0)
    return LossOutput(batch.advantages - logprobs * factors)
