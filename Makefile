# Every target sets up what it needs in .venv. TORCH and PYTHON can be overridden:
#   make test PYTHON=python3.12 TORCH="torch==2.6.0"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check fix bench wheel clean

$(VENV)/base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[report]"
	touch $@

$(VENV)/demo: $(VENV)/base
	$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[demo]"
	touch $@

$(VENV)/test: $(VENV)/base
	$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[demo,test,dev]"
	touch $@

demo: $(VENV)/demo
	$(BIN)/gpusampler demo --output demo

test: $(VENV)/test
	$(BIN)/python -m pytest

check: $(VENV)/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf build/typecheck && mkdir -p build/typecheck
	cp -rs "$(CURDIR)/gpusampler" build/typecheck/
	cp -rs "$(CURDIR)/kernels" build/typecheck/gpusampler/
	$(BIN)/mypy -p gpusampler

fix: $(VENV)/test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/test
	$(BIN)/python -m bench quality
	$(BIN)/python -m bench speed
	$(BIN)/python -m bench scale

wheel: $(VENV)/test
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist demo *.egg-info
