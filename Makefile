# `make demo` and `make test` need python3.11 (or another: make PYTHON=python3.12) and this file, nothing else.
PYTHON ?= python3.11
VENV ?= .venv
DEMO ?=
BENCH ?=
GPU ?=
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
pip := $(bin)/python -m pip --disable-pip-version-check
install := $(pip) install -qq --retries 10 --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test coverage check fmt bench gpu clean

help:
	@echo "make demo      train ResNet-18 twice on two ranks, plainly and overlapped, and compare"
	@echo "make test      lint, types, import rules and all tests"
	@echo "make coverage  all tests, and which lines they reach; takes twice as long"
	@echo "make check     the same without the tests"
	@echo "make fmt       format, and mend what the linter can"
	@echo "make bench     step times beside PyTorch's own ways"
	@echo "make gpu       all that needs a GPU, within eight minutes; a report in overlap-gpu (OUT=folder to put it elsewhere)"
	@echo "               DEVICE=cpu is the dry run; PYTHON=python3 names the Python that has torch; it installs nothing"
	@echo "make clean     remove what these made"

demo: $(installed)
	$(bin)/python -m overlap demo $(DEMO)

bench: $(installed)
	$(bin)/python -m overlap bench $(BENCH)

gpu:
	$(gpu_python) -m benchmarks.gpu --device $(DEVICE) --folder "$(OUT)/overlap-gpu" $(GPU)

check: $(installed)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports --no-logo

test: check
	$(bin)/python -m pytest

coverage: $(installed)
	rm -rf .coverage && mkdir .coverage
	$(bin)/coverage run -m pytest
	$(bin)/coverage combine --quiet
	$(bin)/coverage report

fmt: $(installed)
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

clean:
	rm -rf $(VENV) .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache overlap-demo overlap-bench overlap-trace overlap-gpu dist

# Once, and again only when what is to be installed changes: nothing else here uses the network. torch comes first
# and alone, so that pip takes the build that this machine offers, and torchvision without its wish for another.
$(installed): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: make PYTHON=... with Python 3.11 or newer"; exit 1; }
	@echo "Installing into $(VENV); this takes a minute or two, once."
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(install) torch
	$(install) --no-deps torchvision
	$(install) hatchling editables
	$(install) --no-build-isolation --editable '.[dev]'
	@touch $@
