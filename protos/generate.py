"""Generate the Python code of every proto; with --check, see that what is checked in matches."""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def generate(out: Path) -> None:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py below `out`. Raises SystemExit when protoc refuses."""
    arguments = ["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main([*arguments, *(str(path) for path in PROTOS)]) != 0:
        raise SystemExit("protoc failed")


def stale(out: Path) -> list[str]:
    """Names of generated files that are missing or differ from a fresh generation."""
    generate(out)
    fresh = [path.relative_to(out) for path in out.rglob("*_pb2*")]
    return [
        str(name) for name in fresh if not (ROOT / name).exists() or not filecmp.cmp(out / name, ROOT / name, False)
    ]


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        if names := stale(Path(folder)):
            raise SystemExit("generated code is stale, run `make protos`: " + ", ".join(names))


if __name__ == "__main__":
    main()
