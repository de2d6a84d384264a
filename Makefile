# The commands of the project; each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint selftest bench clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*##/|/' | awk -F'|' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## create .venv with the tested versions of everything

# The stamp is newer than what decides the environment, so a repeated run costs nothing.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	sys.exit(0 if (3, 11) <= v[:2] <= (3, 12) else "error: Python 3.11 or 3.12 expected, %d.%d found; set PYTHON=/path/to/python3.12" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the tested versions into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## train, validate, evaluate and sample a tiny EFLA on the built-in corpus
	@$(BIN)/python -m scripts.demo

test: setup  ## the whole CPU test suite
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

selftest: setup  ## every kernel against float64 on this machine's accelerator
	@$(BIN)/python -m efla_kernels.selftest

bench: setup  ## speed of the ops beside the installed peers, JSON under results/
	@$(BIN)/python -m scripts.bench

clean:  ## remove caches (never runs/ or data/tokens/)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache build dist
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
