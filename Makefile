# `make test` and `make demo` set everything up themselves; they need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint types clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with conjoin (editable) and all it needs

# What was renamed or copied is set up again: the scripts of an environment, and what it imports, name the folder it was made in.
FOLDER = cd -P $(VENV)/.. 2>/dev/null && pwd -P
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(shell $(FOLDER)))
.PHONY: $(STAMP)
endif

# torch goes first, at the version the tests are run with, so that no other package chooses another build of it. Where the newest
# release of a package has no build for this machine (z3 on older ARM systems), an older one with a build is taken, not its source.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Conjoin needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary --editable '.[dev]'
	@$(FOLDER) > $@

demo: $(STAMP) ## see what conjoin does, in a minute, without a GPU
	$(BIN)/python examples/demo.py

# Workers have one thread each, and there is one more of them than cores: many tests wait for processes that they start. Tests
# write and read text as it stands in their files, in UTF-8 whatever the locale; and they start many processes, which would each
# compile the package anew without bytecode.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
PYTEST = OMP_NUM_THREADS=1 PYTHONUTF8=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test: $(STAMP) ## run all tests, doctests and the code in the docs
	$(PYTEST)

test-all: $(STAMP) ## run all tests and every strategy on every model of the zoo, on 2, 4 and 8 ranks
	$(PYTEST) -m "whole_matrix or not whole_matrix"

lint: $(STAMP) ## check style, imports and complexity
	$(BIN)/python -m ruff check

types: $(STAMP) ## check types
	$(BIN)/python -m mypy

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
