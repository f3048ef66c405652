# Each target does all its own set-up in .venv. CUDA kernels are compiled into it only where a GPU is seen; elsewhere the
# tests build the same sources for the CPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -1)
ifeq ($(HAS_GPU),)
export TRANSFORMER_KERNELS_CUDA_ARCHS ?= none
endif
SOURCES := pyproject.toml setup.py constraints.txt

.PHONY: help demo test gates lint gpu clean

help:
	@echo "make demo   train a character GPT on this machine and compare the backends (a few minutes)"
	@echo "make test   the test suite (about ten minutes on two cores)"
	@echo "make gates  the full grids, sanitizers and compilers' reports"
	@echo "make lint   ruff and mypy"
	@echo "make gpu    on a GPU: build, test, benchmark and record"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python $(SOURCES)
	$(PIP) --editable ".[train]"
	@touch $@

$(VENV)/.test: $(BIN)/python $(SOURCES)
	$(PIP) --editable ".[test]"
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) ".[lint]"
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m transformer_kernels demo

test: $(VENV)/.test
	$(BIN)/python -m pytest tests -m "not slow" -n 2 --durations=15

gates: $(VENV)/.test
	$(BIN)/python -m pytest tests -m slow -n 2 --durations=15

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
