# make demo, make test: each makes what it needs, from Python >= 3.11 with venv and pip, and a package registry.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV := .venv
GPU_VENV := .venv-gpu
BIN := $(VENV)/bin
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2

# An environment is brought up to date when the project file or the path of this folder has changed.
KEY := $(shell (cat pyproject.toml; echo "$(CURDIR)") | cksum | cut -d' ' -f1)
DEMO_STAMP := $(VENV)/.installed-demo-$(KEY)
DEV_STAMP := $(VENV)/.installed-dev-$(KEY)
GPU_STAMP := $(GPU_VENV)/.installed-$(KEY)

# The development environment holds all that the demo needs.
DEMO_READY := $(if $(wildcard $(DEV_STAMP)),$(DEV_STAMP),$(DEMO_STAMP))

# JAX's CUDA plugin, with which tests compile programs for GPUs that are not there, exists for Linux alone.
ifeq ($(shell uname -s),Linux)
TEST_STAMPS := $(DEV_STAMP) $(GPU_STAMP)
GPU_PYTHON := $(CURDIR)/$(GPU_VENV)/bin/python
else
TEST_STAMPS := $(DEV_STAMP)
GPU_PYTHON :=
endif

# $(call make_venv,FOLDER): keeps one that works; else takes PYTHON, or the first usable Python on the PATH.
define make_venv
	@usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	if ! $(1)/bin/python -c "$$usable" 2>/dev/null || ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
		found=; \
		for python in $(if $(PYTHON),"$(PYTHON)",python3 python python3.13 python3.12 python3.11 python3.14); do \
			if "$$python" -c "$$usable" 2>/dev/null; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "No usable Python found$(if $(PYTHON), under PYTHON=$(PYTHON)): 3.11 or later with venv and ensurepip is needed" \
				"(on Debian the package python3-venv). Name one with 'make PYTHON=/path/to/python3.12 ...'." >&2; exit 1; \
		fi; \
		echo "Making $(1) with $$("$$found" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
		"$$found" -m venv --clear $(1); \
	fi
endef

.NOTPARALLEL:
.PHONY: help venv demo test lint format pytest clean
help:
	@echo "make demo    serve one small model as itself and as three adapters in one batch, print what each answers"
	@echo "make test    everything that CI checks: lint, then all tests"
	@echo "make venv    the development environment alone ($(VENV))"
	@echo "make lint    ruff, pyright, import contracts;    make format    let ruff rewrite"
	@echo "make pytest PYTEST_ARGS='tests/test_x.py -k y'    some tests"
	@echo "make clean   remove what the above made"

$(DEMO_STAMP):
	$(call make_venv,$(VENV))
	@echo "Installing what the demo needs into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install --quiet -e '.[demo]'
	rm -f $(VENV)/.installed-* && touch $@

$(DEV_STAMP):
	$(call make_venv,$(VENV))
	@echo "Installing what the tests need into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	rm -f $(VENV)/.installed-* && touch $@

# The plugin wheels alone, without CUDA's libraries, in an environment of their own: beside them, a plain `import jax`
# without a driver prints a traceback.
$(GPU_STAMP): $(DEV_STAMP)
	$(call make_venv,$(GPU_VENV))
	jax=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jax"))'); \
	$(GPU_VENV)/bin/python -m pip install --quiet -e . "jax==$$jax"; \
	$(GPU_VENV)/bin/python -m pip install --quiet --no-deps "jax-cuda12-plugin==$$jax" "jax-cuda12-pjrt==$$jax"
	rm -f $(GPU_VENV)/.installed-* && touch $@

venv: $(DEV_STAMP)

demo: $(DEMO_READY)
	$(BIN)/python -m lora_jax.demo

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
# import-linter reads folders, so it gets the package as it is installed: with kernels inside.
	rm -rf build/imports && mkdir -p build/imports/lora_jax
	ln -s "$(CURDIR)"/lora_jax/* "$(CURDIR)/kernels" build/imports/lora_jax/
	cd build/imports && "$(CURDIR)/$(BIN)/lint-imports" "$(CURDIR)/pyproject.toml" --no-cache --no-logo

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pytest: $(TEST_STAMPS)
	LORA_JAX_GPU_PYTHON="$(GPU_PYTHON)" $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --durations=15 $(PYTEST_ARGS)

test: lint pytest

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist lora_jax.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
