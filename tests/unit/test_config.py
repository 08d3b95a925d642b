"""What a configuration file is refused for, and how the error names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import ConfigError, PoolConfig, load_config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (
            "{name: m, target: {path: m, tensor_parallel: 2, num_cpus: 0}}",
            "models.0.target: tensor_parallel above 1 needs num_cpus or num_gpus above 0, to be placed",
        ),
        (
            "{name: m, target: {path: m}, draft: {path: d, tensor_parallel: 65}}",
            "models.0.draft.tensor_parallel: Input should be less than or equal to 64",
        ),
        ("{name: m, target: {path: m}}, {name: m, target: {path: m}}", "config: models: names must be unique"),
        (
            "{name: m, target: {path: m, autoscaling: {min_replicas: 3, max_replicas: 2}}}",
            "models.0.target.autoscaling: min_replicas 3 is above max_replicas 2",
        ),
        (
            "{name: m, target: {path: m, label_selector: {pool: in(a)}}}",
            "models.0.target.label_selector.pool: String should match pattern",
        ),
        ("{name: m, target: {path: m, colour: red}}", "models.0.target.colour: Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_served_is_refused_by_the_name_of_its_field(tmp_path: Path, model: str, complaint: str) -> None:
    path = tmp_path / "paceline.yaml"
    path.write_text(f"models: [{model}]")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path}: {complaint}" in str(caught.value)


def test_target_and_draft_are_divided_apart(tmp_path: Path) -> None:
    path = tmp_path / "paceline.yaml"
    path.write_text("models: [{name: m, target: {path: m, tensor_parallel: 3}, draft: {path: d, tensor_parallel: 2}}]")
    (model,) = load_config(path).models
    assert model.draft is not None
    assert (model.target.tensor_parallel, model.draft.tensor_parallel) == (3, 2)


@pytest.mark.parametrize(
    ("fields", "version"),
    [
        ({"path": "smollm2-135m-draft"}, "smollm2-135m-draft"),
        ({"path": "/models/draft-3/"}, "draft-3"),
        ({"path": "org/draft"}, "draft"),
        ({"path": "/"}, "/"),
        ({"path": "org/draft", "version": "2027-01"}, "2027-01"),
    ],
)
def test_a_pools_version_is_the_last_part_of_its_path_unless_it_is_given(fields: dict[str, str], version: str) -> None:
    assert PoolConfig(**fields).version_name == version
