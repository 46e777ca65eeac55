"""`lmcache-stream doctor` on the real servers."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_stream.serving import doctor
from tests.real.conftest import STACKS

if TYPE_CHECKING:
    from lmcache_stream.serving.up import ServingStack


def examine(stack: ServingStack, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    urls = ["--base-url", stack.base_url, "--kv-url", stack.kv_url, "--kv-http-url", stack.kv_http_url]
    status = doctor.run(parser.parse_args([*urls, "--json", *more]))
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is (status == 0)
    return status, {finding["name"]: finding for finding in said["findings"]}


@pytest.mark.parametrize("stack", STACKS, indirect=True)
def test_passes(stack: ServingStack, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = examine(stack, capsys)
    status, found = examine(stack, capsys)  # what the first one left in the caches does not matter
    others = {name: finding for name, finding in found.items() if finding["status"] != "pass"}
    assert set(others) == (set() if stack.options.shared_memory else {"shared memory"}), others
    assert first == status == 0
    assert found["engine version"]["detail"][0].isdigit()
    assert found["cache version"]["detail"] != "not published"
    assert "cpu-packed" in found["reading"]["detail"]
    told = "on" if stack.options.prefix_caching else "off"
    assert found["prefix caching"]["detail"].startswith(f"{told};")


def test_fails_with_another_http_address(stack_d: ServingStack, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine(stack_d, capsys, "--kv-http-url", stack_d.base_url)
    assert status == 1
    assert [name for name, finding in found.items() if finding["status"] == "fail"] == ["cache http"]
    assert "--kv-http-url" in found["cache http"]["remedy"]


def test_fails_with_a_model_that_nobody_registered(stack_d: ServingStack, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine(stack_d, capsys, "--kv-model", stack_d.served_model_name + "-other")
    assert status == 1
    assert [name for name, finding in found.items() if finding["status"] == "fail"] == ["registration"]
    assert repr(stack_d.model_name) in found["registration"]["detail"]
