from __future__ import annotations

import argparse
import math
import traceback
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.bench.config import EditorSpec, ServeOptions, add_flags, load_options
from lmcache_stream.errors import UsageError

VLLM = """
base-url model dataset-name dataset-path num-prompts random-input-len random-output-len random-range-ratio seed
request-rate burstiness max-concurrency num-warmups ignore-eos temperature top-p extra-body goodput
percentile-metrics metric-percentiles save-result save-detailed result-dir result-filename metadata disable-tqdm
"""
OURS = """
kv-url kv-http-url kv-model editor keep edit-every compare-baseline modify-concurrency resume max-kv-bytes
quality config
"""


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def options(*arguments: str, **given: Any) -> ServeOptions:
    return load_options(parse(*arguments), environ={}, **given)


@pytest.mark.parametrize("name", [*VLLM.split(), *OURS.split()])
def test_the_flag_is_there(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert f"--{name}" in {flag for action in parser._actions for flag in action.option_strings}


def test_help_can_be_printed() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert "tokens of a random prompt (1024)" in " ".join(parser.format_help().split())


def test_defaults_are_those_of_vllm_bench_serve() -> None:
    defaults = options()
    assert defaults.num_prompts == 1000
    assert (defaults.random_input_len, defaults.random_output_len) == (1024, 128)
    assert defaults.request_rate == math.inf
    assert defaults.percentile_metrics == ["ttft", "tpot", "itl"]
    assert defaults.metric_percentiles == [99]
    assert defaults.temperature is None
    assert defaults.sampling_params == {"repetition_penalty": 1.0, "ignore_eos": True}


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    file.write_text("num-prompts = 1\nseed = 1\nburstiness = 1.5\nrequest_rate = 1.5")
    environ = {"LMCACHE_STREAM_NUM_PROMPTS": "2", "LMCACHE_STREAM_SEED": "2", "LMCACHE_STREAM_BURSTINESS": "2.5"}
    flags = parse("--config", str(file), "--num-prompts", "3", "--seed", "3")
    read = load_options(flags, environ=environ, num_prompts=4)
    assert (read.num_prompts, read.seed, read.burstiness, read.request_rate) == (4, 3, 2.5, 1.5)


def test_a_file_says_everything_that_flags_say(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    file.write_text(
        'editor = ["snapkv:window=16", "knorm"]\nkeep = 0.5\nedit-every = 32\n'
        "goodput = {ttft = 200}\nextra-body = {top_k = 5}\n"
        'metric-percentiles = [50, 99.9]\npercentile-metrics = "ttft,e2el"\nmax-kv-bytes = "8GiB"\nsave-result = true\n'
        'metadata = {gpu = "none"}\nrequest-rate = "inf"\nresume = true\nrandom-range-ratio = {input = 0.25}\n'
    )
    said = options(
        *("--editor", "snapkv:window=16", "--editor", "knorm", "--keep", "0.5", "--goodput", "ttft:200"),
        *("--edit-every", "32"),
        *("--extra-body", '{"top_k": 5}', "--metric-percentiles", "50,99.9", "--percentile-metrics", "ttft,e2el"),
        *("--max-kv-bytes", "8GiB", "--save-result", "--metadata", "gpu=none", "--request-rate", "inf", "--resume"),
        *("--random-range-ratio", '{"input": 0.25}'),
    )
    assert options(file=file) == said
    assert [str(spec) for spec in said.editors] == ["snapkv:keep=0.5,window=16", "knorm:keep=0.5"]
    assert said.max_kv_bytes == 8 * 2**30
    assert said.resume is True
    assert said.random_range_ratio == {"input": 0.25, "output": 0.0}


def test_the_environment_takes_words() -> None:
    environ = {"LMCACHE_STREAM_EDITOR": "knorm keydiff:keep=64", "LMCACHE_STREAM_SAVE_RESULT": "1"}
    read = load_options(environ={**environ, "LMCACHE_STREAM_GOODPUT": "ttft:1 tpot:2", "LMCACHE_STREAM_MODEL": ""})
    assert [spec.name for spec in read.editor] == ["knorm", "keydiff"]
    assert read.editor[1].params == {"keep": 64}
    assert read.save_result
    assert read.model is None
    assert read.goodput == {"ttft": 1.0, "tpot": 2.0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-prompts", "0"], "--num-prompts: "),
        (["--num-prompts", "99999999999999999999"], "--num-prompts: "),
        (["--random-input-len", "99999999999999999999"], "--random-input-len: "),
        (["--temperature", "inf"], "--temperature: "),
        (["--num-prompts", "many"], "--num-prompts: "),
        (["--request-rate", "0"], "--request-rate: a rate is above 0"),
        (["--request-rate", "fast"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "-1"], "--burstiness"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--max-kv-bytes", "lots"], "--max-kv-bytes"),
        (["--goodput", "ttft=3"], "KEY:VALUE"),
        (["--goodput", "speed:3"], "no objective: choose from ttft, tpot, e2el"),
        (["--goodput", "ttft:-3"], "no time"),
        (["--metadata", "alone"], "KEY=VALUE"),
        (["--percentile-metrics", "ttft,tea"], "--percentile-metrics"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--extra-body", "{"], "--extra-body"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--extra-body", '{"n": 2}'], "--extra-body: it has n=2"),
        (["--extra-body", '{"stream": false}'], "--extra-body: it has stream=False"),
        (["--extra-body", '{"top_k": NaN}'], "--extra-body: it['top_k'] is nan"),
        (["--extra-body", '{"max_tokens": 2}'], "--random-output-len"),
        (["--base-url", "http://localhost:1", "--kv-url", "tcp://localhost:1"], "needs --kv-http-url"),
        (["--result-filename", ".."], "--result-dir"),
        (["--editor", "knorm", "--keep", "1.5"], "--keep"),
        (["--editor", "knorm", "--keep", "half"], "--keep"),
        (["--editor", "knorm:keep"], "--editor: 'knorm:keep' is not of the form NAME:KEY=VALUE"),
        (["--editor", ":keep=2"], "names no editor"),
        (["--keep", "0.5"], "need an --editor"),
        (["--compare-baseline"], "need an --editor"),
        (["--edit-every", "64"], "need an --editor"),
        (["--editor", "knorm", "--edit-every", "0"], "--edit-every: "),
        (["--editor", "knorm", "--edit-every", "-3"], "--edit-every: "),
        (["--editor", "knorm", "--edit-every", "64.5"], "--edit-every: "),
        (["--quality", "x.json"], "add --save-result"),
        (["--editor", "knorm", "--extra-body", '{"min_tokens": 9}'], "--ignore-eos"),
        (["--kv-model", "x"], "--kv-model needs --base-url and --kv-url"),
        (["--dataset-name", "hf"], "--dataset-name"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-path", "x.jsonl"], "does not go with --dataset-name random"),
        (["--base-url", "http://localhost:1", "--editor", "knorm"], "needs --kv-url"),
        (["--kv-http-url", "http://localhost:1"], "needs --kv-url"),
        (["--kv-url", "tcp://localhost:1"], "needs the --base-url"),
        (["--random-range-ratio", "1.0"], "--random-range-ratio"),
        (["--random-range-ratio", "null"], "--random-range-ratio"),
        (["--random-range-ratio", '{"in": 0.1}'], "--random-range-ratio"),
        (["--result-filename", "there/x.json"], "--result-dir"),
        (["--custom-output-len", "0"], "--custom-output-len"),
        (["--config", "/none.toml"], "cannot read the options in /none.toml"),
    ],
)
def test_what_cannot_be_right_is_said_in_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        options(*arguments)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--base-url", "http://u:hunter2@h"],
        ["--kv-url", "tcp://u:hunter2@h:1"],
        ["--kv-url", "redis://h?password=hunter2"],
        ["--base-url", "http://h", "--kv-url", "redis://u:hunter2@h"],
        ["--base-url", "http://h", "--kv-url", "tcp://h:1?password=hunter2"],
        ["--base-url", "http://h", "--kv-url", "tcp://h:1", "--kv-http-url", "http://u:hunter2@h"],
    ],
)
def test_a_secret_is_not_repeated(arguments: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        options(*arguments)
    assert "hunter2" not in "".join(traceback.format_exception(error.value))


def test_the_complaint_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    file.write_text("num-prompts = 0")
    with pytest.raises(UsageError, match=r"num-prompts in .*bench\.toml"):
        load_options(environ={}, file=file)
    with pytest.raises(UsageError, match="LMCACHE_STREAM_NUM_PROMPTS"):
        load_options(environ={"LMCACHE_STREAM_NUM_PROMPTS": "0"})
    with pytest.raises(UsageError, match="num_prompts="):
        load_options(environ={}, num_prompts=0)
    file.write_text("num-promts = 1")
    with pytest.raises(UsageError, match=r"num-promts in .*no such option"):
        load_options(environ={}, file=file)
    file.write_text("num-prompts =")
    with pytest.raises(UsageError, match="not TOML"):
        load_options(environ={}, file=file)


@pytest.mark.parametrize("text", ["snapkv", "random:keep=0.5,seed=3", "rkv:scope=head,rerotate=false"])
def test_an_editor_is_written_as_it_is_read(text: str) -> None:
    assert str(EditorSpec.parse(text)) == text


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        *(("4", 4), ("0.5", 0.5), ("head", "head"), ('"4"', "4"), ("[[0, 4], [8, 12]]", [[0, 4], [8, 12]])),
        *(("true", True), ("True", True), ("false", False), ("FALSE", False), ("null", None), ("None", None)),
    ],
)
def test_values_of_parameters(value: str, meant: Any) -> None:
    read = EditorSpec.parse(f"x:first={value}, the-second={value}").params
    assert read == {"first": meant, "the_second": meant}
    assert type(read["first"]) is type(meant)


def test_parameters_of_requests() -> None:
    params = options(
        *("--dataset-name", "prefix_repetition", "--temperature", "0", "--top-p", "0.9"),
        *("--extra-body", '{"top_p": 0.5, "stop": ["."]}'),
    ).sampling_params
    assert params == {"repetition_penalty": 1.0, "temperature": 0.0, "top_p": 0.5, "stop": ["."]}
