# Every target makes the environment that it needs: Python >= 3.10 with venv, git, make and a C compiler suffice.
#
#   make demo    save, change, reload and reshard real models on 4 ranks (CPU)
#   make test    all tests; PYTEST_ARGS="tests/comm -k timeout" for some
#   make check   format, lint, types, layers; changes nothing
#   make format  what `check` would complain about and ruff can repair
#   make bench   the benchmarks
#   make clean   remove all that make has made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
SOURCES := $(wildcard src tests demo benchmarks)
BENCHMARKS := $(sort $(wildcard benchmarks/bench_*.py) $(wildcard benchmarks/planning.py))

.DELETE_ON_ERROR:
.PHONY: demo test check format bench clean

demo: $(INSTALLED)
	$(BIN)/python demo/run.py

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(INSTALLED)
	$(if $(BENCHMARKS),,@echo "benchmarks/ has no bench_*.py and no planning.py")
	@set -e; for name in $(notdir $(BENCHMARKS:.py=)); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an installation that was interrupted is done again. pip works in place, so a changed
# constraint costs seconds; after another PYTHON, `make clean` first.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is not Python 3.10 or newer; choose one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input \
	  -c constraints.txt -e '.[megatron,bench,test,dev]'
	@touch $@
