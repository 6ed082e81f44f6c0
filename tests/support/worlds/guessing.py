"""Environments of OpenEnv, which its real server and the stand-in serve alike."""

import os
import random
from pathlib import Path

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Seen(Observation):
    text: str = ""
    left: int = 0


class Move(Action):
    row: int
    column: int


class Guessing(Environment):
    """A number is to be guessed; replies may be what goes wrong."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.number, self.left = 0, 3

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 9) -> Seen:
        self.number = random.Random(seed).randint(0, highest)
        return Seen(text=f"A number up to {highest}.", left=self.left)

    def step(self, action: Guess, timeout_s: float | None = None) -> Seen:
        self.left -= 1
        if action.message == "raises":
            raise KeyError("board")
        if action.message == "dies":
            os._exit(3)
        if action.message == "unrewarded":
            return Seen(text="over", done=True)
        if action.message == "tell":
            return Seen(text=str(self.number), reward=0.25, left=self.left)
        right = action.message == str(self.number)
        reward = 1.0 if right else None if self.left else 0.0
        return Seen(text="right" if right else "wrong", left=self.left, reward=reward, done=right or not self.left)

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        if file := os.environ.get("CLOSED"):
            with Path(file).open("a") as closed:
                closed.write("closed\n")


class Board(Guessing):
    """Actions are no texts, and neither are observations."""

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Seen:
        return Seen(text="", left=2)

    def step(self, action: Move, timeout_s: float | None = None) -> Seen:  # type: ignore[override]
        return Seen(text="", left=action.row, reward=action.column, done=action.row == 0)


class Broken(Guessing):
    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Seen:
        raise RuntimeError("no board")


app = create_app(Guessing, Guess, Seen, max_concurrent_envs=64)
small = create_app(Guessing, Guess, Seen, max_concurrent_envs=1)
board = create_app(Board, Move, Seen, max_concurrent_envs=64)
broken = create_app(Broken, Guess, Seen)
