# Every target installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check serve docs clean

demo: $(VENV)/.runtime  ## install, get the default model, run examples/judge.py
	@$(BIN)/ramify pull
	@$(BIN)/python examples/judge.py

serve: $(VENV)/.runtime  ## the local server, on http://127.0.0.1:30000
	@$(BIN)/ramify serve

test: $(VENV)/.dev check  ## everything that CI runs
	@$(BIN)/ramify pull
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

check: $(VENV)/.dev  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" sh .ci/typecheck

docs: $(VENV)/.dev  ## rewrite the generated parts of the documentation
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/json_schema_table.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
