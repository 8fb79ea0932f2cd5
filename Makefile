# `make demo` shows pycoll at work, `make test` runs all tests. Both install their needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out

.PHONY: help demo test test-torch setup-demo setup-test lint test-cpp test-fuzz \
        test-python test-rdma test-launchers soak soak-stores docs test-quick optimized \
        test-optimized bench-peers bench-net bench-rdma bench-training gpu-check clean

help:
	@echo "make demo         install into $(VENV), train on 1 and 4 ranks, measure all_reduce on 2,"
	@echo "                  train by all-reduce and by a server"
	@echo "make test         install everything the tests need and run them"
	@echo "make test-quick   checks for a first change, in less than three minutes"
	@echo "make test-torch   tests that use torch with another version: TORCH=2.14.1 (the default)"
	@echo "make docs         build the site into out/site; warnings are errors"
	@echo "make test-rdma    test verbs on Soft-RoCE devices, in a virtual machine with Debian's"
	@echo "                  kernel"
	@echo "make test-launchers  jobs over ssh and torchrun between network namespaces (as root),"
	@echo "                  Ray, Dask, Spark, Lightning, Accelerate; says what it skips"
	@echo "make soak         compare random operations with exact results, for an hour"
	@echo "make soak-stores  1,000 seeds of the simulated stores with newcomers, cuts of the network"
	@echo "                  and checked invariants"
	@echo "make optimized    build with profile-guided optimization: record a profile, then rebuild"
	@echo "make bench-peers  install Open MPI, MPICH and torch, compare over shared memory; then, with"
	@echo "                  that build, sweeps, kernels and call costs; results go to bench/"
	@echo "make gpu-check    tests on this machine's GPUs, then bench/gpu.py; fails without a GPU"
	@echo "make bench-net    compare over TCP between hosts made of network namespaces (as root)"
	@echo "make bench-rdma   compare verbs with Open MPI over UCX, in the machine of test-rdma"
	@echo "make bench-training  train by all policies, with DDP over Gloo, and with Horovod if"
	@echo "                  bench/setup_horovod.sh has built it"

# Debian packages venv and the headers separately from Python itself.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); apt-get update -qq && \
		apt-get install -y -qq python3-venv python3-dev >/dev/null && $(PYTHON) -m venv $(VENV); }

# A program in this folder imports the sources next to it. Without --editable these have no native
# part.
setup-demo: $(BIN)/pip
	$(BIN)/pip install --quiet --editable '.[demo]'

demo: setup-demo
	@mkdir -p $(OUT)
	$(BIN)/python examples/train_digits.py --ranks 1 --ranks 4
	$(BIN)/pycoll bench all_reduce -n 2 -b 8 -e 64M -f 4 --plot $(OUT)/all_reduce.png
	$(BIN)/python examples/train_methods.py --plot $(OUT)/step.png
	@echo
	@echo "next: look at $(OUT)/all_reduce.png, and at $(OUT)/step.png: a training step by each of two"
	@echo "      methods, with the messages that the backward pass hides"
	@echo "      save README's example as hello.py: $(BIN)/pycoll run -n 4 hello.py"
	@echo "      $(BIN)/pycoll info shows what was found on this machine, $(BIN)/pycoll explain"
	@echo "      which algorithm runs and why"

setup-test: $(BIN)/pip
	bash tests/packages.sh $(BIN)/python
	bash tests/setup.sh $(BIN)

test: $(BIN)/pip
	bash tests/all.sh $(BIN)

# Linters of Python, and the tests that find most faults in little time.
test-quick: setup-test
	bash tests/quick.sh $(BIN)

docs: $(BIN)/pip
	$(BIN)/pip install --quiet -r docs/site/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(OUT)/site
	@echo "open $(OUT)/site/index.html"

lint:
	bash tests/lint.sh $(BIN)

test-cpp:
	bash tests/cpp/run.sh

# Not part of `test`, which runs with the version in tests/requirements.txt: it downloads torch.
# For one file: make test-torch TORCH=2.14.1 TESTS=tests/torch/test_doors.py
TORCH ?= 2.14.1
test-torch: setup-test
	bash tests/torch/with_version.sh $(BIN) $(TORCH) $(TESTS)

test-fuzz:
	bash tests/fuzz/run.sh

test-python:
	bash tests/python.sh $(BIN)

# Not part of `test`: it needs QEMU, Debian's packages and several minutes.
test-rdma: setup-test
	bash tests/rdma/run.sh $(BIN)

# Not part of `test`: it needs root, sshd, several minutes and 700 MB of engines (ENGINES=0: none).
# Arguments of pytest pass on: make test-launchers LAUNCHERS='-k dask'.
test-launchers: setup-test
	bash tests/launchers/run.sh $(BIN) $(LAUNCHERS)

optimized: setup-test
	bash bench/optimize.sh $(BIN)

# SOAK passes arguments on: make soak SOAK='--seconds 600 --seed 7'.
soak: setup-test
	cd tests && ../$(BIN)/python soak.py --seconds 3600 $(SOAK)

# 1,000 seeds of the simulated stores of which `make test` runs 50 or 100.
STORE_SEEDS ?= 1000
soak-stores: setup-test
	STORE_SEEDS=$(STORE_SEEDS) $(BIN)/python -m pytest -q -n 0 --timeout 1800 \
	  -o faulthandler_timeout=1800 tests/ps/simulation/test_invariants.py \
	  tests/ps/simulation/test_link_simulation.py tests/ps/simulation/test_newcomer_simulation.py \
	  tests/ps/simulation/test_elastic_simulation.py

# Without the tests of what torch's compiler and Horovod's names find in Python.
test-optimized: optimized
	$(BIN)/pycoll info | grep 'optimized with a profile'
	bash tests/python.sh $(BIN) tests/api tests/arrays tests/comm tests/regressions \
	  --ignore-glob '*test_compiled_torch.py' --ignore-glob '*test_horovod_attributes.py'

# The comparison over shared memory is of a plain build, which is what users install.
bench-peers: setup-test
	bash bench/setup_peers.sh
	$(BIN)/python bench/shm.py --markdown bench/RESULTS.md --plot bench/shm.svg
	$(MAKE) optimized
	$(BIN)/python bench/peers.py --markdown bench/RESULTS.md
	$(BIN)/python bench/dtypes.py --markdown bench/RESULTS.md
	$(BIN)/python bench/kernels.py --markdown bench/RESULTS.md
	$(BIN)/python bench/codecs.py --markdown bench/RESULTS.md
	$(BIN)/python bench/overhead.py --markdown bench/RESULTS.md

# It uses the packages that PYTHON has, since a machine with a GPU may have no network. For a
# virtual environment: make gpu-check PYTHON=.venv/bin/python
gpu-check:
	bash tests/gpu/run.sh $(PYTHON)

bench-net:
	bash bench/setup_peers.sh
	$(BIN)/python bench/net.py --markdown bench/RESULTS.md --plot bench/net.svg

# Like test-rdma it needs QEMU and Debian's packages. setup_peers.sh installs an environment with
# mpi4py.
bench-rdma:
	bash bench/setup_peers.sh
	$(BIN)/python bench/rdma.py --markdown bench/RESULTS.md

bench-training: setup-test
	$(BIN)/python bench/training.py --markdown bench/RESULTS.md --plot bench/training.svg

clean:
	rm -rf build $(OUT) $(VENV)
