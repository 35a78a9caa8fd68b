# make demo    a model on disk completes a file of prompts; installs into .venv the first time
# make test    the tests, about half an hour on two cores
# make check   format, lint, types
# make gpu     what needs a CUDA device, from the source tree: nothing is installed
# make gpu-matrix   large models on 16 GiB of a CUDA device, until 9 minutes are over

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Tests side by side, one for each core; more than some are held up by memory.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
# On a device a test is mostly its imports, and kernels that are compiled.
GPU_JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 12 ? n : 12)))

.PHONY: demo test check gpu gpu-matrix

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Installing Freight into $(VENV). Most of it is torch, some hundred megabytes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed: $(VENV)/.ready
	@echo "Installing what tests and checks need into $(VENV)."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=25

check: $(VENV)/.installed
	$(BIN)/python -m ruff format --check src tests examples benchmarks tools
	$(BIN)/python -m ruff check src tests examples benchmarks tools
	$(BIN)/python -m mypy

# The budget is counted by the driver, for all processes: its test runs alone.
gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -W default -n $(GPU_JOBS) --dist worksteal tests/gpu \
		tests/kernels/test_triton*.py tests/runtime/test_kernel_choice.py
	PYTHONPATH=src $(PYTHON) -m pytest -W default tests/gpu -k no_more_than_its_budget
	PYTHONPATH=src $(PYTHON) benchmarks/kernels_cuda.py
	PYTHONPATH=src $(PYTHON) -m freight bench offload --model benchmarks/llama-7b --device cuda \
		--gpu-memory 6GiB --shape 128:32 --rows 64 --repeats 1 --unwritten-weights

gpu-matrix:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_matrix.py $(MATRIX)
