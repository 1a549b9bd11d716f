# `make repro` runs the study, `make test` the tests. Both build .venv from requirements/lock.txt first, once.
PYTHON ?= python3
VENV ?= .venv
PROFILE ?=
# make splits names at spaces and colons: what it looks for by name stays relative or escaped, what a shell sees is quoted.
SPACE := $(subst ,, )
BIN := $(if $(filter /%,$(firstword $(VENV))),$(VENV),$(CURDIR)/$(VENV))/bin
# The stamp carries the lock's checksum: another lock, another stamp, a new install. File times say nothing in a clone.
STAMP := $(subst :,\:,$(subst $(SPACE),\ ,$(VENV)))/.installed-$(shell cksum < requirements/lock.txt | tr -d ' ')
TEPO := "$(BIN)/python" -m tepo_core.commands.cli
export PATH := $(BIN):$(PATH)
export TEPO_PYTHON := $(BIN)/python

.PHONY: help venv repro test test-slow test-peers test-vllm test-browser lint lab lock clean
help:
	@echo "make repro [PROFILE=smoke|quick|full]   run the study; prints where the report is, and the headline"
	@echo "make test                               the default test suite (about five and a half minutes on two cores)"
	@echo "make test-slow | test-peers | test-vllm | test-browser   what the default suite leaves out"
	@echo "make lab                                JupyterLab on the notebooks"
	@echo "make lint                               ruff"
	@echo "make lock                               resolve requirements/lock.txt anew from pyproject.toml"
	@echo "make clean                              remove all results (the environment and DVC's cache stay)"
	@echo "options: PYTHON=python3.12 (3.11 or newer), VENV=folder of the environment"

venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and %s is %d.%d. Install one, then for example: make PYTHON=python3.11 repro" % ((sys.executable,) + sys.version_info[:2]))'
	@case "$(BIN)" in *:*) echo "$(BIN): Python makes no environment in a path with a colon; give another place, for example: \
	make VENV=\$$HOME/tepo-venv repro" >&2; exit 1;; esac
	@case "$(BIN)" in "$(CURDIR)"/*) ;; *) test ! -x "$(BIN)/python" || { echo "VENV=$(VENV) lies outside this folder and was \
	built from another lock; it is left alone. Remove it, or leave VENV out to build .venv here." >&2; exit 1; };; esac
	@test -x "$(BIN)/python" || $(PYTHON) -m venv "$(VENV)"
	@echo "Installing the locked packages into $(VENV): once, some minutes, most of it torch."
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -r requirements/lock.txt
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm -f "$(VENV)"/.installed-*
	@touch "$@"

repro: $(STAMP)
	@$(TEPO) repro $(if $(PROFILE),--profile "$(PROFILE)")

test: $(STAMP)
	@"$(BIN)/python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)
	@"$(BIN)/python" -m pytest -m slow

test-peers: $(STAMP)
	@bash tests/peers/run.sh

test-vllm: $(STAMP)
	@PYTHON="$(BIN)/python" bash tests/vllm/run.sh

test-browser: $(STAMP)
	@"$(BIN)/python" -m pytest -m browser

lint: $(STAMP)
	@"$(BIN)/python" -m ruff check .
	@"$(BIN)/python" -m ruff format --check .

lab: $(STAMP)
	@"$(BIN)/python" -m jupyter lab notebooks/00_overview.ipynb

# pip-tools is wanted only here. torch's local build tag goes, so that pip takes the build that fits the machine.
lock: $(STAMP)
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check pip-tools
	@"$(BIN)/python" -m piptools compile --quiet --allow-unsafe --strip-extras --no-header --no-emit-index-url \
		--no-emit-find-links --no-emit-trusted-host --extra dev --extra lora \
		--constraint requirements/constraints.txt --output-file requirements/lock.txt pyproject.toml
	@sed -i.bak 's/^\(torch==[0-9.]*\)+[a-z0-9]*$$/\1/' requirements/lock.txt && rm requirements/lock.txt.bak

clean:
	@rm -rf build runs data/prepared .tepo
	@find reports -mindepth 1 ! -name README.md -delete
	@echo "Results removed. DVC's cache (.dvc/cache) stays, so that 'make repro' can take unchanged stages from it."
