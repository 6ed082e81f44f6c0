# Every target first makes .venv with the locked CPU stack, unless that is already done.
PYTHON_RUN := .venv/bin/python
READY := .venv/ready

.PHONY: demo test test-all check format setup

setup: $(READY)

$(READY): requirements/cpu.txt pyproject.toml scripts/setup
	scripts/setup .venv

demo: $(READY)
	.venv/bin/trueline demo

test: $(READY)
	$(PYTHON_RUN) -m pytest -m "not slow and not gpu"

test-all: $(READY)
	$(PYTHON_RUN) -m pytest -m "not gpu"

check: $(READY)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	$(PYTHON_RUN) -m pytest -q tests/test_house.py

format: $(READY)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .
