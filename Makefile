# Every target makes the virtual environment by itself: `make demo`, `make test`, `make check`.
# PYTHON is the interpreter to start from; VENV where the environment goes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
# Python keeps what it compiles: tests start hundreds of processes that import elastix.
export PYTHONDONTWRITEBYTECODE =
# So pip need not compile 28,000 files of packages, most of which nothing here imports.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: help demo test coverage mutants check bench bench-counts bench-short endurance chaos gpu examples versions screenshots docs wheel pins clean \
	$(wildcard examples/*.py) examples/notebook.ipynb

help:
	@echo "make demo      search a convnet, then train the winner while workers are killed and stopped"
	@echo "make test      the tests (some minutes)"
	@echo "make coverage  the same, and which lines they ran"
	@echo "make mutants   break the lines that decide, one at a time: do the fast tests notice? (an hour)"
	@echo "make check     format, lint, types, import contracts, the documents"
	@echo "make docs      the documents as a site, in build/site"
	@echo "make wheel     dist/elastix-VERSION-py3-none-any.whl, for pip install elsewhere"
	@echo "make chaos     the long failure tests"
	@echo "make bench     what is timed, beside torch DDP, torchft and Ray Train (95 minutes, on a quiet machine)"
	@echo "make bench-counts  what is counted or follows from a seed (four hours, beside other work; it can be stopped)"
	@echo "make endurance a run under fire for half an hour, on a quiet machine"
	@echo "make gpu       tests and measurements that need one GPU; without one the tests are skipped and the measurements refused"
	@echo "make examples  every example, as CI runs them"
	@echo "make versions  the fast tests with other Pythons, torch and Ray, each in an environment of its own"
	@echo "make screenshots  the report, light and dark, wide and narrow (needs chromium)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "elastix needs Python 3.11 or newer; try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[dev,docs]'
	@touch $@

demo: $(READY)
	$(BIN)/python examples/search_then_train.py

# Four at once on two cores: many tests wait for other processes.
AT_ONCE ?= 4
test: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n $(AT_ONCE) --dist worksteal

coverage: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal --cov --cov-report=term

mutants: $(READY)
	$(BIN)/python -m tests.mutants --number 300

check: $(READY) docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# Strict: a broken link, a page outside the navigation, or a name that the API page cannot find fails.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# By way of the sdist, so that nothing of an older build gets into it.
wheel: $(READY)
	$(BIN)/python -m build --outdir dist .

# One target each, so that `make --jobs=2` runs two at once. Where RAY_ADDRESS names a Ray, they use
# it; those in which a campaign or a run of ours starts Ray by itself start one also then.
EXAMPLES := $(sort $(wildcard examples/*.py))
OWN_RAY := $(addprefix examples/,search.py survive_a_kill.py)
examples: $(EXAMPLES) examples/notebook.ipynb
$(EXAMPLES): $(READY)
	@echo "== $@"
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT \
		&& env $(if $(filter $@,$(OWN_RAY)),--unset=RAY_ADDRESS) TMPDIR=$$folder $(BIN)/python $@
examples/notebook.ipynb: $(READY)
	mkdir -p build
	$(BIN)/jupyter-execute --output $(abspath build)/notebook.ipynb $@
	$(BIN)/python -c 'import json; cells = json.load(open("build/notebook.ipynb"))["cells"]; \
		fits = [one["outputs"] for one in cells if ".fit()" in "".join(one["source"])]; \
		assert [len(shown) for shown in fits] == [1], "a fit is one display, not " + str(fits)'

screenshots: $(READY)
	$(BIN)/python -m tests.screenshots build/screenshots
	$(BIN)/python -m tests.screenshots build/screenshots --readme

chaos: $(READY)
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest tests/chaos -m "not slow"

# What runs, and how long it takes: .venv/bin/python -m benchmarks --list. make bench ONLY="exact crews" takes some.
bench: TARGET := timed
bench-counts: TARGET := counted
endurance: TARGET := endurance
bench bench-counts endurance: $(READY)
	$(PIP_INSTALL) -e '.[bench]'
	$(BIN)/python -m benchmarks $(TARGET) $(if $(ONLY),--only $(ONLY))

bench-short: $(READY)
	env --unset=RAY_ADDRESS $(BIN)/python -m benchmarks short $(if $(ONLY),--only $(ONLY))

# Where there is a CUDA device. CI has none. With another Python's packages: make gpu READY= BIN=/usr/bin
gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu -n 6 --dist worksteal
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu.json
	$(BIN)/python -m benchmarks.table --update

# Not a part of bench: it fetches gigabytes, and takes ten minutes for each row.
versions: $(READY)
	$(BIN)/python -m benchmarks.versions --out benchmarks/results/versions.json
	$(BIN)/python -m benchmarks.table --update

pins: $(READY)
	@{ head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
		| sed 's/+cpu$$//' | grep -v '^-e '; } > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
