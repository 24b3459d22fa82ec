# Needs Python 3.11+ and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The jobs here are small: one thread each is steady where threads would wait for each other on a busy machine.
export OMP_NUM_THREADS ?= 1

.PHONY: train test lint docs setup clean

train: $(STAMP)  ## set up, then train the default problem with SGD and KFACSGD and compare them
	$(BIN)/python -m experiments.compare

test: lint  ## set up, then check style, types and tests
	$(BIN)/python -m pytest -n 2 tests

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(STAMP)  ## set up, then build the documentation, examples included, into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

setup: $(STAMP)

# A virtual environment that an interrupted run left half-made has no working pip: it is made anew.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing curvopt and its development tools into $(VENV): once, some minutes, some gigabytes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) dist docs/_build docs/gallery docs/sg_execution_times.rst
