# The two commands: `make demo` (a real model answers) and `make test` (what we promise holds). Both work in a fresh clone.
VENV ?= .venv
# The first interpreter that runs and is new enough (a version manager's shim may do neither).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL ?= smollm2-135m
PROMPT ?= What is gravity?
# For bench-peers: where the peers live, the scripts that set them up and run them, rows (parts of their keys, with
# commas), optional peers (transformers, vllm), the bundle that our starts load, and the record if not today's.
PEERS ?= ../.peers
ADAPTERS ?= ../shared/peers
ONLY ?=
WITH ?=
BUNDLE ?=
OUT ?=
# Extra arguments for pytest: make test ARGS="tests/engine -x". TEST_JOBS: processes that share the test files,
# one more than cores: tests of servers and of clients wait a good part of their time.
ARGS ?=
TEST_JOBS ?= $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1)))
SOURCES := $(shell find src native include -type f ! -name '*.pyc') CMakeLists.txt pyproject.toml
NATIVE := $(shell find native include -type f) CMakeLists.txt pyproject.toml

.PHONY: help setup demo check test test-slow test-soak test-judges mutants docs bench-peers lint format types wheel clean

help:
	@echo "make demo     install without torch, pull $(MODEL), answer a prompt"
	@echo "make check    format, lint, types, structure, and the tests that need neither torch nor a model: under a minute"
	@echo "make test     install what the tests need and run them (ARGS=... goes to pytest)"
	@echo "make test-slow    what takes longer      make test-soak    the same with more work, before a release"
	@echo "make test-judges  tests whose judge is a package that the development environment cannot hold (tests/judges.txt)"
	@echo "make mutants  changes places of a room at random and prints what its tests do not notice (ROOM=server COUNT=30 SEED=0 SINCE=commit)"
	@echo "make bench-peers  time other engines beside ours and fill the tables in the documents (ONLY=rows WITH=transformers,vllm)"
	@echo "make docs     build the documentation site in build/docs"
	@echo "make setup    make the development environment in $(VENV)"
	@echo "make lint     ruff, clang-format      make types    mypy"
	@echo "make wheel    a manylinux wheel in wheelhouse/      make clean    remove what was built"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A plain installation, as a user makes it. It replaces a development installation in the same environment.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) install --quiet .
	@rm -f $(VENV)/.development
	@touch $@

# Python files are used where they lie; the native module is built again when native/ changes.
$(VENV)/.development: $(NATIVE) constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@rm -f $(VENV)/.installed
	@touch $@

setup: $(VENV)/.development

demo: $(if $(wildcard $(VENV)/.development),setup,$(VENV)/.installed)
	$(BIN)/roofline pull $(MODEL)
	$(BIN)/roofline generate "$(PROMPT)" --model $(MODEL) --max-tokens 48

# The quick loop of a change. The tests that need torch or a model skip themselves or lie in other folders.
CHECK_TESTS := tests/common tests/docs tests/hardware tests/program tests/server
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tools.house
	$(BIN)/python -m mypy
	$(PYTEST) -m "not slow and not e2e" -q $(CHECK_TESTS) $(ARGS)

# The site. Its builder reads docstrings, so it runs where the package and torch are installed.
$(VENV)/.docs: pyproject.toml | setup
	$(PIP) install --quiet $$($(BIN)/python -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

docs: setup $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -n docs build/docs
	@echo "build/docs/index.html"

# Tests start hundreds of Python processes: each compiles the package's modules anew where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

test: setup
	@$(BIN)/roofline pull $(MODEL) || echo "No model: the tests that need $(MODEL) will be skipped."
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup
	$(PYTEST) -m "slow and not soak" $(ARGS)

# With more work what the slow tests do with less: before a release, and after a change of what they check.
test-soak: setup
	$(PYTEST) -m soak $(ARGS)

# Tests whose judge is a package that the development environment cannot hold (tests/judges.py): they have one of their
# own, which sees the development environment's packages behind its own.
JUDGES := build/judges
JUDGED_TESTS := tests/bench/test_quality.py tests/bundle/test_llama_cpp.py \
    tests/bundle/test_llama_cpp_converter.py tests/deploy/kubernetes/test_objects.py tests/deploy/test_files.py \
    tests/server/test_conform_packages.py tests/train/test_loggers.py tests/weights/test_quantised.py
$(JUDGES)/.installed: tests/judges.txt tools/llama_cpp_source.py | setup
	$(PYTHON) -m venv $(JUDGES)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > $$(echo $(JUDGES)/lib/python3.*/site-packages)/zz_development.pth
	$(JUDGES)/bin/pip --disable-pip-version-check install --quiet -r tests/judges.txt
	$(BIN)/python -m tools.llama_cpp_source
	@touch $@

test-judges: setup $(JUDGES)/.installed
	PYTHONPATH=$$(echo $(CURDIR)/$(JUDGES)/lib/python3.*/site-packages) LITELLM_LOCAL_MODEL_COST_MAP=True \
	    ROOFLINE_TEST_JUDGES=1 $(PYTEST) -m "not soak" $(JUDGED_TESTS) $(ARGS)

# A room that is not named is all of the package. SINCE: only the lines that were changed since a commit. ALSO: folders
# of tests for what the room's own do not notice.
ROOM ?=
ALSO ?=
COUNT ?= 30
SEED ?= 0
SINCE ?=
mutants: setup
	$(BIN)/python -m tools.mutants $(ROOM) --count $(COUNT) --seed $(SEED) $(if $(SINCE),--since $(SINCE)) $(ALSO:%=--also %)

# Goes on where an earlier run of the same day stopped. The estimate comes first; the machine should be idle.
bench-peers: setup
	$(BIN)/python -m benchmarks.peers --peers $(PEERS) --adapters $(ADAPTERS) --only "$(ONLY)" --with "$(WITH)" \
	    $(if $(BUNDLE),--bundle $(BUNDLE)) $(if $(OUT),--out $(OUT)) --documents README.md docs/explanation/measured.md

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if [ -x $(BIN)/clang-format ]; then find native include -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror; fi

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@if [ -x $(BIN)/clang-format ]; then find native include -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i; fi

types: setup
	$(BIN)/python -m mypy

# auditwheel refuses a wheel that needs more of the system than its manylinux tag promises.
wheel: setup
	rm -rf dist wheelhouse
	$(BIN)/python -m build --wheel --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir wheelhouse dist/*.whl
	$(BIN)/python -m auditwheel show wheelhouse/*.whl
	@! $(BIN)/python -m zipfile -l wheelhouse/*.whl | grep -v '^roofline/include/roofline\.h ' | grep -E '^(native|tests|src)/|\.(cpp|h)[[:space:]]'

clean:
	rm -rf build dist wheelhouse .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
