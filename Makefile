# Every target sets up what it needs in .venv, and then does its job.
#   make demo    train a binarised network five ways on real digits
#   make test    the tests, without slow ones (about 7 minutes on 2 cores)
#   make test-all  all tests (about 35 minutes on 2 cores)
#   make check   lint, format and types
#   make fuzz    random programs from the seed of today (an hour; ARGS=--minutes=10)
#   make hosts   the suite on every version of PyTorch, JAX, NumPy and Python (hours)
#   make proof   that rules fire or raise, everywhere (some hours; ARGS=--quick: two minutes)
#   make public  overrides in public models (PYTHON: one that has them; ten minutes)
#   make peers   relevance, quantizers and spikes next to others' (PYTHON: one that has them)
#   make docs    the documentation site, in out/site
#   make bench   timings and memory against autograd, torch, NumPy and TensorFlow

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# With the newest versions that were tested; `make test PINS=` takes whatever is newest today.
PINS ?= --constraint .github/newest.txt
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all check proof fuzz hosts public peers docs bench clean

# (One BLAS thread: the matrices are small, and threads would only wait for each other.)
demo: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/python examples/binarized_digits.py $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal --all $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Tests that choose among libraries, dtypes, shapes and roads: here they take all of them.
GRIDS := ops/test_ops ops/test_roads core/test_builtin_rules graph/test_samples transforms/test_jit_samples rules/test_quantizers

proof: $(VENV)/.test
	$(BIN)/python -m tests.campaigns.proof $(ARGS)
ifeq ($(findstring --quick,$(ARGS)),)
	$(BIN)/python -m pytest -n 2 --dist worksteal --proof $(GRIDS:%=tests/%.py)
endif

fuzz: $(VENV)/.test
	$(BIN)/python -m tests.campaigns.fuzz $(ARGS)

hosts: $(VENV)/.test
	$(BIN)/python -m tests.campaigns.hosts $(ARGS)

# The packages must be installed beforehand: tests/campaigns/public_models.py says how.
public:
	$(PYTHON) -m tests.campaigns.public_models $(ARGS)

# The same packages, and the packages in the docstrings of the three modules.
peers:
	$(PYTHON) -m tests.campaigns.relevance_peers $(ARGS)
	$(PYTHON) -m tests.campaigns.relevance_peers --layers
	$(PYTHON) -m tests.campaigns.relevance_peers --more
	$(PYTHON) -m tests.campaigns.relevance_peers --lost
	$(PYTHON) -m tests.campaigns.relevance_peers page
	$(PYTHON) -m tests.campaigns.quantize_peers
	$(PYTHON) -m tests.campaigns.quantize_peers page
	$(PYTHON) -m tests.campaigns.spike_peers
	$(PYTHON) -m tests.campaigns.spike_peers page

# (Pages are executed, one process for each core, unless out/pages has their outputs.)
docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going --quiet --jobs auto docs out/site $(ARGS)
	@echo "The front page: out/site/index.html"

bench: $(VENV)/.bench
	$(BIN)/python -m bench $(ARGS)

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regrad needs Python 3.11 or newer; run: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml .github/newest.txt
	$(INSTALL) $(PINS) --editable '.[examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml .github/newest.txt
	$(INSTALL) $(PINS) --editable '.[test,examples]'
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml .github/newest.txt
	$(INSTALL) $(PINS) --editable '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.made pyproject.toml .github/newest.txt
	$(INSTALL) $(PINS) --editable '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) out docs/reference/names .pytest_cache .ruff_cache
