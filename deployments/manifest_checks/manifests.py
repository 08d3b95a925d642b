"""Manifests as checks look at them: objects, and the pods that will come of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

Json = dict[str, Any]


class ManifestError(ValueError):
    """These are no manifests of a Paceline."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template: where it stands, the labels that its pods get, and its spec."""

    where: str
    labels: Mapping[str, str]
    spec: Json

    @property
    def containers(self) -> list[Json]:
        """Containers, the main one first."""
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Json]:
        """Init containers too."""
        return [*self.spec.get("initContainers", ()), *self.containers]

    @property
    def ports(self) -> dict[str, int]:
        """Numbers of the containers' ports by name."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", ())}


@dataclass(frozen=True, slots=True)
class Manifests:
    """All objects of one overlay. Raises ManifestError unless there is one RayService among them."""

    documents: tuple[Json, ...]

    @classmethod
    def parse(cls, text: str) -> Manifests:
        """Manifests in YAML."""
        try:
            documents = tuple(document for document in yaml.safe_load_all(text) if document)
        except yaml.YAMLError as error:
            raise ManifestError(f"not YAML: {error}") from error
        return cls(documents)

    def __post_init__(self) -> None:
        if len(self.of_kind("RayService")) != 1:
            raise ManifestError(f"one RayService is needed, {len(self.of_kind('RayService'))} are there")

    def of_kind(self, *kinds: str) -> list[Json]:
        """Objects of these kinds."""
        return [document for document in self.documents if document.get("kind") in kinds]

    @property
    def ray_service(self) -> Json:
        """The RayService."""
        return self.of_kind("RayService")[0]

    @property
    def ray_cluster(self) -> Json:
        """The specification of the RayService's cluster."""
        cluster: Json = self.ray_service["spec"]["rayClusterConfig"]
        return cluster

    @property
    def worker_groups(self) -> list[Json]:
        """The cluster's worker groups."""
        return list(self.ray_cluster.get("workerGroupSpecs", ()))

    @property
    def serve_config(self) -> Json:
        """What Serve is told. Raises ManifestError."""
        try:
            config = yaml.safe_load(self.ray_service["spec"].get("serveConfigV2", ""))
        except yaml.YAMLError as error:
            raise ManifestError(f"serveConfigV2 is not YAML: {error}") from error
        return config if isinstance(config, dict) else {}

    def head(self) -> Pod:
        """The pod of Ray's head."""
        return _group_pod("head", "head", self.ray_cluster["headGroupSpec"])

    def workers(self) -> list[Pod]:
        """The pods of the worker groups, in their order."""
        return [_group_pod("worker", group["groupName"], group) for group in self.worker_groups]

    def pods(self) -> Iterator[Pod]:
        """Every pod that will be there."""
        yield self.head()
        yield from self.workers()
        for workload in self.of_kind("StatefulSet", "Deployment", "Job"):
            template = workload["spec"]["template"]
            yield Pod(f"{workload['kind']} {name_of(workload)}", template["metadata"]["labels"], template["spec"])

    def pods_matching(self, selector: Mapping[str, Any]) -> list[Pod]:
        """The pods that a Kubernetes label selector matches."""
        return [pod for pod in self.pods() if matches(selector, pod.labels)]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a Kubernetes label selector matches; an empty one matches everything."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(_meets(rule, labels.get(rule["key"])) for rule in selector.get("matchExpressions", ()))


def name_of(document: Json) -> str:
    """An object's name."""
    return str(document.get("metadata", {}).get("name", "?"))


def _meets(rule: Json, value: str | None) -> bool:
    match rule["operator"]:
        case "In":
            return value in rule["values"]
        case "NotIn":
            return value not in rule["values"]
        case "Exists":
            return value is not None
        case _:
            return value is None


def _group_pod(kind: str, name: str, group: Json) -> Pod:
    """The labels of a group are its pods' too; KubeRay adds its own."""
    template = group["template"]
    own = template.get("metadata", {}).get("labels", {})
    kuberay = {"ray.io/node-type": kind, "ray.io/group": name}
    return Pod(f"group {name}", own | group.get("labels", {}) | kuberay, template["spec"])
