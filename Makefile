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

.PHONY: help demo test coverage mutants check bench bench-short chaos gpu examples versions screenshots docs wheel pins clean

help:
	@echo "make demo      search a convnet, then train the winner while workers are killed and stopped"
	@echo "make test      the tests (some minutes)"
	@echo "make coverage  the same, and which lines they ran"
	@echo "make mutants   break the lines that decide, one at a time: do the fast tests notice? (an hour)"
	@echo "make check     format, lint, types, import contracts, the documents"
	@echo "make docs      the documents as a site, in build/site"
	@echo "make wheel     dist/elastix-VERSION-py3-none-any.whl, for pip install elsewhere"
	@echo "make chaos     the long failure tests"
	@echo "make bench     the benchmarks, beside torch DDP, torchft and Ray Train"
	@echo "make gpu       tests and measurements that need one GPU; without one the tests are skipped and the measurements refused"
	@echo "make examples  every example, as CI runs them"
	@echo "make versions  the fast tests with other Pythons, torch and Ray, each in an environment of its own"
	@echo "make screenshots  the report, light and dark, wide and narrow (needs chromium)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "elastix needs Python 3.11 or newer; try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
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

examples: $(READY)
	set -e; for script in examples/*.py; do echo "== $$script"; $(BIN)/python $$script; done
	mkdir -p build
	$(BIN)/jupyter-execute --output $(abspath build)/notebook.ipynb examples/notebook.ipynb
	$(BIN)/python -c 'import json; cells = json.load(open("build/notebook.ipynb"))["cells"]; \
		fits = [one["outputs"] for one in cells if ".fit()" in "".join(one["source"])]; \
		assert [len(shown) for shown in fits] == [1], "a fit is one display, not " + str(fits)'

screenshots: $(READY)
	$(BIN)/python -m tests.screenshots build/screenshots
	$(BIN)/python -m tests.screenshots build/screenshots --readme

chaos: $(READY)
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest tests/chaos -m "not slow"

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.overhead --out benchmarks/results/overhead.json
	$(BIN)/python -m benchmarks.recovery --out benchmarks/results/recovery.json
	$(BIN)/python -m benchmarks.goodput --out benchmarks/results/goodput.json
	$(BIN)/python -m benchmarks.checkpoint --out benchmarks/results/checkpoint.json
	$(BIN)/python -m benchmarks.store --out benchmarks/results/store.json
	$(BIN)/python -m benchmarks.search --out benchmarks/results/search.json
	$(BIN)/python -m benchmarks.executor --out benchmarks/results/executor.json
	$(BIN)/python -m benchmarks.executor --out benchmarks/results/executor_waiting.json --waiting 1000 10000 100000
	$(BIN)/python -m benchmarks.packing --out benchmarks/results/packing.json
	$(BIN)/python -m benchmarks.inherit --out benchmarks/results/inherit.json
	$(BIN)/python -m benchmarks.ensemble --out benchmarks/results/ensemble.json
	$(BIN)/python -m benchmarks.data --out benchmarks/results/data.json
	$(BIN)/python -m benchmarks.formats --out benchmarks/results/formats.json
	$(BIN)/python -m benchmarks.rehearsal --out benchmarks/results/rehearsal.json
	$(BIN)/python -m benchmarks.estimate --out benchmarks/results/estimate.json
	$(BIN)/python -m benchmarks.install --out benchmarks/results/install.json
	$(BIN)/python -m benchmarks.startup --out benchmarks/results/startup.json
	$(BIN)/python -m benchmarks.exact --out benchmarks/results/exact.json
	$(BIN)/python -m benchmarks.adapters --out benchmarks/results/adapters.json
	$(BIN)/python -m benchmarks.prediction --out benchmarks/results/prediction.json
	$(BIN)/python -m benchmarks.size --out benchmarks/results/size.json
	$(BIN)/python -m benchmarks.endurance --out benchmarks/results/endurance.json
	$(BIN)/python -m benchmarks.crews --out benchmarks/results/crews.json
	$(BIN)/python -m benchmarks.table --update

# Where there is a CUDA device. CI has none. With another Python's packages: make gpu READY= BIN=/usr/bin
gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu -n 6 --dist worksteal
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu.json
	$(BIN)/python -m benchmarks.table --update

# Not a part of bench: it fetches gigabytes, and takes ten minutes for each row.
versions: $(READY)
	$(BIN)/python -m benchmarks.versions --out benchmarks/results/versions.json
	$(BIN)/python -m benchmarks.table --update

bench-short: $(READY)
	$(BIN)/python -m benchmarks.overhead --rounds 4 --steps 3 --out build/overhead.json
	$(BIN)/python -m benchmarks.recovery --repeats 1 --systems elastix --out build/recovery.json
	$(BIN)/python -m benchmarks.exact --rounds 2 --steps 3 --schedules 2 --flips 2 --faults 2 --kills 1 --out build/exact.json \
		--parts byte_equal flips guard all_killed cost_mlp cost_convnet stall pace shares shadow dcp
	$(BIN)/python -m benchmarks.endurance --seconds 40 --harms 10 --out build/endurance.json
	$(BIN)/python -m benchmarks.size --parts store campaign workers --models 1000 3000 --trials 100 400 --workers 6 \
		--seconds 3 --out build/size.json

pins: $(READY)
	@{ head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
		| sed 's/+cpu$$//' | grep -v '^-e '; } > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
