# Everything here works on a fresh machine with make, a POSIX shell and one of Python 3.12, 3.13, 3.14, pyenv or uv.
#
# Environments are made once and again only when pyproject.toml changes: a stamp file in each says that it is up to date.
#   .venv         jaxshare itself; `make demo` installs what it runs on, the other targets add the tools
#   .venv-gpu     jaxshare with what compiles for a GPU, which no other target needs
#   .venv-torch   PyTorch and transformers' models, which jaxshare is measured against and never imports
#   .venv-lm-eval jaxshare with lm_eval; .venv-lm-eval-hf has lm_eval with PyTorch, which it is compared with
#   .venv-docs    jaxshare with what makes the site of its documents
#   .venv-others  jaxshare with Ray Serve and other people's clients of its server
#   .venv-tunix   jaxshare with Tunix, whose learners it samples for
#   .venv-llama   llama.cpp, built for this machine from the source in its Python package, which jaxshare is measured against
#   .venv-hogwild PyTorch and the older transformers that the authors' implementation of Hogwild! Inference needs

PYTHON ?=
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
DEMO_ARGS ?=
DOCS_ARGS ?=
# The folder of all versions of the site.
SITE ?=
SERVE_ARGS ?= embedded
BENCH_ARGS ?= --quick
GPU_ARGS ?=
# A folder of wheels for a machine without a network; `make gpu-wheels` fills it, which takes some GB.
WHEELS ?=
BUILD_NEEDS := 'setuptools>=77'
# Python compiles a module at its first import; of all that is installed, most are never imported.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
PIP_INSTALL := $(PIP) $(if $(WHEELS),--no-index --find-links '$(abspath $(WHEELS))')
# A checkout of the authors' implementation of Hogwild! Inference, which has no package and is not kept here.
HOGWILD ?=

BIN := .venv/bin
RUNTIME := .venv/.installed
SERVE := .venv/.installed-serve
DEV := .venv/.installed-dev
AUDIT := .venv/.installed-audit
PAGE := .venv/.installed-page
CUDA := .venv/.installed-cuda
GPU_ENV := .venv-gpu/.installed
TORCH_ENV := .venv-torch/.installed
TORCH_PYTHON := .venv-torch/bin/python
HOGWILD_ENV := .venv-hogwild/.installed
HOGWILD_PYTHON := .venv-hogwild/bin/python
LM_EVAL_ENV := .venv-lm-eval/.installed
LM_EVAL_HF_ENV := .venv-lm-eval-hf/.installed
OTHERS_ENV := .venv-others/.installed
TUNIX_ENV := .venv-tunix/.installed
DOCS_ENV := .venv-docs/.installed
LLAMA_ENV := .venv-llama/.installed
LLAMA := llama-cpp-python==0.3.36

WHAT ?= decode
BENCHES := agents approximate attention before collaboration crowds decode devices engine evaluation grammars kernels llama-cpp lm_eval logits_cache mixed quantised residency rollouts sampling serve sharing workers
BENCH_NEEDS_attention := $(CUDA)
BENCH_NEEDS_decode := $(TORCH_ENV)
BENCH_NEEDS_llama-cpp := $(LLAMA_ENV)
BENCH_NEEDS_lm_eval := $(LM_EVAL_ENV) $(LM_EVAL_HF_ENV)
BENCH_NEEDS_sharing := $(TORCH_ENV)
BENCH_NEEDS_workers := $(if $(HOGWILD),$(HOGWILD_ENV))
BENCH_OPTIONS_before := --earlier '$(EARLIER)'
BENCH_OPTIONS_decode := --torch-python $(TORCH_PYTHON)
BENCH_OPTIONS_sharing := --torch-python $(TORCH_PYTHON)
BENCH_OPTIONS_workers := $(if $(HOGWILD),--hogwild '$(HOGWILD)' --hogwild-python $(HOGWILD_PYTHON))

# A tool that looks at these would otherwise work on the environment that the caller has active.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help demo serve docs docs-release docs-check test test-page test-others test-all test-gpu lint bench audit drill gpu gpu-wheels gpu-compile parity parity-transformers parity-hogwild lm-eval clean
# A recipe that fails must not leave a stamp behind.
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r target words; do printf '  make %-14s %s\n' "$$target" "$$words"; done

demo: $(RUNTIME) ## one model as two workers and as sixteen branches over one shared cache (DEMO_ARGS='--seed 3')
	@$(BIN)/jaxshare demo $(DEMO_ARGS)

serve: $(SERVE) ## a model behind OpenAI's HTTP interface, on this machine alone (SERVE_ARGS='MODEL --port 8080')
	@$(BIN)/jaxshare serve $(SERVE_ARGS)

docs: $(DOCS_ENV) ## the documents as a site, at http://127.0.0.1:8001
	@.venv-docs/bin/python -m scripts.docs.site --serve

docs-release: $(DOCS_ENV) ## the site as a version in SITE, a folder of all versions, which stay (SITE=DIR; DOCS_ARGS='--name dev')
	@test -n "$(SITE)" || { echo "docs-release takes a folder of versions: make docs-release SITE=pages" >&2; exit 2; }
	.venv-docs/bin/python -m scripts.docs.site
	.venv-docs/bin/python -m scripts.docs.versions '$(SITE)' $(DOCS_ARGS)

# Programs of the pages that are left out there have tests of their own.
docs-check: $(DEV) $(DOCS_ENV) ## the site, built strictly; links, spelling, commands, tables; programs that are run or say why not
	.venv-docs/bin/python -m scripts.docs.site
	.venv-docs/bin/codespell README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs benchmarks/*.md build/docs/command_line.md
	$(BIN)/python -m pytest -q -m "" tests/package/test_docs.py

test: $(DEV) ## ruff and the quick tests (PYTEST_ARGS='-k rope')
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-page: $(PAGE) ## the server's page in Chromium (CHROMIUM=PROGRAM), and the types of its programs where npx is
	@if command -v npx >/dev/null; then npx --yes --package 'typescript@5' tsc --project tests/page/tsconfig.json; else echo "there is no npx, so the types of the page's programs are not checked"; fi
	$(BIN)/python -m pytest -q -m page tests/page

test-others: $(OTHERS_ENV) $(TUNIX_ENV) ## the server before replicas under Ray Serve, and asked by lm_eval and the OpenAI Agents SDK; Tunix's learners with an engine
	.venv-others/bin/python -m pytest -q -m others tests/serving/others
	.venv-tunix/bin/python -m pytest -q -m others tests/serving/rollouts/test_tunix_rollout.py

test-all: $(DEV) $(PAGE) audit docs-check test-others ## ruff and all tests, the slow ones too, the documents, and an audit of dependencies
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/python -m pytest -q -m "not others" $(PYTEST_ARGS)

# Links stand in for jaxshare/checkout.py, which finds models/ and serving/ where a program runs: pyright runs nothing.
lint: $(DEV) ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	@rm -rf build/pyright && mkdir -p build/pyright/jaxshare
	@ln -s "$(CURDIR)"/jaxshare/* "$(CURDIR)/models" "$(CURDIR)/serving" build/pyright/jaxshare/
	@find -L build/pyright -name '*.py' -print0 | xargs -0 $(BIN)/pyright --pythonpath $(BIN)/python

bench: $(DEV) $(BENCH_NEEDS_$(WHAT)) ## one benchmark: WHAT=decode, or another of scripts/bench (BENCH_ARGS= for the full run)
	@case ' $(BENCHES) ' in *' $(WHAT) '*) ;; *) echo 'WHAT is "$(WHAT)"; it must be one of: $(BENCHES)' >&2; exit 2;; esac
	$(BIN)/python -m scripts.bench.$(subst -,_,$(WHAT)) $(BENCH_OPTIONS_$(WHAT)) $(BENCH_ARGS)

audit: $(AUDIT) ## known vulnerabilities and licences of all that is installed
	$(BIN)/python -m scripts.audit

drill: $(DEV) ## faults of all kinds thrown at every promise (DRILL_ARGS='--parts device --minutes 60 --seed 7')
	$(BIN)/python -m scripts.drill.run $(DRILL_ARGS)

test-gpu: $(CUDA) ## on a GPU: every backend against the reference
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_autotune_level=0 $(BIN)/python -m pytest -q -m gpu -n 8

# A rehearsal takes neither a GPU nor what JAX has for one.
gpu: $(if $(findstring --rehearse,$(GPU_ARGS)),$(DEV),$(CUDA)) ## on a GPU: answers, texts and speed, bounded in time, resumed, then tables (WHEELS=DIR; GPU_ARGS='--minutes 9'; --rehearse on a CPU)
	@$(BIN)/python -m scripts.gpu.run_all $(GPU_ARGS)

gpu-wheels: .venv/bin/python ## the wheels that `make gpu WHEELS=DIR` installs on a machine without a network, into DIR
	@test -n "$(WHEELS)" || { echo "gpu-wheels takes a folder: make gpu-wheels WHEELS=wheels" >&2; exit 2; }
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --dest '$(WHEELS)' '.[dev,cuda13]' $(BUILD_NEEDS)

gpu-compile: $(GPU_ENV) ## the GPU kernels and whole decode steps compiled for an H200 and for four, without one (GPU_ARGS='--parts steps')
	@.venv-gpu/bin/python -m scripts.gpu.compile $(GPU_ARGS)

parity: parity-transformers parity-hogwild ## logits and greedy text against transformers and, with HOGWILD=DIR, the authors' code for workers, run now

parity-transformers: $(DEV) $(TORCH_ENV)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT TERM && \
	$(TORCH_PYTHON) -m scripts.fixtures.make_parity --out "$$folder" && \
	JAXSHARE_PARITY_FIXTURES="$$folder" $(BIN)/python -m pytest -q -m "" $(PYTEST_ARGS) tests/models/test_parity.py && \
	$(TORCH_PYTHON) -m scripts.fixtures.make_sampling --checkpoints tests/fixtures/parity --out "$$folder/sampling" && \
	JAXSHARE_SAMPLING_FIXTURES="$$folder/sampling" $(BIN)/python -m pytest -q -m "" $(PYTEST_ARGS) tests/models/test_sampling_parity.py

ifeq ($(HOGWILD),)
parity-hogwild:
	@echo "Workers were not compared with the authors' implementation, which takes a checkout of it:"
	@echo "    git clone https://github.com/eqimp/hogwild_llm && make parity HOGWILD=hogwild_llm"
else
parity-hogwild: $(DEV) $(HOGWILD_ENV)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT TERM && \
	$(HOGWILD_PYTHON) -m scripts.fixtures.make_hogwild --hogwild '$(HOGWILD)' --out "$$folder" && \
	JAXSHARE_HOGWILD_FIXTURES="$$folder" $(BIN)/python -m pytest -q -m "" $(PYTEST_ARGS) tests/serving/workers/test_hogwild_parity.py tests/serving/workers/test_hogwild_formatting.py
endif

lm-eval: $(LM_EVAL_ENV) $(LM_EVAL_HF_ENV) ## tasks of lm_eval run by jaxshare and by its own backend `hf`: the same results, and the time of both
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT TERM && \
	export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_DATASETS_CACHE="$$folder/datasets" && \
	.venv-lm-eval-hf/bin/python -m scripts.lm_eval.make_expected --out "$$folder" && \
	.venv-lm-eval/bin/python -m scripts.lm_eval.compare "$$folder"

clean: ## remove what make has made: environments, caches, builds
	rm -rf .venv .venv-gpu .venv-torch .venv-lm-eval .venv-lm-eval-hf .venv-others .venv-tunix .venv-llama .venv-hogwild .venv-docs build dist jaxshare.egg-info .pytest_cache .ruff_cache .hypothesis
	find jaxshare models serving tests scripts examples -type d -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python .venv-gpu/bin/python .venv-lm-eval/bin/python .venv-others/bin/python .venv-tunix/bin/python .venv-docs/bin/python:
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(scripts/find_python.sh 3.12 3.15); [ -n "$$python" ] && \
	echo "making $(@:/bin/python=) with $$python" && "$$python" -m venv --clear $(@:/bin/python=)

$(RUNTIME): pyproject.toml .venv/bin/python
	@echo "installing jaxshare into .venv"
	@$(BIN)/python $(PIP_INSTALL) --editable .
	@touch $@

$(SERVE): pyproject.toml .venv/bin/python
	@echo "installing jaxshare and its server into .venv"
	@$(BIN)/python $(PIP) --editable '.[serve]'
	@touch $@ $(RUNTIME)

$(DEV): pyproject.toml .venv/bin/python
	@echo "installing jaxshare and its tools into .venv"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(RUNTIME) $(SERVE)

$(GPU_ENV): pyproject.toml .venv-gpu/bin/python
	@echo "installing jaxshare and what compiles for a GPU into .venv-gpu"
	@.venv-gpu/bin/python $(PIP) --editable '.[dev,gpu-compile]'
	@touch $@

$(AUDIT): $(DEV)
	@echo "installing what audits dependencies into .venv"
	@$(BIN)/python $(PIP) --editable '.[dev,audit]'
	@touch $@

$(PAGE): $(DEV)
	@echo "installing what drives a browser into .venv"
	@$(BIN)/python $(PIP) --editable '.[dev,page]'
	@touch $@

$(CUDA): $(DEV)
	@command -v nvidia-smi >/dev/null || { echo "this takes an NVIDIA GPU with its driver: nvidia-smi is not there" >&2; exit 2; }
	@echo "installing JAX's plugin for NVIDIA GPUs into .venv"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev,cuda13]'
	@touch $@

$(TORCH_ENV): scripts/make_torch_env.sh
	@scripts/make_torch_env.sh .venv-torch '$(TORCH)' 'transformers>=5,<6' 'peft>=0.17,<1' safetensors sentencepiece protobuf
	@touch $@

$(LM_EVAL_ENV): pyproject.toml .venv-lm-eval/bin/python
	@echo "installing jaxshare and lm_eval into .venv-lm-eval"
	@.venv-lm-eval/bin/python $(PIP) --editable '.[lm-eval,serve]'
	@touch $@

$(LM_EVAL_HF_ENV): scripts/make_torch_env.sh
	@scripts/make_torch_env.sh .venv-lm-eval-hf '$(TORCH)' 'lm_eval[hf]>=0.4.13,<0.5' 'transformers>=5,<6'
	@touch $@

$(DOCS_ENV): pyproject.toml .venv-docs/bin/python
	@echo "installing jaxshare and what makes its site into .venv-docs"
	@.venv-docs/bin/python $(PIP) --editable '.[docs]'
	@touch $@

$(OTHERS_ENV): pyproject.toml .venv-others/bin/python
	@echo "installing jaxshare, Ray Serve and clients of the server into .venv-others"
	@.venv-others/bin/python $(PIP) --editable '.[others]'
	@touch $@

$(TUNIX_ENV): pyproject.toml .venv-tunix/bin/python
	@echo "installing jaxshare and Tunix into .venv-tunix"
	@.venv-tunix/bin/python $(PIP) --editable '.[testing,tunix]'
	@touch $@

# The package's wheels are built for no machine in particular; its source has llama.cpp, and cmake and a compiler build it for this one.
$(LLAMA_ENV):
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(scripts/find_python.sh 3.12 3.15); [ -n "$$python" ] && \
	echo "building llama.cpp in .venv-llama, which takes ten minutes" && "$$python" -m venv --clear .venv-llama
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" .venv-llama/bin/python $(PIP) --no-binary llama-cpp-python '$(LLAMA)' 'gguf>=0.17,<0.20'
	@touch $@

$(HOGWILD_ENV): scripts/make_torch_env.sh
	@scripts/make_torch_env.sh .venv-hogwild '$(TORCH)' 'transformers==4.50.3'
	@touch $@
