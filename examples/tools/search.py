"""Search in a folder of texts as a tool: DOCUMENTS=folder/ trueline ... --tools examples/tools/search.py:search."""

import heapq
import math
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

TEXTS = (".txt", ".md")
LONGEST_PASSAGE, MOST_PASSAGES = 1500, 3  # in characters
SATURATION, LENGTH_SHARE = 1.5, 0.75  # BM25's k1 and b


class Index:
    """BM25 over the passages of all texts below a folder."""

    def __init__(self, documents: str) -> None:
        files = sorted(file for file in Path(documents).rglob("*") if file.suffix in TEXTS and file.is_file())
        if not files:
            raise FileNotFoundError(f"no {' or '.join(TEXTS)} file in the folder DOCUMENTS={documents}")
        named = [(str(file.relative_to(documents)), file.read_text(errors="replace")) for file in files]
        self.passages = [(name, passage) for name, text in named for passage in passages_of(text)]
        self.found_in: dict[str, list[tuple[int, float]]] = defaultdict(list)  # word -> passages, and weights there
        counts = [Counter(words_of(passage)) for _, passage in self.passages]
        mean = sum(map(Counter.total, counts)) / max(len(counts), 1)
        for place, words in enumerate(counts):
            penalty = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * words.total() / mean)
            for word, count in words.items():
                self.found_in[word].append((place, count * (SATURATION + 1) / (count + penalty)))

    def best(self, query: str) -> list[tuple[str, str]]:
        scores: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            found = self.found_in.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for place, weight in found:
                scores[place] += rarity * weight
        return [self.passages[place] for place in heapq.nlargest(MOST_PASSAGES, scores, key=scores.__getitem__)]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def passages_of(text: str) -> list[str]:
    """Cut a text between paragraphs, and a longer paragraph anywhere."""
    parts = [""]
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if len(parts[-1]) + len(paragraph) > LONGEST_PASSAGE:
            parts.append("")
        parts[-1] += f"{paragraph}\n\n"
    cut = [part[start : start + LONGEST_PASSAGE] for part in parts for start in range(0, len(part), LONGEST_PASSAGE)]
    return [passage.strip() for passage in cut if passage.strip()]


INDEX = Index(os.environ.get("DOCUMENTS", "."))


def search(query: str) -> str:
    """Search the documents for passages that hold the words of a query.

    Args:
        query: A few words to look for.
    """
    found = INDEX.best(query)
    return "\n\n".join(f"[{name}]\n{passage}" for name, passage in found) or "No passage holds any of these words."
