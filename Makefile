# Two commands: `make train` and `make test`. Underneath it is plain pip and pytest; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test check bench peers docs clean

train: $(VENV)/installed
	$(BIN)/python cli.py

test: $(VENV)/installed
	$(BIN)/python -m pytest

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

peers: .peers/litgpt/installed .peers/torchtitan/installed

.peers/%/installed: benchmarks/%.txt $(VENV)/installed
	$(BIN)/pip install --upgrade --no-deps --target $(@D) -r $<
	touch $@

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[dev,bench]'
	touch $@

clean:
	rm -rf $(VENV) .peers .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
