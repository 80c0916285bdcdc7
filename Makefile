# make demo: the main job on embedded data. make test: every check. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e

.PHONY: demo demo-sites test style types suite kernels test-gpu check bench-env clean

$(VENV)/.for-demo: pyproject.toml constraints/cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[report]'
	touch $@

$(VENV)/.for-test: pyproject.toml constraints/cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	touch $@

demo: $(VENV)/.for-demo
	$(BIN)/fedstill demo

# A coordinator with three sites and then five peers, as processes of this machine.
demo-sites: $(VENV)/.for-test
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/demo_sites.py

check: style types

style: $(VENV)/.for-test
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

types: $(VENV)/.for-test
	$(BIN)/mypy

suite: $(VENV)/.for-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Types are checked beside the tests: mypy alone would leave the other core idle.
test: style
	$(MAKE) --jobs=2 types suite

# Every kernel compiled for a GPU that need not be here: what it needs, and whether it is taken.
kernels: $(VENV)/.for-test
	$(BIN)/python tests/compile_kernels.py

# With a torch for CUDA, which the environment of the other targets has not: PYTHON's own.
test-gpu:
	$(PYTHON) tests/on_gpu.py

# Other systems to measure beside, each in an environment of its own; none is a dependency.
bench-env: .bench/flower/.done .bench/pfl/.done

.bench/flower/.done: OTHER = flwr[simulation]==1.41.0
.bench/pfl/.done: OTHER = pfl[pytorch]==0.6.0
.bench/%/.done: | $(VENV)/.for-demo
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check '$(OTHER)' \
		"torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')"
	touch $@

clean:
	rm -rf $(VENV) .bench build dist .pytest_cache .mypy_cache .ruff_cache
