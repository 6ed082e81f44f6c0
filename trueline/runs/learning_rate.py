"""Learning rates by task, size and adapters: the default of a run that sets none, and words about one that is far off.

They are rules of thumb, near what published recipes use.
"""

import math

from trueline.config.base import Tree
from trueline.config.model import ModelConfig, TrainingConfig

BASE_RATE, BASE_PARAMETERS = 2e-6, 1e9  # reinforcement and preferences, all weights of a 1B model
SMALLER, LARGER = 0.7, 0.3  # exponents of the size below and above that
FACTORS = {"policy": 1, "preference": 1, "kto": 1}  # others imitate data or score, and take ten times as much
ADAPTERS = 10  # times the rate of all weights
LARGEST = 2e-3
FAR = 30  # times too small or too large: worth a word
ROUND = (1, 2, 5, 10)
NAMES = {"policy": "reinforcement learning", "preference": "preferences", "critic": "a critic"}


def suited_rate(parameters: int, kind: str, *, adapters: bool) -> float:
    """Return the learning rate that suits the size of a policy, a critic, or the model of an offline task."""
    size = BASE_PARAMETERS / max(parameters, 1)
    by_size = BASE_RATE * size ** (SMALLER if size > 1 else LARGER)
    factor = FACTORS.get(kind, 10) * (ADAPTERS if adapters else 1)
    return min(float(f"{rounded(by_size) * factor:.0e}"), LARGEST)


def rounded(rate: float) -> float:
    """Return the nearest of 1, 2 and 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(rate))
    return unit * min(ROUND, key=lambda digit: abs(math.log(rate / unit / digit)))


def rate_keys(parameters: int, kind: str, model: ModelConfig, training: TrainingConfig) -> Tree:
    """Return the learning rate of a section: the one that was set, or the default for this model."""
    suited = suited_rate(parameters, kind, adapters=model.lora.rank > 0)
    return {"learning_rate": suited if training.learning_rate is None else training.learning_rate}


def rate_line(
    parameters: int, kind: str, model: ModelConfig, training: TrainingConfig, section: str = "training"
) -> str:
    """Describe the rate of a plan beside the default, and the reason of that."""
    suited, rate = suited_rate(parameters, kind, adapters=model.lora.rank > 0), training.peak_rate()
    reason = f"default for {NAMES.get(kind, kind)}{' with adapters' * (model.lora.rank > 0)} on {size_of(parameters)}"
    said = f": {reason}" if rate == suited else f", as set; {suited:g} is the {reason}"
    return f"rate       {section}.learning_rate={rate:g}{said}"


def size_of(parameters: int) -> str:
    return f"{parameters / 1e9:.2g}B parameters" if parameters >= 1e8 else f"{parameters / 1e6:.2g}M parameters"


def rate_warnings(
    parameters: int, kind: str, model: ModelConfig, training: TrainingConfig, section: str = "training"
) -> list[str]:
    """Return nothing, or one line about a rate far from what suits the model; the rate itself is the user's."""
    suited, rate = suited_rate(parameters, kind, adapters=model.lora.rank > 0), training.learning_rate
    if rate is None or suited / FAR <= rate <= suited * FAR:
        return []
    trained = "adapters of a model" if model.lora.rank else "a model"
    fear = "learn next to nothing" if rate < suited else "diverge"
    return [
        f"{section}.learning_rate={rate:g} is far from the {suited:g} or so that suits {trained} of "
        f"{size_of(parameters)}: it may {fear}; leave the key out to take that default"
    ]
