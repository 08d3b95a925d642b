"""Text to token ids and back: encoding, chat templates, and streaming decoding with stop strings.

Decoding works on bytes. Every token id stands for a fixed run of bytes, so the text of a sequence is the UTF-8 decoding
of the concatenation, and a stream needs no more state than the (at most three) bytes of an unfinished character:

    tokens      | 198 | 9521 | 240 | 159 | 152 | 128 |
    bytes       | \\n  | The  | f0  | 9f  | 98  | 80  |
    text        | \\n  | The  | held back      | 😀   |
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CUT = "\udfff"  # a lone surrogate, which no text that can be encoded holds: pieces on its sides are encoded apart
_IMPORTING = threading.Lock()

ChatRenderer = Callable[[Sequence[Mapping[str, str]]], str]


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or a text or conversation cannot be encoded; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token id.

    `pieces[token_id]` is what the token stands for, special tokens included; they are left out of decoded text.
    `strips_leading_space`: the tokenizer puts a space before the text it encodes and takes it away when it decodes.
    """

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    strips_leading_space: bool = False

    def text_bytes(self, token_id: int) -> bytes:
        """What a token adds to decoded text: nothing for special tokens and for ids the tokenizer does not know."""
        if token_id in self.special_ids or not 0 <= token_id < len(self.pieces):
            return b""
        return self.pieces[token_id]


class Tokenizer:
    """Owns one model's vocabulary, encoder and chat template; immutable, safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, render_chat: ChatRenderer | None) -> None:
        self._backend = backend
        self._render_chat = render_chat
        self.vocabulary = read_vocabulary(backend)
        added = backend.get_added_tokens_decoder().values()
        self._special_texts = [token.content for token in added if token.special and len(token.content) > 1]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a directory in transformers' format. Raises TokenizerError."""
        with _IMPORTING:  # transformers' lazy imports fail when two threads make the first one together
            from transformers import AutoTokenizer  # slow to import, and only needed here

        if not path.is_dir():
            raise TokenizerError(f"cannot load a tokenizer from {path}: no such directory")
        try:
            source = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # a corrupt file may surface as anything, even a bare Exception
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TokenizerError(f"cannot load a tokenizer from {path}: {reason}") from error
        backend = getattr(source, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(f"the tokenizer in {path} has no fast version (tokenizer.json)")
        return cls(backend, _chat_renderer(source) if source.chat_template else None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id known to the tokenizer."""
        return len(self.vocabulary.pieces)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it stands, with whatever the tokenizer puts around one (such as a BOS token).

        Special tokens that are written out in the text become special tokens.
        """
        return tuple(self._backend.encode(text).ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's next message begins.

        Each message has `role` and `content`. Only the template makes special tokens: what is written in a message is
        text, so it cannot end its turn. Raises TokenizerError when the model has no template or it refuses.
        """
        if self._render_chat is None:
            raise TokenizerError("the model has no chat template; use a text prompt")
        text = self._render_chat([{key: self._disarm(value) for key, value in item.items()} for item in messages])
        pieces = (self._backend.encode(piece, add_special_tokens=False) for piece in text.split(_CUT))
        return tuple(token_id for piece in pieces for token_id in piece.ids)

    def _disarm(self, text: str) -> str:
        """Cut every special token that is written out in a text after its first character."""
        for special in self._special_texts:
            while special in text:  # a pass leaves those that overlap the one before
                text = text.replace(special, special[0] + _CUT + special[1:])
        return text

    def decode(self, token_ids: Iterable[int], *, follows_text: bool = False) -> str:
        """The text of token ids, special tokens left out; bytes that are no UTF-8 become U+FFFD.

        `follows_text` keeps the leading space of a text that continues another.
        """
        data = b"".join(map(self.vocabulary.text_bytes, token_ids))
        if self.vocabulary.strips_leading_space and not follows_text:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens included; empty for an unknown id."""
        return self.vocabulary.pieces[token_id] if 0 <= token_id < self.vocab_size else b""


def _chat_renderer(source: object) -> ChatRenderer:
    from jinja2 import TemplateError

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return str(source.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))  # type: ignore[attr-defined]
        except TemplateError as error:
            raise TokenizerError(f"the model's chat template refuses the conversation: {error}") from error

    return render


# --- vocabulary ------------------------------------------------------------------------------------------------------


def read_vocabulary(backend: tokenizers.Tokenizer) -> Vocabulary:
    """The bytes of each token, from the kind of decoder. Raises TokenizerError for one that is not byte-exact."""
    steps = _decoder_steps(backend)
    kinds = {str(step["type"]) for step in steps}
    if "ByteLevel" in kinds:
        to_bytes = _byte_level_bytes
    elif kinds & {"Metaspace", "ByteFallback"}:
        to_bytes = _sentencepiece_bytes
    else:
        raise TokenizerError(f"unsupported token decoder {sorted(kinds)}: byte-level and SentencePiece are supported")
    ids = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(ids.values(), default=-1) + 1)
    for piece, token_id in ids.items():
        pieces[token_id] = to_bytes(piece)
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return Vocabulary(tuple(pieces), special, any(map(_strips_leading_space, steps)))


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    if backend.decoder is None:
        return [{"type": "none"}]
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _strips_leading_space(step: Mapping[str, object]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start") != 0


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100, U+0101, …
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:  # an added token is stored as plain text
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()


# --- streaming -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DetokenizedChunk:
    """Text that is final, how many of the pushed tokens belong to the output, and the stop string that ended it."""

    text: str
    num_tokens_used: int
    stop_string: str | None = None


class _StopAutomaton:
    """Owns how much of one stop string the text so far ends with (Knuth–Morris–Pratt)."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0, 0]  # _fallback[n]: longest proper prefix of stop[:n] that is also its suffix
        for char in stop[1:]:
            self._fallback.append(self._next(self._fallback[-1], char))

    def _next(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched]
        return matched + 1 if self.stop[matched] == char else 0

    def advance(self, char: str) -> bool:
        """Take one more character; whether the text now ends with the whole stop string."""
        self.matched = self._next(self.matched, char)
        is_complete = self.matched == len(self.stop)
        if is_complete:
            self.matched = self._fallback[-1]
        return is_complete


class _StopScanner:
    """Owns the text that may still turn out to be the start of a stop string.

    The stop string that is complete first ends the text, the longest of those that are complete at the same character.
    That depends on the text alone, not on how it was cut into tokens or steps.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._automata = [_StopAutomaton(item) for item in stop]
        self._held = ""

    def feed(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """Text that is released now, and the stop string if one is complete and `may_stop`."""
        if not self._automata:
            return text, None
        for end, char in enumerate(text, 1):
            complete = [automaton.stop for automaton in self._automata if automaton.advance(char)]
            if complete and may_stop:
                stop = max(complete, key=len)
                return (self._held + text[:end])[: -len(stop)], stop
        text = self._held + text
        keep = len(text) - max(automaton.matched for automaton in self._automata)
        self._held = text[keep:]
        return text[:keep], None

    def release(self) -> str:
        held, self._held = self._held, ""
        return held


class IncrementalDetokenizer:
    """Owns the decoding state of one output stream; costs time in the new tokens only.

    Joined, the chunks are the decoded text of all tokens, cut before the first stop string. By default the output
    continues a prompt, so a leading space is kept even by tokenizers that strip it from a whole text. A stop string
    that is complete before the min_tokens-th token ends nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0, follows_text: bool = True
    ) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = _StopScanner(stop)
        self._strip_space = tokenizer.vocabulary.strips_leading_space and not follows_text
        self._stop_string: str | None = None
        self._num_tokens_to_go = min_tokens  # before a stop string counts

    def push(self, token_ids: Sequence[int]) -> DetokenizedChunk:
        """Take the next tokens. After a stop string, further tokens are not used and give no text."""
        released: list[str] = []
        used = 0
        for token_id in token_ids:
            if self._stop_string is not None:
                break
            used += 1
            self._num_tokens_to_go -= 1
            released.append(self._scan(self._utf8.decode(self._text_bytes(token_id))))
        return DetokenizedChunk("".join(released), used, self._stop_string)

    def flush(self) -> DetokenizedChunk:
        """Release what was held back, at the end of the output; an unfinished character becomes U+FFFD."""
        if self._stop_string is not None:
            return DetokenizedChunk("", 0, self._stop_string)
        text = self._scan(self._utf8.decode(b"", final=True))
        if self._stop_string is None:
            text += self._scanner.release()
        return DetokenizedChunk(text, 0, self._stop_string)

    def _text_bytes(self, token_id: int) -> bytes:
        data = self._vocabulary.text_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            return data.removeprefix(b" ")
        return data

    def _scan(self, text: str) -> str:
        if not text:
            return ""
        released, self._stop_string = self._scanner.feed(text, may_stop=self._num_tokens_to_go <= 0)
        return released
