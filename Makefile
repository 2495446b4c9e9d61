# `make` alone lists the targets. Every target makes or refreshes .venv by itself.

PYTHON ?= python3
EXTRAS := train,mcp,synthesize,dev
BIN    := .venv/bin
STAMP  := .venv/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo base test check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv, or refresh it when pyproject.toml or constraints.txt changed

demo: $(STAMP) ## train an agent for the built-in shop on this CPU and evaluate it before and after
	$(BIN)/trialogue demo

base: $(STAMP) ## make the tiny base model anew (about half an hour)
	$(BIN)/python -m trialogue.learn.pretrain trialogue/engine/weights/tiny

test: $(STAMP) ## run the tests; ARGS="-k talk -n 2" goes to pytest
	$(BIN)/pytest tests --ignore=tests/hosts -m "not slow" $(ARGS)

check: $(STAMP) ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean: ## remove .venv, caches and builds; runs are kept
	rm -rf .venv build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "trialogue needs Python 3.11 or newer and '$(PYTHON)' is not. Name one: make setup PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
