"""Starts atheris on a target."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType


def drive(check: Callable[[bytes], None], *modules: ModuleType) -> None:
    """Fuzz `check` as the command line says, guided by what runs of `modules`."""
    atheris = importlib.import_module("atheris")
    for module in modules:
        for thing in vars(module).values():
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            for function in vars(thing).values() if inspect.isclass(thing) else [thing]:
                if inspect.isfunction(function):
                    atheris.instrument_func(function)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
