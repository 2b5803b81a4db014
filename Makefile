# make demo | test | lint | bench | clean
#
# Needs make and Python 3.11 or later, nothing else. Each target makes .venv and installs what it
# needs, once: the stamp files say what is there, and are older than their sources when it no longer
# is. Calls may run at the same time: tools/environment.py holds a lock.
#
#   make test ARGS="-x tests/test_address.py"     arguments for pytest
#   make demo ARGS="--steps 3"                    arguments for the demo
#   make bench ARGS=latency                       one benchmark only
#   make test PYTHON=/usr/bin/python3.12          another interpreter

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean
.SUFFIXES:
# The files of a fresh clone are as good as they get: no rules to make them.
MAKEFLAGS += --no-builtin-rules

PYTHON ?=
ARGS ?=
BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt tools/environment.py

help:
	@sed -n '1,11s/^# \{0,1\}//p' Makefile

demo: .venv/stamp-demo
	$(BIN)/python -m aiocomm demo $(ARGS)

test: .venv/stamp-test
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests tools

bench: .venv/stamp-bench
	$(BIN)/python -m benchmarks $(ARGS)

.venv/stamp-%: $(SOURCES)
	@for python in $(PYTHON) python3.11 python3; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        exec "$$python" tools/environment.py $*; \
	    fi; \
	done; \
	echo "No Python 3.11 or later found as python3.11 or python3." \
	    "Install it, or name one: make PYTHON=/path/to/python" >&2; \
	exit 1

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
