# Every target makes .venv itself on first use.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help train test test-deep lint format bench docs clean

help:
	@echo "make train   train a small GPT on real text, fully sharded over 8 virtual devices"
	@echo "make test    run the tests        make lint    ruff and pyright"
	@echo "make bench   step time and memory against jit + NamedSharding"
	@echo "make docs    write docs/reference.md from the docstrings"

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: .venv/.done
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: .venv/.done
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-deep: .venv/.done
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: .venv/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.done
	$(BIN)/python benchmarks/step_time.py $(ARGS)

docs:
	$(PYTHON) docs/make_reference.py

clean:
	rm -rf .venv out
