# Two commands matter: `make demo` and `make test`. Each sets everything up by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
TORCH ?= torch==2.13.0

.PHONY: setup demo test lint types unit format peers bench clean

setup: .venv/.ready

# torch goes first and alone, so that the pinned CPU build satisfies every later requirement.
.venv/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -qq --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m radixkv.native.build --if-possible
	touch $@

demo: setup
	$(BIN)/radixkv demo

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# The others that the benchmarks run beside us, each in an environment of its own.
peers: setup
	TORCH=$(TORCH) $(BIN)/python benchmarks/peers/install.py

# Every benchmark in its short form, on one page.
bench: setup
	$(BIN)/python -m benchmarks

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis
