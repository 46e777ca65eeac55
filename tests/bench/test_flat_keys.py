from __future__ import annotations

import numpy as np
import pytest

from lmcache_stream.bench.flat_keys import flat_keys
from lmcache_stream.bench.records import GENERATE, RequestRecord
from tests.bench.results import options, recorded, trace


def test_equal_what_vllm_made_of_the_same_requests() -> None:
    result, records = recorded()
    given = options(max_concurrency=4, save_detailed=True, goodput={"ttft": 1000.0, "tpot": 1000.0})
    flat = flat_keys(records, result["duration"], given)
    for key, value in flat.items():
        if key == "itls":
            assert [pytest.approx(gaps) for gaps in value] == result[key]
        else:
            assert value == pytest.approx(result[key]), key


@pytest.mark.parametrize("seed", range(3))
def test_equal_an_independent_computation(seed: int) -> None:
    records = trace(40, seed)
    given = options(
        goodput={"ttft": 200.0, "tpot": 30.0, "e2el": 900.0},
        percentile_metrics="ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue",
        metric_percentiles="25,50,99,99.9",
        max_concurrency=8,
        request_rate=10,
    )
    flat = flat_keys(records, 4.0, given)
    good = [one for one in records if not one.error]
    arrivals = [np.array([at for at, _ in one.events]) for one in good]
    tokens = np.array([sum(count for _, count in one.events) for one in good])
    ttft = np.array([times[0] for times in arrivals])
    e2el = np.array([times[-1] for times in arrivals])
    many = tokens > 1
    tpot = (e2el[many] - ttft[many]) / (tokens[many] - 1)
    queue = np.array([one.queue for one in good])
    expected = {
        "ttft": ttft,
        "tpot": tpot,
        "itl": np.concatenate([np.diff(times) for times in arrivals]),
        "e2el": e2el,
        "client_queue_time": queue,
        "e2el_including_client_queue": e2el + queue,
    }
    for metric, values in expected.items():
        assert flat[f"mean_{metric}_ms"] == pytest.approx(1000 * np.mean(values))
        assert flat[f"median_{metric}_ms"] == pytest.approx(1000 * np.median(values))
        assert flat[f"std_{metric}_ms"] == pytest.approx(1000 * np.std(values))
        for name, q in (("p25", 25), ("p50", 50), ("p99", 99), ("p99.9", 99.9)):
            assert flat[f"{name}_{metric}_ms"] == pytest.approx(1000 * np.percentile(values, q))
    zero_for_one = np.where(many, (e2el - ttft) / np.maximum(tokens - 1, 1), 0)
    met = (ttft <= 0.2) & (zero_for_one <= 0.03) & (e2el <= 0.9)
    assert flat["request_goodput"] == pytest.approx(met.sum() / 4.0)
    assert 0 < met.sum() < len(good)
    assert (flat["completed"], flat["failed"]) == (32, 8)
    assert flat["total_output_tokens"] == tokens.sum()
    assert flat["output_throughput"] == pytest.approx(tokens.sum() / 4.0)


def test_of_nothing() -> None:
    flat = flat_keys([], 0.0, options())
    assert (flat["completed"], flat["output_throughput"], flat["mean_ttft_ms"]) == (0, 0.0, 0.0)
    assert flat["p99_itl_ms"] == 0.0


def test_a_spread_gap_is_shared_by_the_tokens_of_its_event() -> None:
    one = RequestRecord(GENERATE, "generate", 0, 0.0, 1.0, events=[(0.1, 2), (0.4, 3), (0.5, 1)])
    assert one.itl == pytest.approx([0.3, 0.1])
    assert one.itl_spread == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.1])
    assert one.tpot == pytest.approx(0.4 / 5)
