"""Built-in tools: a calculator, Python that keeps its state within an episode, and search in a folder of texts."""

import ast
import heapq
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline.environments.tools.calls import ToolMistake
from trueline.environments.tools.interpreter import Interpreter
from trueline.environments.tools.schemas import UnfitTool
from trueline.rewards.code import SECONDS
from trueline.rewards.sandbox import Limits

EPISODE: ContextVar[str] = ContextVar("episode")  # that the tool which runs was called in

# Calculator

Number = int | float
LONGEST_EXPRESSION = 500  # characters
MOST_BITS = 4096  # of a whole number, which is about 1,200 digits
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos},
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        "abs": abs,
        "round": lambda *values: rounded(*values),
        "min": min,
        "max": max,
        "sqrt": math.sqrt,
        "floor": math.floor,
        "ceil": math.ceil,
    },
    **{"exp": math.exp, "log": math.log, "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan},
}
NAMES = {"pi": math.pi, "e": math.e}
KNOWS = f"it knows numbers, + - * / // % **, parentheses, {', '.join([*NAMES, *FUNCTIONS])}"


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: The expression, such as (3 + 4) * 2**10 or sqrt(2) / 3.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolMistake(f"the expression has {len(expression)} characters; give at most {LONGEST_EXPRESSION}")
    try:
        value = valued(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ToolMistake(f"{expression!r} is no arithmetic expression: {KNOWS}") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolMistake(f"{expression!r} cannot be computed: {error}") from None
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def valued(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return bounded(value)
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
            return bounded(OPERATORS[type(sign)](valued(operand)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return computed(OPERATORS[type(sign)], valued(left), valued(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return bounded(FUNCTIONS[name](*map(valued, arguments)))
    raise ToolMistake(f"the calculator does not know {ast.unparse(node)!r}: {KNOWS}")


def computed(operation: Callable[..., Any], left: Number, right: Number) -> Number:
    whole = isinstance(left, int) and isinstance(right, int)
    if operation is operator.pow and whole and int(left).bit_length() * right > MOST_BITS:
        raise OverflowError("the result is too large")  # before it takes all memory
    return bounded(operation(left, right))


def rounded(value: Number, digits: Number = 0) -> Number:
    """Round without the power of ten that many digits before the point would take."""
    return round(value, max(int(digits), -MOST_BITS)) if digits else round(value)


def bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if int(value).bit_length() > MOST_BITS:  # int raises for infinity, and for what is no number
        raise OverflowError("the result is too large")
    return value


# Python


class Python:
    """An interpreter for every episode that asks for one."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.interpreters: dict[str, Interpreter] = {}

    async def python(self, code: str) -> str:
        """Run Python code. Variables, functions and imports are kept for the next calls.

        Args:
            code: The code; what it prints and the value of its last expression come back.
        """
        return await self.interpreters.setdefault(EPISODE.get(), Interpreter(self.limits)).run(code)

    async def close(self, episode: str) -> None:
        if episode in self.interpreters:
            await self.interpreters.pop(episode).close()


# Search

TEXTS = (".txt", ".md")
LONGEST_PASSAGE, MOST_PASSAGES = 1500, 3  # in characters
SATURATION, LENGTH_SHARE = 1.5, 0.75  # BM25's k1 and b


class Search:
    """BM25 over the passages of all texts below a folder."""

    def __init__(self, documents: str) -> None:
        files = sorted(file for file in Path(documents).rglob("*") if file.suffix in TEXTS and file.is_file())
        if not files:
            raise UnfitTool(f"the tool search: no {' or '.join(TEXTS)} file in the folder documents={documents}")
        named = [(str(file.relative_to(documents)), file.read_text(errors="replace")) for file in files]
        self.passages = [(name, passage) for name, text in named for passage in passages_of(text)]
        self.found_in: dict[str, list[tuple[int, float]]] = defaultdict(list)  # word -> passages, and weights there
        counts = [Counter(words_of(passage)) for _, passage in self.passages]
        mean = sum(map(Counter.total, counts)) / max(len(counts), 1)
        for place, words in enumerate(counts):
            penalty = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * words.total() / mean)
            for word, count in words.items():
                self.found_in[word].append((place, count * (SATURATION + 1) / (count + penalty)))

    def search(self, query: str) -> str:
        """Search the documents for passages that hold the words of a query.

        Args:
            query: A few words to look for.
        """
        scores: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            found = self.found_in.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for place, weight in found:
                scores[place] += rarity * weight
        best = [self.passages[place] for place in heapq.nlargest(MOST_PASSAGES, scores, key=scores.__getitem__)]
        return "\n\n".join(f"[{name}]\n{passage}" for name, passage in best) or "No passage holds any of these words."


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


# By name


async def nothing_held(episode: str) -> None:
    """Close a tool that holds nothing for an episode."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    function: Callable[..., Any]
    close: Callable[[str], Awaitable[None]] = nothing_held  # what it holds for an episode


def make_python(
    seconds: float = SECONDS, memory_gib: float = 1.0, network: bool = False, files: bool = False
) -> BuiltIn:
    tool = Python(Limits(seconds, memory_gib, network, files, place="environment"))
    return BuiltIn(tool.python, tool.close)


BUILT_IN: dict[str, Callable[..., BuiltIn]] = {  # the parameters are options
    "calculator": lambda: BuiltIn(calculator),
    "python": make_python,
    "search": lambda documents: BuiltIn(Search(documents).search),
}
