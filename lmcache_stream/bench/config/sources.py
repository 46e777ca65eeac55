"""Where options come from: Python, flags, the environment, a file."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import ValidationError

from lmcache_stream.bench.config.options import ServeOptions
from lmcache_stream.errors import UsageError

__all__ = ["add_flags", "load_options"]

ENVIRONMENT: Final = "LMCACHE_STREAM_"
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
