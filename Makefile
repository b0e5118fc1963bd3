# `make demo` and `make test` need python3.11 (or another: make PYTHON=python3.12) and this file, nothing else.
PYTHON ?= python3.11
# Of PyTorch, another version than the pinned one (make test TORCH=2.14.1), or the newest: TORCH=newest.
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
DEMO ?=
BENCH ?=
GPU ?=
MINUTES ?= 10
SOAK ?=
MUTANTS ?=
STEPS ?=
DEVICE ?= cuda
OUT ?= .

bin := $(VENV)/bin
# `make gpu` runs where a GPU is, with the Python that is there and the torch that it has: it installs nothing.
ifeq ($(origin PYTHON),file)
gpu_python := $(if $(wildcard $(bin)/python),$(bin)/python,python3)
else
gpu_python := $(PYTHON)
endif
installed := $(VENV)/.installed
docs_installed := $(VENV)/.installed-docs
pip := $(bin)/python -m pip --disable-pip-version-check
# torchvision's minor version is torch's and fifteen: 0.28.0 belongs to 2.13.0.
ifeq ($(TORCH),)
constraints := constraints.txt
else
constraints := $(VENV)/constraints.txt
pinned := $(if $(filter-out newest,$(TORCH)),$(shell echo $(TORCH) | sed -E \
    's/^2\.([0-9]+)\.([0-9]+)$$/echo torch==2.\1.\2; echo torchvision==0.$$((\1 + 15)).\2/'),true)
endif
install := $(pip) install -qq --no-compile --retries 10 --constraint $(constraints)
# pip compiles on one core, which is half of the time that an installation takes; this takes all cores. Not every file
# can be compiled: torch brings one for a newer Python. The tests of other packages are not imported.
compile = $(@D)/bin/python -m compileall -q -j 0 -x /tests/ $(@D)/lib >/dev/null || true

with_frameworks := .venv-integrations
need_no_framework := test_pytorchs_ddp test_integrations_page

.DEFAULT_GOAL := help
.PHONY: help demo test test-integrations soak mutants coverage check fmt docs bench gpu clean

help:
	@echo "make demo      train ResNet-18 twice on two ranks, plainly and overlapped, and compare"
	@echo "make test      lint, types, import rules and all tests; TORCH=2.14.1 or TORCH=newest: with another PyTorch"
	@echo "make test-integrations  Lightning, Accelerate, the HF Trainer, Ignite and torchft with chains, beside the same without;"
	@echo "               and the optimizers of other packages"
	@echo "make coverage  all tests, and which lines they reach; takes twice as long"
	@echo "make check     the same without the tests"
	@echo "make fmt       format, and mend what the linter can"
	@echo "make docs      the site, into site/: warnings are errors, links are checked"
	@echo "make bench     step times beside PyTorch's own ways"
	@echo "make gpu       all that needs a GPU, within eight minutes; a report in overlap-gpu (OUT=folder to put it elsewhere)"
	@echo "               DEVICE=cpu is the dry run; PYTHON=python3 names the Python that has torch; it installs nothing"
	@echo "make soak      faults at random moments for MINUTES=10, and exact resumes, after every chain once on 8 and 16 ranks; SOAK=... for more: SOAK='--seed 1'"
	@echo "               STEPS=20000 adds so many steps of every form, in which nothing may grow"
	@echo "make mutants   put more than 60 faults into copies of the package, one at a time: the tests must find them; MUTANTS='--jobs 4'"
	@echo "make clean     remove what these made"

demo: $(installed)
	$(bin)/python -m overlap demo $(DEMO)

bench: $(installed)
	$(bin)/python -m benchmarks.bench $(BENCH)

gpu:
	$(gpu_python) -m benchmarks.gpu --device $(DEVICE) --folder "$(OUT)/overlap-gpu" $(GPU)

check: $(installed)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports --no-logo

test: check
	$(bin)/python -m pytest

test-integrations: $(with_frameworks)/.installed
	$(with_frameworks)/bin/python -m pytest tests/integrations $(need_no_framework:%=--ignore tests/integrations/%.py)

# The network is used once, to install; the site itself is built and read without it.
docs: $(docs_installed)
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet
	@echo "site/index.html"

coverage: $(installed)
	rm -rf .coverage && mkdir .coverage
	$(bin)/coverage run -m pytest
	$(bin)/coverage combine --quiet
	$(bin)/coverage report

soak: $(installed)
	for ranks in 8 16; do MANY_RANKS=$$ranks $(bin)/python -m pytest -q tests/test_many_ranks.py || exit 1; done
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(bin)/python -m soak --minutes $(MINUTES) $(SOAK)
	$(if $(STEPS),OMP_NUM_THREADS=1 PYTHONPATH=tests $(bin)/python -m soak.slopes --steps $(STEPS))

mutants: $(installed)
	PYTHONPATH=tests $(bin)/python -m mutants $(MUTANTS)

fmt: $(installed)
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

clean:
	rm -rf $(VENV) .venv-torch-* $(with_frameworks) .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache overlap-race overlap-gpu overlap-soak dist site

# Once, and again only when what is to be installed changes: nothing else here uses the network. torch comes first
# and alone, so that pip takes the build that this machine offers, and torchvision without its wish for another.
$(installed): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: make PYTHON=... with Python 3.11 or newer"; exit 1; }
	@echo "Installing into $(VENV); this takes a minute or two, once."
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),{ grep -Ev '^torch(vision)?==' constraints.txt; $(pinned); } > $(constraints))
	$(install) torch
	$(install) --no-deps torchvision
	$(install) hatchling editables
	$(install) --no-build-isolation --editable '.[dev]'
	$(compile)
	@touch $@

$(docs_installed): $(installed)
	$(install) --no-build-isolation --editable '.[dev,docs]'
	@touch $@

# The frameworks in an environment of their own. torch comes first and alone here, too, so that none of them chooses
# another; none brings a CUDA wheel. Without torchvision, which some of them would import where it is. The optimizers of
# docs/reports/optimizers.md come without what they ask for: they need torch and numpy alone. So does torchft, after its
# OpenTelemetry.
$(with_frameworks)/.installed: pip := $(with_frameworks)/bin/python -m pip --disable-pip-version-check
$(with_frameworks)/.installed: install = $(pip) install -qq --no-compile --retries 10 --constraint constraints-integrations.txt
$(with_frameworks)/.installed: pyproject.toml constraints-integrations.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: make PYTHON=... with Python 3.11 or newer"; exit 1; }
	@echo "Installing into $(with_frameworks); this takes a minute or two, once."
	test -x $(with_frameworks)/bin/python || $(PYTHON) -m venv $(with_frameworks)
	$(install) torch
	$(install) hatchling editables
	$(install) --no-build-isolation --editable '.[lightning,accelerate,transformers]' pytorch-ignite \
	    cloudpickle pytest pytest-timeout
	$(install) --no-deps adamp adan-pytorch came-pytorch dadaptation lion-pytorch madgrad muon-optimizer prodigyopt \
	    pytorch_optimizer pytorch-ranger schedulefree timm torch-optimizer
	$(install) opentelemetry-exporter-otlp-proto-http opentelemetry-sdk opentelemetry-api scikit-learn
	$(install) --no-deps torchft
	$(compile)
	@touch $@
