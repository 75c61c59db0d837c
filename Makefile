# Every target needs only Python 3.11 or newer: it creates .venv here and installs what it needs.
.PHONY: demo demo-transformer test test-all docs notebooks lint types clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

demo: .venv/installed-benchmarks
	$(BIN)/python -m benchmarks quickstart

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

# A pretrained Transformer, fine-tuned at epsilon 8; DPOPT_DATA names the folder with its weights and the reviews.
# Each of two cores is a separate device: this is faster than running every operation on both.
demo-transformer: .venv/installed-pretrained
	XLA_FLAGS=--xla_force_host_platform_device_count=2 $(BIN)/python examples/fine_tune_transformer.py \
		--mesh data=2

# Includes the tests marked slow: runs killed many times, simulated devices, the audit.
test-all: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow"

# Builds the site in site/. A broken link or an unknown name is an error. (The variable silences a notice of the theme.)
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Runs the notebooks in full (minutes) and stores their outputs.
notebooks: .venv/installed-dev
	$(BIN)/python -m notebooks.run

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/pyright

.venv/installed-%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "dpopt needs Python 3.11 or newer; none was found on PATH."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

clean:
	rm -rf .venv
