# Every target first creates .venv with the locked CPU stack, if it is missing.
PYTHON_RUN := .venv/bin/python
READY := .venv/ready
# Two at a time, files with many processes first; a file stays in one process, so that its tests share engines.
PYTEST := $(PYTHON_RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
CELLS := .pytest_cache/model_table

.PHONY: demo test test-slow soak models docs site check format setup

setup: $(READY)

$(READY): requirements/cpu.txt pyproject.toml scripts/setup
	scripts/setup .venv

demo: $(READY)
	.venv/bin/trueline demo

test: $(READY)
	$(PYTEST) -m "not slow and not soak and not gpu"

test-slow: $(READY)
	$(PYTEST) -m "slow and not soak and not gpu"

soak: $(READY)
	$(PYTEST) -m "soak and not gpu"

# Runs every test behind a cell of docs/models.md, and writes the results into it.
models: $(READY)
	rm -rf $(CELLS)
	TRUELINE_WRITE_TABLE=$(CELLS) $(PYTEST) -m models
	$(PYTHON_RUN) -m tests.support.model_table $(CELLS)

# Writes the tables of findings and metrics and the tree of modules into their pages.
docs: $(READY)
	$(PYTHON_RUN) -m tests.support.generated_docs

# Builds the documentation as a site: open site/html/index.html, or serve the folder, which search needs.
site: $(READY)
	$(PYTHON_RUN) -m tests.support.site site

check: $(READY)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	$(PYTHON_RUN) -m pytest -q tests/test_house.py

format: $(READY)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .
