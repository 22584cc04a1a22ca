# Everything here sets up .venv by itself: `make quickstart` works in a fresh clone.
#   PYTHON=python3.12 make test      another interpreter
#   TORCH='torch==2.12.0' make setup another torch than constraints.txt pins (a ROCm build, say)
#   UV= make setup                   pip installs, as it does where uv cannot be had

PYTHON ?= python3
TORCH ?= $(shell grep ^torch== constraints.txt)
TRITON ?= $(shell grep ^triton constraints.txt)
NUMPY ?= $(shell grep ^numpy== constraints.txt)
UV ?= uv
VENV = .venv

BIN = $(VENV)/bin
STAMP := $(VENV)/.installed
# Nothing is compiled that nobody imports: Python keeps what it compiles at the first import.
export PYTHONDONTWRITEBYTECODE :=
# Twice quiet: errors only.
PIP = $(BIN)/python -m pip install -qq --no-input --no-compile --disable-pip-version-check
UV_PIP = $(BIN)/uv pip install -q --python $(BIN)/python
# pip installs torch where it is configured for a machine's own builds, which uv does not know.
TORCH_BY := pip
INSTALL_TORCH = --no-build-isolation torch -e . -c $(VENV)/constraints.txt
# Examples of hypothesis are the same ones each time, too.
PYTEST = $(BIN)/python -m pytest -q --durations=10 -n $(WORKERS) --dist loadfile \
  --no-loadscope-reorder --hypothesis-profile=ci
# Tests that every commit runs, by their marks, and how many there are at least.
QUICK = -m "not slow and not chaos and not exhaustive and not gpu"
LONG = -m "(slow or chaos) and not exhaustive and not gpu"
QUICK_LEAST = --least quick=2400
LONG_LEAST = --least slow=15 --least chaos=22 --least browser=3 --least prometheus=1 --least tc=3
# Files of tests that run at a time; 0 runs them in pytest itself.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup lock quickstart autoscaling multihost test oldest lint format chaos exhaustive campaign soak fuzz mutants audit screenshots docs gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## install ringray and its tools into .venv

# The stamp is written last, so a half-finished installation does not count.
$(STAMP): pyproject.toml constraints.txt requirements.lock tests/plugins/requirements.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no '$(PYTHON)' here; install Python 3.11, 3.12 or 3.13," \
	       "or name yours: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1), ringray needs Python 3.11, 3.12" \
	       "or 3.13; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	@echo "Installing ringray into $(VENV) ($(TORCH)); the first time takes a minute or two."
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > $(VENV)/uv.txt
	@sed '/^uv==/,/[^\\]$$/d' requirements.lock > $(VENV)/without-uv.txt
	@{ test -n "$(UV)" && $(PIP) --require-hashes -r $(VENV)/uv.txt && \
	    $(UV_PIP) --require-hashes -r requirements.lock; } || { \
	  echo "make: installing with pip instead of uv, which takes longer"; \
	  $(PIP) --require-hashes -r $(VENV)/without-uv.txt; }
	@$(PIP) --no-deps --require-hashes -r tests/plugins/requirements.txt
# torch and triton have no hashes in the lock, as their builds differ by platform; an older torch
# takes an older setuptools.
	@{ grep -v -E '^(torch|triton|numpy|setuptools)[=<]' constraints.txt; \
	  printf '%s\n' '$(TORCH)' '$(TRITON)' '$(NUMPY)'; } > $(VENV)/constraints.txt
	@{ test $(TORCH_BY) = uv && $(UV_PIP) $(INSTALL_TORCH); } || $(PIP) $(INSTALL_TORCH)
	@touch $@

lock: $(STAMP) ## write requirements.lock, the hashes of what constraints.txt pins
	@$(BIN)/uv pip compile -q --universal --python-version 3.11.5 --generate-hashes \
	  --no-annotate --no-header --no-emit-package torch --no-emit-package triton \
	  --extra dev -c constraints.txt pyproject.toml > $(VENV)/lock.txt
# CUDA's libraries come with torch; what holds for each supported platform need not be said.
	@sed -E -e '/^(cuda|nvidia)-[^m]/,/[^\\]$$/d' \
	  -e "s/ ; python_full_version < '3.14' and sys_platform == 'linux' / /" \
	  $(VENV)/lock.txt > requirements.lock

quickstart: $(STAMP) ## measure real rings on this machine, in four partitions
	@$(BIN)/python -m ringray run experiments/quickstart.yaml

autoscaling: $(STAMP) ## measure rings on a cluster that grows and shrinks on this machine
	@$(BIN)/python cluster/local.py --until-empty -- \
	  $(BIN)/python -m ringray run experiments/autoscaling.yaml

# Needs root, ip and tc.
multihost: $(STAMP) ## measure rings over four hosts with shaped links on this machine
	@$(BIN)/python experiments/multihost.py

test: $(STAMP) ## run the quick tests
	@$(PYTEST) tests $(QUICK) $(QUICK_LEAST)

# The least that pyproject.toml asks for, as GPU images have it. Triton's interpreter of that time
# knows no numpy after 2.3.
OLDEST = $(shell sed -n 's/^ *"$(1)>=\([0-9.]*\)[;"].*/$(1)==\1.*/p' pyproject.toml)
OLDEST_TESTS := tests/attention tests/kernels/test_compiled.py tests/kernels/test_hopper.py \
  tests/kernels/test_triton.py tests/kernels/test_vendors.py tests/contracts/test_backends.py \
  --deselect 'tests/attention/test_ring_attention.py::test_rings[3]'
oldest: VENV = .venv-oldest
oldest: ## test the kernels and the op with the oldest torch and triton, in .venv-oldest
	@$(MAKE) --no-print-directory VENV=$(VENV) TORCH_BY=uv \
	  TORCH='$(call OLDEST,torch)' TRITON='$(call OLDEST,triton)' NUMPY='numpy==2.3.*' setup
	@$(PYTEST) $(OLDEST_TESTS) $(QUICK) --least quick=330

chaos: $(STAMP) ## run the slow tests and those that kill processes
	@$(PYTEST) tests $(LONG) $(LONG_LEAST)

exhaustive: $(STAMP) ## run what is too long for every commit (hours)
	@$(PYTEST) tests -m "exhaustive and not gpu"

#   SEED=7 make campaign      the faults of that seed again
campaign: $(STAMP) ## break real sweeps 200 times at random moments (about an hour)
	@$(BIN)/python -m tests.chaos.campaign --faults 200 $(if $(SEED),--seed $(SEED))

soak: $(STAMP) ## measure 5,000 trials and see that nothing grows
	@$(BIN)/python -m tests.chaos.soak --trials 5000

#   SEED=7 make fuzz          other specs
fuzz: $(STAMP) ## load and plan 10,000 generated specs (two minutes of CPU time)
	@$(BIN)/python -m tests.fuzz.runner $(or $(SEED),20261121) 0-9999

#   ONLY=ring- make mutants      those whose names contain it; QUICK=1 those that CI takes
mutants: $(STAMP) ## change the product in small wrong ways and see that tests fail
	@$(BIN)/python -m tests.mutants $(if $(ONLY),--only '$(ONLY)') $(if $(QUICK),--quick)

# Asks a service on the internet, so that neither lint nor CI wait for it. A finding that stays gets
# --ignore-vuln=ID here, with the reason in a comment.
audit: $(STAMP) ## look for known vulnerabilities of what constraints.txt pins
	@grep == constraints.txt > $(VENV)/pinned.txt
	@$(BIN)/pip-audit --strict --no-deps --disable-pip -r $(VENV)/pinned.txt

# Needs a Chromium that is installed; none is downloaded.
screenshots: $(STAMP) ## draw MLflow's pages, a report and pages of the site into docs/images
	@$(BIN)/python -m tests.browser.screenshots

# Broken links end it. Needs no network; the pages open from the disk, too.
docs: $(STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/mkdocs.yml
	@echo "open site/index.html"

# Goes on where GPU_RESULTS ends. Needs torch, triton, numpy, pytest, pytest-timeout and
# pytest-xdist; takes PYTHON where there is no .venv.
#   make gpu GPU_SECONDS=240      in less time
GPU_SECONDS ?= 530
GPU_RESULTS ?= gpu.jsonl
gpu: ## measure and test the kernels on a GPU, in nine minutes
	@PYTHONPATH=.:kernels $(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) \
	  -m ringray_kernels.bench --first-light --resume $(GPU_RESULTS) \
	  --minutes $$(awk 'BEGIN {print $(GPU_SECONDS) / 60}')

lint: $(STAMP) ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --explicit-package-bases cluster/*.py experiments/*.py
	@MYPYPATH=experiments/paper $(BIN)/mypy experiments/paper/*.py
	@$(BIN)/mypy experiments/published/*.py
	@MYPYPATH=experiments/measured:experiments/published $(BIN)/mypy experiments/measured/*.py
	@MYPYPATH=docs/hooks $(BIN)/mypy docs/hooks/*.py

format: $(STAMP) ## apply the style
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

clean: ## remove .venv, caches and build outputs
	@rm -rf .venv .venv-oldest build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@rm -rf -- *.egg-info
