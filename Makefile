# In a fresh clone: `make demo` and `make test`. Each target installs what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/pytest

SERVER := build/rollout-server

.PHONY: demo test test-unit test-full test-hosts test-slurm test-server test-versions package gpu chaos lint typing generated mutation bench clean

demo: $(STAMP)
	$(BIN)/grpo-run demo

# More workers than cores, because most tests wait for processes. Each worker collects a share of the unit tests
# (tests/support/workers.py); the other tests start with the longest, from one warm launcher. Tests marked `alone`
# measure time or memory: they run after the others, one by one.
REAL := tests/integration tests/fault tests/hosts tests/browser
UNIT_WORKERS := --numprocesses 3
WORKERS := --numprocesses 4
EXTENSION := build/torch_extensions/deepspeed_shm_comm/deepspeed_shm_comm.so

# Otherwise every process of the tests compiles our sources and rewrites the assertions of all tests anew.
unexport PYTHONDONTWRITEBYTECODE

# All three parts run, whatever the others end with.
test: $(STAMP) system $(EXTENSION)
	@failed=; \
	$(PYTEST) tests/unit -q -m "not full" $(UNIT_WORKERS) || failed="unit tests"; \
	$(PYTEST) $(REAL) -q -m "not full and not alone" $(WORKERS) --durations=10 || failed="$$failed, real tests"; \
	$(PYTEST) $(REAL) -q -m "alone and not full" --durations=5 || failed="$$failed, tests that run alone"; \
	test -z "$$failed" || { echo "failed: $${failed#, }"; exit 1; }

test-unit: $(STAMP)
	$(PYTEST) tests/unit -q -m "not full" $(UNIT_WORKERS)

# All tests and the campaigns, which take hours. Results of the last run: docs/reference/campaigns.md.
test-full: $(STAMP) system $(EXTENSION)
	$(PYTEST) tests -q --durations=50

# Runs over two and three hosts of namespaces, which lose ranks, supervisors, hosts and cables: some minutes, as root.
test-hosts: $(STAMP) system
	$(PYTEST) tests/hosts -q --durations=0

# The batch files of examples/slurm under a real Slurm on hosts of namespaces: a quarter of an hour, as root.
test-slurm: $(STAMP) system
	sh tests/support/install-slurm.sh
	$(PYTEST) tests/slurm -q --durations=0

# AsyncGRPO against a real vLLM on the CPU, in an environment of its own with 3 GB: some minutes.
test-server: $(SERVER)/.installed
	$(SERVER)/bin/python -m pytest tests/server -q

$(SERVER)/.installed: tests/support/install-rollout-server.sh pyproject.toml
	@echo "installing vLLM for the CPU into $(SERVER); output in $(SERVER).log"
	@rm -rf $(SERVER) && mkdir -p build
	@PYTHON=$(PYTHON) sh tests/support/install-rollout-server.sh $(SERVER) >$(SERVER).log 2>&1 || { cat $(SERVER).log; exit 1; }
	touch $@

# Build the wheel and run it where nothing else of the project is: without extras, and not from this folder.
CLEAN := build/package
package: $(STAMP)
	rm -rf $(CLEAN)
	$(BIN)/python -m build --no-isolation --outdir $(CLEAN)/dist >$(CLEAN).log 2>&1 || { cat $(CLEAN).log; exit 1; }
	$(PYTHON) -m venv $(CLEAN)/venv
	$(CLEAN)/venv/bin/pip install --quiet --constraint constraints.txt $(CLEAN)/dist/*.whl
	cd $(CLEAN) && venv/bin/python -m grpo_run --version
	cd $(CLEAN) && venv/bin/grpo-run train arithmetic --nproc-per-node 2 --inject kill@rank1:step7 --set grpo.max_steps=12

# Install sets of library versions from 0.26 to the newest TRL, and train one job in each: minutes a set, results kept in build/versions.
test-versions: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -P -m support.version_sets

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typing: $(STAMP)
	mkdir -p build/typing/grpo_run && touch build/typing/grpo_run/__init__.py
	for folder in runtime trainers watchdog dashboards cli; do ln -sfn ../../../$$folder build/typing/grpo_run/; done
	$(BIN)/mypy

# Generate the drawings, the metrics, the options and the order of a step in docs/ from the code.
generated: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -P -m support.metrics_page
	PYTHONPATH=tests $(BIN)/python -P -m support.alerts_page
	PYTHONPATH=tests $(BIN)/python -P -m support.import_graph
	COLUMNS=80 PYTHONPATH=tests $(BIN)/python -P -m support.command_line_page
	PYTHONPATH=tests $(BIN)/python -P -m support.step_page

# Mutate the modules that decide, and list what no test notices. cosmic-ray is installed beside the project's environment.
mutation: $(STAMP)
	test -x build/mutation/bin/cosmic-ray || $(PYTHON) -m venv build/mutation
	build/mutation/bin/python -m pip install --quiet cosmic-ray==8.7.0
	$(BIN)/python -P tests/support/mutation.py build/mutation/bin

# Run benchmarks on an idle machine. Peers are installed into a virtual environment of their own.
bench: $(STAMP)
	$(BIN)/python -P benchmarks/micro.py
	$(BIN)/python -P benchmarks/metrics.py
	$(BIN)/python -P benchmarks/false_alarms.py
	$(BIN)/python -P benchmarks/overhead.py
	$(BIN)/python -P benchmarks/overhead_in_turns.py
	$(BIN)/python -P benchmarks/live_page.py
	$(BIN)/python -P benchmarks/pace.py
	$(BIN)/python -P benchmarks/recovery.py
	$(BIN)/python -P benchmarks/side_by_side.py
	$(BIN)/python -P benchmarks/stopping.py
	$(BIN)/python -P benchmarks/watching.py
	$(BIN)/python -P benchmarks/consensus.py
	$(BIN)/python -P benchmarks/loops.py
	$(BIN)/python -P benchmarks/memory.py
	$(BIN)/python -P benchmarks/memory_trace.py
	$(BIN)/python -P benchmarks/checkpoint.py

# What waits for a GPU: at most nine minutes on one, and a dated table.
gpu: $(STAMP)
	$(BIN)/python -P benchmarks/gpu.py --output docs/reference/gpu.md

# Faults of 40 kinds in real runs, compared with undisturbed ones, as root: `make chaos FAULTS=200` continues where the last slice has
# ended (build/chaos), `make chaos SEED=1 CASE=12.3` repeats one fault. 200 take 8 minutes on two idle cores.
FAULTS ?= 1000
SEED ?= 1
WORK ?= build/chaos
chaos: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -P -m support.chaos --faults $(FAULTS) --seed $(SEED) --work $(WORK) $(if $(CASE),--case $(CASE)) $(if $(TABLE),--table $(TABLE))

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); output in $(VENV)/install.log"
	@{ $(BIN)/python -m pip install --quiet --upgrade "pip>=25" "setuptools>=77" \
	&& $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"; \
	} >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	touch $(STAMP)

# DeepSpeed compiles this extension when it is first used on CPU. Part of the installation of its tests.
$(EXTENSION): | $(STAMP)
	@echo "compiling DeepSpeed's extension for CPU; output in $(VENV)/extension.log"
	@PYTHONPATH=tests $(BIN)/python -P -m support.compile_extensions >$(VENV)/extension.log 2>&1 \
	|| { cat $(VENV)/extension.log; exit 1; }

# Install prometheus and alertmanager for tests that scrape, check rules and fire alerts, chromium for tests that open a report, and
# ip for tests over several hosts.
.PHONY: system
system:
	@command -v prometheus >/dev/null && command -v prometheus-alertmanager >/dev/null || sh tests/support/install-prometheus.sh
	@sh tests/support/install-chromium.sh
	@sh tests/support/install-namespaces.sh

clean:
	rm -rf build runs demo-out .pytest_cache .mypy_cache .ruff_cache
