"""Prompts that measurements use: the demo draft's held-out ones, and chat prompts of other kinds."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Final

OTHER_PROMPTS: Final = (
    "Translate 'good morning, how are you?' into French, Spanish and German.",
    "What is 17 times 23? Show your steps.",
    "List the planets of the solar system in order of size.",
    "Summarise the plot of Romeo and Juliet in four sentences.",
    "Write a bash command that counts the lines of every .txt file in a folder.",
    "My cat sleeps all day. Should I worry?",
    "Suggest five names for a coffee shop near a railway station.",
    "What happens if I mix baking soda with vinegar?",
    "Rewrite this politely: send me the report now.",
    "Who wrote The Old Man and the Sea, and what is it about?",
    "Give me a recipe for pancakes without eggs.",
    "What is the difference between a virus and a bacterium?",
    "Plan a weekend in Lisbon for two people who like music.",
    "Complete the list: Monday, Tuesday, Wednesday,",
    "Repeat the sentence 'the quick brown fox jumps over the lazy dog' five times.",
    "Explain recursion with an example in Python.",
)


def heldout_prompts() -> list[str]:
    """48 prompts of the templates the demo draft was trained on, about other things."""
    prompts: list[str] = json.loads((files("load_tests") / "heldout_prompts.json").read_text())
    return prompts


def all_prompts() -> list[str]:
    """64 prompts."""
    return [*heldout_prompts(), *OTHER_PROMPTS]
