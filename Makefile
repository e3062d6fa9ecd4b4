# `make` lists what can be made. Everything runs in .venv, which is created on first use with python3 and pip.
#
#   make test PYTHON=python3.12           another interpreter
#   make test TORCH="torch==2.12.0"       another torch than constraints.txt pins
#   make test ARGS="-k readme"            more arguments for pytest (or for the demo or the benchmark)

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
ARGS =

VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# The stamp carries the request in its name, so asking for another torch or python updates .venv.
STAMP := $(VENV)/.ready-$(shell printf '%s' "$(PYTHON) $(TORCH)" | cksum | tr ' ' '-')
# Which interpreter this is: the same line for a python and for a virtual environment made from it.
IDENTITY := import sys; print(sys.base_prefix, sys.version)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint types bench docs dist clean

help:
	@echo "make demo    check, measure and train on this machine, and write a report (HTML) of it"
	@echo "make test    lint, types and tests"
	@echo "make lint    ruff only"
	@echo "make types   mypy only"
	@echo "make bench   compare modules on this machine (ARGS=--help lists the options)"
	@echo "make docs    guides, notebooks and API reference as a site, into build/site"
	@echo "make dist    the package as wheel and sdist, into dist"
	@echo "make clean   remove .venv and caches"
	@echo
	@echo "PYTHON=$(PYTHON)  TORCH=$(TORCH)  (both can be overridden, see Makefile)"

demo: $(STAMP)
	@$(BIN)/dilated-attention demo $(ARGS)

bench: $(STAMP)
	@$(BIN)/dilated-attention bench $(ARGS)

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict  # which --quiet would undo

dist: $(STAMP)
	@$(BIN)/python -m hatchling build

test: lint types
	@echo "tests"
	@$(PYTEST) $(ARGS)
ifndef ARGS
	@echo "tests of attention without the native kernel"
	@DILATED_ATTENTION_ISA=none $(PYTEST) $(PLAIN)
endif

# Tests start processes of several threads beside each other: threads that wait must leave the cores to others.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --dist worksteal
PLAIN := $(addprefix tests/,kernels/test_choice.py kernels/test_contract.py decode modules/test_attention.py test_ops.py test_overflow.py)

lint: $(STAMP)
	@echo "lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@echo "types"
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One call for torch and all the rest: pip either finds versions that suit both TORCH and pyproject.toml or stops
# before it installs anything.
NATIVE := src/dilated_attention_pytorch/kernels/native
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard $(NATIVE)/*.[ch]) $(NATIVE)/build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "make: PYTHON=$(PYTHON) must be a Python of version 3.10 or later" >&2; exit 1; }
	@rm -f $(VENV)/.ready-*
	@if [ "$$($(BIN)/python -c 'import pip; $(IDENTITY)' 2>/dev/null)" != "$$($(PYTHON) -c '$(IDENTITY)')" ]; then \
	  echo "creating $(VENV) with $(PYTHON)"; \
	  $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) >/dev/null 2>&1 \
	       && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } \
	  || { echo "make: $(PYTHON) -m venv failed; it needs the venv module (Debian and Ubuntu: the package" \
	            "python3-venv) or pip 22.3 or later" >&2; exit 1; }; \
	fi
	@echo "installing $(TORCH), the development tools and this package"
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install \
	  -c $(VENV)/constraints.txt "$(TORCH)" -e '.[dev]'
	@touch $@
