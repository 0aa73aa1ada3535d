# Two commands in a fresh clone: `make demo` and `make test`. Each sets up what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/pytest

.PHONY: demo test test-unit test-full lint typing generated bench clean

demo: $(STAMP)
	$(BIN)/grpo-run demo

test: $(STAMP) system
	$(PYTEST) tests/unit -q
	$(PYTEST) tests/integration tests/fault tests/browser -q -m "not full" --durations=10

test-unit: $(STAMP)
	$(PYTEST) tests/unit -q

# Longer campaigns; the last run's table is in docs/campaigns.md.
test-full: $(STAMP) system
	$(PYTEST) tests -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typing: $(STAMP)
	mkdir -p build/typing/grpo_run && touch build/typing/grpo_run/__init__.py
	for folder in runtime trainers watchdog dashboards cli; do ln -sfn ../../../$$folder build/typing/grpo_run/; done
	$(BIN)/mypy

# Grafana dashboard, alert rules and the lifecycle diagram, from the tables in the code.
generated: $(STAMP)
	$(BIN)/python -P -m grpo_run.dashboards.provisioning.generate

# Benchmarks measure; run them on a quiet machine. The peers install into an environment of their own.
bench: $(STAMP)
	$(BIN)/python -P benchmarks/micro.py
	$(BIN)/python -P benchmarks/false_alarms.py
	$(BIN)/python -P benchmarks/overhead.py
	$(BIN)/python -P benchmarks/recovery.py
	$(BIN)/python -P benchmarks/watching.py
	$(BIN)/python -P benchmarks/checkpoint.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25" "setuptools>=77"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

# promtool and prometheus, for the tests that scrape and check rules; chromium, for those that open a report.
.PHONY: system
system:
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || sh tests/support/install-prometheus.sh
	@sh tests/support/install-chromium.sh

clean:
	rm -rf build runs demo-out .pytest_cache .mypy_cache .ruff_cache
