"""The settings of one machine's proxy: another cluster's are others, and an operator's stand."""

from __future__ import annotations

from pathlib import Path

from deployments.ingress_proxy import set_proxy_environment


def settings_in(folder: str) -> dict[str, str]:
    environment: dict[str, str] = {}
    set_proxy_environment(environment, Path(folder))
    return environment


def test_two_clusters_on_one_machine_share_no_file_and_no_port() -> None:
    first, second = settings_in("/tmp/a"), settings_in("/tmp/b")
    own = [name for name in first if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE", "_PORT"))]
    assert len(own) == 8
    assert all(first[name] != second[name] for name in own)
    ports = [value for name, value in first.items() if name.endswith("_PORT")]
    assert len(set(ports)) == 4


def test_what_an_operator_has_set_stands() -> None:
    environment = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    set_proxy_environment(environment, Path("/tmp/a"))
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_every_setting_is_one_that_ray_serve_reads() -> None:
    from ray.serve._private import constants

    assert all(hasattr(constants, name) for name in settings_in("/tmp/a"))
