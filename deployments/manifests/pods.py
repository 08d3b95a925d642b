"""Pod templates of Ray's nodes: what runs in them, with what, and as whom."""

from __future__ import annotations

from typing import Any, Final

from cluster.config import ClusterConfig
from cluster.kubernetes_config import KubernetesConfig, PodConfig
from deployments.manifests.names import (
    ADMIN_TOKEN_KEY,
    APP_LABELS,
    APP_METRICS_PORT,
    APP_METRICS_PORT_NAME,
    GRPC_PORT_NAME,
    HEAD,
    HEAD_PORTS,
    HTTP_PORT_NAME,
    RAY_METRICS_PORT,
    RAY_METRICS_PORT_NAME,
    STORE_URL_KEY,
    from_secret,
)
from deployments.manifests.worker_groups import PoolName, WorkerGroup, pod_config
from deployments.metrics_port import METRICS_PORT_VARIABLE
from deployments.names import NICENESS, NICENESS_VARIABLE

Json = dict[str, Any]

USER_ID: Final = 1000  # `ray` in Ray's images
GROUP_ID: Final = 100
MODELS_PATH: Final = "/models"
CACHE_PATH: Final = "/var/cache/paceline"
CONTAINER_SECURITY: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
# A real generation through this pod's proxy; cluster.transport.readiness bounds how long it takes.
READY: Final = {
    "httpGet": {"path": "/ready", "port": HTTP_PORT_NAME},
    "initialDelaySeconds": 10,
    "periodSeconds": 10,
    "timeoutSeconds": 10,
    "failureThreshold": 2,
}
POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": GROUP_ID,
    "fsGroup": GROUP_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def head_template(config: ClusterConfig, kubernetes: KubernetesConfig) -> Json:
    """The pod of Ray's head: the dashboard, Serve's controller and a proxy, but no replica."""
    pod = pod_config(kubernetes, "head")
    container = _ray_container("ray-head", config, kubernetes, pod, 0)
    container["ports"] += [_port(name, number) for name, number in HEAD_PORTS.items()]
    return _template({"pool": HEAD}, container, [], pod, kubernetes)


def worker_template(group: WorkerGroup, config: ClusterConfig, kubernetes: KubernetesConfig) -> Json:
    """The pod of a worker group."""
    container = _ray_container("ray-worker", config, kubernetes, group.pod, group.num_gpus)
    container["ports"].append(_port(APP_METRICS_PORT_NAME, APP_METRICS_PORT))
    container["env"] += [
        {"name": METRICS_PORT_VARIABLE, "value": str(APP_METRICS_PORT)},
        {"name": NICENESS_VARIABLE, "value": NICENESS},
    ]
    if group.kind is PoolName.ROUTER:
        container["env"] += _control_secrets(kubernetes.secret)
        container["readinessProbe"] = READY
    inits = [] if kubernetes.model_claim else [_fetching(config, kubernetes.image)]
    template = _template(group.labels, container, inits, group.pod, kubernetes)
    template["spec"]["automountServiceAccountToken"] = False  # the head may need one, for Ray's autoscaler
    template["spec"]["topologySpreadConstraints"] = [_over_zones(APP_LABELS | group.labels)]
    return template


def _over_zones(labels: dict[str, str]) -> Json:
    """A lost zone takes no more than its share of a group, where the nodes allow it: rather uneven than not at all."""
    return {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }


def _control_secrets(secret: str) -> list[Json]:
    """What routers and the control service, which runs beside them, must know."""
    return [
        from_secret("PACELINE_ADMIN_TOKEN", secret, ADMIN_TOKEN_KEY),
        from_secret("PACELINE_STORE_URL", secret, STORE_URL_KEY),
    ]


def _template(
    labels: dict[str, str], container: Json, inits: list[Json], pod: PodConfig, kubernetes: KubernetesConfig
) -> Json:
    spec: Json = {
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": _volumes(pod, kubernetes),
    }
    if inits:
        spec["initContainers"] = inits
    if pod.node_selector:
        spec["nodeSelector"] = pod.node_selector
    if pod.tolerations:
        spec["tolerations"] = [toleration.model_dump(mode="json", exclude_none=True) for toleration in pod.tolerations]
    return {"metadata": {"labels": APP_LABELS | labels}, "spec": spec}


def _ray_container(
    name: str, config: ClusterConfig, kubernetes: KubernetesConfig, pod: PodConfig, num_gpus: int
) -> Json:
    mounts: list[Json] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "models", "mountPath": CACHE_PATH}]
    if kubernetes.model_claim:
        mounts[1] = {"name": "models", "mountPath": MODELS_PATH, "readOnly": True}
    return {
        "name": name,
        "image": kubernetes.image,
        "ports": [
            _port(HTTP_PORT_NAME, config.router.http_port),
            _port(GRPC_PORT_NAME, config.router.grpc_port),
            _port(RAY_METRICS_PORT_NAME, RAY_METRICS_PORT),
        ],
        "env": _cache(),
        "resources": _resources(pod, num_gpus),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }


def _cache() -> list[Json]:
    """Where fetched models are, those of the hub too: init containers and the others must agree."""
    return [
        {"name": "PACELINE_CACHE", "value": CACHE_PATH},
        {"name": "HF_HOME", "value": f"{CACHE_PATH}/huggingface"},
    ]


def _port(name: str, number: int) -> Json:
    return {"name": name, "containerPort": number}


def _resources(pod: PodConfig, num_gpus: int) -> Json:
    """Memory and GPUs are limits too; a limit on CPUs would only throttle."""
    limits: Json = {"memory": quantity_gib(pod.memory_gib)}
    if num_gpus:
        limits["nvidia.com/gpu"] = num_gpus
    return {"requests": {"cpu": f"{round(pod.cpus * 1000)}m"} | limits, "limits": limits}


def _volumes(pod: PodConfig, kubernetes: KubernetesConfig) -> list[Json]:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity_gib(pod.shm_gib)}}
    if kubernetes.model_claim is None:
        return [shm, {"name": "models", "emptyDir": {}}]
    claim = {"claimName": kubernetes.model_claim, "readOnly": True}
    return [shm, {"name": "models", "persistentVolumeClaim": claim}]


def _fetching(config: ClusterConfig, image: str) -> Json:
    """An init container that puts every model into the pod's cache."""
    pools = [pool for model in config.models for pool in (model.target, model.draft) if pool is not None]
    commands = [f"paceline models fetch {path}" for path in dict.fromkeys(pool.path for pool in pools)]
    return {
        "name": "fetch-models",
        "image": image,
        "command": ["bash", "-ec", "\n".join([*commands, ""])],
        "env": _cache(),
        "resources": {"requests": {"cpu": "500m", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "models", "mountPath": CACHE_PATH}],
    }


def quantity_gib(gib: float) -> str:
    """GiB as Kubernetes writes it."""
    return f"{round(gib * 1024)}Mi" if gib % 1 else f"{round(gib)}Gi"
