# Needs Python 3.11+ and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The jobs here are small: one thread each is steady where threads would wait for each other on a busy machine.
export OMP_NUM_THREADS ?= 1

.PHONY: help train test test-alone lint docs build setup clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(STAMP)  ## train a small CNN with SGD and KFACSGD and compare them: a minute
	$(BIN)/python -m experiments.compare

test: lint  ## check style, types and tests: some ten minutes on two cores
	$(BIN)/python -m pytest -n 2 tests
	$(BIN)/python tests/alone.py

test-alone: $(STAMP)  ## run 60 random tests, each in a process of its own
	$(BIN)/python tests/alone.py

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(STAMP)  ## build the documentation, examples included, into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

build: $(STAMP)  ## build wheel and source distribution into dist and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

setup: $(STAMP)  ## install curvopt and its development tools into .venv, as every other target does first

# A virtual environment that an interrupted run left half-made has no working pip: it is made anew.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing curvopt and its development tools into $(VENV): once, some minutes, some gigabytes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

clean:  ## remove all that the other targets made, but for runs
	rm -rf $(VENV) dist docs/_build docs/gallery docs/sg_execution_times.rst
