"""Streaming decoding equals decoding at once, and stop strings cut at the same place however the text arrives."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from cluster.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.fakes import byte_level_backend, byte_tokenizer

pytestmark = pytest.mark.property


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """A Llama-2 style tokenizer: byte tokens for what has no piece, ▁ for a space, a leading space stripped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hi", "▁▁", "a", "é", "▁日", "本", "<"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


BYTE_LEVEL = byte_tokenizer()
SENTENCEPIECE = Tokenizer(sentencepiece_backend(), None)
TOKENIZERS = [BYTE_LEVEL, SENTENCEPIECE]

token_ids = st.lists(st.integers(0, 270), max_size=60)
any_text = st.text(st.sampled_from("ab é日本😀\n 👩‍👩‍👧\u0301"), max_size=40)
stop_strings = st.lists(st.text(st.sampled_from("abé😀"), min_size=1, max_size=4), min_size=1, max_size=4)


def pushed(detokenizer: IncrementalDetokenizer, chunks: list[list[int]]) -> tuple[str, int, str | None]:
    """All text, the number of tokens used, and the stop string after pushing every chunk and flushing."""
    results = [detokenizer.push(chunk) for chunk in chunks]
    results.append(detokenizer.flush())
    return "".join(r.text for r in results), sum(r.num_tokens_used for r in results), results[-1].stop_string


@st.composite
def cut_up(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte_level", "sentencepiece"])
@given(data=st.data(), ids=token_ids)
def test_joined_chunks_equal_decoding_all_tokens_at_once(
    tokenizer: Tokenizer, data: st.DataObject, ids: list[int]
) -> None:
    chunks = data.draw(cut_up(ids))
    whole = pushed(IncrementalDetokenizer(tokenizer, follows_text=False), chunks)
    assert whole == (tokenizer.decode(ids), len(ids), None)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte_level", "sentencepiece"])
@given(prompt=any_text.filter(lambda text: text.strip() != ""), text=any_text)
def test_output_continues_the_prompt_exactly(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before, after = _encode(tokenizer, prompt), _encode(tokenizer, text)
    output = pushed(IncrementalDetokenizer(tokenizer), [[token_id] for token_id in after])[0]
    assert tokenizer.decode(before) + output == tokenizer.decode(before + after)


@given(ids=token_ids)
def test_byte_level_decoding_equals_the_tokenizers_library(ids: list[int]) -> None:
    assert BYTE_LEVEL.decode(ids) == byte_level_backend().decode(ids, skip_special_tokens=True)


@given(text=any_text)
def test_sentencepiece_decoding_of_text_equals_the_tokenizers_library(text: str) -> None:
    ids = _encode(SENTENCEPIECE, text)
    assert SENTENCEPIECE.decode(ids) == sentencepiece_backend().decode(ids, skip_special_tokens=True)


@given(data=st.data(), text=any_text, stops=stop_strings)
def test_a_stop_string_cuts_at_the_same_character_however_the_text_arrives(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    ids = _encode(BYTE_LEVEL, text)
    chunks = data.draw(cut_up(ids))
    cut, stop = first_complete(text, stops)
    used = len(ids) if stop is None else len(text[: len(cut) + len(stop)].encode())
    assert pushed(IncrementalDetokenizer(BYTE_LEVEL, stops), chunks) == (cut, used, stop)


@given(data=st.data(), text=any_text, stops=stop_strings, min_tokens=st.integers(0, 30))
def test_a_stop_string_that_is_complete_before_min_tokens_ends_nothing(
    data: st.DataObject, text: str, stops: list[str], min_tokens: int
) -> None:
    ids = _encode(BYTE_LEVEL, text)
    chunks = data.draw(cut_up(ids))
    cut, stop = first_complete(text, stops, min_tokens)
    used = len(ids) if stop is None else len(text[: len(cut) + len(stop)].encode())
    assert pushed(IncrementalDetokenizer(BYTE_LEVEL, stops, min_tokens=min_tokens), chunks) == (cut, used, stop)


@given(text=any_text, stops=stop_strings)
def test_text_is_released_as_soon_as_it_cannot_belong_to_a_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stops)
    released, seen = "", ""
    for char in text:
        chunk = detokenizer.push(_encode(BYTE_LEVEL, char))
        released, seen = released + chunk.text, seen + char
        if chunk.stop_string is not None:
            return
        held = seen.removeprefix(released)
        assert released + held == seen
        assert held == max((tail for tail in tails(seen) if any(s.startswith(tail) for s in stops)), key=len)


def first_complete(text: str, stops: list[str], min_bytes: int = 0) -> tuple[str, str | None]:
    """The text before the stop string that is complete first (the longest of several), and that stop string.

    One that is complete within fewer bytes than min_bytes does not count.
    """
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop) and len(text[:end].encode()) >= min_bytes]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def tails(text: str) -> list[str]:
    return [text[start:] for start in range(len(text) + 1)]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's tokens, as they occur in the middle of a sequence."""
    if tokenizer is SENTENCEPIECE:
        return list(SENTENCEPIECE.encode(text.replace(" ", "▁")))
    return list(tokenizer.encode(text))
