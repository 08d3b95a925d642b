"""What each kind of document must pass before it is kept. Errors name every flaw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cluster.control.access import parse_access
from cluster.control.document import parse_document
from cluster.control.store import Kind

CHECKS: Final[Mapping[Kind, Callable[[str], object]]] = {Kind.POLICY: parse_document, Kind.ACCESS: parse_access}
