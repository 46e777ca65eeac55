from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

from lmcache_stream import catalogue, cli
from lmcache_stream.bench.config import EditorSpec
from lmcache_stream.editors import Edit, EditInput, Editor, SnapKV, names, registry
from lmcache_stream.editors.parameters import check_parameters, takes_editor


@dataclass(frozen=True, kw_only=True)
class Whole(Editor):
    """Keeps everything.

    Args:
        loudly: Whether it says so.
    """

    name: ClassVar[str] = "whole"
    needs: ClassVar[frozenset[str]] = frozenset({"patience"})

    loudly: bool = False

    def edit(self, x: EditInput) -> Edit:
        return Edit(kv=x.kv, tokens=x.tokens, kept_positions=None)


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Offers an editor as another installed package would."""

    def add(name: str, value: str) -> None:
        point = EntryPoint(name, value, registry.ENTRY_POINTS)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])

    return add


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    cli.main(["editors", *words, "--json"])
    return {method["name"]: method for method in json.loads(capsys.readouterr().out)["editors"]}


def test_a_method_is_described_by_its_class() -> None:
    method = catalogue.describe(SnapKV)
    assert method.summary.startswith("Keeps an observation window at the end")
    assert method.papers == ["arXiv:2404.14469"]
    assert method.scopes == ["shared", "layer", "head"]
    assert method.needs == ["queries", "heads", "rotary"]
    parameters = {one.name: one for one in method.parameters}
    assert "geometry" not in parameters
    assert (parameters["window"].default, parameters["kernel_size"].default) == (32, 5)
    assert parameters["window"].about.startswith("Tokens of the observation window")  # not what the base says
    assert parameters["sinks"].about == "First tokens that are always kept."  # the base's


def test_every_editor_says_what_it_does_and_what_each_parameter_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    methods = listed(capsys)
    assert sorted(methods) == names()
    for name, method in methods.items():
        assert method["summary"].endswith("."), name
        assert method["problem"] is None
        for parameter in method["parameters"]:
            assert parameter["about"].endswith("."), f"{name}: {parameter['name']}"
    assert methods["per-layer"]["scopes"] == ["layer", "head"]
    assert methods["expected-attention"]["scopes"] == ["shared", "layer", "head"]
    assert methods["quantize"]["scopes"] == methods["quantize"]["needs"] == []
    assert methods["merge"]["parameters"][0]["default"] == "keydiff"


@pytest.mark.parametrize("name", names())
def test_defaults_are_shown_as_the_command_line_reads_them(name: str) -> None:
    editor = registry.find(name)
    parameters = catalogue.describe(editor).parameters
    assert parameters
    for one in parameters:
        params = EditorSpec.parse(f"{name}:{one.name}={catalogue._written(one.default)}").params
        assert params == {one.name: one.default}
        if not takes_editor(editor, one.name):
            check_parameters(editor, params)


def test_a_plug_in_is_listed_like_ours(offer: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    offer("whole", f"{__name__}:Whole")
    whole = listed(capsys)["whole"]
    assert whole["module"] == __name__
    assert whole["needs"] == ["patience"]
    assert whole["parameters"] == [{"name": "loudly", "type": "bool", "default": False, "about": "Whether it says so."}]
    assert cli.main(["editors", "whole"]) == 0
    shown = capsys.readouterr().out
    for words in ("Keeps everything.", "loudly", "false", "Needs patience."):
        assert words in shown


def test_a_plug_in_that_does_not_load_hides_no_other(
    offer: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    offer("broken", "no_such_package:Broken")
    assert cli.main(["editors"]) == 1
    shown = capsys.readouterr().out
    assert "No module named 'no_such_package'" in shown
    assert "snapkv" in shown


def test_names_choose_and_a_wrong_one_lists_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(listed(capsys, "streaming_llm", "knorm", "knorm")) == ["streaming-llm", "knorm"]
    assert cli.main(["editors", "nonsense"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_a_name_with_an_underscore_is_found(
    offer: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    offer("who_le", f"{__name__}:Whole")
    assert list(listed(capsys, "who_le")) == list(listed(capsys, "who-le")) == ["whole"]


@pytest.mark.parametrize("words", [[], ["snapkv", "expected-attention", "compose"]])
def test_no_line_is_wider_than_the_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["editors", *words]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
