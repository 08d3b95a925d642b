"""Manifests as text."""

from __future__ import annotations

from typing import Any

import yaml

Json = dict[str, Any]
HEADER = "# Written by `paceline k8s render`. Change the configuration, not this file.\n"


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)  # enums of strings too


def to_yaml(*documents: Json) -> str:
    """YAML documents with a header, keys in the order given."""
    return HEADER + body(*documents)


def body(*documents: Json) -> str:
    """YAML documents, keys in the order given."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=len(documents) > 1)
