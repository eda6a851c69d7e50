# Everything happens in .venv; PYTHON chooses the interpreter it is made with:
#   make test PYTHON=python3.12
# TORCH says which torch to add before the package; without it Python 3.11 gets the one below and
# other versions do without, since the tests that need torch then skip:
#   make venv PYTHON=python3.13 TORCH=torch==2.13.0

PYTHON ?= python3
TORCH ?=
TORCH_OF_3_11 := torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_MARK := $(VENV)/.torch-$(or $(subst =,-,$(TORCH)),default)

NATIVE := $(wildcard native/*.cpp native/*.h)
SOURCES := pyproject.toml CMakeLists.txt $(NATIVE) $(shell find src -name '*.py')

.PHONY: chaos sanitize venv demo test raises bench lint docs clean

venv: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# torch comes first, so that nothing below chooses another one; another TORCH is installed anew.
$(TORCH_MARK): $(BIN)/python
	@torch='$(TORCH)'; \
	version=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	if [ -z "$$torch" ] && [ "$$version" = 3.11 ]; then torch='$(TORCH_OF_3_11)'; fi; \
	if [ -n "$$torch" ]; then \
	  $(BIN)/python -m pip install --quiet "$$torch"; \
	else \
	  echo "Python $$version: without torch; make TORCH=$(TORCH_OF_3_11) adds it"; \
	fi
	@touch $@

$(VENV)/.tools: $(BIN)/python
	$(BIN)/python -m pip install --quiet 'scikit-build-core>=0.10' 'nanobind>=2.4' 'numpy>=2' cmake ninja
	@touch $@

# The package is installed anew when a source has changed: that compiles what changed of the core
# and finds new modules.
$(STAMP): $(TORCH_MARK) $(VENV)/.tools $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@

# Trains a small language model on four ranks of this machine; figures in runs/demo/summary.json.
demo: $(STAMP)
	$(BIN)/bireme run -n 4 examples/train_lm.py

test: $(STAMP)
	$(BIN)/python -m pytest -q

# Lists each raise of the package that no test executes.
raises: $(STAMP)
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -q
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/python tests/raises.py build/coverage.json

# Compares with Gloo, MPICH and Open MPI on this machine; see benchmarks/README.md.
bench: $(STAMP)
	$(BIN)/bireme bench engine -n 2 --peers gloo,mpich,openmpi --json benchmarks/latest.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

# Ends ranks at random moments, 300 times and more.
chaos: $(STAMP)
	$(BIN)/python -m pytest -q -s tests/chaos --trials 300

# The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize:
	tests/native/sanitize.sh

docs: $(STAMP)
	$(BIN)/python -c 'import bireme.knobs; print(bireme.knobs.markdown(), end="")' > docs/knobs.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
