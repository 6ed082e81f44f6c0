"""The table of docs/models.md: tests compare its cells with what they find, or write them anew (`make models`)."""

import json
import os
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
FOLDER = "TRUELINE_WRITE_TABLE"  # names the folder that cells are written to, one file each
FAMILIES = (
    "Llama 3.1",
    "Llama 3.2",
    "Qwen2.5",
    "Qwen3",
    "Qwen3-Instruct-2507",
    "Qwen3.5",
    "Qwen3.6",
    "Qwen3-Coder",
    "Mistral v0.3",
    "Mistral Small",
    "Gemma 2",
    "Gemma 3",
    "Gemma 4",
    "Phi-3",
    "Phi-3.5",
    "DeepSeek-R1 distill",
    "DeepSeek-V3",
    "GLM-4.5",
    "gpt-oss",
    "SmolLM2",
    "SmolLM3",
    "OLMo 2",
    "LFM2",
    "Mixtral",
    "Qwen3-MoE",
)
WITH_PICTURES = {  # by the model_type of their configurations
    "idefics3": "Idefics3 (SmolVLM's layout)",
    "llava": "LLaVA 1.5",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL, mixture",
    "gemma3": "Gemma 3, with its tower",
    "qwen3_5": "Qwen3.5, with its tower",
}
WEIGHTS = ("loads", "sync attested", "GRPO step", "SFT step", "LoRA", "saved opens in both", "verify")
TEMPLATES = ("mask, one turn", "mask, several turns", "system prompt", "two rounds of tools", "thinking")
PICTURES = ("packed", "padded", "two ranks, ZeRO 0 and 3", "learns, and opens in Transformers", "GRPO step", "vLLM")
TABLES = {WEIGHTS: FAMILIES, PICTURES: tuple(WITH_PICTURES.values()), TEMPLATES: FAMILIES}  # columns, and rows
ROWS = FAMILIES + TABLES[PICTURES]
Cells = dict[tuple[str, str], str]


def check_cell(family: str, column: str, value: str) -> None:
    """Compare a cell of the page with what was found, or write it where `make models` asks for that."""
    assert family in ROWS, f"{family}: no row of the table"
    columns = [column for columns, rows in TABLES.items() if family in rows for column in columns]
    assert column in columns, f"{column}: no column of the table"
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"{ROWS.index(family)}-{columns.index(column)}.json"
        (Path(folder) / name).write_text(json.dumps([family, column, in_cell(value)]))
        return
    written = read_cells(PAGE.read_text()).get((family, column), "")
    found = in_cell(value)
    assert written == found, (
        f"docs/models.md is stale: run `make models` ({family}, {column}: it says {written!r}, and {found!r} was found)"
    )


def in_cell(value: str) -> str:
    """Return a text as it can stand in a table of Markdown."""
    return " ".join(value.replace("|", "\\|").split())


def read_cells(page: str) -> Cells:
    cells: Cells = {}
    columns: list[str] = []
    for line in page.splitlines():
        parts = [part.strip() for part in line.replace("\\|", "\0").strip().strip("|").split("|")]
        parts = [part.replace("\0", "\\|") for part in parts]
        if line.startswith("| model |"):
            columns = parts[1:]
        elif line.startswith("| ") and parts[0] in ROWS:
            cells |= {(parts[0], column): value for column, value in zip(columns, parts[1:], strict=True)}
    return cells


def table(columns: tuple[str, ...], cells: Cells) -> list[str]:
    rows = [["model", *columns], ["---"] * (1 + len(columns))]
    rows += [[family, *(cells.get((family, column), "") for column in columns)] for family in TABLES[columns]]
    return [f"| {' | '.join(row)} |" for row in rows]


def written(page: str, cells: Cells) -> str:
    """Return the page with its tables made anew; what stands around them stays."""
    lines: list[str] = []
    heads = {table(columns, cells)[0]: columns for columns in TABLES}
    inside = False
    for line in page.splitlines():
        if line in heads:
            lines += table(heads[line], cells)
        inside = line in heads or (inside and line.startswith("|"))
        if not inside:
            lines.append(line)
    return "\n".join(lines) + "\n"


def merge(folder: Path) -> None:
    """Put the cells that tests have written into the page; the others stay as they are."""
    cells = read_cells(PAGE.read_text())
    for file in folder.glob("*.json"):
        family, column, value = json.loads(file.read_text())
        cells[family, column] = value
    PAGE.write_text(written(PAGE.read_text(), cells))


if __name__ == "__main__":
    merge(Path(sys.argv[1]))
