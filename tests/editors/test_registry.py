"""Editors by name."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

import lmcache_stream.editors as editors
from lmcache_stream.editors import Edit, EditInput, Editor, Merge, PerLayer, SnapKV, StreamingLLM, registry
from lmcache_stream.errors import UsageError


class Theirs(Editor):
    """An editor of somebody else."""

    name: ClassVar[str] = "theirs"

    def edit(self, x: EditInput) -> Edit:
        return Edit(kv=x.kv, tokens=x.tokens, kept_positions=None)


def test_every_method_has_a_name() -> None:
    assert editors.names() == [
        *("compose", "expected-attention", "h2o", "keydiff", "knorm", "lagkv", "merge", "middle-out", "per-layer"),
        *("quantize", "random", "rkv", "snapkv", "streaming-llm", "tova"),
    ]


def test_get_makes_an_editor() -> None:
    assert editors.get("streaming-llm", keep=64, sinks=2) == StreamingLLM(keep=64, sinks=2)
    assert editors.get("streaming_llm") == StreamingLLM()


def test_unknown_names_and_parameters_list_the_choices() -> None:
    with pytest.raises(UsageError, match=r"no editor is called 'snap'.*keydiff.*snapkv"):
        editors.get("snap")
    with pytest.raises(UsageError, match=r"streaming-llm has no parameter sink: choose from .*sinks"):
        editors.get("streaming-llm", sink=4)


def test_a_name_stands_for_an_editor_inside_another() -> None:
    assert editors.get("merge", editor="snapkv") == Merge(editor=SnapKV())
    assert editors.get("per-layer", default="streaming_llm") == PerLayer(default=StreamingLLM())
    with pytest.raises(UsageError, match="no editor is called 'snap'"):
        editors.get("merge", editor="snap")


def test_editors_are_frozen_and_equal_by_their_parameters() -> None:
    editor = StreamingLLM()
    with pytest.raises(dataclasses.FrozenInstanceError):
        editor.sinks = 5  # type: ignore[misc]  # wrong on purpose
    assert {StreamingLLM(), StreamingLLM(), StreamingLLM(sinks=5)} == {editor, StreamingLLM(sinks=5)}


def test_register_adds_a_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_EDITORS", dict(registry._EDITORS))
    assert editors.register(Theirs) is Theirs
    assert editors.register(Theirs) is Theirs
    assert "theirs" in editors.names()
    assert isinstance(editors.get("theirs"), Theirs)

    class Copycat(Theirs):
        """Of the same name."""

    with pytest.raises(UsageError, match="belongs to Theirs already"):
        editors.register(Copycat)

    class Nameless(Theirs):
        name: ClassVar[str] = ""

    with pytest.raises(UsageError, match="Nameless has no name"):
        editors.register(Nameless)
    with pytest.raises(UsageError, match="no subclass of Editor"):
        editors.register(dict)  # type: ignore[type-var]  # wrong on purpose


class Underscored(Theirs):
    """Of a name with an underscore."""

    name: ClassVar[str] = "of_theirs"


def test_a_name_with_an_underscore_is_found_under_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_EDITORS", dict(registry._EDITORS))
    editors.register(Underscored)
    assert "of-theirs" in editors.names()
    for name in ("of_theirs", "of-theirs"):
        assert registry.find(name) is Underscored
        assert isinstance(editors.get(name), Underscored)


def test_an_entry_point_with_an_underscore_is_found_under_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("of_theirs", f"{__name__}:Underscored", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    assert "of-theirs" in editors.names()
    for name in ("of_theirs", "of-theirs"):
        assert isinstance(editors.get(name), Underscored)


def test_entry_points_offer_editors(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("theirs", f"{__name__}:Theirs", registry.ENTRY_POINTS),
        EntryPoint("broken", "json:dumps", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.ENTRY_POINTS else [])
    assert "theirs" in editors.names()
    assert isinstance(editors.get("theirs"), Theirs)
    with pytest.raises(UsageError, match=r"entry point 'broken' \(json:dumps\) is no subclass of Editor"):
        editors.get("broken")
