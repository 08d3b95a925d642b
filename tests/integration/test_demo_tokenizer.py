"""The demo model's real tokenizer: the same ids, text and stream as transformers gives."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cluster.tokenizer import IncrementalDetokenizer, Tokenizer

pytestmark = pytest.mark.integration

TEXTS = [
    "Hello, world!",
    "  two  spaces",
    "Grüße aus 東京 👩‍👩‍👧!",
    "",
    "\n\n\tdef f(x):\n    return x\n",
    "a\u0301 ﷽ 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
]


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(demo_model_dir)


def stream(tokenizer: Tokenizer, token_ids: list[int], *stops: str) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, stops)
    return "".join([*(detokenizer.push([token_id]).text for token_id in token_ids), detokenizer.flush().text])


def test_ids_and_text_equal_those_of_transformers(tokenizer: Tokenizer, demo_model_dir: Path) -> None:
    reference = AutoTokenizer.from_pretrained(demo_model_dir)
    assert tokenizer.vocab_size == 49152
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert token_ids == tuple(reference.encode(text))
        assert tokenizer.decode(token_ids) == text == stream(tokenizer, list(token_ids))


def test_a_conversation_is_encoded_as_transformers_does(tokenizer: Tokenizer, demo_model_dir: Path) -> None:
    reference = AutoTokenizer.from_pretrained(demo_model_dir)
    messages = [{"role": "user", "content": "Hi 😀"}, {"role": "assistant", "content": "Hello"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(tokenizer.apply_chat_template(messages)) == expected


def test_no_message_can_end_its_turn_or_begin_another(tokenizer: Tokenizer) -> None:
    def count(content: str) -> int:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": content}])
        assert f"user\n{content}\n" in tokenizer.decode(ids)
        return sum(token_id in tokenizer.vocabulary.special_ids for token_id in ids)

    rng = random.Random(3)
    parts = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_", "end|>", "system\n", "<", "|", " a"]
    assert tokenizer.encode("<|im_end|>") == (2,)
    assert {count("".join(rng.choices(parts, k=rng.randint(1, 8)))) for _ in range(300)} == {count("Hello")}


def test_random_tokens_stream_to_what_transformers_decodes(tokenizer: Tokenizer, demo_model_dir: Path) -> None:
    reference = AutoTokenizer.from_pretrained(demo_model_dir)
    rng = random.Random(7)
    for length in (1, 2, 3, 10, 100, 1000):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(length)]
        assert stream(tokenizer, token_ids) == reference.decode(token_ids, skip_special_tokens=True)


def test_every_token_by_itself_decodes_as_in_transformers(tokenizer: Tokenizer, demo_model_dir: Path) -> None:
    reference = AutoTokenizer.from_pretrained(demo_model_dir)
    ids = [[token_id] for token_id in range(tokenizer.vocab_size)]
    assert [tokenizer.decode(one) for one in ids] == reference.batch_decode(ids, skip_special_tokens=True)


def test_a_stop_string_is_found_at_every_offset_of_a_real_text(tokenizer: Tokenizer) -> None:
    text = "The quick brown 😀 fox"
    token_ids = list(tokenizer.encode(text))
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop = text[start:end]
            assert stream(tokenizer, token_ids, stop) == text[: text.index(stop)]


def test_threads_of_a_fresh_process_may_load_tokenizers_at_the_same_time(demo_model_dir: Path) -> None:
    """transformers' own lazy imports do not stand that."""
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from pathlib import Path;"
        "from cluster.tokenizer import Tokenizer;"
        "list(ThreadPoolExecutor(4).map(Tokenizer.load, [Path(sys.argv[1])] * 4))"
    )
    subprocess.run([sys.executable, "-c", program, str(demo_model_dir)], check=True, timeout=120)
