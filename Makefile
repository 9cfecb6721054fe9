# make quickstart   set everything up and train the tiny model of examples/quickstart
# make vision       the same for examples/vision, a tiny model that reads images
# make test         set everything up and run the tests that a developer runs all day
# make coverage     the same tests, and which lines they run in all processes; fails below the floor in pyproject.toml.
#                   SET=all adds the slow and the nightly tests
# make lint         ruff, pyright (strict), import rules, sizes, declared dependencies, spelling
# make lines        lines of code of each package
# make format       what ruff can mend
# make docs         the documentation site, into build/site; fails if a link does not hold
# make test-slow    the tests that take a minute or more, or start many processes; ARGS=--write-durations notes how long
# make test-sample  some files of these: as many as end within BUDGET seconds (420); which ones, the commit decides
# make test-slowly  the tests of `make test` beside busy loops that make the machine three times slower than a good one
# make test-wheel   the wheel alone, in an environment of its own
# make test-nightly   minutes of what these cover in a smaller size: three and four ranks, many models, learning from images,
#                   benchmarks, the conformance suites of new engines, the wheel with torch, the commands of the docs
# make test-universes   600 simulated runs with faults: 300 that have to pass, and 300 new ones, whose failures are listed
# make test-chaos  kills in all configurations, the same bits with kills as without, and the search for planted mistakes
# make test-integration   the tests against real SGLang and vLLM servers, which it installs below the user's cache
# make test-gpu    what only GPUs can show; skipped without CUDA
# make gpu-report  what one GPU does, in five minutes, with the torch that is there: no set-up; ARGS="--only memory lora"
# make test-hosts      runs on two hosts made of network namespaces, with a cable that is cut (root); five minutes
# make test-clusters   these and a real Slurm of two nodes on this machine (Debian, and root), a Ray of three, a NATS
#                   cluster whose servers are killed, runs whose workers come and go, and replays; half an hour
# make bench        the benchmarks of docs/benchmarks.md, one after the other
#
# PYTHON=python3.12       another interpreter than the first that is new enough
# PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple"
#                         handed to pip, here for builds of torch without CUDA
# JOBS=3                  processes that run the tests. Tests also wait: one or two more than there are cores keep all
#                         cores busy. Unset: 4 for `make test`, 3 for the others, whose tests compute more
# ARGS="seed=2"           handed to stretto run by `make quickstart` and `make vision`, and to pytest by `make test` and the like

VENV := .venv
BIN := $(VENV)/bin
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	command -v $$python >/dev/null 2>&1 && $$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
PIP_ARGS ?=
ARGS ?=
JOBS ?=
# Hundreds of processes import the same modules: they keep them compiled, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE :=
# Compiling all that is installed takes half of an installation's time, and most of it is never imported.
PIP_INSTALL = $(BIN)/pip install -q --no-compile $(PIP_ARGS) -c constraints.txt
# A file's tests run in one process, which makes their shared fixtures once; conftest.py has the order of the files.
PARALLEL := --dist loadfile --no-loadscope-reorder
ALL := not integration and not chaos and not cluster and not gpu
DEFAULT := not slow and not nightly and $(ALL)
SLOW := slow and not nightly and $(ALL)
# `.ci/run` gives a test that fails a second chance, alone, and reports it.
PYTEST = $(BIN)/python $(if $(SECOND_CHANCE),.ci/second_chance.py,-m pytest -q)
BUDGET ?= 420
SET ?= default

.PHONY: quickstart vision test test-slow test-sample test-slowly test-wheel test-nightly test-universes test-chaos test-integration test-gpu gpu-report test-hosts test-clusters coverage lint lines format docs bench clean

quickstart: $(VENV)/installed
	$(BIN)/stretto run examples/quickstart/run.yaml $(ARGS)

vision: $(VENV)/installed
	$(BIN)/python examples/vision/make_model.py
	$(BIN)/stretto run examples/vision/run.yaml $(ARGS)

test: $(VENV)/installed
	$(PYTEST) -n $(or $(JOBS),4) $(PARALLEL) -m "$(DEFAULT)" $(ARGS)

test-slow: $(VENV)/installed
	$(PYTEST) -n $(or $(JOBS),3) $(PARALLEL) -m "$(SLOW)" $(ARGS)

test-sample: $(VENV)/installed
	$(BIN)/python .ci/sample.py $(BUDGET) "$(SLOW)"

test-slowly: $(VENV)/installed
	$(BIN)/python .ci/slowly.py $(MAKE) test ARGS="$(ARGS)"

test-wheel: $(VENV)/installed
	$(PYTEST) tests/contracts/test_wheel.py -m "$(SLOW)" $(ARGS)

test-nightly: $(VENV)/installed
	$(PYTEST) -n $(or $(JOBS),3) $(PARALLEL) -m "nightly and $(ALL)" $(ARGS)

test-universes: $(VENV)/installed
	$(BIN)/python tests/helpers/universe_search.py small 0 300
	-$(BIN)/python tests/helpers/universe_search.py small $$(date +%s) 300

test-chaos: $(VENV)/installed
	$(BIN)/python -m pytest -q -m chaos $(ARGS)

test-integration: $(VENV)/installed
	$(BIN)/stretto engine install sglang --cpu
	$(BIN)/stretto engine install vllm --cpu
	$(BIN)/python -m pytest -q -m integration $(ARGS)
	$(BIN)/python .ci/served.py passed

test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -q -rs -m gpu $(ARGS)

gpu-report:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_report.py $(ARGS)

test-hosts: $(VENV)/installed
	$(BIN)/python -m pytest -q -rs -m cluster tests/hosts $(ARGS)

test-clusters: $(VENV)/installed
	$(PIP_INSTALL) -e '.[ray]'
	$(BIN)/python -m pytest -q -m cluster $(ARGS)

coverage: $(VENV)/installed
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -q -n $(or $(JOBS),3) $(PARALLEL) -m "$(if $(filter all,$(SET)),$(ALL),$(DEFAULT))" $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report $(if $(filter all,$(SET)),--fail-under=93)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python .ci/lint_imports.py
	$(BIN)/python .ci/lint_sizes.py
	$(BIN)/python .ci/lint_patience.py
	$(BIN)/python .ci/lint_json_lines.py
	$(BIN)/deptry core plugins/* examples/quickstart
	$(BIN)/codespell

# Needs no set-up, so that it also counts another checkout.
lines:
	@python3 .ci/lines.py

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(VENV)/installed
	$(BIN)/python benchmarks/bus.py
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/scale.py 10 100 1000
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/images.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/durability.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/failing_members.py
	$(BIN)/python benchmarks/programs.py
	$(BIN)/python benchmarks/algorithms.py
	$(BIN)/python benchmarks/curriculum.py

clean:
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "stretto needs Python 3.11 or newer: none of python3, python3.11 ... python3.14 is; give one with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "$(PYTHON) has no venv module (on Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[dev]'
	$(BIN)/stretto schema > examples/schema.json  # editors check the example files with it
	@touch $@
