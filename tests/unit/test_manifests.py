"""What `paceline k8s render` makes of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig, ConfigError, load_config
from deployments.live_config import with_live_part
from deployments.manifests.render import render
from deployments.manifests.serve_config import builder_args, serve_config
from deployments.manifests.worker_groups import placed, worker_groups

pytestmark = pytest.mark.unit

K8S = Path(__file__).resolve().parents[2] / "k8s"
OVERLAYS = ("dev", "prod")
PODS = {name: {"cpus": 1, "memory_gib": 1} for name in ("head", "router", "draft", "target")}


def config_of(overlay: str) -> ClusterConfig:
    return load_config(K8S / "configs" / f"{overlay}.yaml")


def config_with(models: list[dict[str, Any]], **kubernetes: Any) -> ClusterConfig:
    section = {"image": "i", "redis": {"address": "r:6379"}, "pods": PODS} | kubernetes
    return ClusterConfig.model_validate({"models": models, "kubernetes": section})


def rayservice_of(overlay: str) -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load((K8S / "overlays" / overlay / "rayservice.yaml").read_text())
    return service


def groups_of(config: ClusterConfig) -> dict[str, Any]:
    assert config.kubernetes is not None
    return {group.name: group for group in worker_groups(placed(config), config.kubernetes)}


def overrides_of(config: ClusterConfig) -> dict[str, Any]:
    return {entry["name"]: entry for entry in serve_config(placed(config))["applications"][0]["deployments"]}


def test_the_checked_in_manifests_are_what_the_example_configurations_render_to() -> None:
    rendered = {K8S / path: text for overlay in OVERLAYS for path, text in render(config_of(overlay), overlay).items()}
    for path, text in rendered.items():
        assert path.read_text() == text, f"{path} is not what its configuration renders to: run paceline k8s render"
    folders = [K8S / "base", *(K8S / "overlays" / overlay for overlay in OVERLAYS)]
    checked_in = {path for folder in folders for path in folder.iterdir()}
    assert checked_in == set(rendered)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_arguments_overrides_and_the_live_part_together_are_the_configuration(overlay: str) -> None:
    config = placed(config_of(overlay))
    entries = overrides_of(config)
    args = builder_args(config)
    for model in args["models"]:
        for pool in ("target", "draft"):
            entry = entries[f"{pool}-{model['name']}"]
            scaling = entry.get("autoscaling_config")
            model[pool] |= {"replicas": entry["num_replicas"]} if scaling is None else {"autoscaling": scaling}
    rebuilt = with_live_part(ClusterConfig.model_validate(args), entries["router"]["user_config"])
    assert rebuilt == config.model_copy(update={"kubernetes": None})


@pytest.mark.parametrize(
    "change",
    [
        {"speculation": {"enabled": False}},
        {"speculation": {"max_draft_tokens": 9}},
        {"speculation": {"drafter": "ngram"}},
        {"router": {"replicas": 4}},
    ],
)
def test_a_live_field_changes_no_argument_so_that_serve_restarts_nothing(change: dict[str, Any]) -> None:
    config = placed(config_of("dev"))
    changed = with_live_part(config, change)
    assert changed != config
    assert builder_args(changed) == builder_args(config)
    assert serve_config(changed) != serve_config(config)


def test_a_number_of_replicas_changes_no_argument() -> None:
    model = {"name": "m", "target": {"path": "m"}, "draft": {"path": "d"}}
    more = {"name": "m", "target": {"path": "m", "replicas": 3}, "draft": {"path": "d", "replicas": 5}}
    one, other = placed(config_with([model])), placed(config_with([more]))
    assert builder_args(one) == builder_args(other)
    assert (overrides_of(other)["target-m"]["num_replicas"], overrides_of(other)["draft-m"]["num_replicas"]) == (3, 5)


def test_limits_of_autoscaling_change_no_argument_and_are_the_groups_too() -> None:
    def config(most: int) -> ClusterConfig:
        pool = {"path": "m", "autoscaling": {"min_replicas": 2, "max_replicas": most}}
        return config_with([{"name": "m", "target": pool}])

    assert builder_args(placed(config(3))) == builder_args(placed(config(9)))
    override = overrides_of(config(9))["target-m"]
    assert override["num_replicas"] == "auto"
    assert (override["autoscaling_config"]["min_replicas"], override["autoscaling_config"]["max_replicas"]) == (2, 9)
    group = groups_of(config(9))["target"]
    assert (group.min_replicas, group.max_replicas) == (2, 9)


def test_the_arguments_say_where_each_pool_runs_and_the_groups_have_those_labels() -> None:
    config = config_of("prod")
    (model,) = builder_args(placed(config))["models"]
    groups = groups_of(config)
    assert set(groups) == {"router", "draft", "target"}
    for pool in ("draft", "target"):
        assert model[pool]["label_selector"] == groups[pool].labels == {"pool": pool, "model": "llama-3.3-70b"}


def test_a_tensor_parallel_replica_is_one_pod_with_a_gpu_for_each_rank() -> None:
    target = groups_of(config_of("prod"))["target"]
    assert (target.num_gpus, target.min_replicas, target.max_replicas) == (4, 2, 6)


def test_pods_of_a_group_are_spread_over_zones_by_the_labels_that_they_have() -> None:
    for group in rayservice_of("prod")["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (spread,) = group["template"]["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "topology.kubernetes.io/zone"
        assert spread["labelSelector"]["matchLabels"] == group["template"]["metadata"]["labels"]


def test_replicas_share_no_pod_wherever_serve_can_keep_them_apart() -> None:
    entries = overrides_of(config_of("prod"))
    assert entries["router"]["max_replicas_per_node"] == entries["draft-llama-3.3-70b"]["max_replicas_per_node"] == 1
    assert "max_replicas_per_node" not in entries["target-llama-3.3-70b"]


def test_each_model_has_groups_of_its_own_with_its_own_pods() -> None:
    big = {"cpus": 8, "memory_gib": 64}
    models = [{"name": "Org/A 1", "target": {"path": "a"}}, {"name": "b", "target": {"path": "b"}}]
    groups = groups_of(config_with(models, pods=PODS | {"target-b": big}))
    assert {name: group.pod.cpus for name, group in groups.items()} == {"router": 1, "target-org-a-1": 1, "target-b": 8}
    assert groups["target-org-a-1"].labels == {"pool": "target", "model": "Org-A-1"}


def test_a_label_selector_of_the_configuration_stays_but_for_the_pool() -> None:
    config = config_with([{"name": "m", "target": {"path": "m", "label_selector": {"pool": "big", "zone": "a"}}}])
    assert groups_of(config)["target"].labels == {"pool": "target", "zone": "a"}


@pytest.mark.parametrize(
    ("models", "pods", "complaint"),
    [
        (["a b", "a/b"], PODS, "models: names must differ as labels too"),
        (["m"], {"router": PODS["router"], "target": PODS["target"]}, "kubernetes.pods: needs an entry for head"),
        (["m"], PODS | {"ruter": PODS["router"]}, "kubernetes.pods.ruter: there is no such group, only draft, head,"),
        (["m"], {"head": PODS["head"], "router": PODS["router"]}, "kubernetes.pods: needs an entry for target"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(models: list[str], pods: dict[str, Any], complaint: str) -> None:
    config = config_with([{"name": name, "target": {"path": "m"}} for name in models], pods=pods)
    with pytest.raises(ConfigError, match=complaint):
        render(config, "dev")


def test_a_configuration_without_a_kubernetes_section_is_not_rendered() -> None:
    with pytest.raises(ConfigError, match="kubernetes: needed"):
        render(ClusterConfig.model_validate({"models": [{"name": "m", "target": {"path": "m"}}]}), "dev")


def test_the_serve_config_is_text_in_the_manifest_that_reads_back_as_it_was() -> None:
    config = config_of("dev")
    manifest = yaml.safe_load((K8S / "overlays/dev/rayservice.yaml").read_text())
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == serve_config(placed(config))
