"""Errors to plant in rendered manifests, with the check that must catch each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import yaml

from deployments.manifest_checks.manifests import Manifests

Json = dict[str, Any]


class Editor:
    """Manifests that are changed in place before they are looked at again."""

    def __init__(self, manifests: Manifests) -> None:
        self.documents = copy.deepcopy(list(manifests.documents))

    def manifests(self) -> Manifests:
        return Manifests(tuple(self.documents))

    def named(self, kind: str, name: str = "paceline") -> Json:
        return next(d for d in self.documents if d["kind"] == kind and d["metadata"]["name"] == name)

    @property
    def spec(self) -> Json:
        spec: Json = self.named("RayService")["spec"]
        return spec

    @property
    def cluster(self) -> Json:
        cluster: Json = self.spec["rayClusterConfig"]
        return cluster

    def group(self, name: str) -> Json:
        return next(group for group in self.cluster["workerGroupSpecs"] if group["groupName"] == name)

    def container(self, name: str) -> Json:
        container: Json = self.group(name)["template"]["spec"]["containers"][0]
        return container

    def serve(self, change: Callable[[Json], None]) -> None:
        config = yaml.safe_load(self.spec["serveConfigV2"])
        change(config)
        self.spec["serveConfigV2"] = yaml.safe_dump(config, sort_keys=False)

    def app(self, change: Callable[[Json], None]) -> None:
        self.serve(lambda config: change(config["applications"][0]))

    def alert(self, expr: str) -> None:
        self.rule["expr"] = expr

    @property
    def rule(self) -> Json:
        rule: Json = self.named("PrometheusRule")["spec"]["groups"][0]["rules"][0]
        return rule


def rename_port(e: Editor) -> None:
    e.container("router")["ports"][0]["name"] = "http"


def deployments(app: Json) -> Any:
    return app["deployments"]


def target_args(app: Json) -> Json:
    target: Json = app["args"]["models"][0]["target"]
    return target


def restart_with_v2(e: Editor) -> None:
    e.group("target")["template"]["spec"]["restartPolicy"] = "Always"


def incremental(e: Editor) -> None:
    e.spec["upgradeStrategy"] = {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": {}}


def literal_secret(e: Editor) -> None:
    e.container("router")["env"][-1] = {"name": "PACELINE_STORE_URL", "value": "redis://:hunter2@redis:6379"}


def open_pools(e: Editor) -> None:
    del e.named("NetworkPolicy", "paceline-pools")["spec"]["ingress"][0]["from"]


def drafts_reach_targets(e: Editor) -> None:
    peer = {"podSelector": {"matchLabels": {"pool": "draft"}}}
    e.named("NetworkPolicy", "paceline-pools")["spec"]["ingress"][0]["from"].append(peer)


def without_policies(e: Editor) -> None:
    e.documents = [document for document in e.documents if document["kind"] != "NetworkPolicy"]


Plant = Callable[[Editor], object]
PLANTED: list[tuple[str, str, Plant, str]] = [
    # overlay, the check that must catch it, the error, what must be said
    ("prod", "schema", lambda e: e.named("Service")["spec"].update(selectr={}), "selectr"),
    (
        "prod",
        "schema",
        lambda e: e.named("Service")["spec"]["ports"][0].update(port="8000"),
        "is not of type 'integer'",
    ),
    ("prod", "schema", lambda e: e.named("Service").update(kind="Servce"), "has no such kind"),
    ("prod", "operator", lambda e: e.named("RayService")["metadata"].update(name="p" * 48), "48 characters"),
    ("prod", "operator", lambda e: e.named("RayService")["metadata"].update(name="1st"), "no DNS-1035 label"),
    ("prod", "operator", restart_with_v2, "restartPolicy must be Never or unset with autoscaler v2"),
    ("dev", "operator", lambda e: e.group("draft").update(idleTimeoutSeconds=60), "needs autoscaler v2"),
    ("prod", "operator", lambda e: e.cluster["headGroupSpec"]["rayStartParams"].update({"num-cpus": "0"}), "go either"),
    ("prod", "operator", lambda e: e.group("draft")["rayStartParams"].update(labels="pool=draft"), "go into `labels`"),
    ("dev", "operator", lambda e: e.group("draft").pop("maxReplicas"), "minReplicas and maxReplicas are needed"),
    ("prod", "operator", lambda e: e.group("draft").update(minReplicas=99), "minReplicas is above maxReplicas"),
    ("prod", "operator", lambda e: e.cluster.pop("gcsFaultToleranceOptions"), "everything stops with the head"),
    (
        "prod",
        "operator",
        lambda e: e.cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["env"].append(
            {"name": "RAY_REDIS_ADDRESS", "value": "r:6379"}
        ),
        "RAY_REDIS_ADDRESS must not be set",
    ),
    (
        "prod",
        "operator",
        lambda e: e.cluster["headGroupSpec"].update(headService={"metadata": {"name": "head"}}),
        "headService.metadata.name must not be set",
    ),
    ("prod", "operator", incremental, "needs gatewayClassName"),
    ("prod", "operator", lambda e: e.cluster.pop("authOptions"), "must be token"),
    (
        "prod",
        "serve-config",
        lambda e: e.serve(lambda c: c.update(proxy_locations="x")),
        "proxy_locations: Serve",
    ),
    ("prod", "serve-config", lambda e: e.serve(lambda c: c["grpc_options"].update(prot=1)), "grpc_options.prot: Serve"),
    ("prod", "serve-config", lambda e: e.app(lambda a: a.update(route="/")), "applications[0].route: Serve knows"),
    ("prod", "serve-config", lambda e: e.app(lambda a: deployments(a)[0].update(num_replica=1)), "[0].num_replica: Se"),
    (
        "prod",
        "serve-config",
        lambda e: e.app(lambda a: deployments(a)[0].update(ray_actor_options={"num_cpu": 1})),
        "ray_actor_options.num_cpu: Serve knows",
    ),
    (
        "prod",
        "serve-config",
        lambda e: e.app(lambda a: deployments(a)[2].update(autoscaling_config={"max_replica": 2})),
        "autoscaling_config.max_replica: Serve knows",
    ),
    ("prod", "serve-config", lambda e: e.app(lambda a: a["args"].update(colour="red")), "args.colour: Extra inputs"),
    ("prod", "serve-config", lambda e: e.app(lambda a: target_args(a).update(tensor_parallel=65)), "tensor_parallel"),
    ("prod", "serve-config", lambda e: e.app(lambda a: deployments(a)[0].update(name="ruter")), "there is no ruter"),
    ("prod", "serve-config", lambda e: e.app(lambda a: a.update(import_path="app:build")), "import_path: is app:build"),
    (
        "prod",
        "serve-config",
        lambda e: e.serve(lambda c: c["grpc_options"].update(grpc_servicer_functions=["no.such.function"])),
        "no.such.function cannot be imported",
    ),
    (
        "prod",
        "serve-config",
        lambda e: e.app(lambda a: deployments(a)[0].update(user_config={"speculation": {"hold": "never"}})),
        "speculation.hold does not change in place",
    ),
    (
        "prod",
        "serve-config",
        lambda e: e.app(lambda a: deployments(a)[0].update(user_config={"speculation": {"max_draft_tokens": 99}})),
        "speculation.max_draft_tokens",
    ),
    ("prod", "proxy", lambda e: e.serve(lambda c: c.update(proxy_location="HeadOnly")), "must be EveryNode"),
    ("prod", "proxy", lambda e: e.serve(lambda c: c["http_options"].update(host="127.0.0.1")), "must be 0.0.0.0"),
    ("prod", "ports", rename_port, "needs a container port 8000 named serve"),
    ("prod", "ports", lambda e: e.serve(lambda c: c["grpc_options"].update(port=9001)), "container port 9001 named"),
    (
        "prod",
        "ports",
        lambda e: e.named("Service")["spec"]["ports"][0].update(targetPort="http"),
        "Service paceline: no pod that it selects has a port http",
    ),
    (
        "prod",
        "ports",
        lambda e: e.named("PodMonitor", "paceline-head")["spec"]["podMetricsEndpoints"][0].update(port="prom"),
        "PodMonitor paceline-head: no pod that it selects has a port prom",
    ),
    ("prod", "placement", lambda e: e.group("target")["labels"].pop("pool"), "group target: has no label `pool`"),
    ("prod", "placement", lambda e: e.group("draft")["labels"].update(pool="drafts"), "no group has the labels"),
    (
        "prod",
        "placement",
        lambda e: e.app(lambda a: target_args(a)["label_selector"].update(pool="gpu")),
        "target-llama-3.3-70b: no group has the labels pool=gpu",
    ),
    ("prod", "placement", lambda e: e.app(lambda a: target_args(a).pop("label_selector")), "has no label_selector"),
    ("prod", "placement", lambda e: e.cluster["headGroupSpec"].pop("resources"), "replicas are placed there"),
    (
        "prod",
        "bundles",
        lambda e: e.container("target")["resources"]["limits"].update({"nvidia.com/gpu": 8}),
        "4 GPUs of a pod are in no bundle of target-llama-3.3-70b",
    ),
    ("prod", "bundles", lambda e: e.app(lambda a: target_args(a).update(tensor_parallel=8)), "needs 8 GPUs in one pod"),
    ("prod", "bundles", lambda e: e.container("draft")["resources"]["requests"].update(cpu="2"), "needs 4 CPUs in one"),
    ("prod", "capacity", lambda e: e.group("target").update(maxReplicas=1), "6 replicas, and its group only 1 pods"),
    ("prod", "capacity", lambda e: e.cluster.pop("enableInTreeAutoscaling"), "6 replicas, and nothing adds pods to"),
    (
        "prod",
        "selectors",
        lambda e: e.named("PodDisruptionBudget", "paceline-draft")["spec"]["selector"]["matchLabels"].update(pool="x"),
        "PodDisruptionBudget paceline-draft: selects no pod",
    ),
    ("prod", "selectors", lambda e: e.named("Service")["spec"]["selector"].update(pool="routers"), "selects no pod"),
    ("prod", "isolation", open_pools, "lets everybody reach a pool"),
    ("prod", "isolation", drafts_reach_targets, "lets group draft reach a pool"),
    ("prod", "isolation", without_policies, "no network policy selects it"),
    ("prod", "secrets", literal_secret, "PACELINE_STORE_URL must come from a secret"),
    ("prod", "secrets", lambda e: e.container("router")["env"].pop(), "PACELINE_STORE_URL is missing"),
    (
        "prod",
        "secrets",
        lambda e: e.cluster["gcsFaultToleranceOptions"].pop("redisPassword"),
        "redisPassword: must",
    ),
    ("prod", "secrets", lambda e: e.documents.append({"kind": "Secret"}), "are made apart from the manifests"),
    (
        "dev",
        "secrets",
        lambda e: e.named("StatefulSet", "paceline-redis")["spec"]["template"]["spec"]["containers"][0].update(
            env=[{"name": "REDIS_PASSWORD", "value": "hunter2"}]
        ),
        "StatefulSet paceline-redis: redis: REDIS_PASSWORD must come from a secret",
    ),
    ("prod", "resources", lambda e: e.container("draft")["resources"]["requests"].pop("cpu"), "requests no cpu"),
    (
        "dev",
        "resources",
        lambda e: e.group("draft")["template"]["spec"]["initContainers"][0].pop("resources"),
        "fetch-models: has no limit of memory",
    ),
    ("prod", "resources", lambda e: e.cluster["autoscalerOptions"].pop("resources"), "autoscalerOptions: requests no"),
    ("prod", "users", lambda e: e.group("draft")["template"]["spec"].pop("securityContext"), "runAsNonRoot is not set"),
    ("prod", "users", lambda e: e.container("draft").pop("securityContext"), "may gain privileges"),
    (
        "prod",
        "readiness",
        lambda e: e.container("router")["readinessProbe"]["httpGet"].update(path="/health"),
        "must get /ready from port serve",
    ),
    (
        "prod",
        "budgets",
        lambda e: e.named("PodDisruptionBudget", "paceline-draft").update(
            spec={"maxUnavailable": 1, "selector": {"matchLabels": {"pool": "draft"}}}
        ),
        "only minAvailable as a number",
    ),
    (
        "prod",
        "budgets",
        lambda e: e.named("PodDisruptionBudget", "paceline-draft")["spec"].update(minAvailable=99),
        "lets no pod go",
    ),
    ("prod", "promql", lambda e: e.alert("sum by (model (rate(paceline_requests_total[5m]))"), "unclosed left"),
    ("prod", "promql", lambda e: e.alert("rate(paceline_requests_total)"), "expected type"),
    ("prod", "metrics", lambda e: e.alert("paceline_requests > 0"), "there is no metric paceline_requests"),
    (
        "prod",
        "metrics",
        lambda e: e.alert("rate(paceline_ttft_seconds_bucket[5m])"),
        "no metric paceline_ttft_seconds_b",
    ),
    (
        "prod",
        "promtool",
        lambda e: e.named("PrometheusRule")["spec"]["groups"][0]["rules"][0]["annotations"].update(
            summary="{{ $lab }}"
        ),
        "undefined variable",
    ),
]
