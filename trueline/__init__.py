"""Train language models from feedback."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueline.api import Run, RunFailed, evaluate, generate, live_plot, load, train
    from trueline.config.base import ConfigError

__all__ = ["ConfigError", "Run", "RunFailed", "evaluate", "generate", "live_plot", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: reward processes import this package too, and start without a configuration."""
    if name not in __all__:
        raise AttributeError(f"module 'trueline' has no attribute {name!r}")
    from trueline import api  # noqa: PLC0415

    return vars(api)[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
