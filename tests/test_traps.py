"""What has gone wrong for people doing this job, by name, and the tests that would notice."""

from __future__ import annotations

import ast
import asyncio
import functools
import os
import re
from pathlib import Path

import pytest

from lmcache_stream.errors import LMCacheStreamError
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .cancellation.places import BLOCKED, CHUNK, PROMPT
from .engines import MODEL, kv_of

TESTS = Path(__file__).parent

TRAPS: dict[str, tuple[str, ...]] = {
    # Tokens and streams
    "only the last id of an event is taken": (
        "completions/test_sse.py::test_every_id_of_an_event_counts_and_the_text_goes_on_the_last",
        "completions/test_sse_properties.py::test_in_any_framing_and_cut_anywhere_tokens_come_out_as_they_went_in",
    ),
    "ids pile up behind a slow reader": (
        "completions/test_reading.py::test_more_than_the_read_buffer_piles_up_behind_a_slow_reader",
        "completions/test_client.py::test_batches_hold_what_came_together_with_its_time",
    ),
    "token ids are not asked for": (
        "completions/test_client.py::test_request",
        "completions/test_sse.py::test_ids_that_are_missing_are_an_error_that_says_what_to_ask_for",
    ),
    "the delta of ids is taken for all of them": ("completions/test_sse.py::test_recorded_stream",),
    "an id comes with empty text, or text without an id": (
        "completions/test_sse.py::test_text_without_an_id",
        "stream/test_state.py::test_text_without_a_token_is_text_only",
    ),
    "done is guessed from a count when the engine says how it ended": ("stream/test_state.py::test_done",),
    "the count rule without max_tokens": ("stream/test_stream.py::test_done_by_count_for_plain_callables",),
    "the engine's reasons to stop are lost": (
        "completions/test_sse.py::test_every_finish_reason_is_delivered",
        "completions/test_sse.py::test_stop_reason",
    ),
    "HTTP 200 and then an error inside the stream": (
        "completions/test_sse.py::test_error_inside_the_stream_keeps_the_tokens_before_it",
        "completions/test_broken_streams.py::test_error_after_tokens",
        "completions/test_sse_properties.py"
        "::test_garbage_or_an_error_between_events_is_an_error_behind_the_tokens_before_it",
    ),
    "a stream that just stops is taken for its end": (
        "completions/test_sse.py::test_stream_that_just_stops",
        "completions/test_sse_properties.py::test_a_stream_cut_off_anywhere_gives_its_first_tokens_and_an_error",
        "completions/test_broken_streams.py::test_clean_end_of_http_without_an_end_of_the_stream",
        "completions/test_broken_streams.py::test_cut_inside_an_event",
    ),
    "output tokens contain the prompt, or not all that was generated": (
        "stream/test_stream.py::test_prefill_modify_decode",
        "stream/test_stream.py::test_ids_sent_are_kept_ids_tail_suffix_and_generated_each_once",
        "stream/test_machine.py::TestStreamMachine",
    ),
    "the last token comes with the finish reason": (
        "completions/test_sse_properties.py::test_in_any_framing_and_cut_anywhere_tokens_come_out_as_they_went_in",
    ),
    "an event of usage has no choices": ("completions/test_sse.py::test_cached_tokens",),
    "legal framing that a simple reader does not know": (
        "completions/test_sse.py::test_event_stream_format",
        "completions/test_sse.py::test_splitter_reads_any_lines_as_the_standard_does",
        "fuzz/test_fuzz.py::test_the_kept_corpus_passes",
    ),
    "the reason in the body of a refusal is not shown": (
        "completions/test_client.py::test_recorded_refusals",
        "completions/test_faults.py::test_recorded_error_bodies",
    ),
    "a read that stalls": (
        "completions/test_broken_streams.py::test_idle_timeout_within_the_stream",
        "completions/test_broken_streams.py::test_idle_timeout_before_the_answer",
        "completions/test_broken_streams.py::test_idle_timeout_does_not_bound_the_whole_stream",
    ),
    "a connection that is not to be had": ("completions/test_http.py::test_nobody_listens",),
    "parameters that make several sequences of one": (
        "completions/test_request.py::test_what_cannot_be_one_stream_is_refused",
        "completions/test_sse.py::test_several_choices_are_refused",
    ),
    "sampling parameters are refused or overwritten": (
        "completions/test_request.py::test_any_json_values_arrive_and_nothing_is_changed",
        "completions/test_request.py::test_stream_options_are_merged",
        "stream/test_http.py::test_what_is_sent",
    ),
    "a batch waits for one of a hundred connections": (
        "completions/test_http.py::test_there_is_no_limit_of_connections",
        "stream/test_http.py::test_many_streams_share_one_client",
    ),
    "a line longer than a buffer": (
        "completions/test_client.py::test_long_prompt_arrives_whole_and_comes_back_in_the_first_event",
        "completions/test_sse.py::test_event_size_is_bounded_however_it_arrives",
    ),
    "a cancelled client leaves the engine generating": (
        "completions/test_client.py::test_cancellation_closes_the_response",
        "completions/test_client.py::test_leaving_closes_the_response",
        "test_main_job.py::test_a_cancelled_decode_frees_the_engine_and_the_stream_goes_on",
        "cancellation/test_every_coroutine.py::test_cancelled_at_every_point",
    ),
    # Edits
    "an edit that keeps its ids is ignored by the cache": (
        "stream/test_kv.py::test_every_edit_gets_a_salt_of_its_own_from_the_callers",
        "stream/test_kv.py::test_without_a_salt_an_edit_that_keeps_its_ids_is_an_error_and_changes_nothing",
        "kvcache/memory/test_context.py::test_a_second_store_of_other_bytes_is_no_success",
    ),
    "an edit of values alone is not decoded from": ("test_main_job.py::test_an_edit_of_values_alone_is_decoded_from",),
    "an edit of whatever prefix is there": (
        "stream/test_kv.py::test_an_edit_waits_until_the_whole_prompt_is_offloaded",
        "stream/test_kv.py::test_a_timeout_says_what_was_seen_and_wanted",
        "stream/test_kv.py::test_chunks_evicted_between_waiting_and_retrieving_are_waited_for_again",
    ),
    "the tail is moved before the editor ran": (
        "stream/test_passes.py::test_a_failing_editor_changes_nothing_and_its_exception_passes",
        "stream/test_machine.py::TestStreamMachine",
    ),
    "a store that says already cached for everything": (
        "kvcache/mp/test_store.py::test_a_store_tells_what_became_of_each_chunk",
        "kvcache/memory/test_cache.py::test_a_put_tells_taken_same_kept_and_missing",
    ),
    "tokens move although there was no room": ("stream/test_kv.py::test_no_room_is_an_error_and_changes_nothing",),
    "tokens move although a store timed out": (
        "kvcache/mp/test_store.py::test_a_late_reservation_is_filled_with_what_was_to_be_stored",
        "test_traps.py::test_a_store_that_times_out_moves_no_token",
    ),
    "kept counts that are not whole chunks lose the rest": (
        "stream/test_stream.py::test_an_edit_of_odd_length_leaves_its_rest_in_front_of_the_tail",
        "editors/test_base.py::test_budgets_are_whole_chunks",
    ),
    "keys rotated again in their own precision": ("rotary/test_turning.py::test_rounds_once_to_the_dtype_of_the_keys",),
    "partial, scaled and interleaved rotations": (
        "rotary/test_against_models.py::test_moved_keys_equal_freshly_rotated_ones",
        "rotary/test_against_models.py::test_interleaved_models_rotate_neighbours",
        "rotary/test_frequencies.py::test_scaled_frequencies_equal_those_of_transformers",
    ),
    "queries that cover less than the KV": (
        "editors/test_editors.py::test_queries_are_asked_for_by_name_and_with_the_remedy",
    ),
    "an editor without the queries it needs": (
        "editors/test_editors.py::test_queries_are_asked_for_by_name_and_with_the_remedy",
        "test_main_job.py::test_an_editor_without_the_queries_it_needs_is_refused_before_anything_is_fetched",
    ),
    "all editors at once on one GPU": (
        "batch/test_phases.py::test_phases_are_bounded_as_documented",
        "batch/test_phases.py::test_decoding_with_edits_edits_every_stream_but_few_at_once",
    ),
    # The cache server
    "a handler that fails answers nothing": (
        "kvcache/mp/test_session.py::test_a_refused_lookup_times_out_and_says_that_the_server_is_up",
    ),
    "a server whose mode has no such operations": (
        "kvcache/mp/test_connect.py::test_the_wrong_mode",
        "kvcache/mp/test_discovery.py::test_refuses_a_server_in_a_wrong_mode",
    ),
    "a lookup that times out is taken for a miss": (
        "kvcache/mp/test_session.py::test_a_refused_lookup_times_out_and_says_that_the_server_is_up",
        "kvcache/mp/test_served.py::test_a_vanished_engine_is_no_miss",
    ),
    "a second question eats the answer of a lookup": (
        "test_traps.py::test_the_answer_of_a_lookup_is_asked_for_by_one_at_a_time",
    ),
    "read locks outlive their session": (
        "kvcache/mp/test_fetch.py::test_no_lock_outlives_a_failed_retrieve",
        "kvcache/mp/test_session.py::test_a_late_lookup_is_unlocked",
        "kvcache/mp/test_fetch.py::test_read_locks_are_freed_whatever_became_of_the_preparation",
        "cancellation/test_every_coroutine.py::test_cancelled_at_every_point",
    ),
    "two operations on equal keys collide": (
        "kvcache/mp/test_turns.py::test_equal_calls_do_not_confuse_the_server",
        "kvcache/mp/test_turns.py::test_a_store_of_what_is_there_and_retrieves_of_it_leave_no_lock",
    ),
    "a reservation that is never written": (
        "kvcache/mp/test_store.py::test_a_cancelled_store_is_finished",
        "kvcache/mp/test_lifetime.py::test_a_store_is_finished_when_the_loop_ends",
        "kvcache/mp/test_context.py::test_bad_input_sends_nothing",
    ),
    "a forgotten registration": (
        "kvcache/mp/test_registry.py::test_a_forgotten_registration_is_made_again",
        "kvcache/mp/test_fetch.py::test_slots_of_an_earlier_registration_are_not_read",
    ),
    "a segment of a server that restarted": (
        "kvcache/mp/test_registry.py::test_the_same_context_works_after_a_restart",
        "kvcache/mp/test_registry.py::test_a_registration_made_again_without_an_answer_leads_to_no_old_segment",
        "kvcache/mp/test_store.py::test_a_late_reservation_of_a_server_that_is_gone_is_not_written",
        "kvcache/mp/test_pool.py::test_another_segment_of_the_same_name_is_noticed",
    ),
    "no slots: there already, or no room": (
        "kvcache/mp/test_store.py::test_no_room",
        "kvcache/mp/test_store.py::test_a_store_tells_what_became_of_each_chunk",
    ),
    "an edit is evicted before it is decoded from": (
        "stream/test_kv.py::test_an_evicted_edit_is_noticed_before_the_request",
        "stream/test_kv.py::test_an_edit_evicted_between_lookup_and_prefill_is_noticed",
        "stream/test_kv.py::test_an_edit_evicted_during_a_request_without_a_verdict_is_noticed_by_the_next",
        "test_main_job.py::test_an_edit_evicted_before_it_is_decoded_from_is_noticed",
    ),
    "a registration under the engine's name": ("test_traps.py::test_nothing_is_registered_under_the_engines_name",),
    "instance ids of two containers are equal": (
        "test_traps.py::test_two_processes_of_one_number_have_their_own_instance_ids",
    ),
    "the lease of a lookup runs out in a queue": ("test_traps.py::test_nothing_is_looked_up_before_a_copy_can_start",),
    "a status that is not ready, a list, or lacks a key": (
        "kvcache/mp/test_discovery.py::test_an_answer_that_is_none_is_one_error_with_the_url",
        "kvcache/mp/test_status.py::test_status_that_is_none",
        "kvcache/mp/test_status.py::test_config_that_is_none",
        "kvcache/mp/test_connect.py::test_not_ready_yet",
    ),
    "a server that knows only the old route": ("kvcache/mp/test_connect.py::test_the_old_route",),
    "chunks that are no whole blocks": ("kvcache/mp/test_resolve.py::test_chunks_must_be_whole_blocks",),
    "hybrid models": ("kvcache/mp/test_status.py::test_groups_of_different_geometry_are_refused_by_name",),
    "MLA": (
        "kvcache/mp/test_judge.py::test_reads_mla",
        "editors/test_editors.py::test_mla_works_or_is_refused",
    ),
    "a request is put between two connections, where nobody gets it": (
        "kvcache/mp/test_transport.py::test_nothing_is_sent_between_two_connections",
    ),
    "a server that is gone without a word is talked to for a quarter of an hour": (
        "kvcache/mp/test_transport.py::test_a_connection_that_nobody_acknowledges_is_given_up",
        "kvcache/mp/test_grpc.py::test_a_connection_that_nobody_acknowledges_is_given_up",
    ),
    # Batches and reports
    "one failing stream takes everybody's results away": (
        "batch/test_phases.py::test_what_succeeded_keeps_its_metrics",
        "batch/test_phases.py::test_failures_can_be_collected",
    ),
    "a subset counts the whole batch": ("batch/test_phases.py::test_a_subset_is_counted_and_run_alone",),
    "a bad format is noticed after the work": ("batch/test_phases.py::test_a_bad_format_is_refused_before_any_work",),
    "time to the first token and per token are missing": (
        "metrics/test_phases.py::test_prefill",
        "metrics/test_phases.py::test_decode",
    ),
    "throughput that leaves out the time of edits": (
        "bench/test_result.py::TestEditedRuns::test_throughput_with_and_without_edit_time",
    ),
    "a first token sampled apart from the rest": (
        "batch/test_phases.py::test_the_documented_phases",
        "bench/test_serve.py::TestEditedRuns::test_edits_while_decoding_generate_what_a_stream_by_itself_does",
    ),
    # Rotary positions
    "dynamic NTK, where model and engine differ": ("rotary/test_frequencies.py::test_dynamic_ntk_needs_its_engine",),
    "an attention factor is applied twice": (
        "rotary/test_frequencies.py::test_scaled_frequencies_equal_those_of_transformers",
        "rotary/test_against_models.py::test_moved_keys_equal_freshly_rotated_ones",
    ),
    "the two regimes of longrope": ("rotary/test_frequencies.py::test_longrope_takes_the_factors_of_its_regime",),
    "rotary parameters of old and new configurations": (
        "rotary/test_parameters.py::test_older_type_key_is_read",
        "rotary/test_parameters.py::test_parameters_by_layer_type",
        "rotary/test_parameters.py::test_gemma3_reads_alike_from_old_and_new_configurations",
    ),
    "a cache that is cropped the wrong way": (
        "test_traps.py::test_no_cache_is_cropped",
        "engine/test_model.py::test_kv_out_and_in_again_computes_the_same",
    ),
}


@functools.cache
def collected(file: str) -> set[str]:
    """What pytest collects from a file; tests that are always skipped are left out."""
    found = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{name}" for name in _tests(node.body)}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".TestCase"):
            found |= {ast.unparse(target) for target in node.targets}
    return found | _tests(ast.parse((TESTS / file).read_text()).body)


def _tests(body: list[ast.stmt]) -> set[str]:
    return {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not any(re.search(r"\bmark\.(skip\b|xfail)", ast.unparse(mark)) for mark in node.decorator_list)
    }


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_has_tests(trap: str) -> None:
    assert TRAPS[trap]
    for test in TRAPS[trap]:
        file, _, name = test.partition("::")
        assert name in collected(file), f"{test} is gone"


async def connected(server: FakeCacheServer) -> AsyncKVCacheContext:
    return await aconnect(server.url, server.http_url, MODEL, 10.0, geometry=BLOCKED)


async def test_the_answer_of_a_lookup_is_asked_for_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server tells the result of a lookup once."""
    asking, most = 0, 0
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(MODEL, BLOCKED)
        async with await connected(server) as ctx:
            assert isinstance(ctx, MPKVCacheContext)
            call = ctx._transport.call

            async def counted(operation: wire.Operation[object], *args: object, **options: float) -> object:
                nonlocal asking, most
                if operation not in (wire.WAIT_PREFETCH_STATUS, wire.QUERY_PREFETCH_STATUS):
                    return await call(operation, *args, **options)  # type: ignore[arg-type]
                asking += 1
                most = max(most, asking)
                try:
                    return await call(operation, *args, **options)  # type: ignore[arg-type]
                finally:
                    asking -= 1

            monkeypatch.setattr(ctx._transport, "call", counted)
            await ctx.put(kv_of(PROMPT), PROMPT)
            fault = server.fault(wire.WAIT_PREFETCH_STATUS, "hold")
            looking = asyncio.create_task(ctx.lookup(PROMPT))
            assert await asyncio.to_thread(fault.struck.wait, 10)
            await asyncio.sleep(1.2)  # longer than a wait at the server, and than one doubts that it is there
            fault.release()
            assert await looking == len(PROMPT) // CHUNK * CHUNK
    assert most == 1


async def test_nothing_is_registered_under_the_engines_name() -> None:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(MODEL, BLOCKED)
        engines = set(server._registrations)
        async with await connected(server) as ctx:
            await ctx.put(kv_of(PROMPT), PROMPT)
            ours = [made for number, made in server._registrations.items() if number not in engines]
            assert ours
            assert all(MODEL not in made.model_name for made in ours)


async def test_two_processes_of_one_number_have_their_own_instance_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(MODEL, BLOCKED)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        async with await connected(server), await connected(server):
            assert len(server.clients) == 2
            assert all(1 < number < 2**63 for number in server.clients)


async def test_nothing_is_looked_up_before_a_copy_can_start() -> None:
    """The locks of a lookup run out while its client waits for its turn."""
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(MODEL, BLOCKED)
        async with await connected(server) as ctx:
            assert isinstance(ctx, MPKVCacheContext)
            await ctx.put(kv_of(PROMPT), PROMPT)
            taken = 0
            while not ctx._turns.free.locked():
                await ctx._turns.free.acquire()
                taken += 1
            asked = server.calls["lookup"]
            waiting = asyncio.create_task(ctx.retrieve(PROMPT))
            await asyncio.sleep(0.05)
            assert server.calls["lookup"] == asked
            for _ in range(taken):
                ctx._turns.free.release()
            assert await waiting is not None
            assert server.calls["lookup"] == asked + 1


async def test_a_store_that_times_out_moves_no_token() -> None:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(MODEL, BLOCKED)
        async with await connected(server) as ctx:
            stream = AsyncLMCacheStream(ctx, lambda *_: [], PROMPT, "mine")
            fault = server.fault(wire.PREPARE_STORE, "hold")
            with pytest.raises(LMCacheStreamError, match="prepare_store"):
                await stream.update_kv(kv_of(PROMPT[:CHUNK]), PROMPT[:CHUNK], timeout=0.1)
            assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == (PROMPT, [], "mine")
            fault.release()


def test_no_cache_is_cropped() -> None:
    """What a negative length means to `DynamicCache.crop` has changed between versions of transformers."""
    sources = [path for folder in ("lmcache_stream", "benchmarks") for path in (TESTS.parent / folder).rglob("*.py")]
    assert sources
    assert not [path for path in sources if re.search(r"\.crop\(", path.read_text())]
