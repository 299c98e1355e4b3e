# Every target sets up what it needs and then does its job; nothing has to be run first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.synced
ARGS ?=
# How many random fleets `make test-long` compares the two engines on; every other proof of the engines runs in proportion.
EXAMPLES ?= 20000
# How many seeds of the world of faults `make test-slow` runs; `make soak` runs as many as there is time for.
WORLD_SEEDS ?= 4
# How long `make soak` runs, and its first seed.
FOR ?= 1h
SEED ?= 1

# Tests start hundreds of processes: none of them may compile every module to bytecode again.
unexport PYTHONDONTWRITEBYTECODE
# As `bigfleet.cli.runtime.program` sets it: the threads of numpy's OpenBLAS spin when each process starts.
export OPENBLAS_NUM_THREADS ?= 1
# Where tools/install.sh puts the uv that it fetches.
export PATH := $(PATH):$(CURDIR)/.cache/uv

.DEFAULT_GOAL := help
.PHONY: help up kernels test test-slow test-long certify-aws test-kubernetes test-kubernetes-slow controlplane helm image image-lock release release-check kubernetes-demo soak fuzz lint types format libvirt bench proto docs sbom audit lock setup clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The lock files pin every version with its hashes: what BigFleet needs to run, and that with all that develops it.
install := @sh tools/install.sh $(PYTHON)

$(RUNTIME): requirements.lock pyproject.toml
	$(install) $< $(VENV) --project
	@touch $@

$(STAMP): requirements-dev.lock requirements.lock pyproject.toml
	$(install) $< $(VENV) --project
	@touch $(RUNTIME) $@

setup: $(STAMP) ## create .venv with all that develops BigFleet

up: $(RUNTIME) ## run a provider, a shard and simulated clusters: make up ARGS="--for 60s"
	@$(BIN)/bigfleet up $(ARGS)

# Without this each worker of the tests would compile all of it.
kernels: $(STAMP) ## compile the engine's kernels once, for every later process of this user
	@$(BIN)/bigfleet kernels build

# `worksteal` leaves the tests of a module to one worker, so that what they share is started once. Proofs by examples run
# a fifth of what CI runs, and properties a quarter, unless BIGFLEET_HYPOTHESIS_EXAMPLES says otherwise. A worker waits for
# processes a quarter of the time, so there is one more than cores.
test: kernels ## run the tests but the slow ones: make test ARGS="-k fence"
	@$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist worksteal -m "not slow and not long and not kubernetes" $(ARGS)

# Three workers more than cores: a worker waits for processes half of the time, and with one more than two cores a quarter
# of the processor time was not used. Without Prometheus the tests of its alerts are skipped, unless
# BIGFLEET_REQUIRE_PROMETHEUS=1. Guests that QEMU emulates boot for minutes beside other tests.
test-slow: export BIGFLEET_HYPOTHESIS_EXAMPLES ?= 500
test-slow: export BIGFLEET_TEST_PATIENCE_SECONDS ?= 600
test-slow: kernels ## run the slow tests, real processes killed and certified: make test-slow WORLD_SEEDS=200
	@BIGFLEET_WORLD_SEEDS=$(WORLD_SEEDS) $(BIN)/python -m pytest -n $$(($$(nproc) + 3)) --dist worksteal -m "slow and not long and not kubernetes" $(ARGS)

test-long: kernels ## run the longest tests, and the engines' proofs on many fleets: make test-long EXAMPLES=100000
	@BIGFLEET_HYPOTHESIS_EXAMPLES=2000 $(BIN)/python -m pytest -n auto --dist worksteal -m "long and not kubernetes" $(ARGS)
	@BIGFLEET_HYPOTHESIS_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n auto --dist worksteal tests/engine $(ARGS)

# etcd, the API server, the controller manager, the scheduler and kubectl in one program, built from tools/controlplane by
# Go and cached in the user's cache directory.
controlplane: $(STAMP) ## build the Kubernetes control plane of the tests unless it is cached, and print its path
	@$(BIN)/python -m tools.build_controlplane

# The tests of charts use them, and are skipped without them unless BIGFLEET_REQUIRE_HELM=1.
helm: $(STAMP) ## fetch helm and kubectl for the tests of charts unless they are cached, and print the path of helm
	@$(BIN)/python -m tools.fetch_helm

# Without a container engine, from the packages of Debian 12 and of requirements.lock. It needs apt-get and dpkg-deb of
# Debian 12, and root or user namespaces.
image: $(STAMP) ## build the container image as an OCI layout, build/image: make image EXTRAS="uvloop"
	@$(BIN)/python -m tools.image build build/image $(if $(filter undefined,$(origin EXTRAS)),,--extras "$(EXTRAS)")

image-lock: $(STAMP) ## pin the newest versions of Debian's packages for the image
	@$(BIN)/python -m tools.image lock

# Artefacts of the commit of this checkout, with checksums, and a signature if KEY names a private key.
release: image sbom ## build a release of this commit: build/release; make release KEY=release.key signs it
	@$(BIN)/python -m tools.release build build/release --image build/image --sbom build/bigfleet.cdx.json $(if $(KEY),--key $(KEY))

# It has no wheel: it is built with libvirt-dev, pkg-config and a C compiler. The tests with real domains also need Debian's
# libvirt-daemon-system, qemu-system-x86, qemu-utils, qemu-guest-agent, linux-image-cloud-amd64, busybox-static, openssl, syslinux and mtools.
LIBVIRT := $(VENV)/.libvirt
$(LIBVIRT): requirements-libvirt.lock $(STAMP)
	@pkg-config --exists libvirt || { echo "libvirt-dev and pkg-config are missing: apt-get install libvirt-dev pkg-config gcc python3-dev"; exit 1; }
	$(install) $< $(VENV)
	@touch $@

libvirt: $(LIBVIRT) ## build libvirt's Python binding, with which the tests of real virtual machines run

# Image, units and charts of the release are started: the image as root only, the charts on a control plane where there is
# one (`make helm controlplane`), and else they are skipped, unless BIGFLEET_REQUIRE_HELM=1 and BIGFLEET_REQUIRE_KUBERNETES=1.
# A virtual machine is booted by the installed wheel, before all that: a missing libvirt fails the check, unless
# BIGFLEET_REQUIRE_LIBVIRT=0.
RELEASED := build/released
release-check: export BIGFLEET_RELEASE_DIR = $(CURDIR)/build/release
release-check: export BIGFLEET_UNITS = $(CURDIR)/$(RELEASED)/deploy/systemd
release-check: export BIGFLEET_CHARTS = $(CURDIR)/$(RELEASED)/charts
release-check: export BIGFLEET_REQUIRE_LIBVIRT ?= 1
release-check: $(STAMP) $(if $(filter 0,$(BIGFLEET_REQUIRE_LIBVIRT)),,$(LIBVIRT)) ## verify, install and start what `make release` built: make release-check PUBLIC_KEY=release.pub
	@$(BIN)/python -m tools.release check build/release $(if $(PUBLIC_KEY),--public-key $(PUBLIC_KEY))
	@rm -rf $(RELEASED) && mkdir -p $(RELEASED)/charts
	@tar -xzf build/release/bigfleet-*.tar.gz -C $(RELEASED) --strip-components=1
	@for chart in build/release/charts/*.tgz; do tar -xzf "$$chart" -C $(RELEASED)/charts || exit 1; done
	@$(BIN)/python -m pytest -n 0 tests/libvirt/test_installed_wheel.py tests/release/test_installed_release.py tests/deploy/test_image.py \
	  tests/deploy/test_image_contents.py tests/deploy/test_systemd_units.py tests/deploy/test_charts.py \
	  tests/deploy/test_chart_schemas.py tests/deploy/chart_values tests/kubernetes/charts $(ARGS)

# Without the program these tests are skipped, unless BIGFLEET_REQUIRE_KUBERNETES=1. Three workers, each with control
# planes of its own: on two cores two workers leave a third of the processor time unused. A plane takes 700 MB. The files begin
# in the order of collection, the longest first (tests/kubernetes/conftest.py); xdist would begin it last, as it has one test.
test-kubernetes: $(STAMP) ## run the tests on a real Kubernetes control plane: make test-kubernetes ARGS="-k evict"
	@$(BIN)/python -m tools.build_controlplane >/dev/null || [ "$$BIGFLEET_REQUIRE_KUBERNETES" != 1 ]
	@BIGFLEET_CONTROLPLANE="$$($(BIN)/python -m tools.build_controlplane --path)" \
	  $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "kubernetes and not slow" $(ARGS)

# make certify-aws ACCOUNT=… REGION=… OFFERINGS=… BOOTSTRAP=s3://… NODE_ROLE=… BUDGET_USD=… CONFIRM=yes; the credentials are those
# of botocore's chain. docs/aws-provider.md has the rest.
certify-aws: $(STAMP) ## certify the EC2 provider in an account of AWS; a dry run unless CONFIRM=yes
	@$(BIN)/python -m tools.certify_aws --account "$(ACCOUNT)" --region "$(REGION)" --offerings "$(OFFERINGS)" \
	  --bootstrap "$(BOOTSTRAP)" --node-role "$(NODE_ROLE)" --budget-usd "$(BUDGET_USD)" --confirm "$(CONFIRM)" $(ARGS)

test-kubernetes-slow: export BIGFLEET_REQUIRE_KUBERNETES = 1
test-kubernetes-slow: $(STAMP) ## run the closed loops and the kills on real Kubernetes control planes, 20 minutes and more
	@BIGFLEET_CONTROLPLANE="$$($(BIN)/python -m tools.build_controlplane)" \
	  $(BIN)/python -m pytest -n 0 -m "kubernetes and slow" $(ARGS)

kubernetes-demo: $(STAMP) ## run real control planes with operators on simulated machines: make kubernetes-demo ARGS="--for 2m"
	@program="$$($(BIN)/python -m tools.build_controlplane)" && \
	  BIGFLEET_CONTROLPLANE="$$program" $(BIN)/bigfleet up --kubernetes 3 --state-dir .bigfleet/kubernetes $(ARGS)

soak: $(STAMP) ## run the world of faults, seed after seed: make soak FOR=8h SEED=100000
	@$(BIN)/bigfleet sim run --for $(FOR) --seed $(SEED) --jobs $$(nproc) --twice-every 20 --require-marks

FUZZING := $(VENV)/.fuzzing
$(FUZZING): requirements-fuzz.lock $(STAMP)
	$(install) $< $(VENV)
	@touch $@

fuzz: $(FUZZING) ## fuzz the readers of input from outside, guided by coverage: make fuzz FOR=10m ARGS="--only pod --keep"
	@$(BIN)/python -m tests.fuzzing --for $(FOR) $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## print the benchmark tables: make bench ARGS="--quick"
	@$(BIN)/python -m bench $(ARGS)

proto: $(STAMP) ## generate the Python code from proto/
	$(BIN)/python tools/generate_proto.py

COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
lock: ## resolve the versions again (needs uv)
	$(COMPILE) --upgrade --group dev --extra uvloop --extra bound --extra parquet pyproject.toml \
	  --output-file requirements-dev.lock
	$(COMPILE) --constraints requirements-dev.lock --group build --extra uvloop pyproject.toml \
	  --output-file requirements.lock
	$(COMPILE) --constraints requirements-dev.lock --extra aws --extra uvloop pyproject.toml \
	  --output-file requirements-image.lock
	$(COMPILE) --upgrade --group pyproject.toml:docs --output-file requirements-docs.lock
	$(COMPILE) --upgrade --group pyproject.toml:fuzz --output-file requirements-fuzz.lock
	$(COMPILE) --upgrade --group pyproject.toml:libvirt --output-file requirements-libvirt.lock
	$(COMPILE) --upgrade --group pyproject.toml:supply --output-file requirements-supply.lock
	$(COMPILE) --upgrade --group pyproject.toml:uv --output-file requirements-uv.lock

# Tools that build the site or look at the lock file: nothing that builds or runs BigFleet needs them.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.synced
SUPPLY_VENV := .venv-supply
SUPPLY_STAMP := $(SUPPLY_VENV)/.synced

$(DOCS_STAMP): requirements-docs.lock
	$(install) $< $(DOCS_VENV)
	@touch $@

$(SUPPLY_STAMP): requirements-supply.lock
	$(install) $< $(SUPPLY_VENV)
	@touch $@

docs: $(DOCS_STAMP) ## check the links of the documentation and build the site: build/site/index.html
	@$(DOCS_VENV)/bin/python -m tools.docs_site build/docs
	@$(DOCS_VENV)/bin/zensical build --clean --strict

sbom: $(SUPPLY_STAMP) ## write a CycloneDX bill of materials of what BigFleet installs: build/bigfleet.cdx.json
	@$(SUPPLY_VENV)/bin/python -m tools.supply_chain sbom build/bigfleet.cdx.json

audit: $(SUPPLY_STAMP) ## look for known vulnerabilities of what BigFleet installs; needs the network
	@$(SUPPLY_VENV)/bin/python -m tools.supply_chain audit $(SUPPLY_VENV)/bin/pip-audit

clean: ## remove what the targets made, and the state of `make up`
	rm -rf $(VENV) $(DOCS_VENV) $(SUPPLY_VENV) build .cache .bigfleet .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
