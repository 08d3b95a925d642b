# Two commands need nothing but Python 3.11+: `make serve` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test check fmt protos manifests bench install clean

serve: install
	$(BIN)/paceline serve

test: check
	$(BIN)/python -m pytest -q

# Style, types, layers, and generated code that matches its protos.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m protos.generate --check

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: install
	$(BIN)/python -m protos.generate

manifests: install
	for name in dev prod; do $(BIN)/paceline k8s render --config k8s/configs/$$name.yaml --overlay $$name || exit; done

bench: install
	$(BIN)/paceline bench

install: $(VENV)/.installed

# torch goes first and alone: a resolver that sees it among the rest may pick another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Paceline needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
