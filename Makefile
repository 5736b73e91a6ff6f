# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv on its first run and installs nothing
# on its second.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ADAPTERS := $(patsubst %/__init__.py,%,$(wildcard engines/*/src/*/__init__.py))
SUITES := $(patsubst engines/%/pyproject.toml,test-%,$(wildcard engines/*/pyproject.toml))
PACKAGES := core/pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: demo test test-parity test-engines $(SUITES) lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/backstamp demo

# one thread a process: two test processes on two cores, and tensors too small to share out
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# over the published source of two engines, which it fetches into .parity once (90 MB) and never imports
test-parity: $(VENV)/.dev
	$(BIN)/python tests/parity_wheels/fetch.py
	$(BIN)/python -m pytest -n 0 --durations=0 $(wildcard tests/parity_wheels/published_*.py)

# every real engine on the CPU, each in a venv of its own: one's pins never break another's
test-engines: $(SUITES)

test-transformers: .venv-transformers/.ready
	OMP_NUM_THREADS=1 .venv-transformers/bin/python -m pytest engines/transformers/tests

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python -m pytest --durations=0 engines/vllm/tests

test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python -m pytest --durations=0 engines/sglang/tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core/src/backstamp $(wildcard plugins/*/src/*/plugin.py) $(ADAPTERS)
	$(BIN)/backstamp check --only declarations,imports $(patsubst plugins/%/pyproject.toml,backstamp_%.plugin,$(wildcard plugins/*/pyproject.toml))
	$(BIN)/backstamp lint .

bench: $(VENV)/.dev
	$(BIN)/python bench/registry.py

clean:
	rm -rf $(VENV) $(wildcard .venv-*) .parity .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.demo: requirements/demo.txt $(PACKAGES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements/demo.txt
	touch $@

.venv-transformers/.ready: requirements/transformers.txt requirements/demo.txt engines/transformers/pyproject.toml $(PACKAGES)
	test -x .venv-transformers/bin/python || $(PYTHON) -m venv .venv-transformers
	.venv-transformers/bin/python -m pip install --disable-pip-version-check -r requirements/transformers.txt
	touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.demo
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements/dev.txt
	touch $@

# torchvision, torchaudio and torchcodec come with vLLM and do not load beside the CPU build of torch
.venv-vllm/.ready: requirements/vllm.txt core/pyproject.toml plugins/cpu/pyproject.toml engines/vllm/pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -r requirements/vllm.txt
	.venv-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

# SGLang's own dependencies are wheels for GPUs: it comes without them, and what serving on the CPU imports beside it
.venv-sglang/.ready: requirements/sglang.txt $(PACKAGES) engines/sglang/pyproject.toml
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --disable-pip-version-check --no-deps sglang==0.5.23
	.venv-sglang/bin/python -m pip install --disable-pip-version-check -r requirements/sglang.txt
	touch $@
