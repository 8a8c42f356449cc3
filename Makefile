# One command each, on a machine that has nothing but Python 3.11 or later, make and a C++ compiler. Each makes what it
# needs: a virtual environment in .venv, with layerfuse installed in it as a user would (a copy, not a link to here).
#
#   make verify         the main job: four small real models, their specs and fusions, compared with the unfused ones
#   make test           the tests: every kernel, format and way to launch once, products of them in turn
#   make test-all       the same with whole products
#   make fuzz           model files, layers and configs that chance has changed, 20 minutes for each kind
#   make lint           formatting, lint, types
#   make docs           the documentation as a site, in build/site
#   make bench          every fusion against its peers, quickly, and what layerfuse itself costs the host (build/bench)
#   make test-engines   the tests against real vLLM and SGLang layers, in environments of their own (.venv-vllm, ...);
#                       ENGINES=vllm-0.26: an older vLLM
#   make clean          removes all of that
#
# PYTHON=python3.12 chooses another interpreter, VENV=folder another place, TORCH=... another build of torch.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ENGINES ?= vllm sglang
TESTS ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
SOURCES := pyproject.toml README.md $(wildcard *.py *.pyi *.toml *.json py.typed) \
           $(shell find adapters bench cli engines fusion registry testing -name '*.py' -o -name '__init__.pyi' 2>/dev/null)

.DELETE_ON_ERROR:
.PHONY: help verify test test-all fuzz lint docs bench test-engines clean

help:
	@sed -n '4,15s/^# \{0,1\}//p' Makefile

verify: $(VENV)/.installed
	@echo "== layerfuse verify: four small models, each compiled with fusions and without"
	@$(BIN)/layerfuse verify

# Two processes: more of them compile C++ side by side, and small machines have no memory for that. Each takes half of the files, so that
# what a file shares is made once, and in the end some of the other's.
test: $(VENV)/.installed
	$(BIN)/pytest -n 2 --dist worksteal -q $(TESTS)

test-all: $(VENV)/.installed
	$(BIN)/pytest -n 2 --dist worksteal -q -m "" $(TESTS)

fuzz: $(VENV)/.installed
	LAYERFUSE_FUZZ_SECONDS=1200 $(BIN)/pytest -q -s tests/fuzz

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/mkdocs build --strict

# The tables go to build/bench: quick ones must not take the place of those in bench/results.
bench: $(VENV)/.installed
	$(BIN)/layerfuse bench --quick --out build/bench
	$(BIN)/python bench/scripts/overhead.py --layers 4 --out build/bench

test-engines: $(ENGINES:%=test-engine-%)

.PRECIOUS: env-%
env-%:
	PYTHON="$(PYTHON)" tests/engines/make_env.sh $* $(VENV)-$*

# One after the other: each of them builds in this folder.
test-engine-%: env-% $(SOURCES)
	@mkdir -p build
	flock build/lock sh -c 'rm -rf build/lib && $(VENV)-$*/bin/python -m pip install -qq --compile --no-deps --force-reinstall .'
	$(VENV)-$*/bin/python -m pytest -n 2 --dist worksteal -q tests/engines/test_$(firstword $(subst -, ,$*))_*.py

clean:
	rm -rf $(VENV) $(ENGINES:%=$(VENV)-%) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch comes first and alone, so that no other requirement decides which build of it is installed.
$(VENV)/.requirements: pyproject.toml
	@echo "== $(VENV): a new environment, and $(TORCH) in it, the largest download of all: minutes without another word"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q '$(TORCH)'
	@echo "== $(VENV): transformers, what the tests need, and layerfuse"
	@$(BIN)/pip install -q '.[test]'
	@touch $@

# build/lib would carry files into the wheel that are no longer in the source.
$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	@echo "== $(VENV): layerfuse as it is here"
	@rm -rf build/lib
	@$(BIN)/pip install -q --compile --no-deps --force-reinstall .
	@touch $@
