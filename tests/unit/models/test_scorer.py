from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueline.config.model import ModelConfig
from trueline.models.loading import load_model
from trueline.models.scorer import Scorer, hf_name

TOKENS = torch.tensor([[5, 80, 33, 7, 120, 64], [9, 41, 200, 17, 3, 250]])
MASK = torch.tensor([[False, False, True, True, False, True], [False, True, True, True, True, True]])


def make_scorer(folder: Path, chunk: int = 4) -> Scorer:
    return Scorer(load_model(ModelConfig(path=str(folder)), torch.float32), chunk)


def plain(folder: Path, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of token t from the logits of token t - 1; the first token has none."""
    logits = load_model(ModelConfig(path=str(folder)), torch.float32)(input_ids=tokens).logits[:, :-1] / temperature
    scores = logits.log_softmax(-1)
    logprobs = scores.gather(-1, tokens[:, 1:, None])[..., 0]
    entropy = -(scores.exp() * scores).sum(-1)
    first = torch.zeros(len(tokens), 1)
    return torch.cat([first, logprobs], 1), torch.cat([first, entropy], 1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_log_probs_and_entropy_are_those_of_the_plain_model(model_folder: Path, temperature: float, chunk: int) -> None:
    logprobs, entropy = make_scorer(model_folder, chunk)(TOKENS, MASK, temperature)
    expected_logprobs, expected_entropy = plain(model_folder, TOKENS, temperature)
    torch.testing.assert_close(logprobs, expected_logprobs * MASK, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy * MASK, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_plain_model(model_folder: Path) -> None:
    scorer = make_scorer(model_folder)
    model = load_model(ModelConfig(path=str(model_folder)), torch.float32)
    (scorer(TOKENS, MASK)[0] * torch.linspace(1, 2, 6)).sum().backward()
    scores = model(input_ids=TOKENS).logits[:, :-1].log_softmax(-1).gather(-1, TOKENS[:, 1:, None])[..., 0]
    (scores * MASK[:, 1:] * torch.linspace(1, 2, 6)[1:]).sum().backward()
    ours = {hf_name(name): parameter.grad for name, parameter in scorer.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pad", [0, 2, 99])
def test_padding_does_not_change_a_row(model_folder: Path, pad: int) -> None:
    scorer = make_scorer(model_folder)
    padded = torch.cat([TOKENS, torch.full((2, 5), pad)], 1)
    mask = torch.cat([MASK, torch.zeros(2, 5, dtype=torch.bool)], 1)
    alone, wide = scorer(TOKENS, MASK)[0], scorer(padded, mask)[0]
    torch.testing.assert_close(wide[:, :6], alone, rtol=1e-5, atol=1e-5)
    assert (wide[:, 6:] == 0).all()


def test_a_sampled_pad_token_counts_like_any_other(model_folder: Path) -> None:
    tokens = TOKENS.clone()
    tokens[0, 3] = 0  # the id of <pad>
    logprobs, _ = make_scorer(model_folder)(tokens, MASK)
    torch.testing.assert_close(logprobs, plain(model_folder, tokens, 1.0)[0] * MASK, rtol=1e-5, atol=1e-5)


def test_a_row_without_masked_tokens_is_zero_and_can_be_differentiated(model_folder: Path) -> None:
    scorer = make_scorer(model_folder)
    logprobs, _ = scorer(torch.tensor([[5]]), torch.tensor([[False]]))
    assert logprobs.tolist() == [[0.0]]
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in scorer.parameters() if parameter.grad is not None]
    assert gradients
    assert all((gradient == 0).all() for gradient in gradients)


def test_the_first_token_has_no_log_prob(model_folder: Path) -> None:
    logprobs, entropy = make_scorer(model_folder)(TOKENS, torch.ones_like(MASK))
    assert logprobs[:, 0].tolist() == entropy[:, 0].tolist() == [0.0, 0.0]
    assert (logprobs[:, 1:] < 0).all()
