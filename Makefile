# make demo: the main job on embedded data. make test: every check. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -e

.PHONY: demo test check clean

$(VENV)/.for-demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[report]'
	touch $@

$(VENV)/.for-test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	touch $@

demo: $(VENV)/.for-demo
	$(BIN)/fedstill demo

check: $(VENV)/.for-test
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
