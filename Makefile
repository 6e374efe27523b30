# vlmpack's commands. `make` or `make help` lists them.
#
# Every command first creates the virtual environment it needs, in .venv, from the versions pinned in constraints.txt.
#   another Python:           make test PYTHON=python3.12
#   another build of torch:   make test TORCH="torch==2.13.0 --index-url URL"   (any arguments of `pip install`)
#   options of the command:   make test ARGS="-k pack -x"      make demo ARGS="--steps 4"      make bench ARGS="pack collate"

PYTHON ?= python3
TORCH  ?= torch==2.13.0
JOBS   ?= 2
ARGS   ?=

VENV   := .venv
WHEEL  := .venv-wheel
FRESH  := .venv-fresh
PINS   := constraints.txt
BUILD  := pip hatchling editables build
# What the recipes of tinker-cookbook import, beside what tests need.
COOKBOOK := tml-renderers chz blobfile lxml pycryptodomex pyrage cloudpickle tiktoken termcolor math-verify pylatexenc \
  latex2sympy2_extended antlr4-python3-runtime==4.13.2
# No bytecode at installation: most modules are never imported, and Python compiles the others on first import.
PIP    := -m pip --disable-pip-version-check --quiet install --no-compile
# Tests in one file share expensive fixtures (processes, models, results), so one worker runs the whole file.
PYTEST := $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile

# The tests that run with the oldest and the newest supported transformers: every family, each mechanism, calls that
# are passed through, HF Trainer.
CORE := tests/families tests/test_traps.py tests/oracle/test_trainers.py \
  tests/model/test_attach.py tests/model/test_balance.py tests/model/test_delta.py tests/model/test_equality.py \
  tests/model/test_experts.py tests/model/test_passed_on.py tests/model/test_as_plain.py \
  tests/trainer/test_evaluate.py tests/trainer/test_loss.py -m "not dist and not slow"

# Tests start hundreds of processes. Without cached bytecode each would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all mutants gpu bench lint pyright mypy format docs wheel wheel-fresh dist test-oldest test-newest \
  newest constraints clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Train a tiny model on receipts, padded and then packed, and compare (no GPU, no network)
	$(VENV)/bin/vlmpack demo $(ARGS)

test: $(VENV)/.test ## Run the fast tests (minutes): every behavior, on eight model families
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.test ## Run all tests: also the other families, several processes, examples, notebooks (ARGS="-m slow": only these)
	$(PYTEST) $(ARGS)

mutants: $(VENV)/.test ## Break one function at a time and check that tests fail (ARGS="--only window")
	$(VENV)/bin/python tests/mutants -j $(JOBS) $(ARGS)

gpu: ## Test and measure the GPU of this machine with the installed PyTorch and transformers; again: go on
	$(PYTHON) -m benchmarks.gpu --resume $(ARGS)

bench: $(VENV)/.demo ## Measure packed against padded on this machine (ARGS="pack collate", "--check", "--help")
	$(VENV)/bin/python -m benchmarks $(ARGS)

lint: $(VENV)/.dev ## Check style, import layers and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m pip check
	@$(MAKE) --no-print-directory -j 2 pyright mypy

pyright: $(VENV)/.dev
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

mypy: $(VENV)/.dev
	$(VENV)/bin/mypy --python-executable $(VENV)/bin/python --cache-dir $(VENV)/mypy tests/typed_script.py

format: $(VENV)/.dev ## Format the code and fix what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.docs ## Build the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

wheel: dist $(VENV)/.demo ## Build the wheel and the sdist, and try the wheel without extras (packages linked from .venv)
	$(VENV)/bin/python tests/linked_environment.py $(WHEEL) dist/*.whl
	$(WHEEL)/bin/python -I tests/installed_wheel.py

wheel-fresh: dist $(FRESH)/.torch ## The same in an empty environment into which pip installs everything (minutes)
	grep -v "^torch==" $(PINS) > $(FRESH)/pins.txt
	$(FRESH)/bin/python $(PIP) --force-reinstall --no-deps dist/*.whl
	$(FRESH)/bin/python $(PIP) -c $(FRESH)/pins.txt dist/*.whl
	$(FRESH)/bin/python -m pip check
	$(FRESH)/bin/python -I tests/installed_wheel.py

dist: $(VENV)/.torch
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation --outdir dist . > /dev/null

test-oldest: $(VENV)/oldest ## Run the core tests with the oldest supported transformers
	PYTHONPATH=$(CURDIR)/$(VENV)/oldest $(PYTEST) $(CORE) $(ARGS)

test-newest: $(VENV)/.test ## Run them with the newest transformers on PyPI, unless that is the pinned one
	@newest=$$($(VENV)/bin/python -m pip index versions transformers | sed -n 's/^transformers (\(.*\))$$/\1/p'); \
	if grep -qE "^transformers==$$newest( |$$)" $(PINS); \
	then echo "transformers $$newest is the newest release and the pinned one: make test runs these tests"; \
	else $(MAKE) newest && PYTHONPATH=$(CURDIR)/$(VENV)/newest $(PYTEST) $(CORE) $(ARGS); fi

constraints: $(VENV)/.dev ## Write constraints.txt for every supported Python (ARGS=--upgrade: newest versions)
	$(VENV)/bin/python $(PIP) uv
	cp $(PINS) $(VENV)/pins.txt
	printf '%s\n' $(firstword $(TORCH)) $(BUILD) | $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 \
	  --no-header --no-annotate $(addprefix --extra=,dev peers) $(ARGS) pyproject.toml - -o $(VENV)/pins.txt
	{ sed '/^[^#]/,$$d' $(PINS); grep -v -E "^(nvidia|cuda|triton|setuptools)[-=]|== 'pypy'|== 'emscripten'|== 'win32'" $(VENV)/pins.txt; } > $(VENV)/pins.new
	mv $(VENV)/pins.new $(PINS)

clean: ## Delete environments, caches, and what the demo and the examples wrote
	rm -rf $(VENV) $(WHEEL) $(FRESH) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist demo-output results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- environments
# torch is installed first, alone, so that the build named in TORCH stays, whatever the pins say.

# Another PYTHON or TORCH than the environment was created with: create it again.
ifneq ($(origin PYTHON) $(origin TORCH),file file)
$(shell for env in $(VENV) $(FRESH); do [ "$$(cat $$env/.torch 2>&1)" = "$(PYTHON) $(TORCH)" ] || rm -f $$env/.torch; done)
endif

%/.torch:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "vlmpack needs Python 3.10 or newer, and '$(PYTHON)' was not found: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "vlmpack needs Python 3.10 or newer, and '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1): make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot create virtual environments: install its venv package (on Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $*
	$*/bin/python $(PIP) $(TORCH)
	$*/bin/python $(PIP) -c $(PINS) $(BUILD)
	@echo "$(PYTHON) $(TORCH)" > $@

# The pins, with the version of torch that was installed.
$(VENV)/constraints.txt: $(VENV)/.torch $(PINS)
	grep -v "^torch==" $(PINS) > $@
	$(VENV)/bin/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" >> $@

# The extra `dev` includes the others.
$(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.dev: $(VENV)/.%: $(VENV)/constraints.txt pyproject.toml
	$(VENV)/bin/python $(PIP) -c $< --no-build-isolation -e '.[$*]'
	@touch $@ $(if $(filter dev,$*),$(addprefix $(VENV)/.,demo test docs))

# The service is also tested with the oldest client it supports, and with recipes of tinker-cookbook. The newest client is
# in .venv itself.
$(VENV)/.test: | $(VENV)/tinker-0.25.0 $(VENV)/cookbook-0.6.1
$(VENV)/cookbook-0.6.1: | $(VENV)/.torch
	$(VENV)/bin/python $(PIP) --no-deps --ignore-requires-python --target $@ tinker-cookbook==0.6.1 $(COOKBOOK)
$(VENV)/tinker-0.25.0: | $(VENV)/.torch
	$(VENV)/bin/python $(PIP) --no-deps --ignore-requires-python --target $@ tinker==0.25.0

# Another transformers, with its requirements, in a folder that tests put before .venv's own packages.
$(VENV)/oldest: $(VENV)/.test constraints-oldest.txt
	rm -rf $@
	grep -v -E "^(transformers|huggingface-hub)==" $(PINS) | cat - constraints-oldest.txt > $@.txt
	$(VENV)/bin/python $(PIP) -c $@.txt --target $@ transformers
	@touch $@

newest: $(VENV)/.test
	rm -rf $(VENV)/newest
	grep -v -E "^(transformers|huggingface-hub|tokenizers|safetensors)==" $(PINS) > $(VENV)/newest.txt
	$(VENV)/bin/python $(PIP) -c $(VENV)/newest.txt --target $(VENV)/newest --upgrade transformers
