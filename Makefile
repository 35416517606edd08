# Two commands do everything: make course, make test. Both set up .venv first, which is quick when nothing changed.
# Needed: Python 3.11 or newer, make, git.

PYTHON ?= python3 python3.13 python3.12 python3.11 python
PORT ?= 8888
ONLY ?=
ARGS ?=
RUN := .venv/bin/python -m

.DEFAULT_GOAL := help
.PHONY: help setup course notebooks test test-all check format bench clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: ## set up .venv with the tested versions (the other targets do this themselves)
	@for python in $(PYTHON); do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    exec "$$python" course/install.py; \
	done; \
	echo "Found no Python 3.11 or newer among: $(PYTHON)."; \
	echo "Install one (python.org, your system's packages, conda), or name it: make PYTHON=/path/to/python3.12 ..."; \
	exit 1

course: setup ## open the course in JupyterLab (PORT=8888)
	@$(RUN) course build
	@$(RUN) course workspace
	@PORT=$(PORT) $(RUN) course open

notebooks: setup ## build course/*.ipynb from course/src/*.py
	@$(RUN) course build

test: check ## the checks and the quick tests (ARGS= goes to pytest)
	$(RUN) pytest -m "not slow" --durations=15 $(ARGS)

test-all: check ## the checks and every test (ARGS= goes to pytest)
	$(RUN) pytest --durations=30 $(ARGS)

check: setup ## format, lint, types, import arrows, notebooks up to date
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) pyright
	.venv/bin/lint-imports
	$(RUN) course build --check

format: setup ## format the code and fix what the linter can
	$(RUN) ruff check --fix-only .
	$(RUN) ruff format .

bench: setup ## the benchmarks, ours against torch's (ONLY=name)
	$(RUN) benchmarks $(if $(ONLY),--only $(ONLY))

clean: ## remove .venv, caches and build outputs; workspace/ is kept
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -e workspace ]; then echo "workspace/ holds your work and was kept."; fi
