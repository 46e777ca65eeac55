from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.engine.detokenize import Detokenizer, StopStrings


def bytes_to_text(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def all_of(ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(bytes_to_text)
    return [detokenizer.feed(token) for token in ids], detokenizer.flush()


def test_a_character_comes_with_its_last_byte() -> None:
    pieces, rest = all_of(list("a🎈ö".encode()))
    assert pieces == ["a", "", "", "", "🎈", "", "ö"]
    assert rest == ""


def test_an_unfinished_character_comes_at_the_end() -> None:
    pieces, rest = all_of(list("a🎈".encode()[:-1]))
    assert pieces == ["a", "", "", ""]
    assert rest == "\N{REPLACEMENT CHARACTER}"


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([*b"ab ", *"ö🎈€".encode(), 0xFF, 0xE2]), max_size=40))
def test_all_pieces_together_are_the_decoded_whole(ids: list[int]) -> None:
    pieces, rest = all_of(ids)
    assert "".join(pieces) + rest == bytes_to_text(ids)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([" one", "two", "", "three "]), max_size=20))
def test_a_decoder_that_eats_a_leading_space_loses_none_inside(words: list[str]) -> None:
    vocabulary = [" one", "two", "", "three "]
    ids = [vocabulary.index(word) for word in words]

    def decode(tokens: list[int]) -> str:
        return "".join(vocabulary[token] for token in tokens).removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert "".join([*map(detokenizer.feed, ids), detokenizer.flush()]) == decode(ids)


def stopped(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    strings = StopStrings(stops, include=include)
    out = []
    for piece in pieces:
        out.append(strings.feed(piece))
        if strings.matched is not None:
            return out, strings.matched
    return [*out, strings.flush()], None


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert stopped(["an", " e", "x", "it."], [" exit!"]) == (["an", "", "", " exit.", ""], None)
    assert stopped(["an", " e", "x", "it!."], [" exit!"]) == (["an", "", "", ""], " exit!")
    assert stopped(["an e", "xit!"], [" exit!"], include=True) == (["an", " exit!"], " exit!")


def test_a_stop_string_of_one_character_holds_nothing_back() -> None:
    assert stopped(["b", "c", "le"], ["e"]) == (["b", "c", "l"], "e")


def test_the_first_place_wins_and_then_the_order_given() -> None:
    assert stopped(["xabc"], ["c", "bc", "b"]) == (["xa"], "bc")


def test_unarmed_nothing_stops() -> None:
    strings = StopStrings(["stop"])
    assert strings.feed("st") == ""
    assert strings.feed("op", armed=False) == "stop"
    assert strings.matched is None


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("ab.", max_size=40),
    cuts=st.lists(st.integers(1, 4), min_size=40, max_size=40),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_cut_at_the_first_stop_string_however_it_arrives(
    text: str, cuts: list[int], stops: list[str], include: bool
) -> None:
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    out, matched = stopped(pieces, stops, include)
    if not any(stop in text for stop in stops):
        assert ("".join(out), matched) == (text, None)
        return
    assert matched is not None
    given_out = "".join(out)
    before = given_out.removesuffix(matched) if include else given_out
    assert text.startswith(before + matched)
    assert all(stop not in before for stop in stops)
