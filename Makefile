# The two commands: `make demo` and `make test`. Everything else serves them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(shell cat constraints.txt pyproject.toml setup.py | sha256sum | cut -c1-16)

.PHONY: env demo down test test-unit test-full lint format

env: $(STAMP)

$(STAMP): constraints.txt pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python -q -c constraints.txt -e '.[dev]'
	rm -f $(VENV)/.ready-*
	touch $@

test-unit: env
	$(BIN)/pytest tests/unit

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHON=$(BIN)/python tests/mypy.sh

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
