"""`lmcache-stream bench serve` beside `vllm bench serve`: one server, the same flags, prompts and seed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.real.served import show

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache_stream.serving.up import ServingStack

OURS = "import sys; from lmcache_stream.cli import main; sys.exit(main())"
THEIRS = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[3:]))
"""
FLAGS = (
    *("--dataset-name", "random", "--num-prompts", "16", "--random-input-len", "100", "--random-output-len", "32"),
    *("--random-range-ratio", "0.3", "--max-concurrency", "4", "--temperature", "0", "--ignore-eos", "--seed", "7"),
    *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed", "--disable-tqdm"),
)
ROUNDS = 3
COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "input_lens", "output_lens")
LATENCIES = ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms", "duration")


def bench(python: str, program: str, stack: ServingStack, folder: Path, name: str) -> dict[str, Any]:
    where = ["--base-url", stack.base_url, "--model", stack.served_model_name, "--tokenizer", stack.model_name]
    command = [python, "-c", program, "bench", "serve", *where, *FLAGS]
    ran = subprocess.run(
        [*command, "--result-dir", str(folder), "--result-filename", name], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    result: dict[str, Any] = json.loads((folder / name).read_text())
    return result


@pytest.mark.long
@pytest.mark.timeout(900)
def test_counts_are_equal_and_latencies_are_shown(
    stack_a: ServingStack, real_python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if subprocess.run([real_python, "-c", "import pandas"], capture_output=True, check=False).returncode:
        pytest.skip(f"vllm bench serve needs pandas: {real_python} -m pip install pandas")
    ours, theirs = [], []
    for number in range(ROUNDS + 1):
        ours.append(bench(sys.executable, OURS, stack_a, tmp_path, f"ours-{number}.json"))
        theirs.append(bench(real_python, THEIRS, stack_a, tmp_path, f"theirs-{number}.json"))
        assert {key: ours[-1][key] for key in COUNTS} == {key: theirs[-1][key] for key in COUNTS}
        assert set(theirs[-1]) <= set(ours[-1])
    # The first round put the prompts into the cache, for both.
    ratios = {
        key: [mine[key] / other[key] for mine, other in zip(ours[1:], theirs[1:], strict=True)] for key in LATENCIES
    }
    told = [
        f"{key} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        for key, values in ratios.items()
    ]
    show(capsys, f"ours over vllm bench serve, {ROUNDS} rounds: {', '.join(told)}")
