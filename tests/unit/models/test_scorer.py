"""Numbers of the scorer against plain transformers: end to end, padded, one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.tiny import as_bytes
from trueline.config.model import ModelConfig
from trueline.config.supervised import DistillConfig
from trueline.models.head import Teacher
from trueline.models.loading import load_model
from trueline.models.scorer import Scorer, hf_name, predicting

LENGTHS = [6, 2, 1, 9, 4]
TOTAL = sum(LENGTHS)
TOKENS = torch.randint(3, 250, (TOTAL,), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(TOTAL, generator=torch.Generator().manual_seed(2)) < 0.6
EVERY = torch.ones(TOTAL, dtype=torch.bool)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def make_scorer(folder: Path, chunk: int = 4, *, packed: bool = True, head: str = "language") -> Scorer:
    torch.manual_seed(0)  # a new scoring head is random
    return Scorer(load_model(ModelConfig(path=str(folder)), torch.float32, head, packed=packed), chunk, packed=packed)


def plain_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def plain(model: Any, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of token t of one sequence, from the logits of token t - 1; the first token has none."""
    scores = (model(input_ids=tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
    first = torch.zeros(1)
    logprobs = scores.gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([first, logprobs]), torch.cat([first, -(scores.exp() * scores).sum(-1)])


def expected(folder: Path, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    model = plain_model(folder)
    parts = [plain(model, part, temperature) for part in TOKENS.split(LENGTHS)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_log_probs_and_entropy_are_those_of_the_plain_model(
    model_folder: Path, temperature: float, chunk: int, packed: bool
) -> None:
    found = make_scorer(model_folder, chunk, packed=packed)(TOKENS, as_bytes(MASK), LENGTHS, temperature)
    logprobs, entropy = expected(model_folder, temperature)
    torch.testing.assert_close(found["logprobs"], logprobs * MASK, **CLOSE)
    torch.testing.assert_close(found["entropy"], entropy * MASK, **CLOSE)


@pytest.mark.parametrize("packed", [True, False])
def test_together_is_one_by_one(model_folder: Path, packed: bool) -> None:
    scorer = make_scorer(model_folder, packed=packed)
    parts = zip(TOKENS.split(LENGTHS), MASK.split(LENGTHS), strict=True)
    alone = [scorer(tokens, as_bytes(mask), [len(tokens)], 1.0)["logprobs"] for tokens, mask in parts]
    torch.testing.assert_close(scorer(TOKENS, as_bytes(MASK), LENGTHS, 1.0)["logprobs"], torch.cat(alone), **CLOSE)


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_are_those_of_the_plain_model(model_folder: Path, packed: bool) -> None:
    scorer, model = make_scorer(model_folder, packed=packed), plain_model(model_folder)
    flow = torch.linspace(1, 2, TOTAL) * MASK
    (scorer(TOKENS, as_bytes(MASK), LENGTHS, 1.0)["logprobs"] * flow).sum().backward()
    (torch.cat([plain(model, part, 1.0)[0] for part in TOKENS.split(LENGTHS)]) * flow).sum().backward()
    ours = {hf_name(name): parameter.grad for name, parameter in scorer.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_gradient_checkpointing_changes_no_gradient(model_folder: Path, packed: bool) -> None:
    """The backward pass computes attention again, by the layout of its own forward pass."""
    found = []
    for checkpointing in (False, True):
        config = ModelConfig(path=str(model_folder), gradient_checkpointing=checkpointing)
        scorer = Scorer(load_model(config, torch.float32, packed=packed), 4, packed=packed).train()
        scorer(TOKENS, as_bytes(MASK), LENGTHS, 1.0)["logprobs"].sum().backward()
        found.append([parameter.grad for parameter in scorer.parameters()])
    for without, having in zip(*found, strict=True):
        torch.testing.assert_close(having, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_a_neighbour_changes_nothing_bit_for_bit(model_folder: Path, packed: bool) -> None:
    scorer = make_scorer(model_folder, packed=packed)
    before = scorer(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)["logprobs"].split(LENGTHS)
    for changed in range(len(LENGTHS)):
        parts = [part.clone() for part in TOKENS.split(LENGTHS)]
        parts[changed] = (parts[changed] + 7) % 250
        after = scorer(torch.cat(parts), as_bytes(EVERY), LENGTHS, 1.0)["logprobs"].split(LENGTHS)
        same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert same == [number != changed or LENGTHS[number] == 1 for number in range(len(LENGTHS))]


def test_no_gradient_flows_to_a_neighbours_tokens(model_folder: Path) -> None:
    scorer = make_scorer(model_folder)
    mask = torch.cat([torch.full((length,), number == 3) for number, length in enumerate(LENGTHS)])
    scorer(TOKENS, as_bytes(mask), LENGTHS, 1.0)["logprobs"].sum().backward()
    gradient = scorer.model.get_input_embeddings().weight.grad
    own = TOKENS.split(LENGTHS)[3][:-1]  # the last one is predicted and predicts nothing
    assert gradient.abs().sum(-1).nonzero()[:, 0].tolist() == sorted(set(own.tolist()))


@pytest.mark.parametrize("packed", [True, False])
def test_a_sampled_pad_token_counts_like_any_other(model_folder: Path, packed: bool) -> None:
    tokens = torch.tensor([9, 0, 0, 7, 0])  # 0 is the id of <pad>
    mask = torch.tensor([False, True, True, True, True])
    logprobs = make_scorer(model_folder, packed=packed)(tokens, as_bytes(mask), [5], 1.0)["logprobs"]
    torch.testing.assert_close(logprobs, plain(plain_model(model_folder), tokens, 1.0)[0], **CLOSE)


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_masked_is_zero_and_can_be_differentiated(model_folder: Path, packed: bool) -> None:
    scorer = make_scorer(model_folder, packed=packed)
    logprobs = scorer(torch.tensor([5, 6, 0, 0]), bytes(4), [2, 2], 1.0)["logprobs"]
    assert logprobs.tolist() == [0.0] * 4
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in scorer.parameters() if parameter.grad is not None]
    assert gradients
    assert all((gradient == 0).all() for gradient in gradients)


def test_a_mask_on_first_tokens_is_ignored(model_folder: Path) -> None:
    found = make_scorer(model_folder)(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)
    torch.testing.assert_close(found["logprobs"], expected(model_folder)[0], **CLOSE)
    assert [part[0].item() for part in found["logprobs"].split(LENGTHS)] == [0.0] * len(LENGTHS)
    assert [part[0].item() for part in found["entropy"].split(LENGTHS)] == [0.0] * len(LENGTHS)


def test_predicting_positions_stand_before_masked_ones_of_their_own_sequence() -> None:
    mask = torch.tensor([True, False, True, True, True])
    assert predicting(mask, [3, 2]).tolist() == [False, True, False, True, False]


HEADS = {
    "reward": transformers.AutoModelForSequenceClassification,
    "steps": transformers.AutoModelForTokenClassification,
}


def saved_head(scorer: Scorer, folder: Path, head: str) -> Any:
    """The scorer's model as plain transformers opens it."""
    scorer.model.save_pretrained(folder)
    return HEADS[head].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("head", ["steps", "reward"])
@pytest.mark.parametrize("packed", [True, False])
def test_scores_are_those_of_plain_classification(model_folder: Path, tmp_path: Path, packed: bool, head: str) -> None:
    """A reward is the score of the last token."""
    scorer = make_scorer(model_folder, packed=packed, head=head)
    scores = scorer(TOKENS, as_bytes(MASK), LENGTHS, 1.0)["scores"]
    model = saved_head(scorer, tmp_path, head)
    found = [model(input_ids=part[None]).logits[0] for part in TOKENS.split(LENGTHS)]
    theirs = torch.cat([logits.view(-1, scores.shape[1]) for logits in found])
    assert scores.shape == (TOTAL, 2 if head == "steps" else 1)
    ours = scores if head == "steps" else scores[torch.tensor(LENGTHS).cumsum(0) - 1]
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_plain_transformers_finds_the_same_reward_in_a_padded_batch(model_folder: Path, tmp_path: Path) -> None:
    """It reads the score at the last token that is not padding: an end token must not be taken for padding."""
    scorer = make_scorer(model_folder, head="reward")
    end = transformers.AutoTokenizer.from_pretrained(model_folder).eos_token_id
    rows = [torch.tensor([9, 8, 7, 6, end]), torch.tensor([5, end])]
    scores = scorer(torch.cat(rows), as_bytes(torch.ones(7)), [5, 2], 1.0)["scores"][[4, 6], 0]
    model = saved_head(scorer, tmp_path, "reward")
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    torch.testing.assert_close(model(input_ids=padded).logits[:, 0], scores, **CLOSE)


@pytest.mark.parametrize("packed", [True, False])
def test_a_student_is_compared_with_its_teacher_at_the_same_tokens(model_folder: Path, packed: bool) -> None:
    student, teacher = (load_model(ModelConfig(path=str(model_folder)), torch.float32, packed=packed) for _ in "12")
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(1.5)
    config = DistillConfig(temperature=2.0)
    found = Scorer(student, 4, packed=packed, distillation_target=Teacher(teacher, config))(
        TOKENS, as_bytes(MASK), LENGTHS, 1.0
    )
    logits = torch.cat([plain_model(model_folder)(input_ids=part[None]).logits[0] for part in TOKENS.split(LENGTHS)])
    ours, theirs = (logits / 2.0).log_softmax(-1), (1.5 * logits / 2.0).log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).roll(1)
    divergence[[0, *torch.tensor(LENGTHS).cumsum(0)[:-1].tolist()]] = 0
    torch.testing.assert_close(found["divergence"], divergence * MASK, **CLOSE)


def test_a_teacher_is_not_among_the_trained_parts(model_folder: Path) -> None:
    student, teacher = (load_model(ModelConfig(path=str(model_folder)), torch.float32, packed=True) for _ in "12")
    scorer = Scorer(student, 4, distillation_target=Teacher(teacher, DistillConfig()))
    theirs = {parameter.data_ptr() for parameter in teacher.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in scorer.parameters()}
    scorer(TOKENS, as_bytes(MASK), LENGTHS, 1.0)["divergence"].sum().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("packed", [True, False])
def test_a_critics_value_is_of_the_state_before_the_token(model_folder: Path, packed: bool) -> None:
    """A reward head's score at token t - 1 is the value at token t; a sequence's first token has none."""
    judge = make_scorer(model_folder, packed=packed, head="reward")
    critic = Scorer(judge.model, 4, packed=packed, values=True)
    scores = judge(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)["scores"][:, 0]
    expected = torch.cat([torch.cat([torch.zeros(1), part[:-1]]) for part in scores.split(LENGTHS)])
    torch.testing.assert_close(critic(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)["values"], expected, **CLOSE)
