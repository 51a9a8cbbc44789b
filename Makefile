# Every target installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 30000
HOST_PYTHON ?= python3.12
CAPABILITY ?= 9.0

.PHONY: demo quick test long-test ray-test check serve docs screenshots gpu-visit-kit gpu-visit-rehearsal gpu-check clean

demo: $(VENV)/.runtime  ## install, get the default model, run examples/judge.py
	@$(BIN)/ramify pull
	@$(BIN)/python examples/judge.py

serve: $(VENV)/.runtime  ## PORT=30000: the local server, on http://127.0.0.1:$(PORT)
	@$(BIN)/ramify pull
	@$(BIN)/ramify serve --port $(PORT)

# As many test processes as there are cores; the tests of one file share one, and with it their servers and models.
# Files run in their order, as the files with few tests are not the short ones: the kernels' take minutes.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

quick: $(VENV)/.dev  ## the tests that are not slow: 2 to 3.5 minutes on two cores
	@$(BIN)/ramify pull
	$(PYTEST) -m "not slow and not long and not ray"

test: $(VENV)/.dev check  ## lint, types and all tests but the long ones and those of Ray
	@$(BIN)/ramify pull
	$(PYTEST) -m "not long and not ray"

long-test: $(VENV)/.ray  ## the tests that `make test` leaves out because they take minutes: before a release
	@$(BIN)/ramify pull
	$(PYTEST) -m long

ray-test: $(VENV)/.ray  ## the tests of Ray, in one process: they share a cluster on this machine
	$(BIN)/python -m pytest -m "not long" tests/ray

check: $(VENV)/.dev  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" sh .ci/typecheck

gpu-visit-kit: $(VENV)/.runtime  ## HOST_PYTHON=python3.12 CAPABILITY=9.0: what a GPU host without a network needs
	@$(BIN)/ramify pull
	$(BIN)/python .ci/gpu_visit_kit.py $(HOST_PYTHON) --capability $(CAPABILITY)

gpu-visit-rehearsal:  ## the three calls of a visit on small shapes, with the kit and the packages of its host
	@test -f gpu-visit-kit/run || { echo "There is no ./gpu-visit-kit: make gpu-visit-kit first."; exit 2; }
	PATH="$(abspath .venv-gpu-host/bin):$$PATH" sh gpu-visit-kit/run A B C --tiny

gpu-check: $(VENV)/.dev  ## on a machine with a GPU: its tests and figures, into ./gpu-visit, in about ten minutes
	$(BIN)/python -m benchmarks.gpu_visit A B C --out gpu-visit

docs: $(VENV)/.dev  ## rewrite the generated parts of the documentation
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/command_line.py
	$(BIN)/python docs/field_tables.py
	$(BIN)/python docs/json_schema_table.py
	$(BIN)/python docs/reference.py

screenshots: $(VENV)/.dev  ## docs/images: pictures of a trace and of the dashboard under load, by chromium, in three minutes
	@$(BIN)/ramify pull
	$(BIN)/python docs/screenshots.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(VENV)/bin/python
	@echo "Installing; torch is the largest part …"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@ $(VENV)/.runtime

$(VENV)/.ray: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,ray]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
