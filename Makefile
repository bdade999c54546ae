# FROST: set-up and everyday commands. `make help` lists them.
#
# Variables (environment or command line):
#   FROST_NO_VENV=1   use python3 (or PYTHON) as it is and install nothing
#   PYTHON=python3.x  the interpreter to build .venv with, or to use as it is
#   JOBS=n            pytest workers             PYTEST_ARGS="-k causal"   further pytest arguments
#   TEST_TIMEOUT=s    limit of one test          BENCH_ARGS="..."          arguments of the benchmark

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
NEWEST := $(VENV)/newest-triton
TEST_TIMEOUT ?= 300
PYTEST_ARGS ?=
BENCH_ARGS ?=

# nproc obeys OMP_NUM_THREADS, which says nothing about how many tests may run side by side.
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); \
	echo $$(( n > 4 ? 4 : n )))

# FROST_NO_VENV: anything but empty or 0 switches it on.
NO_VENV := $(filter-out 0,$(FROST_NO_VENV))

ifneq ($(NO_VENV),)

PY := $(or $(PYTHON),python3)
READY :=
# `$(REQUIRE) x y`: one line that names every package that is missing. Nothing is imported, so it takes no time.
REQUIRE = @$(PY) -c 'import sys; from importlib.util import find_spec; \
	missing = [name for name in sys.argv[1:] if find_spec(name) is None]; \
	missing and sys.exit("FROST_NO_VENV: " + sys.executable + " lacks " + ", ".join(missing) + \
		"; install them, or leave FROST_NO_VENV out")' torch networkx msgpack numpy rich typer
# Nothing is installed, so programs outside the root (examples/) find the packages here.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

else

PY := $(VENV)/bin/python
# A driver that answers, or a device node where nvidia-smi is not on the PATH.
FLAVOR := $(shell if { nvidia-smi -L 2>/dev/null | grep -q GPU; } || test -e /dev/nvidia0; then echo gpu; else echo cpu; fi)
# NVRTC compiles without a GPU, so the CUDA templates are compiled and read everywhere.
EXTRAS_cpu := dev,cuda
EXTRAS_gpu := dev,cuda
# Tried in order: a file that can't be satisfied here gives way to the next.
CONSTRAINTS_cpu := constraints/cpu.txt constraints/cpu-pypi.txt
CONSTRAINTS_gpu := constraints/gpu.txt
# The stamp names the flavor: a GPU that comes or goes installs anew.
READY := $(VENV)/.installed-$(FLAVOR)
REQUIRE := @true

endif

.PHONY: help venv demo test test-kernels test-newest lint check bench docs clean

help:
	@echo "make demo    set up .venv and run examples/quickstart.py (seconds)"
	@echo "make test    set up .venv and run the tests (minutes; PYTEST_ARGS picks some)"
	@echo "make test-kernels  compile every row of the tile tables for every card, emulate the sm80 kernels (tens of minutes)"
	@echo "make test-newest   the kernels' tests with the newest Triton's interpreter (minutes)"
	@echo "make lint    ruff and mypy (seconds)"
	@echo "make check   shipped gates match their kernels, docs/support.md matches the capability rows (seconds)"
	@echo "make bench   benchmarks against peers (NVIDIA GPU, minutes)"
	@echo "make docs    regenerate docs/support.md (seconds)"
	@echo "make venv    set up .venv only (minutes, mostly PyTorch's download; the others do it when it is missing)"
	@echo "make clean   remove .venv, caches and build outputs"
	@echo
	@echo "Variables, on the command line or in the environment:"
	@echo "  PYTEST_ARGS=\"-k causal\"  further arguments of pytest"
	@echo "  JOBS=n                   pytest workers (default: one per core, at most 4; here $(JOBS))"
	@echo "  TEST_TIMEOUT=s           limit of one test (default $(TEST_TIMEOUT))"
	@echo "  BENCH_ARGS=\"--help\"      arguments of the benchmark"
	@echo "  PYTHON=python3.x         the interpreter to build .venv with, or to use as it is"
	@echo "  FROST_NO_VENV=1          use python3 (or PYTHON) as it is and install nothing"

venv: $(READY)

# A .venv that runs is updated in place; one that is missing, broken or of another Python is made anew.
# The stamp is written last: an install that stops half-way is repeated.
$(VENV)/.installed-%: pyproject.toml $(wildcard constraints/*.txt)
	@usable='import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))'; \
	if ! $(PY) -c "$$usable" 2>/dev/null || ! $(PY) -m pip --version >/dev/null 2>&1; then \
		found=; \
		for p in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.10 python3); do \
			if "$$p" -c "$$usable" >/dev/null 2>&1; then found=$$p; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "FROST needs Python 3.10 to 3.13 with the venv module; tried:" \
				"$(or $(PYTHON),python3.11 python3.12 python3.13 python3.10 python3)." \
				"Name one with PYTHON=/path/to/python" >&2; \
			exit 1; \
		fi; \
		echo "creating $(VENV) with $$("$$found" --version)"; \
		"$$found" -m venv --clear $(VENV); \
	fi
	@rm -f $(VENV)/.installed-*
	@installed=; \
	for c in $(CONSTRAINTS_$*); do \
		echo "installing FROST[$(EXTRAS_$*)] with $$c"; \
		if $(PY) -m pip install --quiet -c $$c -e '.[$(EXTRAS_$*)]'; then installed=$$c; break; fi; \
		echo "could not install with $$c" >&2; \
	done; \
	test -n "$$installed"
	@touch $@

demo: $(READY)
	$(REQUIRE)
	$(PY) examples/quickstart.py

# One thread per worker: the workers share the cores already. A machine that brings its own packages may
# lack either plugin; the tests don't need them.
test: $(READY)
	$(REQUIRE) pytest hypothesis
	@have() { $(PY) -c "import $$1" 2>/dev/null; }; \
	plugins=; \
	if have xdist; then plugins="-n $(JOBS)"; fi; \
	if have pytest_timeout; then plugins="$$plugins --timeout=$(TEST_TIMEOUT)"; fi; \
	set -x; \
	OMP_NUM_THREADS=1 $(PY) -m pytest $$plugins $(SELECT) $(PYTEST_ARGS)

# Registers, spills and shared memory of every kernel that ships, for every card it ships for, and the sm80 kernels' source run
# on emulated instructions: no GPU is needed, but more time than one waits for after every change.
test-kernels: SELECT := -q -m tables tests/unit
test-kernels: TEST_TIMEOUT := 1200
test-kernels: test

# The kernels' own tests once more, interpreted by the newest Triton that the package index has: beside the pinned one, so
# that a release which breaks them is seen before users see it.
test-newest: $(READY)
	$(REQUIRE) pytest
	rm -rf $(NEWEST)
	$(PY) -m pip install --quiet --no-deps --target $(NEWEST) triton
	export PYTHONPATH=$(CURDIR)/$(NEWEST):$(CURDIR); \
	$(PY) -c 'import triton; print("newest Triton:", triton.__version__)'; \
	plugins=; \
	if $(PY) -c "import xdist" 2>/dev/null; then plugins="-n $(JOBS)"; fi; \
	OMP_NUM_THREADS=1 $(PY) -m pytest $$plugins -q tests/numerics -k triton $(PYTEST_ARGS)

lint: $(READY)
	$(REQUIRE) ruff mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

check: $(READY)
	$(REQUIRE)
	$(PY) -m frost gate check
	$(PY) -m tools.support_matrix --check

bench: $(READY)
	$(REQUIRE)
	$(PY) -m tools.bench $(BENCH_ARGS)

docs: $(READY)
	$(REQUIRE)
	$(PY) -m tools.support_matrix

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .frost_routing
	find descriptors engines frost tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +
