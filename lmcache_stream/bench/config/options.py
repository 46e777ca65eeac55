"""What `bench serve` can be asked to do, and what goes together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

from lmcache_stream.addresses import check_address, shown
from lmcache_stream.bench.config import words
from lmcache_stream.bench.config.words import EditorSpec

__all__ = ["METRICS", "ServeOptions"]

METRICS: Final = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
FROM_A_FILE = frozenset({"sharegpt", "custom"})

Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServeOptions(BaseModel):
    """What `bench serve` is asked to do. Names and defaults are those of `vllm bench serve` where it has them."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", hide_input_in_errors=True
    )

    base_url: Annotated[str | None, Field(description="a running engine, such as http://localhost:8000")] = None
    kv_url: Annotated[str | None, Field(description="its LMCache server's requests, such as tcp://localhost:5555")] = (
        None
    )
    kv_model: Annotated[
        str | None,
        Field(description="name of the model in the KV cache, which is vLLM's --model, if the cache knows several"),
    ] = None
    kv_http_url: Annotated[str | None, Field(description="the same server's HTTP, such as http://localhost:8080")] = (
        None
    )
    model: Annotated[
        str | None,
        Field(description="name of the served model; without --base-url, folder of the model to serve (SmolLM2-135M)"),
    ] = None
    tokenizer: Annotated[
        str | None, Field(description="folder or name of the tokenizer, if it is not the model's folder")
    ] = None

    dataset_name: Annotated[
        Literal["random", "sharegpt", "custom", "prefix_repetition"],
        Field(description="where prompts come from: random, sharegpt, custom or prefix_repetition"),
    ] = "random"
    dataset_path: Annotated[
        Path | None, Field(description='sharegpt: a JSON file; custom: JSON lines with "prompt" and "output_tokens"')
    ] = None
    num_prompts: Annotated[int, Field(ge=1, le=10**7, description="prompts to send")] = 1000
    seed: Annotated[int, Field(ge=0, lt=2**32, description="of prompts and arrivals")] = 0
    random_input_len: Annotated[Count, Field(description="tokens of a random prompt")] = 1024
    random_output_len: Annotated[Count, Field(description="tokens to generate from one")] = 128
    random_range_ratio: Annotated[
        dict[str, float],
        BeforeValidator(words.ratios),
        Field(description='spread of both: 0.3 means 70 to 130 %%, or {"input": 0.3, "output": 0.5}'),
    ] = {"input": 0.0, "output": 0.0}
    random_prefix_len: Annotated[int, Field(ge=0, description="tokens that all random prompts begin with")] = 0
    sharegpt_output_len: Annotated[
        Count | None, Field(description="tokens to generate, instead of the length of the recorded answer")
    ] = None
    custom_output_len: Annotated[
        int, Field(ge=-1, description="tokens to generate; -1: what each line says in output_tokens")
    ] = 256
    skip_chat_template: Annotated[bool, Field(description="custom: send prompts as they are")] = False
    prefix_repetition_prefix_len: Annotated[Count, Field(description="tokens of a shared prefix")] = 256
    prefix_repetition_suffix_len: Annotated[Count, Field(description="tokens of each prompt's own")] = 256
    prefix_repetition_num_prefixes: Annotated[Count, Field(description="shared prefixes")] = 10
    prefix_repetition_output_len: Annotated[Count, Field(description="tokens to generate")] = 128

    request_rate: Annotated[
        float, BeforeValidator(words.rate), Field(description="requests a second; inf: all at once")
    ] = math.inf
    burstiness: Annotated[
        float, BeforeValidator(words.rate), Field(description="1: Poisson arrivals, less: bursts, more: evener")
    ] = 1.0
    max_concurrency: Annotated[Count | None, Field(description="requests at once")] = None
    max_kv_bytes: Annotated[
        ByteSize | None, Field(gt=0, description="bytes of KV of the requests under way at once, such as 8GiB")
    ] = None
    num_warmups: Annotated[int, Field(ge=0, description="requests before the clock starts")] = 0

    ignore_eos: Annotated[bool, Field(description="generate to the full length; random prompts always do")] = False
    temperature: Annotated[
        float | None, Field(ge=0, allow_inf_nan=False, description="0: greedy; left out: the engine's default")
    ] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="left out: the engine's default")] = None
    extra_body: Annotated[
        dict[str, Any],
        BeforeValidator(words.json_value),
        AfterValidator(words.extra_body),
        Field(description="JSON object of further request parameters"),
    ] = {}

    editor: Annotated[
        list[EditorSpec],
        BeforeValidator(words.editors),
        Field(description="edit the KV between prefill and decode; again for a further run over the same prompts"),
    ] = []
    keep: Annotated[
        float | int | None,
        BeforeValidator(words.keep),
        Field(description="KV that editors keep: a ratio such as 0.5, or a count of tokens"),
    ] = None
    edit_every: Annotated[
        Count | None,
        Field(description="edit again whenever that many tokens were generated; needs a count of tokens to keep"),
    ] = None
    compare_baseline: Annotated[bool, Field(description="decode the same prompts without an edit first")] = False
    modify_concurrency: Annotated[Count, Field(description="edits at once")] = 4
    modify_timeout: Annotated[Seconds, Field(description="seconds to wait until the cache covers a prompt")] = 60.0

    goodput: Annotated[
        dict[str, float],
        BeforeValidator(lambda given: words.pairs(given, ":")),
        AfterValidator(words.objectives),
        Field(description="objectives in milliseconds: ttft:200 tpot:50 e2el:5000"),
    ] = {}
    percentile_metrics: Annotated[
        list[Literal["ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"]],
        BeforeValidator(words.names),
        Field(description="metrics to report, by commas"),
    ] = ["ttft", "tpot", "itl"]
    metric_percentiles: Annotated[
        list[Annotated[float, Field(ge=0, le=100)]],
        BeforeValidator(words.percentiles),
        Field(description="their percentiles, by commas"),
    ] = [99.0]

    save_result: Annotated[bool, Field(description="write result, report.html and journal")] = False
    quality: Annotated[
        Path | None, Field(description="what bench quality --json wrote, to be drawn into report.html")
    ] = None
    save_detailed: Annotated[bool, Field(description="write every request into the result, too")] = False
    result_dir: Annotated[Path | None, Field(description="folder for them (here)")] = None
    result_filename: Annotated[str | None, Field(description="name of the result, instead of one with the date")] = None
    metadata: Annotated[
        dict[str, str],
        BeforeValidator(lambda given: words.pairs(given, "=")),
        Field(description="KEY=VALUE pairs for the result"),
    ] = {}
    resume: Annotated[
        Literal[True] | Path | None,
        BeforeValidator(words.resume),
        Field(description="go on with a run that was broken off: its journal, or else the newest that fits"),
    ] = None
    disable_tqdm: Annotated[bool, Field(description="no progress on the terminal")] = False

    @model_validator(mode="after")
    def _fits_together(self) -> ServeOptions:
        urls = {"--base-url": self.base_url, "--kv-url": self.kv_url, "--kv-http-url": self.kv_http_url}
        for flag, url in urls.items():
            if url is not None:
                check_address(url, flag)
        if self.dataset_name in FROM_A_FILE and self.dataset_path is None:
            raise ValueError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        if self.dataset_name not in FROM_A_FILE and self.dataset_path is not None:
            raise ValueError(
                f"--dataset-path does not go with --dataset-name {self.dataset_name}: choose sharegpt, custom"
            )
        if not self.editor and (self.compare_baseline or self.keep is not None or self.edit_every is not None):
            raise ValueError("--keep, --edit-every and --compare-baseline need an --editor NAME")
        if self.editor and "min_tokens" in self.extra_body:
            raise ValueError(
                "min_tokens in --extra-body does not go with --editor, whose prefill generates one token: "
                "--ignore-eos generates to the full length"
            )
        if self.base_url is not None and self.editor and self.kv_url is None:
            raise ValueError("--editor needs --kv-url and --kv-http-url beside --base-url")
        if self.kv_http_url is not None and self.kv_url is None:
            raise ValueError("--kv-http-url needs --kv-url")
        if self.kv_model is not None and (self.base_url is None or self.kv_url is None):
            raise ValueError("--kv-model needs --base-url and --kv-url")
        if self.base_url is None and self.kv_url is not None and not self.kv_url.startswith("memory://"):
            raise ValueError(f"--kv-url {shown(self.kv_url)} needs the --base-url of its engine")
        if self.kv_url is not None and self.kv_http_url is None and not self.kv_url.startswith("memory://"):
            raise ValueError(
                f"--kv-url {shown(self.kv_url)} needs --kv-http-url, the same server's HTTP address, such as "
                "http://localhost:8080"
            )
        if self.quality is not None and not (self.save_result or self.resume):
            raise ValueError("--quality goes into report.html: add --save-result")
        if self.custom_output_len == 0:
            raise ValueError("--custom-output-len is -1 or at least 1")
        if self.result_filename is not None and (
            Path(self.result_filename).name != self.result_filename or self.result_filename == ".."
        ):
            raise ValueError("--result-filename is a name; its folder is --result-dir")
        return self

    @property
    def editors(self) -> list[EditorSpec]:
        """The editors, each with its `keep`."""
        return [spec.with_keep(self.keep) for spec in self.editor]

    @property
    def sampling_params(self) -> dict[str, Any]:
        """What every request is sent with, but for `max_tokens`."""
        params: dict[str, Any] = {"repetition_penalty": 1.0}
        if self.ignore_eos or self.dataset_name == "random":
            params["ignore_eos"] = True
        params |= {"temperature": self.temperature} if self.temperature is not None else {}
        params |= {"top_p": self.top_p} if self.top_p is not None else {}
        return {**params, **self.extra_body}
