# `make train` and `make test` need nothing but Python 3.10 or newer: they make .venv themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test check docs bench clean

train: $(VENV)/recipes.installed
	$(BIN)/python recipes/fashion_mnist.py --strategy ring --devices 2 $(ARGS)

test: $(VENV)/test.installed
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/docs.installed
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)

bench: $(VENV)/recipes.installed
	$(BIN)/python -m lit_parallel.benchmark $(ARGS)

$(VENV)/%.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
