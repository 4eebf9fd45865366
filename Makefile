# Two commands for a new machine with Python 3.11 or later: `make demo`, `make test`. While you change code: `make check`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
FLOORS_VENV := .venv-floors
FLOORS_STAMP := $(FLOORS_VENV)/installed
WHEEL_VENV := .venv-wheel
EXTRAS ?=
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/installed
DEMO ?= demo
# Folders of tests of the core. Those that need torch are skipped, which tests/whole/test_make_check.py keeps few.
CORE := batching buckets cache captions dataset format fs images manifest recipe runs sources train/config vocabulary \
	workers

.PHONY: venv demo check test test-all test-floors test-wheel test-real lint docs bench clean

venv: $(STAMP)

# torch first and by its exact version: a plain "torch" downloads gigabytes of CUDA libraries on Linux.
$(STAMP): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" sh manifests/demo.sh $(DEMO)

# In about a minute, for who changes code: what needs no torch. It is no substitute for `make test`.
check: venv
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --without-torch $(CORE:%=tests/%)

test: venv
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test-all: venv
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'slow or not slow'

# What depends most on the libraries, with the lowest versions that pyproject.toml allows. Old releases warn of their own
# deprecations.
test-floors: $(FLOORS_STAMP)
	$(FLOORS_VENV)/bin/python -m pytest -q -p no:cacheprovider -W ignore::DeprecationWarning tests/models \
		tests/train/models tests/encode/test_run.py tests/whole/test_families.py

$(FLOORS_STAMP): pyproject.toml .ci/constraints.txt .ci/floors.py
	$(PYTHON) -m venv $(FLOORS_VENV)
	$(FLOORS_VENV)/bin/python .ci/floors.py > $(FLOORS_VENV)/floors.txt
	$(FLOORS_VENV)/bin/python -m pip install --quiet --requirement $(FLOORS_VENV)/floors.txt
	@touch $(FLOORS_STAMP)

# What users install: a wheel, in an environment that has nothing else and away from this tree, goes the way of the demo.
# `make test-wheel EXTRAS=[all]` installs every extra, too.
test-wheel:
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(WHEEL_VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEEL_VENV)/dist .
	$(WHEEL_VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(WHEEL_VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt \
		"$$(ls $(CURDIR)/$(WHEEL_VENV)/dist/*.whl)$(EXTRAS)"
	cd $(WHEEL_VENV) && PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" sh $(CURDIR)/manifests/demo.sh demo

# Memory of loading and of whole runs of models of real size, with random weights: 14 GB of disk, 12 of memory, an hour or
# more of CPU time.
test-real: venv
	$(BIN)/python -m tests.benchmarks --only bench_loading --only bench_real --limits

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

# The pages that are generated from the code.
docs: venv
	$(BIN)/python -m tests.docs

bench: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python -m tests.benchmarks $(BENCH)

# Other libraries to read the same rows with; in a place of their own, so that they change nothing that is tested.
$(BENCH_STAMP): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[dev,bench]'
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --no-deps mosaicml-streaming litdata
	@touch $(BENCH_STAMP)

clean:
	rm -rf $(VENV) $(FLOORS_VENV) $(WHEEL_VENV) $(BENCH_VENV) $(DEMO) build .mypy_cache .ruff_cache .pytest_cache .hypothesis latentry.egg-info
