"""Writes the API reference to build/docs; a warning is an error (run it with -W error)."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from pathlib import Path
from typing import get_type_hints

import pdoc

import lmcache_stream
from lmcache_stream.editors import Editor

OUT = Path(__file__).parent.parent / "build" / "docs"

# Rooms that nobody imports from.
INTERNAL = {
    "addresses",
    "bodies",
    "callables",
    "catalogue",
    "cli",
    "console",
    "finishing",
    "journal",
    "model_config",
    "portal",
}
# Modules in rooms that people import from.
FURTHER = (
    "bench.config",
    "bench.prompts",
    "bench.serve",
    "editors.base",
    "editors.registry",
    "kvcache.context",
    "serving.doctor",
    "serving.options",
    "serving.up",
    "testing.fake_cache_server",
    "testing.tiny",
)


def specifications() -> list[str]:
    """What has a page: all rooms and a few modules in them, each without what lies in it."""
    rooms = [room.name for room in pkgutil.iter_modules(lmcache_stream.__path__) if room.name not in INTERNAL]
    names = [f"lmcache_stream.{name}" for name in rooms]
    further = (f"lmcache_stream.{name}" for name in FURTHER)
    return ["lmcache_stream", *names, r"!lmcache_stream\.\w+\.", *further, r"!lmcache_stream\.\w+\.\w+\."]


def resolve(name: str) -> None:
    """Make ready what pdoc does not find by itself: names imported late, and annotations of inherited fields."""
    module = importlib.import_module(name)
    for public in module.__all__:
        thing = vars(module).setdefault(public, getattr(module, public))
        if isinstance(thing, type) and issubclass(thing, Editor) and dataclasses.is_dataclass(thing):
            annotations = thing.__init__.__annotations__
            annotations.update({key: hint for key, hint in get_type_hints(thing).items() if key in annotations})


def main() -> None:
    for name in ("lmcache_stream", "lmcache_stream.editors", "lmcache_stream.testing"):
        resolve(name)
    pdoc.render.configure(docformat="google", footer_text=f"lmcache-stream {lmcache_stream.__version__}")
    pdoc.pdoc(*specifications(), output_directory=OUT)
    print(f"wrote {OUT / 'index.html'}")


if __name__ == "__main__":
    main()
