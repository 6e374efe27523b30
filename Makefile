# vlmpack: everything a newcomer or a machine types.
#
#   make demo    train a tiny Qwen3-VL on receipts, padded and packed in turn, and compare the two
#   make test    run the tests: every behavior once
#   make bench   measure vlmpack against what it replaces
#   make help    the rest
#
# Each target makes its own virtual environment in .venv first, from the versions pinned in constraints.txt.
# Another interpreter:     make test PYTHON=python3.12
# Another build of torch:  make test TORCH="torch==2.13.0 --index-url URL"   (anything `pip install` takes)
# Options for the command: make test ARGS="-k pack -x"      make demo ARGS="--steps 4"      make bench ARGS="pack collate"

PYTHON ?= python3
TORCH  ?= torch==2.13.0
JOBS   ?= 2
ARGS   ?=

VENV   := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
WHEEL  := .venv-wheel
FRESH  := .venv-fresh
PINS   := constraints.txt
BUILD  := pip hatchling editables build
PIP    := -m pip --disable-pip-version-check --quiet
# Tests of one file share what takes long to make: processes, models, results.
PYTEST := -n $(JOBS) --dist loadfile

# What meets transformers, and must work with the oldest that we support and the newest: every family, each mechanism,
# calls that are passed on, HF Trainer.
CORE_STEP    := $(addprefix tests/model/test_,attach.py balance.py delta.py equality.py experts.py passed_on.py \
                stock.py)
CORE_TRAINER := $(addprefix tests/trainer/test_,end_to_end.py evaluate.py loss.py)
CORE_TESTS   := tests/families $(CORE_STEP) $(CORE_TRAINER) tests/test_traps.py -m "not dist and not slow"

# Tests start hundreds of processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all mutants bench lint format docs wheel wheel-fresh dist test-oldest test-newest constraints clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Train on receipts, padded and packed in turn; a table and a picture (no GPU, no network)
	$(VENV)/bin/vlmpack demo $(ARGS)

test: $(VENV)/.test ## Run the tests: every behavior once, eight families that have every mechanism, within minutes
	$(VENV)/bin/python -m pytest $(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.test ## Run all tests: every other family too, processes, kills, examples, notebooks (ARGS="-m slow": those alone)
	$(VENV)/bin/python -m pytest $(PYTEST) $(ARGS)

mutants: $(VENV)/.test ## Break one function of the maths at a time and see that the tests fail (ARGS="--only expert")
	$(VENV)/bin/python tests/mutants -j $(JOBS) $(ARGS)

bench: $(VENV)/.demo ## Measure packed against padded on this machine (ARGS="pack collate", "gpu", "report a.json b.json", "--help")
	$(VENV)/bin/python -m benchmarks $(ARGS)

lint: $(VENV)/.dev ## Check style, types (a user's script too), who imports whom, and versions of extras
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/mypy --python-executable $(VENV)/bin/python --cache-dir $(VENV)/mypy tests/typed_script.py
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m pip check

format: $(VENV)/.dev ## Rewrite the files in the project's style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.docs ## Build the documentation site in build/site, offline; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

wheel: dist $(VENV)/.demo ## Build the wheel and the sdist, and try the wheel with its base requirements alone, linked from .venv
	$(VENV)/bin/python tests/linked_environment.py $(WHEEL) dist/*.whl
	$(WHEEL)/bin/python -I tests/installed_wheel.py

wheel-fresh: dist $(FRESH)/.torch ## The same in an empty environment, into which pip installs the wheel and what it requires
	grep -v "^torch==" $(PINS) > $(FRESH)/pins.txt
	$(FRESH)/bin/python $(PIP) install --force-reinstall --no-deps dist/*.whl
	$(FRESH)/bin/python $(PIP) install -c $(FRESH)/pins.txt dist/*.whl
	$(FRESH)/bin/python -m pip check
	$(FRESH)/bin/python -I tests/installed_wheel.py

dist: $(VENV)/.torch
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation --outdir dist . > /dev/null

test-oldest: $(OLDEST)/.test ## Run the core tests with the oldest supported transformers
	$(OLDEST)/bin/python -m pytest $(PYTEST) $(CORE_TESTS) $(ARGS)

test-newest: $(VENV)/.torch ## Run them with the newest transformers that pip finds, unless it is the pinned one
	@newest=$$($(VENV)/bin/python -m pip index versions transformers | sed -n 's/^transformers (\(.*\))$$/\1/p'); \
	if grep -qE "^transformers==$$newest( |$$)" $(PINS); \
	then echo "transformers $$newest is the newest release and the pinned one: make test runs these tests"; \
	else $(MAKE) test-newest-anew; fi

test-newest-anew: $(NEWEST)/.test
	$(NEWEST)/bin/python $(PIP) install -c $(NEWEST)/constraints.txt --upgrade transformers
	$(NEWEST)/bin/python -m pytest $(PYTEST) $(CORE_TESTS) $(ARGS)

constraints: $(VENV)/.dev ## Work out constraints.txt anew, for every supported Python (ARGS=--upgrade: newest versions)
	$(VENV)/bin/python $(PIP) install uv
	cp $(PINS) $(VENV)/pins.txt
	printf '%s\n' $(firstword $(TORCH)) $(BUILD) | $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 \
	  --no-header --no-annotate $(addprefix --extra=,dev docs demo peers) $(ARGS) pyproject.toml - -o $(VENV)/pins.txt
	{ sed '/^[^#]/,$$d' $(PINS); grep -v -E "^(nvidia|cuda|triton|setuptools)[-=]|== 'pypy'|== 'emscripten'|== 'win32'" $(VENV)/pins.txt; } > $(VENV)/pins.new
	mv $(VENV)/pins.new $(PINS)

clean: ## Remove the environments, caches and whatever the demo wrote
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(WHEEL) $(FRESH) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist demo-output results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- environments
# torch goes in first and by itself, and the build named in TORCH is the one that stays, whatever the pins say.

# An environment that was made with another interpreter or torch than is now asked for is made anew.
ifneq ($(origin PYTHON) $(origin TORCH),file file)
$(shell for env in $(VENV) $(OLDEST) $(NEWEST) $(FRESH); do [ "$$(cat $$env/.torch 2>&1)" = "$(PYTHON) $(TORCH)" ] || rm -f $$env/.torch; done)
endif

%/.torch:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "vlmpack needs Python 3.10 or newer, and '$(PYTHON)' was not found: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "vlmpack needs Python 3.10 or newer, and '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1): make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: install its venv package (on Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $*
	$*/bin/python $(PIP) install $(TORCH)
	$*/bin/python $(PIP) install -c $(PINS) $(BUILD)
	@echo "$(PYTHON) $(TORCH)" > $@

# The pins, but torch as it was installed; for the oldest transformers its own lines, and none for the newest.
$(VENV)/constraints.txt: OWN := torch
$(OLDEST)/constraints.txt: OWN := torch|transformers|huggingface-hub
$(NEWEST)/constraints.txt: OWN := torch|transformers|huggingface-hub|tokenizers|safetensors
$(VENV)/constraints.txt: $(VENV)/.torch $(PINS)
$(NEWEST)/constraints.txt: $(NEWEST)/.torch $(PINS)
$(OLDEST)/constraints.txt: $(OLDEST)/.torch $(PINS) constraints-oldest.txt
%/constraints.txt:
	grep -v -E "^($(OWN))==" $(PINS) | cat - $(filter constraints-%,$^) > $@
	$*/bin/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" >> $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(VENV)/constraints.txt pyproject.toml
	$(VENV)/bin/python $(PIP) install -c $< --no-build-isolation -e '.[$*]'
	@touch $@

# The oldest client that the service serves, beside the newest, which is installed: both cannot be in one environment.
$(VENV)/.test: | $(VENV)/tinker-0.25.0
$(VENV)/tinker-0.25.0: | $(VENV)/.torch
	$(VENV)/bin/python $(PIP) install --no-deps --ignore-requires-python --target $@ tinker==0.25.0

$(OLDEST)/.test $(NEWEST)/.test: %/.test: %/constraints.txt pyproject.toml
	$*/bin/python $(PIP) install -c $< --no-build-isolation -e '.[test]'
	@touch $@
