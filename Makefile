# Needs Python 3.11+ and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# The package index that PyTorch comes from: without a GPU that of its CPU builds, a tenth of the size. Empty is what pip
# has; `make train TORCH_INDEX=` decides so, and any index of PyTorch may stand there.
TORCH_INDEX ?= $(if $(shell nvidia-smi -L 2>/dev/null; ls /dev/kfd 2>/dev/null),,https://download.pytorch.org/whl/cpu)

# The jobs here are small: one thread each is steady where threads would wait for each other on a busy machine.
export OMP_NUM_THREADS ?= 1

.PHONY: help train test test-slow test-alone mutate lint docs build setup clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(VENV)/.experiments  ## train a small CNN with SGD, AdamW and KFACSGD and compare them: a minute
	$(BIN)/python -m experiments.compare

test: lint  ## check style, types and tests: some ten minutes on two cores
	$(BIN)/python -m pytest -n 2 -m "not slow" tests
	$(BIN)/python tests/alone.py

test-slow: $(VENV)/.dev  ## run the tests that take more than ten seconds: several processes, an emulated device
	$(BIN)/python -m pytest -n 2 -m slow tests

test-alone: $(VENV)/.dev  ## run 60 random tests, each in a process of its own
	$(BIN)/python tests/alone.py

mutate: $(VENV)/.dev  ## list which of 100 changed operators and numbers no test notices: an hour or two of a core, and a stopped run goes on
	$(BIN)/python tests/mutate.py

lint: $(VENV)/.dev  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs  ## build the documentation, examples included, into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

build: $(VENV)/.dev  ## build wheel and source distribution into dist and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

setup: $(VENV)/.dev  ## install what all targets need

# A virtual environment that an interrupted run left half-made has no working pip: it is made anew.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
		echo "PyTorch is in $(VENV)."; \
	elif [ -n "$(TORCH_INDEX)" ] && $(BIN)/python -c \
		'from urllib.request import urlopen; urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; then \
		echo "Installing PyTorch from $(TORCH_INDEX) into $(VENV)."; \
		$(PIP) --index-url $(TORCH_INDEX) torch torchvision; \
	else \
		echo "PyTorch will be the build that pip has: with CUDA some gigabytes."; \
	fi
	@touch $@

# .experiments, .docs, .dev: curvopt with this extra
$(VENV)/.%: pyproject.toml $(VENV)/.torch
	@echo "Installing curvopt with its extra [$*] into $(VENV): once, a few minutes."
	@$(PIP) --editable '.[$*]'
	@touch $@

clean:  ## remove all that the other targets made, but for runs
	rm -rf $(VENV) dist docs/_build docs/gallery docs/sg_execution_times.rst
