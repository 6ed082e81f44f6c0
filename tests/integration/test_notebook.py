"""The notebook, and the code of the page on Python, run as they are, in a real kernel."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).resolve().parents[2]


def run_cells(cells: list[str], folder: Path, checks: str) -> list[list[NotebookNode]]:
    """Run cells in one fresh kernel, then look at what they made; return the outputs of each."""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in (*cells, checks)])
    client = NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    return [cell.outputs for cell in notebook.cells]


def shown(outputs: list[NotebookNode], kind: str) -> list[str]:
    data: list[dict[str, Any]] = [one.get("data", {}) for one in outputs]
    return [one[kind] for one in data if kind in one]


@pytest.mark.slow
def test_the_notebook_trains_plots_evaluates_and_samples(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples/quickstart.ipynb").read_text())
    assert notebook["nbformat"] == 4 and {cell["cell_type"] for cell in notebook["cells"]} == {"markdown", "code"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    checks = (
        "assert after.evaluation['evaluation/reward'] > before.evaluation['evaluation/reward']\n"
        "assert (run.folder / 'curves.svg').is_file() and len(run.metrics) == 21\n"
        "assert [len(row['completions']) for row in sampled.samples] == [2, 2, 2]\n"
        "assert _[0][0] == prompts[0]['prompt'], _"
    )
    cells = ["".join(cell["source"]) for cell in code]
    outputs = run_cells(cells, tmp_path, checks)
    trained = outputs[next(place for place, cell in enumerate(cells) if "trueline.train(" in cell)]
    panels = [text for text in shown(trained, "text/html") if "eta" in text]
    assert len(panels) == 1 and "step 20/20" in panels[0]  # one panel, which the last step has drawn
    live, last = shown(trained, "image/svg+xml")  # of live_plot, and the cell's value
    assert live == last == next(tmp_path.rglob("curves.svg")).read_text()


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == page.count("```") / 2
    run_cells(blocks, tmp_path, "assert resumed.folder == run.folder and len(followed.metrics) == 7 and rewards")
