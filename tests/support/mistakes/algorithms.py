from pathlib import Path

from tests.support.mistakes.home import GRPO, Mistake

ALGORITHMS = """
import torch

from trueline.data.types import LossOutput


def one_parameter(samples):
    pass


def raises(samples, config):
    return {}[len(samples)]


def nothing(samples, config):
    pass


def short(samples, config):
    for sample in samples:
        sample.advantages = torch.ones(1)


def not_finite(samples, config):
    for sample in samples:
        sample.advantages = sample.mask / torch.zeros(1)


def loss_raises(logprobs, batch, config):
    return torch.ones(2) @ torch.ones(3)


def averaged(logprobs, batch, config):
    return LossOutput((logprobs * batch.advantages).mean())


def bare(logprobs, batch, config):
    return logprobs


def loss_not_finite(logprobs, batch, config):
    return LossOutput(logprobs.log())
"""


def add_files(folder: Path) -> None:
    (folder / "own.py").write_text(ALGORITHMS)
    (folder / "wrong.py").write_text("def f(samples, config)\n    pass\n")


MISTAKES: list[Mistake] = [
    ([*GRPO, "algorithm.advantage=gone.py:f"], r"algorithm.advantage: no file gone.py in /.*: check the path"),
    ([*GRPO, "algorithm.advantage=own.py"], r"own.py is a file: name a function in it, as own.py:NAME"),
    ([*GRPO, "algorithm.advantage=own.py:f"], r"own.py has no function 'f'; it has .*one_parameter, raises"),
    ([*GRPO, "algorithm.advantage=gone:f"], r"advantage=gone:f: cannot be imported .*PYTHONPATH"),
    ([*GRPO, "algorithm.advantage=median"], r"advantage=median is unknown: choose from gae.*, file.py:function"),
    ([*GRPO, "algorithm.advantage=wrong.py:f"], r"wrong.py:f raised SyntaxError: expected ':' \(wrong.py, line 1\)"),
    ([*GRPO, "algorithm.advantage=broken.py:f"], r"broken.py:f: cannot be imported \(No module named 'nonsense'\)"),
    ([*GRPO, "algorithm.advantage=own:one_parameter"], r"is called with \(samples, config\): too many"),
    ([*GRPO, "algorithm.advantage=own.py:raises"], r"error: .*own.py:raises raised KeyError: 4 \(own.py, line 12\)", 1),
    ([*GRPO, "algorithm.advantage=own.py:nothing"], r"nothing gave sample 0 no advantages: set sample.adv", 1),
    ([*GRPO, "algorithm.advantage=own.py:short"], r"sample 0 advantages of shape \[1\], .*multiply by sample.mask", 1),
    ([*GRPO, "algorithm.advantage=own.py:not_finite"], r"advantages that are not finite: avoid divisions by zero", 1),
    ([*GRPO, "algorithm.loss=own.py:one_parameter"], r"algorithm.loss=.* is called with \(logprobs, batch, conf"),
    ([*GRPO, "algorithm.loss=own.py:loss_raises"], r"loss_raises raised RuntimeError: .* \(own.py, line 30\)", 1),
    (
        [*GRPO, "algorithm.loss=own.py:averaged"],
        r"averaged returned values of shape \[\]: return LossOutput\(values\)",
        1,
    ),
    (
        [*GRPO, "algorithm.loss=own.py:bare"],
        r"bare returned Tensor: return LossOutput\(values\) with one value per token",
        1,
    ),
    (
        [*GRPO, "algorithm.loss=own.py:loss_not_finite"],
        r"step was skipped .*check logarithms and div.*own.py:loss_not",
        0,
    ),
]
