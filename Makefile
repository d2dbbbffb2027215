# Each target builds everything that it needs. A second call builds only what has changed.

# With this variable, which images of containers often set, each of a thousand processes of the tests would compile every
# module that it imports: an import of TorchRec then takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
VENV := .venv
HOURS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Tests wait for a part of their time: for processes that start or are killed, for leases, for clicks.
TEST_WORKERS := $(shell n=$$(($$(nproc) + 1)); echo $$((n < 8 ? n : 8)))
SERVING := serving/torchrec_recstore_serving/csrc
SERVICE := service/torchrec_recstore_service/csrc
CSRC := torchrec_recstore/csrc
SOURCES := $(wildcard $(CSRC)/*/*.* $(SERVING)/*.* $(SERVING)/ops/*.* $(SERVICE)/*.*)
# All that is built without torch. The files of ops/ need torch, except the registry of handles. library.cpp is the
# interface for Python.
CORE := $(filter-out $(CSRC)/ops/% %/library.cpp,$(wildcard $(CSRC)/*/*.cpp $(SERVING)/*.cpp $(SERVICE)/*.cpp)) \
	$(CSRC)/ops/registry.cpp
INCLUDES := -I $(CSRC) -I $(SERVING) -I $(SERVICE)

.PHONY: help build train online test test-slow test-all test-cpp test-faults test-tsan test-arm test-arm-python test-mutations parity matrix lint proto bench big soak span docs wheels try-wheels package clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(VENV)/.train-requirements: requirements/base.txt requirements/build.txt requirements/examples.txt requirements/torchrec.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing requirements into $(VENV)"
	$(PIP) install -r requirements/build.txt
	$(PIP) install -r requirements/examples.txt
	$(PIP) install --no-deps -r requirements/torchrec.txt
	@touch $@

$(VENV)/.dev-requirements: requirements/dev.txt requirements/cold.txt requirements/docs.txt requirements/service.txt requirements/trainers.txt $(VENV)/.train-requirements
	$(PIP) install -r requirements/dev.txt
	@touch $@

$(VENV)/.built: $(VENV)/.train-requirements packaging/native_build.py $(foreach d,. service serving,$(wildcard $d/setup.py) $d/setup.cfg $d/pyproject.toml) $(SOURCES)
	@echo "building the native libraries of three packages, which takes two to five minutes of processor time"
	@RECSTORE_BUILD_PROGRESS=/proc/$$$$/fd/2 $(PIP) install --no-build-isolation --no-deps --editable . --editable service --editable serving
	@touch $@

build: $(VENV)/.built  ## set up .venv and build the native extension

train: build $(if $(findstring --servers,$(ARGS)),$(VENV)/.online-requirements)  ## train DLRM: make train [DATA=train.txt] [ARGS="--dim 64 ..."]
	$(BIN)/python examples/dlrm/train.py $(if $(DATA),--data "$(DATA)") $(ARGS)

$(VENV)/.online-requirements: requirements/cold.txt requirements/service.txt $(VENV)/.train-requirements
	$(PIP) install -r requirements/cold.txt -r requirements/service.txt
	@touch $@

online: build $(VENV)/.online-requirements  ## train on clicks while they arrive, and serve the model: make online [ARGS="--seconds 300 ..."]
	$(BIN)/python examples/online/run.py $(ARGS)

# The C++ tests need no package: on a clean checkout they are compiled and run beside pip, which takes one core for
# minutes, and beside the build.
test:  ## lint, the C++ tests, and the Python tests that are not slow: the first step of CI
	@$(MAKE) --no-print-directory --output-sync=target -j$(shell nproc) lint-after-pip test-cpp
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not slow" $(ARGS)

# This is one goal, because make comes back to a goal only when it has started all that the other goals need. In two
# lines, because two calls of pip must not run at the same time in one environment.
.PHONY: lint-after-pip
lint-after-pip:
	@$(MAKE) --no-print-directory $(VENV)/.dev-requirements
	@$(MAKE) --no-print-directory lint

# The C++ tests run together, so that no core waits for the last test of a target.
TEST_ARM := $(if $(shell command -v $(ARM_CXX) 2>&1),$(if $(shell command -v $(firstword $(ARM_RUN)) 2>&1),test-arm))
SLOW_CPP := test-faults test-tsan $(TEST_ARM)

test-slow: build $(VENV)/.dev-requirements  ## the slow tests, test-faults, test-tsan, and test-arm if it can run; with THIRD=1, 2 or 3 a third of them: the second step of CI
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m slow $(THIRD:%=--third %) $(ARGS)
	@# build stands there because a third may have none of them, and make without a goal would print its help
	@$(MAKE) --no-print-directory --output-sync=target -j$(shell nproc) build $(if $(THIRD),$(word $(THIRD),$(SLOW_CPP)),$(SLOW_CPP))

test-all:  ## make test, then make test-slow
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-slow

# The tests of the core are built without torch, under sanitizers. Four settings keep the compiler from taking 80 s for
# the loops of each instruction set: -g1 has no variables; AddressSanitizer checks by calls, not inline, and finds what
# the three checks of UndefinedBehaviorSanitizer that are left out are for, where memory is used; of the loops for dims
# and optimizers that are constants, those of dim 16 and of two optimizers alone are compiled.
CPP_FLAGS := -std=c++17 -O1 -g1 -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra -Werror -Wno-psabi \
	-Wno-ignored-attributes -pthread -DRECSTORE_FEW_LOOPS
SANITIZE := $(CPP_FLAGS) -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow \
	-fno-sanitize-recover=all --param=asan-instrumentation-with-call-threshold=0
TSAN := $(CPP_FLAGS) -fsanitize=thread
CPP_OBJECTS := $(CORE:%.cpp=build/cpp/%.o)
CPP_TESTS := $(patsubst tests/cpp/%.cpp,build/cpp/%,$(filter-out %/test_faults.cpp,$(wildcard tests/cpp/test_*.cpp)))

TSAN_OBJECTS := $(CPP_OBJECTS:build/cpp/%=build/tsan/%)

.SECONDARY:

# A test is compiled and then linked, because ccache keeps what is only compiled.
$(foreach kind,cpp tsan arm,$(patsubst %.cpp,build/$(kind)/%.o,$(wildcard tests/cpp/test_*.cpp))): tests/cpp/testing.h

build/cpp/%.o: %.cpp $(filter %.h %.inl,$(SOURCES))
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE) $(INCLUDES) -c $< -o $@

# The linker replaces the functions that the core allocates memory with, so that the test can make them fail.
build/cpp/test_faults: WRAP := -Wl,--wrap=mmap,--wrap=mremap,--wrap=aligned_alloc
build/cpp/test_%: build/cpp/tests/cpp/test_%.o $(CPP_OBJECTS)
	$(CXX) $(SANITIZE) $^ $(WRAP) -ldl -o $@

.PHONY: $(CPP_TESTS:%=run-%)
$(CPP_TESTS:%=run-%): run-%: %
	$<

test-cpp: $(CPP_TESTS:%=run-%)  ## the tests of the native core, under AddressSanitizer and UndefinedBehaviorSanitizer

test-faults: build/cpp/test_faults  ## each memory allocation of the core fails once, under sanitizers; about a minute
	$<

build/tsan/%.o: %.cpp $(filter %.h %.inl,$(SOURCES))
	@mkdir -p $(@D)
	$(CXX) $(TSAN) $(INCLUDES) -c $< -o $@

build/tsan/test_%: build/tsan/tests/cpp/test_%.o $(TSAN_OBJECTS)
	$(CXX) $(TSAN) $^ -ldl -o $@

TSAN_TESTS := $(foreach name,stress parts serving row_server server_rows device_pass,build/tsan/test_$(name))

.PHONY: $(TSAN_TESTS:%=run-%)
$(TSAN_TESTS:%=run-%): run-%: %
	tests/cpp/under_tsan.sh $<

test-tsan: $(TSAN_TESTS:%=run-%)  ## the multithreaded work of the core, under ThreadSanitizer

# The same tests on another processor, for which a cross compiler builds them and which an emulator runs.
ARM_OBJECTS := $(CPP_OBJECTS:build/cpp/%=build/arm/%)
ARM_TESTS := $(CPP_TESTS:build/cpp/%=build/arm/%)

build/arm/%.o: %.cpp $(filter %.h %.inl,$(SOURCES))
	@mkdir -p $(@D)
	$(ARM_CXX) $(CPP_FLAGS) $(INCLUDES) -c $< -o $@

build/arm/test_%: build/arm/tests/cpp/test_%.o $(ARM_OBJECTS)
	$(ARM_CXX) $(CPP_FLAGS) $^ -ldl -o $@

.PHONY: $(ARM_TESTS:%=run-%)
$(ARM_TESTS:%=run-%): run-%: %
	$(ARM_RUN) $<

test-arm: $(ARM_TESTS:%=run-%)  ## the C++ tests for aarch64: needs g++-aarch64-linux-gnu and qemu-user of Debian

# A quarter of an hour, and 2 GB of packages outside the repository at the first time.
test-arm-python: $(VENV)/.wheel-requirements  ## the wheel for aarch64 in an emulated Python: needs g++-aarch64-linux-gnu of Debian 12
	$(BIN)/python -m tests.project.arm.run $(ARGS)

test-mutations: build $(VENV)/.dev-requirements $(CPP_TESTS)  ## one mistake at a time in a copy of the code; a test of make test must fail for each
	$(BIN)/python -m tests.project.mutations.run $(ARGS)

parity: build $(VENV)/.dev-requirements  ## compare every sharding, pooling, batch and row type, and what users do with models, with TorchRec; writes docs/parity.md
	$(BIN)/python -W ignore -m tests.parity.report

matrix: build $(VENV)/.dev-requirements  ## run the tests with each supported TorchRec; writes the README's table of versions
	$(BIN)/python -m tests.project.matrix.run $(ARGS)

CPP_FILES = $(shell find benchmarks examples packaging service serving tests torchrec_recstore \
	-name build -prune -o \( -name '*.h' -o -name '*.inl' -o -name '*.cpp' \) -print)

lint: build $(VENV)/.dev-requirements  ## ruff, clang-format and mypy --strict
	$(BIN)/ruff check --no-cache .  # the cache does not see that a folder has become a package
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/mypy

proto: $(VENV)/.dev-requirements  ## generate the Python code of the protocols
	for each in service/torchrec_recstore_service/wire/recstore serving/torchrec_recstore_serving/predict/predictor; do d=$${each%%/*}; \
	    $(BIN)/python -m grpc_tools.protoc -I$$d --python_out=$$d --pyi_out=$$d --grpc_python_out=$$d $$each.proto || exit 1; done

big: build $(VENV)/.dev-requirements  ## 40 minutes: 50 M samples over 200 M ids, with a kill in the middle (runs/big)
	$(BIN)/python benchmarks/big.py runs/big $(ARGS)

soak: build $(VENV)/.dev-requirements  ## HOURS=2: everything together, with kills; fails if something is not exact, or if memory, files or threads grow (runs/soak)
	$(BIN)/python benchmarks/soak.py run runs/soak --hours $(HOURS) $(ARGS)

bench: build $(VENV)/.dev-requirements  ## run the benchmarks; writes benchmarks/results.json and the tables of the README and the docs
	$(BIN)/python benchmarks/run.py $(ARGS)

# Without torch, and with the package's flags that matter for speed.
SPAN_OBJECTS := $(CPP_OBJECTS:build/cpp/%=build/span/%)
SPAN := -std=c++17 -O3 -g0 -ffp-contract=off -fno-math-errno -Wall -Wno-psabi -Wno-ignored-attributes -pthread -DRECSTORE_SPAN -I benchmarks

build/span/%.o: %.cpp $(filter %.h %.inl,$(SOURCES)) benchmarks/span.h
	@mkdir -p $(@D)
	$(CXX) $(SPAN) $(INCLUDES) -c $< -o $@

build/span/span: benchmarks/span.cpp $(SPAN_OBJECTS)
	$(CXX) $(SPAN) $(INCLUDES) $^ -ldl -o $@

span: build/span/span  ## simulate up to 64 threads: the serial share and the efficiency of each part of a step
	$<

docs: build $(VENV)/.dev-requirements  ## build the documentation as HTML, in build/docs; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

$(VENV)/.wheel-requirements: requirements/wheels.txt $(VENV)/.dev-requirements
	$(PIP) install -r $<
	@touch $@

# dist/ then holds wheels for both processors and the sdists; those of this processor are tried.
wheels: build $(VENV)/.wheel-requirements  ## build wheels and sdists for an index in dist/, check them, and try the wheels
	rm -rf dist
	$(BIN)/python packaging/build_wheels.py $(ARGS)
	for d in . service serving; do $(BIN)/python -m build --sdist --no-isolation --outdir dist $$d || exit 1; done
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m abi3audit --strict --assume-minimum-abi3 3.10 dist/*.whl
	@$(MAKE) --no-print-directory try-wheels

try-wheels:  ## try the wheels in dist/ in a clean environment, with $$PYTHON or python3
	tests/project/package/install.sh $(foreach name,recstore recstore_service recstore_serving,$(wildcard dist/torchrec_$(name)-*$(shell uname -m).whl))

package: $(VENV)/.dev-requirements  ## build wheels and sdists in dist/, and try each in a clean environment
	rm -rf dist
	for d in . service serving; do $(BIN)/python -m build --outdir dist $$d || exit 1; done
	tests/project/package/install.sh dist/*.whl
	tests/project/package/install.sh dist/*.tar.gz

clean:  ## remove builds and the virtual environment
	rm -rf $(VENV) build dist *.egg-info */build */*.egg-info torchrec_recstore/*.so service/*/*.so serving/*/*.so
