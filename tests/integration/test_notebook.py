"""The notebook, and the code of the page on Python, run as they are."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As a notebook does: one cell after the other, in one namespace, `await` allowed, in a loop that is running.
KERNEL = """
import ast, asyncio, inspect, json, sys

async def run(cells, names):
    for cell in cells:
        tree = ast.parse(cell)
        if isinstance(last := tree.body[-1], ast.Expr):
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
        code = compile(ast.fix_missing_locations(tree), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.iscoroutine(done):
            await done

names = {"__name__": "__main__"}
asyncio.run(run(json.load(sys.stdin), names))
exec(sys.argv[1], names)
"""


def run_cells(cells: list[str], folder: Path, checks: str) -> None:
    """Run cells in one fresh process, then look at what they made."""
    command, cells_text = [sys.executable, "-c", KERNEL, checks], json.dumps(cells)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=cells_text, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


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
    run_cells(["".join(cell["source"]) for cell in code], tmp_path, checks)


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == page.count("```") / 2
    run_cells(blocks, tmp_path, "assert resumed.folder == run.folder and len(resumed.metrics) == 5")
