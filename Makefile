# Every target makes the environment that it needs. You only need Python >= 3.10 with venv, git, make and a C compiler.
#
#   make demo    save, change, reload and reshard real models on 4 ranks (CPU)
#   make test    all tests; use PYTEST_ARGS="tests/comm -k timeout" to run some
#   make test-compat        the Megatron tests with Megatron-Core 0.19.2, the saves and loads of ms-swift, the queue of
#                           nvidia-resiliency-ext, and all of test-frameworks and test-browser
#   make test-compat-smoke  the part of test-compat that CI runs, about three minutes
#   make test-frameworks    the switch under Lightning, Accelerate, transformers, torchtitan, TorchTNT, torchtune, torchao,
#                           verl and Megatron-Bridge; FRAMEWORKS=lightning for one of them. On disk torchtitan takes
#                           1.1 GB, verl and Megatron-Bridge 0.8 GB each. These three need Python 3.11
#   make megatron-checkpoints MEGATRON=path  the checkpoints of all versions of Megatron in tests/megatron/saved_by
#   make test-stock STOCK_TESTS=path  PyTorch's own tests of distributed checkpoints on CPU, with stock and with robust_dcp.
#                path is test/distributed/checkpoint of PyTorch's sources, of the version of the installed torch;
#                STOCK_FILES="test_utils.py e2e/*" runs some of them. Or MEGATRON=path, a checkout of Megatron-LM: its
#                tests/unit_tests/dist_checkpointing on eight ranks (hours); STOCK_EVERY=8 runs each eighth of a file
#   make test-hooks  saves and loads as TensorBoard, Weights & Biases (offline), MLflow and OpenTelemetry see them
#   make test-browser       the page of `robust-dcp report` in a headless Chromium (apt-get install chromium)
#   make check   format, lint, types, layers, and that the site of docs/ can be built; changes no file of the sources
#   make docs    the tables and pictures of docs/ written anew from tests and docs/figures.json, and the site in build/site
#   make figures  measure what the documents show, 45 minutes on a quiet machine, and write it into them
#   make coverage  all tests, and which lines and branches of the package they reach; less than 93 % is an error
#   make dist    the sdist and the wheel in dist/, checked for PyPI
#   make format  repairs what ruff can repair of the complaints of `check`
#   make bench   the benchmarks
#   make torture thousands of faults between ranks and at calls to files, kills, hostile checkpoints, async saves while
#                training overwrites all tensors, state dicts saved and loaded by us and by stock crosswise, and two jobs
#                that save to one place; SEED=1
#                (some hours)
#   make gpu     tests and benchmark for a CUDA device, without network. GPU_PYTHON=python3 must have torch with CUDA. The
#                other packages come from .gpu-wheels. Run `make gpu-wheels` on a machine with a network to fill it
#   make clean   remove everything that make has made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
# Many tests wait for a timeout. So on two cores four processes take little longer than one. All tests of a module run
# in one process, because they share fixtures that are slow to set up. No test is tried again.
PYTEST := pytest -n 4 --dist loadfile --no-loadscope-reorder
SOURCES := $(wildcard src tests demo benchmarks torture scripts docs)
# A warning is an error. It fetches nothing, and is not to advertise.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
SEED ?= 1
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
CAMPAIGNS := exchanges hostile async_kills torn_copies back_to_back state_dicts two_savers lost_nodes
BENCHMARKS := planning loading storage reshards sharing messages async_save megatron

.DELETE_ON_ERROR:
.PHONY: demo test coverage test-compat test-compat-smoke test-frameworks test-stock test-hooks test-browser check docs figures dist format bench torture gpu gpu-wheels clean

# On a machine with a GPU these run on the CPU too: their ranks use gloo, and Megatron's models are built on the CPU.
demo test coverage test-compat test-compat-smoke test-frameworks test-stock test-hooks test-browser megatron-checkpoints: export CUDA_VISIBLE_DEVICES :=

demo: $(INSTALLED)
	$(BIN)/python demo/run.py

# Tests start hundreds of interpreters, and none is to compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

test: $(INSTALLED)
	$(BIN)/python -m $(PYTEST) $(PYTEST_ARGS)

coverage: $(INSTALLED)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m $(PYTEST) $(PYTEST_ARGS); tests=$$?; \
	$(BIN)/coverage combine --quiet && \
	$(BIN)/coverage html --quiet --fail-under=0 --directory build/coverage/html && \
	$(BIN)/coverage report && exit $$tests

# Other versions of Megatron. Each is in its own folder, which comes before .venv's packages on the path. The sources of
# 0.19.2 have megatron.training too. They require Python 3.12, but run on 3.10 with tests/megatron/standins.
COMPAT := .compat
FROM_WHEELS := ms-swift-4.6.0 nvidia-resiliency-ext-0.4.1 nvidia-resiliency-ext-0.6.0
COMPAT_TESTS := tests/megatron/seeds \
  $(filter-out tests/megatron/test_compat_%,$(sort $(wildcard tests/megatron/test_*.py)))
TRAINING_TESTS := tests/megatron/test_compat_training.py
SMOKE_TESTS := tests/megatron/test_autoload.py
RUN_COMPAT = PYTHONPATH=$(subst $(eval) ,:,$(abspath $(1))) $(BIN)/python -m pytest -m "compat or not compat" $(2)

# Frameworks that call torch.distributed.checkpoint: one requirements file and one test module each. They lie before
# .venv's packages on the path and are installed without their dependencies, so that torch stays the one of .venv.
ALL_FRAMEWORKS := accelerate lightning megatron_bridge torchao torchtitan torchtnt torchtune verl
FRAMEWORKS ?= $(ALL_FRAMEWORKS)
FRAMEWORK_TESTS := tests/frameworks/test_frameworks.py -k
RUN_FRAMEWORK = $(call RUN_COMPAT,$(BEFORE_$(1)) $(COMPAT)/frameworks/$(1),$(2))
# What two of them need besides: the tests' stand-ins for CUDA, and for Megatron-Bridge a Megatron-Core of its age.
BEFORE_verl := .
BEFORE_megatron_bridge := . tests/megatron/standins $(COMPAT)/megatron-core-0.19.2

test-compat: test-compat-smoke test-frameworks test-hooks test-browser
	@echo "== megatron-core 0.19.2"
	$(call RUN_COMPAT,tests/megatron/standins $(COMPAT)/megatron-core-0.19.2,$(COMPAT_TESTS) $(TRAINING_TESTS))

test-compat-smoke: $(INSTALLED) $(addprefix $(COMPAT)/,$(FROM_WHEELS:=/.installed) megatron-core-0.19.2/.installed) \
  $(COMPAT)/frameworks/lightning/.installed
	@echo "== megatron-core 0.19.2: what is replaced, and the arguments of megatron.training"
	$(call RUN_COMPAT,tests/megatron/standins $(COMPAT)/megatron-core-0.19.2,$(SMOKE_TESTS))
	@echo "== nvidia-resiliency-ext 0.4.1, megatron-core as installed"
	$(call RUN_COMPAT,$(COMPAT)/nvidia-resiliency-ext-0.4.1,tests/megatron/test_compat_nvrx.py)
	@echo "== nvidia-resiliency-ext 0.6.0, megatron-core 0.19.2"
	$(call RUN_COMPAT,tests/megatron/standins $(COMPAT)/megatron-core-0.19.2 $(COMPAT)/nvidia-resiliency-ext-0.6.0,\
	  tests/megatron/test_compat_nvrx.py)
	@echo "== ms-swift 4.6.0, megatron-core as installed"
	$(call RUN_COMPAT,$(COMPAT)/ms-swift-4.6.0,tests/megatron/test_compat_ms_swift.py)
	@echo "== lightning: Fabric with FSDP2"
	$(call RUN_FRAMEWORK,lightning,$(FRAMEWORK_TESTS) lightning-fabric-mp)

# The checkpoints in tests/megatron/saved_by, anew: each by the package itself. MEGATRON is a checkout of Megatron-LM's
# main branch. What has saved is in their names.
MEGATRON ?=
SAVED_BY := $(addprefix tests/megatron/saved_by/,$(addsuffix .tar.xz,0.10.0-stock 0.12.1-stock 0.14.0-stock \
  0.16.1-stock 0.16.1-ours 0.19.2-stock 0.19.2-ours main-stock main-ours))
VERSION_OF = $(firstword $(subst -, ,$(notdir $(1))))
SOURCES_OF = $(if $(findstring main,$(1)),$(MEGATRON),$(COMPAT)/saved_by/$(call VERSION_OF,$(1)))

megatron-checkpoints: $(SAVED_BY)

.PHONY: megatron-checkpoints $(SAVED_BY)
$(SAVED_BY): $(COMPAT)/saved_by/0.10.0 $(COMPAT)/saved_by/0.12.1 $(COMPAT)/saved_by/0.14.0 \
  $(COMPAT)/saved_by/0.16.1 $(COMPAT)/saved_by/0.19.2
	rm -rf $@ $(@:.tar.xz=)
	ROBUST_DCP=$(if $(findstring ours,$@),1,0) PYTHONPATH=tests/megatron/standins:$(call SOURCES_OF,$@):. \
	  $(BIN)/python -m torch.distributed.run --nproc-per-node 2 -m tests.megatron.job_of_versions $@
	rm -rf $(@:.tar.xz=)

$(COMPAT)/saved_by/%: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps --ignore-requires-python \
	  --target $@ megatron-core==$*

test-frameworks: $(FRAMEWORKS:%=test-framework-%)

# None of PyTorch's code is here: whoever has its sources names them.
STOCK_TESTS ?= $(MEGATRON)
STOCK_FILES ?=
STOCK_EVERY ?= 1

test-stock: $(INSTALLED) $(COMPAT)/nvidia-resiliency-ext-0.6.0/.installed
	@test -d "$(STOCK_TESTS)" || { echo "make test-stock STOCK_TESTS=path or MEGATRON=path: see the head of Makefile" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input expecttest regex pydantic
	PYTHONPATH=$(if $(MEGATRON),$(abspath tests/megatron/standins):$(abspath $(COMPAT)/nvidia-resiliency-ext-0.6.0)) \
	  $(BIN)/python scripts/stock_tests.py $(STOCK_TESTS) --every $(STOCK_EVERY) \
	  $(if $(STOCK_FILES),--only $(foreach each,$(STOCK_FILES),'$(each)'))

test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -m "compat or not compat" tests/report_page

# Megatron-Bridge asks for Python 3.12, and runs on 3.11 with the stand-ins.
test-framework-megatron_bridge: $(COMPAT)/megatron-core-0.19.2/.installed
$(COMPAT)/frameworks/megatron_bridge/.installed: PIP_OPTIONS := --ignore-requires-python

test-framework-%: $(COMPAT)/frameworks/%/.installed
	@echo "== $*"
	$(call RUN_FRAMEWORK,$*,$(FRAMEWORK_TESTS) $*)

$(ALL_FRAMEWORKS:%=$(COMPAT)/frameworks/%/.installed): $(COMPAT)/frameworks/%/.installed: \
  tests/frameworks/requirements/%.txt | $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps $(PIP_OPTIONS) --target $(@D) \
	  -r $<
	@touch $@

test-hooks: $(COMPAT)/hooks/.installed
	$(call RUN_COMPAT,$(COMPAT)/hooks,tests/hooks)

$(COMPAT)/hooks/.installed: tests/hooks/requirements.txt | $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps --target $(@D) -r $<
	@touch $@

# Its wheels are for a newer glibc. Only its Python is used.
$(COMPAT)/nvidia-resiliency-ext-0.6.0/.installed: PIP_OPTIONS := --only-binary=:all: --python-version 3.12 \
  --platform manylinux_2_39_x86_64
$(addprefix $(COMPAT)/,$(FROM_WHEELS:=/.installed)): $(COMPAT)/%/.installed: | $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps $(PIP_OPTIONS) --target $(@D) \
	  $(shell echo $* | sed 's/-\([0-9.]*\)$$/==\1/')
	@touch $@

$(COMPAT)/megatron-core-0.19.2/.installed: | $(INSTALLED)
	rm -rf $(@D) && mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-input --no-deps --no-binary megatron-core \
	  --ignore-requires-python --dest $(@D) megatron-core==0.19.2
	tar -xzf $(@D)/megatron_core-0.19.2.tar.gz --strip-components=1 -C $(@D)
	@touch $@

check: $(INSTALLED)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MKDOCS)

docs: $(INSTALLED)
	$(BIN)/python scripts/figures.py --write
	$(BIN)/python scripts/promises.py
	$(MKDOCS)

figures: $(INSTALLED)
	$(BIN)/python scripts/figures.py

dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

format: $(INSTALLED)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(INSTALLED)
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

torture: $(INSTALLED)
	@set -e; for name in $(CAMPAIGNS); do echo "== $$name"; $(BIN)/python -W ignore -m torture.$$name --seed $(SEED); done
	LONG_TESTS=1 $(BIN)/python -m pytest --timeout 0 $(addprefix tests/promises/test_,kills.py ranks.py refusals.py \
	  damage.py other_savers.py round_trips.py mixes.py)

gpu:
	GPU_PYTHON=$(GPU_PYTHON) scripts/gpu.sh

# The wheels are for x86-64 and GPU_PYTHON_VERSION. For others Megatron-Core publishes sources, so its wheel is taken as
# it is.
gpu-wheels: $(INSTALLED)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version $(GPU_PYTHON_VERSION) --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
	  --dest .gpu-wheels msgspec isal megatron-core==0.16.1

clean:
	rm -rf $(VENV) $(COMPAT) .gpu-wheels build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp file is written last, so an interrupted installation is done again. pip works in place, so a changed
# constraint takes only seconds. To change PYTHON, run `make clean` first.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is not Python 3.10 or newer; choose one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input \
	  -c constraints.txt -e '.[megatron,test,dev,docs]'
	@touch $@
