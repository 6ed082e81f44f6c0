"""Mistakes that people make at the command line, by what they are about."""

from pathlib import Path

from tests.support.mistakes import algorithms, data, environments, folders, jobs, models, plans, rewards, words
from tests.support.mistakes.home import Mistake, make_home

MODULES = (words, models, data, environments, rewards, folders, algorithms, plans, jobs)
TABLES: dict[str, list[Mistake]] = {one.__name__.rpartition(".")[2]: one.MISTAKES for one in MODULES}


def fill_home(folder: Path) -> None:
    """Make all that the mistakes need: what many share, then the files of each table."""
    make_home(folder)
    for module in MODULES:
        if "add_files" in vars(module):
            module.add_files(folder)
