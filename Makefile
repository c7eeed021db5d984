# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv first.
PYTHON ?= python3.11
# Where CPU builds of torch come from, if not from the package index pip is set up with (see README, Set-up).
TORCH_INDEX ?=
BIN := .venv/bin
STAMP := .venv/.ready
RUN_DIR ?= runs/demo

.PHONY: setup demo smoke test check format bench bench-hotload bench-logra wheel clean

setup: $(STAMP)

$(STAMP): requirements/cpu-py311.txt pyproject.toml
	@echo "setting up .venv with $$(grep -c '==' requirements/cpu-py311.txt) pinned packages, about 3 minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip==26.3
	$(BIN)/python -m pip install --progress-bar off --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/cpu-py311.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/groundhop run configs/demo.toml --run-dir $(RUN_DIR)
	@echo "the report: $(RUN_DIR)/report.html"

smoke: $(STAMP)
	$(BIN)/groundhop run configs/smoke.toml

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python bench/agent_overhead.py --run $(RUN_DIR)

bench-hotload: $(STAMP)
	$(BIN)/python bench/hotload_codec.py --write docs/results.md

# Alone on the machine; the last three read the traces of a demo run.
bench-logra: $(STAMP)
	$(BIN)/python bench/logra_step.py --write docs/results.md
	$(BIN)/python bench/kl_control.py --run $(RUN_DIR) --write docs/results.md
	$(BIN)/python bench/sketch_sync.py --run $(RUN_DIR) --write docs/results.md
	$(BIN)/python bench/logra_quality.py --run $(RUN_DIR) --write docs/results.md --plot docs/plots/logra-quality.svg

wheel: $(STAMP)
	$(BIN)/python -m build --no-isolation --outdir dist

clean:
	rm -rf .venv dist runs models
