"""docs/troubleshooting.md quotes messages; what it quotes is what the package says."""

import ast
import re

from tests.support.generated_docs import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GENERATED = re.compile(r"<!-- generated.*?<!-- / -->", re.DOTALL)
QUOTE = re.compile(r"(`+)(.+?)\1")
# What a run fills in: `...`, a name in braces or capitals, a key with its value, a word with a number in it.
HOLE = re.compile(r"\.\.\.|\{.*?\}|\b[A-Z]+\b|[\w.]+=[\w.]*|[\w./-]*\d[\w./-]*|[:,] ")


def quoted_messages() -> list[str]:
    cells = re.findall(r"^\| (.*?) \| ", GENERATED.sub("", PAGE.read_text()), re.MULTILINE)
    return [quote for cell in cells for _, quote in QUOTE.findall(cell)]


def package_texts() -> str:
    """All texts of the package but docstrings; where an f-string fills something in, a text ends."""
    texts: list[str] = []
    for file in (ROOT / "trueline").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
        texts += [node.value for node in constants if isinstance(node.value, str)]
    return "\n".join(texts)


def test_the_page_quotes_what_the_package_says() -> None:
    said, quotes = package_texts(), quoted_messages()
    pieces = [(quote, piece.strip(" `,;()")) for quote in quotes for piece in HOLE.split(quote)]
    assert len(quotes) > 130
    assert [(quote, piece) for quote, piece in pieces if len(piece) > 3 and piece not in said] == []
