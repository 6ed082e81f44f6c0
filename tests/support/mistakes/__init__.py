"""Mistakes that people make at the command line, by what they are about."""

from tests.support.mistakes import data, folders, jobs, models, rewards, words
from tests.support.mistakes.home import Mistake

TABLES: dict[str, list[Mistake]] = {
    "words": words.MISTAKES,
    "models": models.MISTAKES,
    "data": data.MISTAKES,
    "rewards": rewards.MISTAKES,
    "folders": folders.MISTAKES,
    "jobs": jobs.MISTAKES,
}
