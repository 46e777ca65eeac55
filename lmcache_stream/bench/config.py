"""The options of `bench serve`: arguments of Python over flags over environment over a file."""

from __future__ import annotations

import argparse
import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from lmcache_stream.completions.request import check_request
from lmcache_stream.errors import UsageError

__all__ = ["METRICS", "EditorSpec", "ServeOptions", "add_flags", "load_options"]

METRICS: Final = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
OBJECTIVES: Final = ("ttft", "tpot", "e2el")
ENVIRONMENT: Final = "LMCACHE_STREAM_"
FROM_A_FILE = frozenset({"sharegpt", "custom"})
GROUPS: Final = {
    "base_url": "servers and model",
    "dataset_name": "prompts",
    "request_rate": "load",
    "ignore_eos": "sampling",
    "editor": "edits",
    "goodput": "results",
}
"""Heading in the help of a group of options, by the first of them."""
METAVARS: Final = {
    "kv_model": "NAME",
    "model": "NAME",
    "tokenizer": "NAME",
    "random_range_ratio": "RATIO",
    "max_kv_bytes": "SIZE",
    "extra_body": "JSON",
    "keep": "N",
    "quality": "FILE",
    "result_dir": "FOLDER",
}


class EditorSpec(BaseModel):
    """An editor as it is asked for: `NAME[:k=v,...]`.

    Args:
        name: The editor's name.
        params: Its parameters.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    name: str
    params: dict[str, Any] = {}

    @classmethod
    def parse(cls, text: str) -> EditorSpec:
        """Read `NAME[:k=v,...]`; values are JSON (`0.5`, `4`, `true`) or plain words.

        Raises:
            ValueError: It is not of that form.
        """
        name, _, rest = text.partition(":")
        params = {}
        for pair in filter(None, rest.split(",")):
            key, separator, value = pair.partition("=")
            if not separator or not key.strip():
                raise ValueError(f"{text!r} is not of the form NAME:KEY=VALUE,KEY=VALUE")
            params[key.strip().replace("-", "_")] = _value(value.strip())
        if not name.strip():
            raise ValueError(f"{text!r} names no editor")
        return cls(name=name.strip(), params=params)

    def with_keep(self, keep: float | int | None) -> EditorSpec:
        """The same with `keep`, unless it has one of its own."""
        if keep is None or "keep" in self.params:
            return self
        return EditorSpec(name=self.name, params={"keep": keep, **self.params})

    def __str__(self) -> str:
        params = ",".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in self.params.items())
        return f"{self.name}:{params}" if params else self.name


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _editors(given: Any) -> Any:
    given = given.split() if isinstance(given, str) else given
    return [EditorSpec.parse(one) if isinstance(one, str) else one for one in given]


def _rate(given: Any) -> Any:
    rate = float(given)
    if not rate > 0:
        raise ValueError(f"a rate is above 0, or inf, not {given}")
    return rate


def _keep(given: Any) -> Any:
    keep = _value(given) if isinstance(given, str) else given
    if isinstance(keep, bool) or not isinstance(keep, int | float) or keep <= 0 or (type(keep) is float and keep > 1):
        raise ValueError(f"{given!r} is neither a ratio such as 0.5, up to 1.0, nor a count of tokens")
    return keep


def _pairs(given: Any, separator: str) -> Any:
    given = given.split() if isinstance(given, str) else given
    if isinstance(given, Mapping):
        return given
    pairs = {}
    for pair in given:
        key, found, value = str(pair).partition(separator)
        if not found or not key.strip():
            raise ValueError(f"{pair!r} is not of the form KEY{separator}VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def _objectives(given: dict[str, float]) -> dict[str, float]:
    for name, value in given.items():
        if name not in OBJECTIVES:
            raise ValueError(f"{name!r} is no objective: choose from {', '.join(OBJECTIVES)}")
        if not value >= 0:
            raise ValueError(f"{name}:{value} is no time in milliseconds")
    return given


def _names(given: Any) -> Any:
    return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given


def _percentiles(given: Any) -> Any:
    return _names(given) if isinstance(given, str) else ([given] if isinstance(given, int | float) else given)


def _ratios(given: Any) -> Any:
    given = _value(given) if isinstance(given, str) else given
    pair = given if isinstance(given, Mapping) else {"input": given, "output": given}
    ratios = {name: float(pair[name]) if name in pair else 0.0 for name in ("input", "output")}
    if set(pair) - set(ratios) or not all(0 <= ratio < 1 for ratio in ratios.values()):
        raise ValueError('a ratio is at least 0.0 and less than 1.0: 0.3, or {"input": 0.3, "output": 0.5}')
    return ratios


def _json(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def _extra_body(given: dict[str, Any]) -> dict[str, Any]:
    if "max_tokens" in given:
        raise ValueError("max_tokens is not for here: prompts bring their lengths, see --random-output-len and others")
    try:
        check_request([0], given, "", None)
    except UsageError as error:
        raise ValueError(str(error).replace("sampling_params", "it")) from error
    return given


def _resume(given: Any) -> Any:
    return {"": True, "true": True, "1": True, "false": None, "0": None, False: None}.get(given, given)


Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServeOptions(BaseModel):
    """What `bench serve` is asked to do. Names and defaults are those of `vllm bench serve` where it has them."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

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
        BeforeValidator(_ratios),
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

    request_rate: Annotated[float, BeforeValidator(_rate), Field(description="requests a second; inf: all at once")] = (
        math.inf
    )
    burstiness: Annotated[
        float, BeforeValidator(_rate), Field(description="1: Poisson arrivals, less: bursts, more: evener")
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
        BeforeValidator(_json),
        AfterValidator(_extra_body),
        Field(description="JSON object of further request parameters"),
    ] = {}

    editor: Annotated[
        list[EditorSpec],
        BeforeValidator(_editors),
        Field(description="edit the KV between prefill and decode; again for a further run over the same prompts"),
    ] = []
    keep: Annotated[
        float | int | None,
        BeforeValidator(_keep),
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
        BeforeValidator(lambda given: _pairs(given, ":")),
        AfterValidator(_objectives),
        Field(description="objectives in milliseconds: ttft:200 tpot:50 e2el:5000"),
    ] = {}
    percentile_metrics: Annotated[
        list[Literal["ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"]],
        BeforeValidator(_names),
        Field(description="metrics to report, by commas"),
    ] = ["ttft", "tpot", "itl"]
    metric_percentiles: Annotated[
        list[Annotated[float, Field(ge=0, le=100)]],
        BeforeValidator(_percentiles),
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
        BeforeValidator(lambda given: _pairs(given, "=")),
        Field(description="KEY=VALUE pairs for the result"),
    ] = {}
    resume: Annotated[
        Literal[True] | Path | None,
        BeforeValidator(_resume),
        Field(description="go on with a run that was broken off: its journal, or else the newest that fits"),
    ] = None
    disable_tqdm: Annotated[bool, Field(description="no progress on the terminal")] = False

    @model_validator(mode="after")
    def _fits_together(self) -> ServeOptions:
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
            raise ValueError(f"--kv-url {self.kv_url} needs the --base-url of its engine")
        if self.kv_url is not None and self.kv_http_url is None and not self.kv_url.startswith("memory://"):
            raise ValueError(
                f"--kv-url {self.kv_url} needs --kv-http-url, the same server's HTTP address, such as "
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each option. A flag that is not given leaves no trace in the parsed options."""
    parser.usage = "%(prog)s [OPTION ...]"
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with options by the same names")
    group: argparse._ActionsContainer = parser
    for name, field in ServeOptions.model_fields.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        flag = "--" + name.replace("_", "-")
        help_ = _help(field.description or "", field.default)
        rules: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_}
        if field.annotation is bool:
            group.add_argument(flag, action="store_true", **rules)
        elif name == "editor":
            group.add_argument(flag, action="append", metavar="NAME[:k=v,...]", **rules)
        elif name == "resume":
            group.add_argument(flag, nargs="?", const=True, metavar="JOURNAL", **rules)
        elif name in ("goodput", "metadata"):
            group.add_argument(flag, nargs="+", metavar="KEY:VALUE" if name == "goodput" else "KEY=VALUE", **rules)
        else:
            group.add_argument(flag, metavar=_metavar(name, field.annotation), **rules)


def load_options(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    **given: Any,
) -> ServeOptions:
    """Put options together: `given` over `flags` over the environment over a TOML file.

    Args:
        flags: What was parsed from the command line; names that are no options do not count, but `config` names a file.
        environ: The environment; None: this process's. `LMCACHE_STREAM_NUM_PROMPTS` is `--num-prompts`, and so on.
        file: A TOML file with the same names; with or without hyphens.
        given: Options by name.

    Raises:
        UsageError: The file cannot be read, or an option is unknown or cannot be right. The message says where it
            comes from.
    """
    flags = flags or {}
    environ = os.environ if environ is None else environ
    names = ServeOptions.model_fields
    values: dict[str, tuple[str, Any]] = {}
    if path := file or flags.get("config"):
        values |= {name: (f"{name.replace('_', '-')} in {path}", value) for name, value in _read(Path(path)).items()}
    for name in names:
        variable = ENVIRONMENT + name.upper()
        if environ.get(variable):
            values[name] = (variable, environ[variable])
        if name in flags:
            values[name] = ("--" + name.replace("_", "-"), flags[name])
    values |= {name: (f"{name}=", value) for name, value in given.items()}
    if unknown := [place for name, (place, _) in values.items() if name not in names]:
        raise UsageError(f"{unknown[0]}: there is no such option; the options are those of bench serve --help")
    try:
        return ServeOptions.model_validate({name: value for name, (_, value) in values.items()})
    except ValidationError as error:
        raise UsageError(_complaint(error, values)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the options in {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    return {name.replace("-", "_"): value for name, value in content.items()}


def _complaint(error: ValidationError, values: Mapping[str, tuple[str, Any]]) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    place, value = values[str(first["loc"][0])]
    if first["type"] == "value_error":
        return f"{place}: {message}"
    return f"{place}: {message[:1].lower()}{message[1:]}, not {value!r}"


def _help(description: str, default: Any) -> str:
    if default in (None, False, "", [], {}) or isinstance(default, dict):
        return description
    shown = (
        ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default)
        if isinstance(default, list)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )
    return f"{description} ({shown})"


def _metavar(name: str, annotation: Any) -> str:
    if name in METAVARS:
        return METAVARS[name]
    for suffix, metavar in (("url", "URL"), ("path", "FILE"), ("name", "NAME")):
        if name.endswith(suffix):
            return metavar
    return "LIST" if "percentile" in name else "X" if float in (annotation, *get_args(annotation)) else "N"
