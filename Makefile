# Each target makes .venv and installs what it needs by itself; a second run starts at once.

SHELL  := /bin/bash
# Another release of torch has a venv of its own: make test TORCH=2.14.1
TORCH  :=
VENV   := .venv$(TORCH:%=-torch%)
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo
READY  := $(or $(wildcard $(STAMP)),$(DEMO))
# The first interpreter that runs, has venv (a pyenv shim may be there and not run) and is new enough for
# what constraints.txt pins.
FIND_PYTHON = for p in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11, 5))' 2>/dev/null; \
	then echo $$p; break; fi; done

# Each process of the tests imports torch and dcpc: compiled once, not every time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help tour demo demo-video installed test smoke test-exact test-slow test-processors zoo gpu gpu-stub fuzz lint docs release clean
.DEFAULT_GOAL := help

help:  ## prints this
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: $(READY)  ## trains on text over two ranks, and races baselines
	$(PY) -m examples.demo

tour: $(READY)  ## three minutes: lengths, a plan, a race, equal numbers
	$(PY) -m examples.tour

demo-video: $(STAMP)  ## trains on images and clips
	$(PY) -m examples.demo_video $(if $(CODEC),--codec $(CODEC))

# Ruff and mypy run inside pytest (tests/test_style.py), with the pinned torch alone. A process a core,
# each with one thread: many tests wait for ranks.
TESTS :=
test: $(STAMP)  ## ruff, mypy and the quick tests; TORCH=2.14.1: those of that release
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n auto --maxprocesses 4 --dist worksteal \
		$(TORCH:%=--ignore=tests/test_style.py) $(TESTS)

# What tells soonest whether a release of torch does: docs/torch-versions.md.
smoke:  ## the tests that tell most of a release: TORCH=2.14.1
	$(MAKE) --no-print-directory zoo
	$(MAKE) --no-print-directory test TESTS="tests/test_tiny.py tests/fx/torch_api tests/trace \
		tests/passes/placement tests/codegen tests/runtime/checkpoint"

# The slow tests that hold numbers: the zoo over ranks, all modes, Inductor. Which slow ones are left
# out, and why, is in tests/conftest.py.
test-exact: $(STAMP)  ## the slow tests that hold numbers
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow and not by_hand" -n auto --maxprocesses 2 --dist worksteal

# The named models of transformers and diffusers against the plain ones; exit 1 where one differs.
zoo: $(STAMP)  ## named models of two libraries against the plain ones
	$(PY) -m benchmarks.zoo --quick

# At most 11 minutes: docs/results/gpu.md. No venv is made where the system's torch has a GPU and is 2.11 or newer.
GPU_PYTHON := python3
HAS_GPU = import sys, torch; v = torch.__version__.split(".")[:2]; \
	sys.exit(not torch.cuda.is_available() or [*map(int, v)] < [2, 11])
gpu:  ## kernels, gradients, peaks and seconds on this machine's GPU
	@python=$(GPU_PYTHON); $$python -c '$(HAS_GPU)' 2>/dev/null || \
		{ $(MAKE) --no-print-directory $(STAMP) && python=$(PY); }; \
	exec $$python -m benchmarks.gpu_checks --json build/gpu.json $(ARGS)

# Needs a CUDA build of torch, some GB: tests/gpu_stub/README.md.
GPU_STUB_PYTHON :=
gpu-stub: $(STAMP)  ## code for a GPU without one: TORCH=2.14.1, or GPU_STUB_PYTHON=/path/to/python
	GPU_STUB_PYTHON=$(or $(GPU_STUB_PYTHON),$(PY)) OMP_NUM_THREADS=1 $(PY) -m pytest tests/gpu_stub

# Everything that is slow.
test-slow: $(STAMP)  ## everything that is slow: hours
	$(PY) -m pytest -m slow

# The folders whose figures depend on kernels of the processor, as far as settings have this one play
# others. torch fails in half precision with ATEN_CPU_CAPABILITY=avx2 alone where there is AMX.
PROCESSORS := ONEDNN_MAX_CPU_ISA=AVX2,ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX512_CORE \
	MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 OMP_NUM_THREADS=4
test-processors: $(STAMP)  ## memory, attention, ops and the zoo as on other processors and with 2 and 4 threads
	for settings in $(PROCESSORS); do echo $$settings; env OMP_NUM_THREADS=1 $${settings/,/ } $(PY) -m pytest -q \
		-m "not slow" tests/symbolic_profile tests/ops tests/verify && \
		env OMP_NUM_THREADS=1 $${settings/,/ } $(PY) -m benchmarks.zoo --quick || exit 1; done

# Fresh random training runs, a fifth of the time, and programs against the plain model; what fails is
# shrunk, and a program is written to tests/fuzz/cases.
SECONDS := 600
fuzz: $(STAMP)  ## random programs and training runs, for SECONDS=600
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz.run --seconds $(SECONDS)

lint: $(STAMP)  ## ruff and mypy alone
	$(PY) -m ruff check
	$(PY) -m mypy

# The documents as a site in build/site, which needs no network to be read; fails on a link that leads nowhere.
docs: $(STAMP)  ## the documents as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "open build/site/index.html; with search: $(PY) -m http.server -d build/site"

# A wheel of the commit that is checked out, tried in a venv of its own; publishes nothing.
release: $(STAMP)  ## builds and tries the wheel of this version
	.ci/release $(PY)

installed: $(STAMP)  ## the venv alone, as each target makes it

# torch goes first and alone: so pip takes the CPU build where one lies at hand, and no CUDA packages.
# -qq: errors alone; of each package pip may warn of places where it found none.
PIP = $(PY) -m pip install -qq --disable-pip-version-check -c $(VENV)/constraints.txt
$(DEMO): pyproject.toml constraints.txt
	@test -x $(PY) || { python=$$($(FIND_PYTHON)); \
		test -n "$$python" || { echo "needs Python 3.11.5 or newer with venv: make PYTHON=/path/to/python" >&2; exit 1; }; \
		"$$python" -m venv $(VENV); }
	@sed -e '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	@echo "installs torch into $(VENV), the first time: some minutes, by the network"
	$(PIP) torch
	@echo "installs dcpc, with matplotlib for the demo's plots"
	$(PIP) -e '.[plots]'
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory $(DEMO)
	@echo "installs what the tests need, transformers and diffusers among it: a minute or more"
	$(PIP) -e '.[test]'
	@touch $@

clean:  ## removes the venvs, build and caches
	rm -rf .venv .venv-torch* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
