# The two commands: `make demo` and `make test`. Everything else serves them.
SHELL := /bin/bash
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
DEVICE ?= auto
DEPLOYMENT := clusters/local/deployment.yaml
SECONDS := 600
EVERY := 20
SEED := 1

# The environment is made anew only when what goes into it changes: the pins, the dependencies and
# entry points (all of pyproject.toml above the first tool's section), the package mapping.
PINS := $(shell (cat constraints.txt setup.py; sed '/^\[tool.ruff/,$$d' pyproject.toml) \
	| sha256sum | cut -c1-16)
STAMP := $(VENV)/.ready-$(PINS)

.PHONY: env demo down docs test test-unit test-full soak lint format help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make env        the environment in .venv (made once, kept while the pins stay)
env: $(STAMP)

# Python is looked for only here: a made environment needs none.
$(STAMP):
	@test -x $(BIN)/python || { python=$$(tests/find-python.sh) && echo "environment: $$python" \
		&& $$python -m venv $(VENV); }
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv
	@# Compiled here, once: ranks and front half that start side by side would each do it.
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@

## make demo       deploy the built-in model here (on a GPU where there is one; DEVICE=cpu, cuda), stream
##                 a completion, show what speculation gains (SET="gateway.port=8080 ..." changes settings)
demo: env
	$(BIN)/python -m overstory.orchestrator.demo $(DEPLOYMENT) --device $(DEVICE) $(addprefix --set ,$(SET))

## make down       take the demo's deployment away
down: env
	$(BIN)/overstory down

## make test       a sample of every kind of test that this machine can run
test: env
	tests/run.sh sample

## make test-unit  the tests that need neither Ray nor SGLang
test-unit: env
	$(BIN)/pytest tests/unit -m "not full" -n 2 --dist loadfile

## make test-full  every test at full size; writes docs/test-results.md
test-full: env
	tests/run.sh full

## make soak       ten minutes of mixed traffic with a random fault every 20 s (SECONDS=, EVERY=, SEED=)
soak: env
	$(BIN)/python tests/cluster/soak.py --seconds $(SECONDS) --every $(EVERY) --seed $(SEED)

## make docs       the documentation as a site in site/; a broken link fails it
docs: env
	@test -x $(VENV)-docs/bin/mkdocs || { $(BIN)/python -m venv $(VENV)-docs \
		&& $(VENV)-docs/bin/pip install -q --disable-pip-version-check 'mkdocs>=1.6,<2'; }
	$(VENV)-docs/bin/mkdocs build --strict

## make lint       ruff and mypy
lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHON=$(BIN)/python tests/mypy.sh

## make format     what ruff can mend
format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
