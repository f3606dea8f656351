# The two commands of the README: `make demo` and `make test`. Both make .venv first; nothing else is needed but git, make, Python 3.11+.
PYTHON ?= python3
VENV := .venv
# What CI runs with; users may have any of pyproject.toml's range. `make TORCH=torch` takes the newest, which may be gigabytes.
TORCH ?= torch==2.13.*
BIN := $(VENV)/bin
# One OpenMP thread per process: test workers on few cores spin against each other otherwise.
# Bytecode is kept, also where the image says not to: pytest rewrites 250 modules of tests, which takes each worker 20 s.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test test-slow test-all overlap soak attack examples lint types docs clean

# $(call install,what) shows what pip does, and then how long it took; on a terminal with a bar for each download.
define install
	@echo "pip installs $(1) with $(TORCH) into $(VENV); once, and how long depends on the line"
	@start=$$(date +%s); $(BIN)/pip install --disable-pip-version-check -e '$(1)' '$(TORCH)' && echo "that took $$(($$(date +%s) - start)) s"
	@touch $@
endef

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call install,.)

$(VENV)/.dev: $(VENV)/.base
	$(call install,.[dev])

demo: $(VENV)/.base
	$(BIN)/paged-attn demo $(ARGS)

# All that takes little (tests/quick.py): five minutes on two idle cores, and it says how many it took.
test: $(VENV)/.dev
	PAGED_ATTN_TEST_SECONDS=300 $(TEST_ENV) $(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" --durations 10 $(ARGS)

# The others: every type of model, every planted error, processes, Inductor. CI runs one of SHARE=1/6 to 6/6 of them (tests/share.py).
test-slow: $(VENV)/.dev
	PAGED_ATTN_TEST_SHARE=$(SHARE) $(TEST_ENV) $(BIN)/pytest -q -n 2 --dist loadfile -m slow --durations 10 -rs $(ARGS)

test-all: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/pytest -q -n 2 --dist loadfile --durations 10 -rs $(ARGS)

# The engine's quick tests again that this changes: each step is launched before the tokens of the one before it are known, as on a GPU.
overlap: $(VENV)/.dev
	PAGED_ATTN_TEST_OVERLAP=1 $(TEST_ENV) $(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" --durations 5 tests/engine tests/server $(ARGS)

MINUTES ?= 60
soak: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

# A server under everything that is known to hurt one; afterwards nothing may be missing.
attack: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m tests.attack --minutes $(MINUTES) $(ARGS)

examples: $(VENV)/.dev
	for example in compile_backend serve_prompts patch_model engine_author plain_gpt nanogpt_like moe_split_point generate_on_pages structured_output tensor_parallel own_backend pypi_model; do $(BIN)/python examples/$$example.py || exit 1; done
	$(BIN)/python examples/train_tiny_lm.py --steps 2 --batch-size 2 --device cpu --out build/tiny_lm

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@long=$$(git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 500'); if [ -n "$$long" ]; then echo "files over 500 lines:"; echo "$$long"; exit 1; fi

types: $(VENV)/.dev
	$(BIN)/mypy --strict -p paged_attn

docs: $(VENV)/.base
	$(BIN)/python -m docs.make_backends
	$(BIN)/python -m docs.make_capture
	$(BIN)/python -m docs.make_settings

clean:
	rm -rf $(VENV) build dist out *.egg-info
