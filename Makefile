# Every target sets up what it needs on a fresh machine: a virtual environment in .venv with the package (editable) and all
# developer tools, at the versions in constraints.txt. When nothing changed, the set-up costs a few hundredths of a second.
#
#   make demo                         make test ARGS='-k conv2d -x'
#   make check                        make setup PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test fuzz sanitize gpu-check check format clean distclean rebuild

# The stamp is written last and holds the path of this checkout. So a set-up that was interrupted (no stamp), a checkout that
# was moved or copied (another path: its environment would import the old place) and an environment whose interpreter has
# vanished all count as "not set up", and are rebuilt from nothing.
SOUND := $(shell test "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" && $(BIN)/python -c '' 2>/dev/null && echo yes)
ifneq ($(SOUND),yes)
$(STAMP): rebuild
endif

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create or refresh .venv
	@:

demo: $(STAMP) ## train a small network in float and in int8, side by side, and make a page of it (under two minutes)
	$(BIN)/byteback train --config configs/demo.toml $(ARGS)

# One process per core: most tests are small and run in one thread. Threads that wait must sleep, or the processes slow each other
# down; a file stays in one process, which shares what its fixtures make. ARGS='-n0 --pdb' runs all in one process.
test: $(STAMP) ## unit tests and docstring examples; more by ARGS='-m slow' or ARGS='-m convergence'
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

fuzz: $(STAMP) ## 10,000 drawn cases of every operator against an oracle; ARGS='--seed 7 --cases 500' draws others
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

sanitize: $(STAMP) ## kernel and block tests under ASan and UBSan, kernels in many threads under TSan (a quarter of an hour)
	PYTHONPATH=tests $(BIN)/python -m sanitize $(ARGS)

gpu-check: $(STAMP) ## kernels of GPUs, without a GPU: compiled for every target, and run in Triton's interpreter (some minutes)
	PYTHONPATH=tests $(BIN)/python -m gpu_check $(ARGS)

CPP := $(shell find csrc tests/sanitize \( -name '*.h' -o -name '*.cpp' \))

# The same tools with the same settings (pyproject.toml) as .pre-commit-config.yaml, over the whole tree.
check: $(STAMP) ## lint, formatting, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	@echo "$(BIN)/clang-format --dry-run --Werror ($(words $(CPP)) files of csrc and tests/sanitize)"
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(STAMP) ## lay out Python and C++, and repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

clean: ## remove caches and build products
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage htmlcov
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## clean, and remove .venv too
	rm -rf $(VENV)

rebuild:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "make: '$(PYTHON)' was not found. Byteback needs Python 3.10 or newer: install it, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1), but Byteback needs 3.10 or newer. Name another one: make setup PYTHON=python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' has no venv module, so $(VENV) cannot be created. Install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Creating $(VENV) (a few minutes the first time: it installs torch)"
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV)

# The stamp goes first and comes back last: an update that is cut short leaves none, and the next make starts from nothing. It
# keeps the time at which the installation began, so that a file edited meanwhile is still newer.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc -type f)
	@rm -f $(STAMP)
	@echo "Installing byteback and its developer tools into $(VENV)"
	@echo "$(CURDIR)" > $(STAMP).begun
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@mv $(STAMP).begun $(STAMP)
