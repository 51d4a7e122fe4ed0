# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# Further options of pytest.
OPTIONS ?=
EXTRAS := tests/extras tests/learning tests/parity tests/contracts tests/unit
BIN := $(VENV)/bin
# What nobody imports isn't compiled: that saves half a minute.
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
# What is imported keeps its bytecode: else each of the processes that tests start compiles torch again, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-extras engines test-engines test-full gpu check format docs clean

quickstart: $(VENV)/.installed
	@$(BIN)/python examples/frozen_lake/quickstart.py

# Workers of one thread each: on two cores, two threads each took nearly twice as long.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not extra' --ignore=tests/extras --ignore=tests/engines -n $(WORKERS) --dist worksteal $(OPTIONS)

# What takes minutes: kills of a run, launchers and replicas, the README's commands, every example, every benchmark at toy size, and
# the known mistakes (tests/mutants.txt).
test-extras: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m extra $(EXTRAS) --durations=8 $(OPTIONS)

# The environments of Ray, DeepSpeed, Megatron, vLLM and the trackers, and SGLang's wheel, made once outside this folder: about 7 GB.
engines: $(VENV)/.installed-dev
	$(BIN)/python tests/engines/environment.py

# Each engine's own smoke test and a check of its numbers against plain torch; with TURNWISE_FULL=1 their long tests too; and what
# we ask of SGLang against its source. What is skipped is said, with what this machine lacks.
test-engines: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engines -s -rs --durations=0 --durations-min=1 $(OPTIONS)

# Everything, with twenty kills; writes tests/full_run.json and tests/durations.json. Only on a clean tree.
test-full: $(VENV)/.installed-dev
	$(BIN)/python tests/full.py

# Every CUDA path, then its figures, in at most ten minutes. It uses the Python at hand, as images for GPUs come with a torch of
# their own, and writes benchmarks/results/gpu-<card>.json. The dependencies of pyproject.toml and pytest must be there, and peft for
# what trains adapters.
gpu:
	TURNWISE_NEEDS_GPU=1 PYTHONPATH=. $(PYTHON) -m pytest tests/gpu
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py
	@# A file of the heavy tiers that can't be imported shows here, not after twenty minutes.
	$(BIN)/python -m pytest --collect-only -qq tests/extras tests/engines

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The page of all settings, from the schema and the table of their effects.
docs: $(VENV)/.installed
	PYTHONPATH=tests/support $(BIN)/python -m settings.page docs/configuration.md

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV), once: this takes a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools, once."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@
