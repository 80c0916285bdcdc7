# make demo: the main job on embedded data. make test: every check. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check clean

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/fedstill demo

check: $(READY)
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
