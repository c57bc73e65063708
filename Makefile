# Every target sets up what it needs in .venv. TORCH and PYTHON can be overridden:
#   make test PYTHON=python3.12 TORCH="torch==2.6.0"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test unit interpret aot test-slow test-gpu check fix bench wheel clean

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

test: unit interpret aot

unit: $(VENV)/test
	$(BIN)/python -m pytest -m "not slow and not gpu" --ignore=tests/interpret --ignore=tests/aot

# The GPU kernels under Triton's interpreter, equal to the specification.
interpret: $(VENV)/test
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests/interpret

# The GPU kernels compiled for sm_80, sm_90, sm_100 and sm_120, without a GPU.
aot: $(VENV)/test
	COMPILE_AHEAD=1 $(BIN)/python -m pytest -m "not slow" tests/aot

test-slow: $(VENV)/test
	$(BIN)/python -m pytest -m slow --ignore=tests/interpret --ignore=tests/aot
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m slow tests/interpret

test-gpu: $(VENV)/test
	$(BIN)/python -m pytest -m gpu

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
	$(BIN)/python -m bench latency
	$(BIN)/python -m bench kernels

wheel: $(VENV)/test
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist demo *.egg-info
