"""The request field `logit_bias`, from what a client sends to pairs that are in range."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic_core import PydanticCustomError

MAX_BIAS = 100
MAX_BIASES = 300


def parse_logit_bias(value: object) -> object:
    """An object of biases by token id, as pairs in its order; JSON has the ids as strings."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise _bad_bias("Input should be an object of biases by token id")
    if len(value) > MAX_BIASES:
        raise _bad_bias("At most {limit} tokens may have a bias", limit=MAX_BIASES)
    biases = {_biased_token(key): _bias(bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise _bad_bias("A token id is given twice")
    return tuple((token_id, bias) for token_id, bias in biases.items() if bias)


def _biased_token(key: object) -> int:
    text = str(key)
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31):
        raise _bad_bias("`{key}` is no token id", key=text[:64])
    return int(text)


def _bias(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_BIAS:
        raise _bad_bias("A bias should be a number from -{limit} to {limit}", limit=MAX_BIAS)
    return float(value)


def _bad_bias(message: str, **values: object) -> PydanticCustomError:
    return PydanticCustomError("logit_bias", message, values)
