# Each target does all its own set-up in .venv. CUDA kernels are compiled into it only where a GPU is seen; elsewhere
# the tests build the same sources for the CPU.
PYTHON ?= python3
OUT ?= runs/benchmarks
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -1)
ifeq ($(HAS_GPU),)
export TRANSFORMER_KERNELS_CUDA_ARCHS ?= none
endif
# Tests run two at a time, each with as many threads as there are cores: one that waits must not keep a core busy.
test gates: export OMP_WAIT_POLICY ?= passive
# The tests run the CPU kernels at every level that the processor has; a user's installation compiles the best one.
$(VENV)/.test $(VENV)/.lint: export TRANSFORMER_KERNELS_CPU_LEVELS ?= present
SOURCES := pyproject.toml setup.py constraints.txt

.PHONY: help demo test gates matrix mutants lint site gpu gpu-plan gpu-kit bench wheel clean

help:
	@echo "make demo   train a character GPT beside the reference and compare the backends (two minutes)"
	@echo "make test   the test suite in a random order (about eight minutes on two cores); SEED=N repeats that of a run"
	@echo "make gates  the full grids, sanitizers and compilers' reports"
	@echo "make matrix  tests on several releases of transformers (ROWS=torch, ROWS=triton), in throwaway environments"
	@echo "make mutants  planted bugs, each of which a test must find (SAMPLE=4 for some)"
	@echo "make lint   ruff, mypy and clang-format"
	@echo "make site   the pages of docs/ with an API reference, in build/site"
	@echo "make gpu    on a GPU: build, verify, test, benchmark and record in runs/gpu (make gpu-plan: the seconds)"
	@echo "make gpu-kit  prepare that on a machine without one: the CUDA extension and Triton's cache"
	@echo "make wheel  what a release has in dist/: the sdist, the CPU wheel and, with nvcc, the wheel for all GPUs"
	@echo "make bench  on a CPU: benchmark, and merge into benchmarks/results (twelve minutes)"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python $(SOURCES)
	$(PIP) --editable ".[train]"
	@touch $@

$(VENV)/.test: $(BIN)/python $(SOURCES)
	$(PIP) --editable ".[test]"
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --editable ".[lint]"
	@touch $@

# The extra `docs` without the package: the reference is read from the sources, so nothing is compiled.
$(VENV)/.site: $(BIN)/python $(SOURCES)
	$(PIP) $(shell sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ,)
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m transformer_kernels demo

test: $(VENV)/.test
	$(BIN)/python -m pytest tests -m "not slow" -n 2 --durations=15 --random-order $(if $(SEED),--random-order-seed=$(SEED))

gates: $(VENV)/.test
	$(BIN)/python -m pytest tests -m slow -n 2 --dist worksteal --durations=15

matrix: $(VENV)/.test
	$(BIN)/python -m tests.matrix $(ROWS)

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants $(if $(SAMPLE),--sample $(SAMPLE))

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.cu' '*.cuh' '*.h')

site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Straight from the checkout with the python3 that is there: nothing is installed. Results in runs/gpu.
gpu:
	PYTHON=$(PYTHON) benchmarks/gpu.sh --first; PYTHON=$(PYTHON) benchmarks/gpu.sh --second

gpu-plan: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu --plan

# Compiles what the record of an H100 or H200 needs into runs/gpu-kit.tar.xz; KIT="--architecture 80" for another GPU.
gpu-kit: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu.kit $(KIT)

# The smaller record of a machine without a GPU, merged into the folder of this processor in benchmarks/results.
# Twelve minutes; leave the machine alone.
bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.cli --record --device cpu --out $(OUT)
	$(BIN)/python -m benchmarks.cli --merge $(OUT)

wheel:
	.ci/wheel --release dist

clean:
	rm -rf $(VENV) build dist *.egg-info
