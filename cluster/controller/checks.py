"""What each kind of document must pass before it is kept. Errors name every flaw.

What programs have written, and people bring back, needs to be readable; what people apply, also applicable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cluster.control.access import parse_access
from cluster.control.applicable import check_applicable
from cluster.control.document import parse_document
from cluster.control.store import Kind

Checks = Mapping[Kind, Callable[[str], object]]

READABLE: Final[Checks] = {Kind.POLICY: parse_document, Kind.ACCESS: parse_access}
APPLICABLE: Final[Checks] = {
    Kind.POLICY: lambda text: check_applicable(parse_document(text)),
    Kind.ACCESS: parse_access,
}
