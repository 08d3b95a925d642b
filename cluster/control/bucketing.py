"""Which share of the traffic a key belongs to: a hash without state, so every router says the same, always.

docs/policy.md describes it for other languages, docs/vectors/bucketing.json pins it down.
"""

from __future__ import annotations

import hashlib
from typing import Final

NUM_BUCKETS: Final = 10_000  # a percentage with two decimals is a number of buckets
_DOMAIN: Final = b"paceline.bucket.v1"


def bucket(salt: str, key: str) -> int:
    """The bucket of `key`, 0 … 9999, uniform over keys; another salt gives an independent one.

    sha256( "paceline.bucket.v1" · len(salt) · salt · len(key) · key ), texts in UTF-8, lengths in bytes as 4 bytes big
    endian; the first 8 bytes of it as a big-endian number, modulo 10000.
    """
    digest = hashlib.sha256(_DOMAIN + _framed(salt) + _framed(key)).digest()
    return int.from_bytes(digest[:8], "big") % NUM_BUCKETS


def in_percent(bucket: int, percent: float) -> bool:
    """Whether a bucket is among the first `percent` (0 … 100, two decimals): who is in at 5 stays in at 10."""
    return bucket < round(percent * 100)


def _framed(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "big") + data
