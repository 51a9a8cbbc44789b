# Every target installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 30000
HOST_PYTHON ?= python3.12
CAPABILITY ?= 9.0

.PHONY: demo quick test long-test ray-test check serve docs screenshots gpu-visit-kit gpu-visit-rehearsal gpu-check clean install-test \
	runtime dev ray

demo: runtime  ## install, get the default model, run examples/judge.py
	@$(BIN)/python -m ramify pull
	@$(BIN)/python examples/judge.py
	@echo "Next: a server by make serve, or your own programs: . $(BIN)/activate, and docs/get-started.md"

serve: runtime  ## PORT=30000: the local server, on http://127.0.0.1:$(PORT)
	@$(BIN)/python -m ramify pull
	@$(BIN)/python -m ramify serve --port $(PORT)

# As many test processes as there are cores; the tests of one file share one, and with it their servers and models.
# Files run in their order, as the files with few tests are not the short ones: the kernels' take minutes.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

quick: dev  ## the tests that are not slow: 2 to 3.5 minutes on two cores
	@$(BIN)/python -m ramify pull
	$(PYTEST) -m "not slow and not long and not ray"

test: dev check  ## lint, types and all tests but the long ones and those of Ray
	@$(BIN)/python -m ramify pull
	$(PYTEST) -m "not long and not ray"

long-test: ray  ## the tests that `make test` leaves out because they take minutes: before a release
	@$(BIN)/python -m ramify pull
	$(PYTEST) -m long

ray-test: ray  ## the tests of Ray, in one process: they share a cluster on this machine
	$(BIN)/python -m pytest -m "not long" tests/ray

install-test:  ## the installations of docs/get-started.md, in fresh places: half an hour, 12 GB of disk
	$(PYTHON) .ci/install_test.py $(ARGS)

check: dev  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" sh .ci/typecheck

gpu-visit-kit: runtime  ## HOST_PYTHON=python3.12 CAPABILITY=9.0: what a GPU host without a network needs
	@$(BIN)/python -m ramify pull
	$(BIN)/python .ci/gpu_visit_kit.py $(HOST_PYTHON) --capability $(CAPABILITY)

gpu-visit-rehearsal:  ## the three calls of a visit on small shapes, with the kit and the packages of its host
	@test -f gpu-visit-kit/run || { echo "There is no ./gpu-visit-kit: make gpu-visit-kit first."; exit 2; }
	PATH="$(abspath .venv-gpu-host/bin):$$PATH" sh gpu-visit-kit/run A B C --tiny

gpu-check: dev  ## on a machine with a GPU: its tests and figures, into ./gpu-visit, in about ten minutes
	$(BIN)/python -m benchmarks.gpu_visit A B C --out gpu-visit

docs: dev  ## rewrite the generated parts of the documentation
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/command_line.py
	$(BIN)/python docs/field_tables.py
	$(BIN)/python docs/json_schema_table.py
	$(BIN)/python docs/reference.py

screenshots: dev  ## docs/images: pictures of a trace and of the dashboard under load, by chromium, in three minutes
	@$(BIN)/python -m ramify pull
	$(BIN)/python docs/screenshots.py

# Does nothing if $(VENV) holds what is asked for: see .ci/install.py.
INSTALL = @command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON). Name a Python: make PYTHON=python3.12"; exit 2; }; \
	$(PYTHON) .ci/install.py "$(VENV)"

runtime:
	$(INSTALL)

dev:
	$(INSTALL) dev

ray:
	$(INSTALL) dev ray

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
