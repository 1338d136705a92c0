# `make demo` and `make test` set up all they need by themselves; see `make help`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The interpreter of the development environment: a version or a path.
PYTHON ?=
# Processes that run tests, which wait half of their time; those of one file stay together.
JOBS ?= 4

# More words for the command of a target, for example: make test ARGS='-k policy -x'
ARGS ?=

# Where it is set, each server that a test starts compiles all its modules: twice the work.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup sandbox demo test lint type fmt bench reference lock clean

help: ## Show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(READY) ## Create .venv with the locked tools and the kernel-mcp command
	@:

$(READY): requirements-dev.lock pyproject.toml .ci/setup
	@.ci/setup environment "$(PYTHON)"
	@touch $@

sandbox:
	@.ci/setup sandbox

demo: $(READY) sandbox ## Analyse a CSV through a real server and show the transcript
	@$(BIN)/python examples/analyse_csv.py $(ARGS)

test: $(READY) sandbox ## Run the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(READY) ## Check style, formatting and words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m tests.words

type: $(READY) ## Check types (mypy, strict)
	@$(BIN)/mypy

fmt: $(READY) ## Format the code and apply safe fixes
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format .

bench: $(READY) sandbox ## Measure what a client waits for
	@$(BIN)/python -m benchmarks $(ARGS)

reference: $(READY) ## Write the generated parts of docs/, and schemas of tools
	@$(BIN)/python -m tests.reference

lock: $(READY) ## Resolve the lock files anew, keeping versions that still fit
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
		--group dev pyproject.toml --output-file requirements-dev.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
		--extra fleet --constraint requirements-dev.lock pyproject.toml --output-file requirements-fleet.lock

clean: ## Remove everything the other targets made
	@rm -rf .venv .bootstrap demo-output dist build benchmarks/results
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./.git -prune -o -name __pycache__ -prune -exec rm -rf {} +
