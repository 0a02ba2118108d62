# Every target does its own set-up: system packages (Debian, as root), virtual environment, build. Quick when all is there.
# PYTHON=python3.12 makes the environment with another Python; ARGS=... goes to pytest or to the benchmark.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
SOURCES := $(shell find rdmaview include -name '*.py[xd]' -o -name '*.h' -o -name '*.map' -o -path '*/softverbs/*.c')

.PHONY: demo test test-all test-rxe lint stubs stubs-check bench bench-bulk bench-rxe build packages clean
.DELETE_ON_ERROR:

demo: build
	$(VENV)/bin/rdmaview demo $(ARGS)

test: build
	$(PY) -m pytest $(ARGS)

test-all: packages
	tools/test-all $(ARGS)

test-rxe: build
	tools/rxe-vm $(PY) -m pytest --device rxe0 $(ARGS)

lint: build $(VENV)/.extra-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PATH="$(abspath $(VENV))/bin:$$PATH" cython-lint rdmaview

stubs: build $(VENV)/.extra-lint
	$(PY) tools/make-stubs

stubs-check: build $(VENV)/.extra-lint
	$(PY) tools/make-stubs --check

bench: build $(VENV)/.extra-bench
	$(PY) benchmarks/bench_view.py $(ARGS)

bench-bulk: build $(VENV)/.extra-bench $(VENV)/.nixl
	$(PY) benchmarks/bench_bulk.py $(ARGS)

bench-rxe: build $(VENV)/.extra-bench
	$(MAKE) --no-print-directory -C benchmarks/c
	tools/rxe-vm --count $(PY) benchmarks/bench_view.py --device rxe0 $(ARGS)
	tools/rxe-vm --count $(PY) benchmarks/bench_bulk.py --only-device rxe0 $(ARGS)

build: $(VENV)/.built

# Stamps are touched last, so that an interrupted run is done again.
$(VENV)/.built: pyproject.toml setup.py $(SOURCES) | packages
	@tools/develop $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.extra-%: pyproject.toml | build
	@tools/install-extra $(VENV) $*
	@touch $@

# For comparison only. It names torch, which its descriptors do without.
$(VENV)/.nixl: | build
	$(PY) -m pip install -qq --disable-pip-version-check --no-input --no-deps nixl-cu12
	@touch $@

packages:
	@tools/install-packages build device

clean:
	rm -rf build dist wheels *.egg-info .venv .venv-3.* .rxe-vm .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find rdmaview tests benchmarks \( -name '*.so' -o -name __pycache__ \) -prune -exec rm -rf {} +
	find rdmaview -maxdepth 1 -name '*.c' -delete
	$(MAKE) --no-print-directory -C benchmarks/c clean
