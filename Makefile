# The words a person types: demo, demo-pictures, test, test-fast, test-lean, notebook, architectures, lint, types,
# docs, fuzz, clients, scale, formats, bench, docker. Each installs what it needs first; gpu installs nothing.
.PHONY: demo demo-pictures test test-fast test-lean notebook architectures lint types docs fuzz clients scale formats bench gpu docker dev
PYTHON ?= python3
comma := ,
# Python keeps what it has compiled of torch and transformers: a process that imports both starts
# twice as fast, and tests start many.
export PYTHONDONTWRITEBYTECODE =
VENV := .venv
BIN := $(VENV)/bin
# One process more than processors, up to 5: tests also wait, for builds of each other and for
# deadlines. One thread of torch a process.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 1 : 5)))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
FAST := $(addprefix tests/,architecture plugins runtime builder/passes builder/checks builder/checkpoint)

# torch from PyPI brings gigabytes of CUDA packages on Linux. Without an NVIDIA GPU the CPU build is
# asked for by its local version, so that nothing else can be taken by accident.
NVIDIA := $(shell command -v nvidia-smi)
TORCH := torch==2.13.0$(if $(NVIDIA),,$(shell test "$$(uname -s)" = Linux && echo +cpu))
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Options for it: make demo DEMO='--flavour tensorrt-rtx'.
demo: $(VENV)/demo         ## build an engine for a real model and answer as three adapters
	$(BIN)/python -m trt_lora.scripts.demo $(DEMO)

demo-pictures: $(VENV)/demo  ## LoRA for a diffusion model that is an ONNX file: build/terrain.png
	$(BIN)/python -m trt_lora.scripts.demo.terrain

test: $(VENV)/ready        ## run the whole test suite, one file per process at a time
	$(PYTEST)

test-fast: $(VENV)/ready   ## what one runs while editing: no engine is built, no kernel emulated
	$(PYTEST) -m "not slow" $(FAST)

# What runs where only the wheel is installed: no torch, no builder, no NVIDIA library. The tests are
# those of the sdist, away from the checkout. Another interpreter: make test-lean PYTHON=python3.13
LEAN := $(CURDIR)/build/lean
LEAN_TESTS := $(addprefix tests/,runtime plugins/contract plugins/test_*.py transcripts)
LEAN_TOOLS := pytest pytest-xdist filelock hypothesis pexpect httpx
LEAN_VENV := $(LEAN)/$(notdir $(PYTHON))
test-lean: $(VENV)/ready $(LEAN)/tiny
	rm -rf $(LEAN)/sdist $(LEAN_VENV)
	$(BIN)/python -c 'import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])' $(LEAN)/sdist >$(LEAN)/sdist.log
	cd $(LEAN)/sdist && tar -xzf trt_lora-*.tar.gz --strip-components=1
	$(PYTHON) -m venv $(LEAN_VENV)
	$(LEAN_VENV)/bin/pip install --quiet \
	  "$$(ls $(LEAN)/sdist/trt_lora-*.tar.gz)[cpu,text,requests,serve,structured,hub,otel]" $(LEAN_TOOLS)
	cd $(LEAN)/sdist && $(LEAN_VENV)/bin/pytest -n $(WORKERS) --dist loadfile \
	  -m "not needs_torch" --rootdir=. --tiny-engine=$(LEAN)/tiny $(LEAN_TESTS)

# The one thing that the lean environment cannot make.
$(LEAN)/tiny: $(VENV)/ready $(shell find builder tests/support/models -name '*.py')
	rm -rf $@ $@.part
	PYTHONPATH=tests $(BIN)/python -W ignore -m support.models.tiny_engine_folder $@.part
	mv $@.part $@

notebook: $(VENV)/ready    ## run docs/switching.ipynb: from PEFT training to switching
	OMP_NUM_THREADS=1 $(BIN)/python -m papermill --no-progress-bar docs/switching.ipynb build/switching.ipynb

architectures: $(VENV)/ready  ## build and compare every architecture, write docs/supported-models.md
	PYTHONPATH=tests $(BIN)/python tests/end_to_end/sweep_architectures.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

types: $(VENV)/ready
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# Not --quiet: --strict counts the warnings that are shown.
docs: $(VENV)/ready        ## the pages as a site in build/site; a page or link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: $(VENV)/ready        ## throw damaged files at every reader, then stress threads and rewritten files
	$(BIN)/python tests/hostile/fuzz.py

# Each in an environment of its own below build/clients, by the pins of tests/clients/clients.toml.
# Some of them: make clients CLIENTS='openai or litellm'.
clients: $(VENV)/ready     ## clients that nobody here wrote ask `trt-lora serve`
	OMP_NUM_THREADS=1 $(BIN)/pytest $(if $(CLIENTS),-k '$(CLIENTS)') -rP tests/clients/run_clients.py

# Each in an environment of its own below build/scaleout, by the pins of tests/scaleout/scaleout.toml.
# Some of them: make scale SCALE='ray or triton'.
scale: $(VENV)/ready       ## Ray Serve, Dynamo, Triton and vllm-router over engines, each as it is
	OMP_NUM_THREADS=1 $(BIN)/pytest $(if $(SCALE),-k '$(SCALE)') -rP tests/scaleout/run_scaleout.py

# Each in an environment of its own below build/formats, by the pins of tests/formats/formats.toml.
# Some of them: make formats FORMATS='bitsandbytes or modelopt'.
formats: $(VENV)/ready     ## the libraries of quantised weights read our fixtures, and we what they make
	OMP_NUM_THREADS=1 $(BIN)/pytest $(if $(FORMATS),-k '$(FORMATS)') -rP tests/formats/run_formats.py

# Options for it: make bench BENCH='--only plan host-step'.
bench: $(VENV)/ready       ## measure on the CPU, write docs/benchmarks/cpu-*.json
	$(BIN)/python -m trt_lora.scripts.bench cpu $(BENCH)

# In the virtual environment if there is one, else with $(PYTHON) as it is: needs torch, numpy,
# safetensors, pytest and cuda-python, and no network. Options for it: make gpu GPU='--only kernels'.
gpu:                       ## check and measure on an NVIDIA GPU, write docs/benchmarks/gpu-*.json
	PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} \
	  $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m trt_lora.scripts.bench gpu $(GPU)

# Where there is docker; test_containers.py and hadolint read the files elsewhere.
docker:                    ## build the images, run the demo in one
	docker compose build
	docker compose run --rm demo

dev: $(VENV)/ready

# An editable install of what the demo runs. Python compiles what it imports of it, not all of it.
$(VENV)/demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --retries 1 '$(TORCH)' 2>/dev/null \
	  || $(BIN)/pip install --quiet --no-compile --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	$(BIN)/pip install --quiet --no-compile -e '.[demo$(if $(NVIDIA),$(comma)rtx)]'
	touch $@

# The tools of development.
$(VENV)/ready: $(VENV)/demo
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@
