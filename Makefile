# Everything runs from a plain Python and make: each target first makes .venv and installs what it needs, once.
# A second run finds the stamp and starts at once. PYTHON=... chooses the interpreter, VENV=... the folder, TORCH=2.15
# the release of torch (with a VENV of its own: one that is made is not made again).
.DEFAULT_GOAL := help
.PHONY: help demo test test-full elsewhere numbers campaign faults parity mutations foreign checkout upstream-colossalai upstream-deepspeed lint \
  types arch bench gpu matrix site pictures clean venv dev

PYTHONS := python3.14 python3.13 python3.12 python3.11
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
GIVEN := $(PYTHON)
SELF := $(MAKE)
PYTHON ?= $(shell for p in python3 $(PYTHONS); do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
TORCH ?= 2.13
CONSTRAINTS := constraints/torch-$(TORCH).txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# The build backend is installed first, under the same constraints, so that no unpinned package is ever fetched.
INSTALL := $(PIP) install --quiet --progress-bar off -c $(CONSTRAINTS)
DEMO ?=
BENCH ?=
GPU ?=
MATRIX ?=
SEES_GPU := import torch, sys; sys.exit(not torch.cuda.is_available())
TESTS ?= tests
WORKERS ?= 2
KILLS ?= 1000
PARITY ?=
FOREIGN ?=
CHECKOUT ?=
UPSTREAM ?=
SHIFT ?= 1
SEED ?= 1
NUMBERS ?= tests/ranks/booster/test_booster_plugins.py::test_each_rank_normalizes_over_its_own_batch tests/ranks/booster/test_booster_lora.py \
  tests/ranks/zero/test_sharded_groups.py tests/ranks/shards/test_engine_checkpointing.py \
  tests/parity/test_random_graphs.py

help:
	@echo "make demo      train a byte-level GPT over 2 ranks (DEMO='--plugin low_level_zero --stage 2' passes options)"
	@echo "make test      one test of each kind of behavior (TESTS=tests/unit for a part; WORKERS=1 for one file at a time)"
	@echo "make test-full these, pairs of factors and costly cases: what a change must pass"
	@echo "make elsewhere README's commands and a few tests as another user, in other surroundings (SEED=2 for another order)"
	@echo "make numbers   compare with other seeds and roundings, and the simplest kernels (SHIFT=2 for other seeds)"
	@echo "make campaign  full products of all factors, for hours (TESTS=tests/parity for a part)"
	@echo "make faults    kill ranks during saves (KILLS=1000), flip bytes, fuzz readers, soak; count what was lost"
	@echo "make parity    each architecture over every way to divide it (PARITY='llama --layouts tp4 ring' for a part)"
	@echo "make mutations each wait between streams taken out, and what finds it (MUTATIONS='SideCopy Later' for a part)"
	@echo "make foreign   programs written for other libraries, ported and run (FOREIGN='deepspeed' for a part)"
	@echo "make upstream-colossalai CHECKOUT=/path/to/ColossalAI    which of its public names cannot be imported here"
	@echo "make upstream-deepspeed CHECKOUT=/path/to/DeepSpeed    its own unit tests (UPSTREAM='runtime/test_data.py' for a part)"
	@echo "make site      the documentation as web pages, in build/site; make pictures draws its pictures anew"
	@echo "make lint      ruff        make types   mypy --strict        make arch   layers and budgets"
	@echo "make bench     compare with the peers (installs them)        make clean  remove .venv and caches"
	@echo "make gpu       everything that needs a GPU, in parts (GPU='--limit 560' for 560 s; call again to go on)"
	@echo "make matrix    a short set under every Python and torch (MATRIX='--only 3.12:2.13' for one; --list: all)"

$(VENV)/.made:
	@"$(or $(PYTHON),none)" -c '$(SUPPORTED)' 2>/dev/null || { \
	  echo "shardwise needs Python 3.11 to 3.14, and '$(or $(PYTHON),python3)' is not one." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.13 $(MAKECMDGOALS)" >&2; exit 2; }
	@rm -rf "$(VENV)"
	@"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	  echo "could not make $(VENV): on Debian and Ubuntu install the package python3-venv" >&2; exit 2; }
	@touch "$@"

$(VENV)/.runtime: $(VENV)/.made pyproject.toml constraints/common.txt $(CONSTRAINTS)
	@echo "installing shardwise and its pinned dependencies into $(VENV) (once)"
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation -e .
	@touch "$@"

$(VENV)/.dev: $(VENV)/.runtime
	@$(INSTALL) --no-build-isolation -e ".[dev]"
	@touch "$@"

$(VENV)/.bench: $(VENV)/.runtime
	@$(INSTALL) --no-build-isolation -e ".[bench]"
	@touch "$@"

$(VENV)/.docs: $(VENV)/.runtime
	@$(INSTALL) --no-build-isolation -e ".[docs]"
	@touch "$@"

venv: $(VENV)/.runtime
dev: $(VENV)/.dev

demo: $(VENV)/.runtime
	@$(BIN)/python examples/demo $(DEMO)

# Two processes share the test files, since ranks idle while the caller compares, and the other way round.
test: $(VENV)/.dev
	$(BIN)/python -m pytest --workers $(WORKERS) $(TESTS)

test-full: $(VENV)/.dev
	$(BIN)/python -m pytest --workers $(WORKERS) --full $(TESTS)

elsewhere: $(VENV)/.dev
	@$(BIN)/python -m tests.elsewhere --seed $(SEED)

# A few comparisons as another processor and other inputs would have them: what rests on rounding errors fails.
numbers: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest --workers $(WORKERS) --seed-shift $(SHIFT) --rounding $(NUMBERS)

# Full products: every model x plan x ranks x number format of the parity matrix (its other factors drawn at random by
# row), every mix of tiers, more random graphs, checkpoints and front-ends.
campaign: $(VENV)/.dev
	$(BIN)/python -m pytest --workers $(WORKERS) -m campaign $(TESTS)

# Ranks killed at random moments of saves, bytes flipped, readers of hostile files, system calls that fail, a soak; fewer
# KILLS take a share of all of it, and fewer than 50 a short run of each part: KILLS=25 takes about a minute on two cores.
# The last line says what was lost.
faults: $(VENV)/.dev
	$(BIN)/python -W ignore -m tests.faults $(KILLS)

# Each architecture of the tables over every way to divide a model, on 4 and 8 ranks against one process, in fp64 and fp32:
# a line for each case, a table at the end.
parity: $(VENV)/.dev
	$(BIN)/python -W ignore -m tests.parity $(PARITY)

# Each wait between streams taken out, one at a time, and what finds it on a device that is late.
mutations: $(VENV)/.dev
	$(BIN)/python -W ignore -m tests.late.mutations $(MUTATIONS)

foreign: $(VENV)/.dev
	$(BIN)/python -W ignore -m tests.foreign $(FOREIGN)

# Before anything is installed for it.
checkout:
	@test -d "$(CHECKOUT)" || { echo "CHECKOUT='$(CHECKOUT)' is no folder: name the checkout of the other library," \
	  "make $(MAKECMDGOALS) CHECKOUT=/path" >&2; exit 2; }

upstream-colossalai: checkout $(VENV)/.dev
	$(BIN)/python -W ignore -m tests.foreign.upstream.names_colossalai "$(CHECKOUT)"

# DeepSpeed's own unit tests, from a checkout that is yours, on what takes its place here. Their fixtures may be classes,
# which pytest no longer takes: the last release that does is put beside the others.
upstream-deepspeed: checkout $(VENV)/.dev
	@$(PIP) install --quiet --no-deps --target build/upstream pytest==8.3.5 hjson==3.1.0 py-cpuinfo==9.0.0
	$(BIN)/python -m tests.foreign.upstream.run_deepspeed --packages build/upstream --checkout "$(CHECKOUT)" $(UPSTREAM)

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

arch: $(VENV)/.dev
	@$(BIN)/python -m tests.structure
	@$(BIN)/python -c 'from tests.budgets import table; print(table())'
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_structure.py tests/test_foreign_names.py

# Warnings are errors: links and anchors that lead nowhere, pages that the navigation leaves out, docstrings that cannot
# be read, anything that a reader's browser would fetch from elsewhere. It is in build/site, to be opened as files;
# search needs a server: python -m http.server -d build/site.
site: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 PATH="$(BIN):$$PATH" $(BIN)/python -m mkdocs build --strict

pictures: $(VENV)/.runtime
	@$(BIN)/python -m docs.pictures

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(BENCH)

# Runs from the source tree with any Python that has torch, numpy, safetensors and pytest: PYTHON=... if given, else a python3
# whose torch sees a GPU, else the one of .venv, where there is a stand-in on the CPU.
gpu:
	@python="$(GIVEN)"; \
	if [ -z "$$python" ] && python3 -c '$(SEES_GPU)' 2>/dev/null; then python=python3; fi; \
	if [ -z "$$python" ]; then $(SELF) --no-print-directory dev || exit; python=$(BIN)/python; fi; \
	exec "$$python" -m benchmarks.gpu $(GPU)

# Needs no .venv: every cell makes an environment of its own and deletes it. Downloads are gigabytes.
matrix:
	@"$(or $(PYTHON),none)" -c '$(SUPPORTED)' 2>/dev/null || { echo "make matrix needs Python 3.11 to 3.14" >&2; exit 2; }
	@"$(PYTHON)" -m tests.matrix $(MATRIX)

clean:
	rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
