# Everything here needs Go, make and git, and installs the rest itself.

GO ?= go
BINARY := bin/plimsoll
TOOL := $(GO) tool -modfile=tools.mod
export CGO_ENABLED ?= 0
# What is compiled in one clone serves the next one.
export GOFLAGS := $(GOFLAGS) -trimpath

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build ## Rehearse the optimizer of Qwen2.5-0.5B on this host
	$(BINARY) rehearse --model qwen2.5-0.5b

.PHONY: build
build: ## Build bin/plimsoll
	$(GO) build -buildvcs=auto -o $(BINARY) ./cmd/plimsoll

PREFIX ?= /usr/local
.PHONY: install
install: build ## Install the program with manual pages and completions under PREFIX (/usr/local)
	scripts/install $(BINARY) $(DESTDIR)$(PREFIX)

PLATFORMS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64 js/wasm
.PHONY: build-all
build-all: ## Build the program for every system; where there is no Linux, its planner
	for p in $(PLATFORMS); do GOOS=$${p%/*} GOARCH=$${p#*/} $(GO) build -ldflags '-s -w' \
		-o bin/$${p%/*}-$${p#*/}/ ./cmd/plimsoll || exit 1; done

PAGE := bin/plimsoll.html
.PHONY: page
page: build ## Build bin/plimsoll.html, the planner in a page for any browser
	GOOS=js GOARCH=wasm $(GO) build -tags page -buildvcs=auto -ldflags '-s -w' -o bin/plimsoll.wasm ./cmd/plimsoll
	$(GO) run ./cmd/page bin/plimsoll.wasm $$($(GO) env GOROOT)/lib/wasm/wasm_exec.js \
		"$$($(BINARY) --version | sed 's/.* //')" $(PAGE)

.PHONY: test-browser
test-browser: page ## Test the pages in headless Chromium (installs it on Debian as root)
	@scripts/_debian chromium chromium
	$(GO) -C browser test -count=1 . $(BROWSER_FLAGS)

.PHONY: pictures-browser
pictures-browser: ## Draw the pictures of the page in docs/pictures
	$(MAKE) test-browser BROWSER_FLAGS='-run TestPage/looks -args -pictures ../docs/pictures'

.PHONY: packages
packages: python ## Make archives, deb, rpm, wheels, an OCI image, a bill of materials and checksums in dist/
	PYTHON=$(PYTHON_ENVIRONMENT)/bin/python scripts/package

.PHONY: test-packages
test-packages: packages ## Install each artefact of dist/ in an empty root, and rehearse with it (Debian, root)
	PYTHON=$(PYTHON_ENVIRONMENT)/bin/python scripts/test-packages

.PHONY: test-wasm
test-wasm: ## Run the planner's tests as WebAssembly (needs node; installs it on Debian as root)
	@scripts/_debian node nodejs
	GOOS=js GOARCH=wasm $(GO) test -exec $$($(GO) env GOROOT)/lib/wasm/go_js_wasm_exec \
		-run 'Version|Anywhere|NeedLinux' ./cmd/plimsoll

.PHONY: test-windows
test-windows: ## Run tests of the planner as Windows programs, under Wine (installs it and mingw on Debian as root)
	@scripts/_debian 'wine x86_64-w64-mingw32-gcc' wine wine64 gcc-mingw-w64-x86-64-win32
	GO=$(GO) scripts/test-windows

# The tests that every change waits for. Where a test has more to show than there is time for, -short leaves it out.
.PHONY: test
test: ## Run the Go tests (4 minutes on two cores)
	$(GO) test -short ./...

.PHONY: test-all
test-all: python ## Run the Go tests at their full size, with real PyTorch (half an hour)
	$(GO) test -timeout 60m ./...

.PHONY: bench-plan
bench-plan: ## Hold the time of plans, up to a trillion parameters, to their limits
	$(GO) test -run '^$$' -bench BenchmarkPlan ./internal/plan/plan

.PHONY: test-purego
test-purego: ## Run the tests of the engine with the kernels in plain Go
	$(GO) test -short -tags purego ./internal/state/optim ./internal/state/optim/kernel/... ./internal/state/engine/...

.PHONY: test-simulation
test-simulation: ## Run 100,000 schedules of the state engine in a simulated world (2 minutes)
	$(GO) test -count=1 -v -timeout 30m ./internal/state/simulation -run 'Schedules$$' -schedules 100000 -services 2000

# Every night has seeds of its own, which the output names.
SIMULATION_FIRST ?= $(shell expr $$(date +%s) / 86400 '*' 10000000)
.PHONY: test-simulation-all
test-simulation-all: ## Run millions of schedules, others each night, and plant faults that they must find (2 hours)
	$(GO) test -count=1 -v -timeout 12h ./internal/state/simulation -planted -schedules 3000000 -services 100000 \
		-first $(SIMULATION_FIRST)

.PHONY: test-kernels
test-kernels: ## Check that the assembly is what its generator writes
	$(GO) -C internal/state/optim/kernel/_asm test ./...

.PHONY: test-experiments
test-experiments: ## Run the tests of the two studies
	$(GO) -C experiments test ./...

.PHONY: test-accuracy
test-accuracy: ## Hold the plans of public measurements to what docs/accuracy.md says (needs the measurements)
	$(GO) -C cmd/accuracy test -count=1 ./...

.PHONY: parts
parts: python ## Run the parts of the build that a change needs beside make test (.ci/parts.toml)
	$(GO) run ./cmd/ci run

.PHONY: ghost
ghost: ## Make the library that stands in for CUDA, beside the program (needs a C compiler; plan makes it by itself)
	mkdir -p bin
	$(CC) -O2 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter -Werror \
		-o bin/libplimsoll_ghost.so internal/run/ghost/library/*.c -ldl -lpthread

.PHONY: test-ghost
test-ghost: python ## Run programs on GPUs that are not there, and hold the planner's own model to one
	$(GO) test -count=1 ./internal/run/ghost ./cmd/rows

.PHONY: all-stamps
all-stamps: python ## Run every part of the build, whether its inputs have changed or not
	$(GO) run ./cmd/ci run -all

.PHONY: nightly
nightly: python ## Run what is too long for every change, and record how it ended (hours)
	$(GO) run ./cmd/ci nightly

.PHONY: test-times
test-times: python ## Measure every package and Python file alone, and write the table of CONTRIBUTING.md
	$(GO) run ./cmd/ci times

STRESS_RUNS ?= 20
.PHONY: stress
stress: ## Run the tests STRESS_RUNS times (20) on a host made busy: cores, memory, processes that stand still
	GO=$(GO) scripts/stress $(STRESS_RUNS)

PYTHON_ENVIRONMENT := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/plimsoll/venv
PYTHON_PACKAGES := torch numpy deepspeed megatron-core transformers peft accelerate lightning pytest pytest-xdist hypothesis hatchling expecttest \
	pytorch_optimizer
# An environment that was made for other packages gets what it lacks.
PYTHON_INSTALLED := $(PYTHON_ENVIRONMENT)/installed-$(shell echo $(PYTHON_PACKAGES) | tr ' ' '-')

.PHONY: python
python: $(PYTHON_INSTALLED) ## Install PyTorch for the tests that compare with it (several GB)

$(PYTHON_INSTALLED):
	python3 -m venv $(PYTHON_ENVIRONMENT)
	$(PYTHON_ENVIRONMENT)/bin/python -m pip install --quiet $(PYTHON_PACKAGES)
	touch $@

# What TRL, diffusers, torchtune and torchtitan need stands beside the packages of the tests.
TRAINERS_ENVIRONMENT := $(dir $(PYTHON_ENVIRONMENT))trainers
TRAINERS_PACKAGES := trl==1.16.0 diffusers==0.42.1 torchtune==0.6.1 torchao==0.9.0 torchtitan==0.2.2 tensorboard
TRAINERS_INSTALLED := $(TRAINERS_ENVIRONMENT)/installed-$(shell echo $(TRAINERS_PACKAGES) | tr ' ' '-')

$(TRAINERS_INSTALLED): $(PYTHON_INSTALLED)
	python3 -m venv $(TRAINERS_ENVIRONMENT)
	$(PYTHON_ENVIRONMENT)/bin/python -c 'import site; print(*site.getsitepackages())' > \
		$$($(TRAINERS_ENVIRONMENT)/bin/python -c 'import site; print(*site.getsitepackages())')/beside.pth
	$(TRAINERS_ENVIRONMENT)/bin/python -m pip install --quiet $(TRAINERS_PACKAGES)
	touch $@

.PHONY: test-ghost-all
test-ghost-all: $(TRAINERS_INSTALLED) ## Hold programs on GPUs that are not there to the CPU, tensor by tensor (1 GB of downloads)
	PLIMSOLL_ALIKE=all $(GO) test -count=1 -run '^TestAsOnTheHost' ./internal/run/ghost
	PLIMSOLL_ALIKE=all PLIMSOLL_PYTHON=$(TRAINERS_ENVIRONMENT)/bin/python \
		$(GO) test -count=1 -run '(Trainers|Pipeline)AsOnTheHost' ./internal/run/ghost

PYTEST_FLAGS := --quiet
PYTEST_WORKERS := 2
PYTEST = PYTHONPATH=python $(PYTHON_ENVIRONMENT)/bin/python -m pytest $(PYTEST_FLAGS)

.PHONY: test-python
test-python: build python ## Run the tests of the PyTorch client
	$(PYTEST) -n $(PYTEST_WORKERS) --dist worksteal python

.PHONY: test-python-all
test-python-all: build python ## Run the tests of the PyTorch client in every combination
	$(PYTEST) --nightly -n $(PYTEST_WORKERS) --dist worksteal python

.PHONY: test-trl
test-trl: build $(TRAINERS_INSTALLED) ## Run TRL's trainers and torchtitan with the optimizer service (1 GB of downloads)
	PYTHONPATH=python $(TRAINERS_ENVIRONMENT)/bin/python -m pytest $(PYTEST_FLAGS) python/tests/test_trl.py python/tests/test_torchtitan.py

# The releases of megatron-core before the one in the environment. Each stands before it on the path, without what it needs.
MEGATRON_RELEASES := 0.16.0 0.15.3
MEGATRON_FOLDERS := $(MEGATRON_RELEASES:%=$(dir $(PYTHON_ENVIRONMENT))megatron-core-%)

$(MEGATRON_FOLDERS): $(dir $(PYTHON_ENVIRONMENT))megatron-core-%: | $(PYTHON_INSTALLED)
	$(PYTHON_ENVIRONMENT)/bin/python -m pip install --quiet --no-deps --target $@ megatron-core==$*

.PHONY: test-megatron-releases
test-megatron-releases: build python $(MEGATRON_FOLDERS) ## Run the tests of the optimizer in Megatron-LM with earlier megatron-core
	for folder in $(MEGATRON_FOLDERS); do \
		PYTHONPATH=$$folder:python $(PYTHON_ENVIRONMENT)/bin/python -m pytest $(PYTEST_FLAGS) \
			-n $(PYTEST_WORKERS) python/tests/test_megatron.py || exit; done

.PHONY: test-standin
test-standin: build python ## Run the PyTorch client on the stand-in device (needs a C++ compiler; installs it on Debian as root)
	@scripts/_debian c++ g++
	$(PYTEST) -n $(PYTEST_WORKERS) python/tests/standin

.PHONY: test-gpu
test-gpu: build python ## Run StateOffload on a CUDA GPU, with rates of its copies and high-water marks (skips without one)
	PYTHONPATH=python $(PYTHON_ENVIRONMENT)/bin/python -m pytest --quiet -s python/tests/test_state_offload_cuda.py

# On a machine with a GPU, PYTHON is the one that has torch for it.
GPU_PYTHON = $(or $(PYTHON),$(PYTHON_ENVIRONMENT)/bin/python)
.PHONY: gpu-proof
gpu-proof: build ghost ## Run the proof on an NVIDIA GPU, or go on with it (8 minutes); docs/gpu.md says how
	$(GPU_PYTHON) scripts/gpu-proof $(AGAIN)

.PHONY: gpu-proof-dry
gpu-proof-dry: build ghost python ## Run the same script without a GPU: on the stand-in device and the ghost (4 minutes)
	@scripts/_debian c++ g++
	rm -rf bin/gpu-proof-dry.jsonl bin/gpu-proof-dry.scratch
	$(GPU_PYTHON) scripts/gpu-proof --dry

.PHONY: gpu-kit
gpu-kit: ghost ## Make bin/gpu-kit: all that the proof needs on a machine without Go or network
	GO=$(GO) scripts/gpu-kit bin/gpu-kit

.PHONY: gpu-page
gpu-page: ## Write docs/gpu.md from the results in scripts/gpu_proof/measured
	python3 scripts/gpu-page --write docs/gpu.md

.PHONY: drift
drift: python ## Check that int8 moments and masters of 24 bits do not drift, and cost no loss on 3 seeds (needs some 10 minutes)
	$(GO) -C experiments test -count=1 -run 'Drift' ./eight-bit
	$(GO) test -count=1 -run 'MastersOf24Bits' ./internal/state/optim/kernel
	$(GO) -C experiments build -o $(CURDIR)/bin/step ./moments/step
	cd experiments/moments && for pair in torch,int8 split/fp32,split24/int8; do \
		$(PYTHON_ENVIRONMENT)/bin/python train.py --optimizers $$pair --step-command $(CURDIR)/bin/step \
			--output $(CURDIR)/bin/drift.csv && \
		$(PYTHON_ENVIRONMENT)/bin/python plot.py --within 0.1 $(CURDIR)/bin/drift.csv $(CURDIR)/bin/drift.svg || exit 1; \
	done

.PHONY: race
race: ## Run the tests under the race detector (needs a C compiler)
	CGO_ENABLED=1 $(GO) test -timeout 60m -race -short ./...
	CGO_ENABLED=1 $(GO) -C experiments test -race -short ./...

.PHONY: test-avx512
test-avx512: ## Run the kernel tests with AVX-512, and with VBMI and BF16, emulated where need be (Debian, root)
	@if grep -w avx512_vbmi /proc/cpuinfo | grep -qw avx512_bf16; then \
		PLIMSOLL_KERNEL=avx512bf16 $(GO) test -count=1 ./internal/state/optim/kernel ./internal/state/engine; \
	elif grep -qw avx512vl /proc/cpuinfo; then \
		PLIMSOLL_KERNEL=avx512 $(GO) test -count=1 ./internal/state/optim/kernel ./internal/state/engine && \
		$(GO) build -o bin/trap internal/state/optim/kernel/_emulate/trap.go && \
		PLIMSOLL_TEST_TRAPPED=1 PLIMSOLL_KERNEL=avx512bf16 $(GO) test -count=1 -short -exec $(CURDIR)/bin/trap \
			./internal/state/optim/kernel; \
	else internal/state/optim/kernel/_emulate/run; fi

.PHONY: test-arm64
test-arm64: ## Run the kernel tests for arm64, emulated (needs qemu-user; installs it on Debian as root)
	@scripts/_debian qemu-aarch64 qemu-user
	GOARCH=arm64 $(GO) test -count=1 -short -exec qemu-aarch64 ./internal/state/optim/kernel

.PHONY: test-slurm
test-slurm: build ## Run jobs under a real Slurm on this host (root; installs it on Debian)
	scripts/test-slurm $(BINARY)

.PHONY: test-numa
test-numa: ## Run tests on an emulated machine with three NUMA nodes (installs QEMU on Debian as root)
	scripts/test-numa

.PHONY: test-power-loss
test-power-loss: ## Lose power after every operation of a save, on a file system of the test's own (Linux, /dev/fuse)
	$(GO) -C internal/state/checkpoint/powerloss test -count=1 -short ./...

.PHONY: test-power-loss-all
test-power-loss-all: ## Lose power there 20 times after every operation, each time with other remains (3 minutes)
	$(GO) -C internal/state/checkpoint/powerloss test -count=1 -timeout 60m ./...

.PHONY: test-nfs
test-nfs: ## Run the tests of checkpoints on NFS, on an emulated machine (installs QEMU on Debian as root)
	scripts/test-nfs

FILES_OF_PACKAGE := {{.ImportPath}} {{.GoFiles}} {{.TestGoFiles}} {{.XTestGoFiles}}

# Elsewhere than here, only packages that have other files there are vetted: build-all compiles the others.
.PHONY: lint
lint: ## Check format, vet, staticcheck and generated files
	@test -z "$$(gofmt -l .)" || { gofmt -d .; exit 1; }
	$(GO) vet ./...
	@mkdir -p bin && $(GO) list -f '$(FILES_OF_PACKAGE)' ./... | sort >bin/files-of-packages
	@for p in $(filter-out linux/amd64 darwin/arm64,$(PLATFORMS)); do \
		packages=$$(GOOS=$${p%/*} GOARCH=$${p#*/} $(GO) list -f '$(FILES_OF_PACKAGE)' ./... | sort | \
			comm -13 bin/files-of-packages - | sed 's/ .*//'); \
		echo "GOOS=$${p%/*} GOARCH=$${p#*/} $(GO) vet" $$packages; \
		GOOS=$${p%/*} GOARCH=$${p#*/} $(GO) vet $$packages || exit 1; done
	$(GO) vet -tags purego ./...
	$(TOOL) staticcheck ./...
	$(GO) -C internal/state/optim/kernel/_asm vet ./...
	$(GO) -C experiments vet ./...
	$(GO) -C packaging vet ./...
	$(GO) -C packaging test ./...
	$(GO) -C browser vet ./...
	$(GO) -C cmd/accuracy vet ./...
	$(GO) -C internal/state/checkpoint/powerloss vet ./...
	staticcheck=$$($(TOOL) -n staticcheck) && cd experiments && $$staticcheck ./... && cd ../cmd/accuracy && \
		$$staticcheck ./...
	$(GO) vet scripts/_guest/init.go
	$(GO) vet internal/state/optim/kernel/_emulate/trap.go
	$(GO) mod tidy -diff
	$(GO) -C experiments mod tidy -diff
	$(GO) -C browser mod tidy -diff
	$(GO) -C cmd/accuracy mod tidy -diff
	$(GO) -C internal/state/checkpoint/powerloss mod tidy -diff
	$(GO) mod verify

.PHONY: licenses
licenses: ## Check the licenses of what the program contains, and write them to bin/NOTICES.txt
	@mkdir -p bin
	GO=$(GO) scripts/licenses bin/NOTICES.txt

.PHONY: vulnerabilities
vulnerabilities: ## Look for known vulnerabilities in what the program calls (needs https://vuln.go.dev)
	GO=$(GO) scripts/vulnerabilities

.PHONY: reproducible
reproducible: ## Build the last commit twice, from two empty caches, and compare the results (4 minutes of CPU time)
	GO=$(GO) timeout 40m scripts/reproducible

.PHONY: generate
generate: ## Write the assembly kernels again
	$(GO) generate ./...

.PHONY: bench
bench: ## Run the kernel benchmarks
	$(GO) test -run '^$$' -bench . ./internal/state/optim/kernel

.PHONY: scoreboard
scoreboard: ## Hold the binding against the rules of other programs, on the corpus of machines
	$(GO) test -count=1 -v -run '^TestScoreboard$$' ./internal/machine/binding -args -scoreboard

.PHONY: exhaustive
exhaustive: ## Plan every recipe of three questions, and hold the search of plimsoll fit to them (5 minutes)
	$(GO) test -count=1 -v -timeout 3h -run '^TestExhaustiveQuestions$$' ./internal/plan/fit -args -exhaustive

.PHONY: advice
advice: ## Apply every advised edit to all public configurations that do not fit, on three GPUs (needs them)
	$(GO) test -count=1 -v -timeout 2h -run '^(TestPublicConfigs|TestPipelines)$$' ./internal/plan/lever -args -all

.PHONY: bench-overlap
bench-overlap: ## Hold the law of overlap against paced steps, from T*/4 to 4 T* (takes 3 minutes, on a quiet host)
	$(GO) test -count=1 -v -run '^TestSweep$$' ./internal/measure/rehearse -args -sweep

.PHONY: bench-compare
bench-compare: ## Compare the kernels with those of commit REF
	scripts/bench-compare $(REF)

.PHONY: accuracy
accuracy: ## Hold plans against public measurements, and write docs/accuracy.md (needs the measurements)
	shared=$${PLIMSOLL_SHARED:-$(CURDIR)/../shared}/data; \
	$(GO) -C cmd/accuracy run . -write $(CURDIR)/docs/accuracy.md \
		-table $(CURDIR)/internal/plan/published/measurements.tsv $$shared/measurements-dev.jsonl && \
	$(GO) -C cmd/accuracy run . -megatron $$shared/megatron-golden-dev.jsonl

.PHONY: ghost-rows
ghost-rows: python ## Plan jobs by the planner's own model and by their programs, and write docs/rows.md (20 minutes)
	$(GO) run ./cmd/rows -python $(PYTHON_ENVIRONMENT)/bin/python -write docs/rows.md

SEED ?= 1
DRAWN_PYTHON ?= $(PYTHON_ENVIRONMENT)/bin/python
.PHONY: ghost-draw
ghost-draw: ## Draw 100 jobs by SEED and record what their programs hold (needs TRL, bitsandbytes and Liger in DRAWN_PYTHON)
	$(GO) run ./cmd/rows -python $(DRAWN_PYTHON) -seed $(SEED)

.PHONY: origins
origins: python ## Look the sources of components up in all releases that they are named for (downloads 2 GB from PyPI)
	$(PYTHON_ENVIRONMENT)/bin/python internal/plan/origin/origintest/lookup.py $(PYTHON_ENVIRONMENT)/../origins

FUZZTIME ?= 20s
FUZZMINIMUM ?= 20000
.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (20s), with at least FUZZMINIMUM executions (20000)
	GO=$(GO) scripts/fuzz $(FUZZTIME) $(FUZZMINIMUM)

.PHONY: soak
soak: build python ## Kill the service and trainers 200 times each, send 10,000 mutations, have every limit fail in turn
	PLIMSOLL_SOAK=1 $(GO) test -count=1 -v -timeout 60m -run 'ManySessions|Mutated|FailsInTurn' ./internal/state/service
	PLIMSOLL_SOAK=1 PYTHONPATH=python $(PYTHON_ENVIRONMENT)/bin/python -m pytest --quiet --nightly \
		python/tests/test_state_offload.py python/tests/test_state_offload_deaths.py
	PLIMSOLL_SOAK=1 PYTHONPATH=python $(PYTHON_ENVIRONMENT)/bin/python -m pytest --quiet --nightly \
		python/tests/standin/test_standin_states.py

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin dist
