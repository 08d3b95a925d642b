"""A store's errors, as the callers of a service see them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from cluster.control.document import DocumentError
from cluster.control.store import ConflictError, InvalidWriteError, MissingError, StoreError
from cluster.messages.answer import ErrorKind, RequestError

Result = TypeVar("Result")


async def errors_of(call: Awaitable[Result]) -> Result:
    """What the call gives. Raises RequestError where it raises an error of a store or a document."""
    try:
        return await call
    except (InvalidWriteError, DocumentError) as error:
        raise RequestError(ErrorKind.INVALID, str(error)) from error
    except ConflictError as error:
        raise RequestError(ErrorKind.CONFLICT, str(error)) from error
    except MissingError as error:
        raise RequestError(ErrorKind.NOT_FOUND, str(error)) from error
    except StoreError as error:
        raise RequestError(ErrorKind.UNAVAILABLE, str(error), retry_after_s=1.0) from error
