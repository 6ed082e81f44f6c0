"""Write the generated parts of the docs: `python -m tests.support.generated_docs`, or `make docs`."""

import ast
import re
from itertools import groupby
from pathlib import Path

from trueline.monitoring.findings import CODES, Code
from trueline.monitoring.metrics import METRICS, Metric

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(<!-- generated: ([^\n]+) -->\n).*?(<!-- / -->)", re.DOTALL)
PAGES = ("docs/troubleshooting.md", "docs/metrics.md", "docs/architecture.md")


def table(*rows: tuple[str, ...]) -> str:
    head, *others = [f"| {' | '.join(row)} |".replace("  ", " ") for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others]) + "\n"


def findings_table(rows: list[Code]) -> str:
    cells = [(f"`{one.code}`", one.meaning, one.threshold(), one.remedy) for one in rows]
    return table(("code", "meaning", "threshold", "what to do"), *cells)


def metrics_table(rows: list[Metric]) -> str:
    cells = [(f"`{one.name}`", one.unit, one.better, one.meaning, one.healthy) for one in rows]
    return table(("name", "unit", "better", "what it is", "healthy, and what to do otherwise"), *cells)


def module_tree() -> str:
    """Return every module of the package with the first line of its docstring, folder by folder."""
    lines = ["```", "trueline/"]
    modules = (ROOT / "trueline").rglob("[!_]*.py")
    for folder, files in groupby(sorted(modules, key=lambda file: (file.parent, file.name)), lambda file: file.parent):
        inside = folder.relative_to(ROOT / "trueline")
        indent = "  " * len(inside.parts)
        lines += [f"{indent}{inside.name}/"] * bool(inside.name)
        for file in files:
            meaning = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0]
            lines.append(f"{indent + '  ' + file.name:<32} {meaning}")
    return "\n".join([*lines, "```", ""])


def render(page: str, text: str) -> str:
    """Fill in what stands between the marks of a page; each names a section."""
    metrics, codes = (groupby(rows, key=lambda one: one.section) for rows in (METRICS, CODES.values()))
    parts = {section: metrics_table(list(rows)) for section, rows in metrics}
    parts["modules"] = module_tree()
    parts |= {section: findings_table(list(rows)) for section, rows in codes}
    return MARKED.sub(lambda found: found[1] + parts[found[2]] + found[3], text)


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(render(page, (ROOT / page).read_text()))
