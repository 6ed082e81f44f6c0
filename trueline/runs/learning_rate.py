"""Learning rates that suit a model's size, and words about one that does not. They are rules of thumb."""

from trueline.config.model import ModelConfig, TrainingConfig

BASE_RATE, BASE_PARAMETERS = 1e-6, 7e9  # reinforcement and preferences, all weights of a 7B model
EXPONENT = 0.7  # smaller models take larger steps
SMALLEST, LARGEST = 5e-7, 1e-3  # what size alone decides
FACTORS = {"policy": 1, "preference": 1, "kto": 1}  # others imitate data or score, and take ten times as much
ADAPTERS = 10  # times the rate of all weights
FAR = 10  # times too small or too large: worth a word


def suited_rate(parameters: int, kind: str, *, adapters: bool) -> float:
    """Return the learning rate that suits the size of a policy, a critic, or the model of an offline task."""
    by_size = BASE_RATE * (BASE_PARAMETERS / max(parameters, 1)) ** EXPONENT
    return min(max(by_size, SMALLEST), LARGEST) * FACTORS.get(kind, 10) * (ADAPTERS if adapters else 1)


def rate_warnings(
    parameters: int, kind: str, model: ModelConfig, training: TrainingConfig, section: str = "training"
) -> list[str]:
    """Return nothing, or one line about a rate far from what suits the model; the rate itself is the user's."""
    suited, rate = suited_rate(parameters, kind, adapters=model.lora.rank > 0), training.learning_rate
    if suited / FAR < rate < suited * FAR:
        return []
    trained = "adapters of a model" if model.lora.rank else "a model"
    fear = "learn next to nothing" if rate < suited else "diverge"
    return [
        f"{section}.learning_rate={rate:g} is far from the {suited:.0e} or so that suits {trained} of "
        f"{parameters / 1e6:.1f} M parameters: it may {fear}"
    ]
