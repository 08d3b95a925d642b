"""Ports and the proxies behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deployments.manifest_checks.manifests import Json, Manifests, Pod, name_of
from deployments.manifests.names import GRPC_PORT_NAME, HTTP_PORT_NAME


def proxy_problems(manifests: Manifests) -> Iterator[str]:
    """KubeRay asks the proxy of every worker for its health, so there must be one on every node."""
    location = manifests.serve_config.get("proxy_location", "EveryNode")
    if location != "EveryNode":
        yield f"proxy_location: is {location}; pods without a proxy never become ready, so it must be EveryNode"
    if manifests.serve_config.get("http_options", {}).get("host") != "0.0.0.0":
        yield "http_options.host: must be 0.0.0.0, or no other pod reaches the proxy"


def port_problems(manifests: Manifests) -> Iterator[str]:
    """Serve's ports by the names that KubeRay looks for, and every port that something names."""
    serve = manifests.serve_config
    wanted = {
        HTTP_PORT_NAME: serve.get("http_options", {}).get("port", 8000),
        GRPC_PORT_NAME: serve.get("grpc_options", {}).get("port", 9000),
    }
    for pod in [manifests.head(), *manifests.workers()]:
        for name, number in wanted.items():
            if pod.ports.get(name) != number:
                yield f"{pod.where}: needs a container port {number} named {name}, has {pod.ports.get(name)}"
    for owner, selector, port in _named_ports(manifests):
        pods = manifests.pods_matching(selector)
        if pods and not any(_has(pod, port) for pod in pods):
            yield f"{owner}: no pod that it selects has a port {port}"


def _named_ports(manifests: Manifests) -> Iterator[tuple[str, Json, Any]]:
    """Who names a port of which pods."""
    for service in manifests.of_kind("Service"):
        for port in service["spec"]["ports"]:
            selector = {"matchLabels": service["spec"]["selector"]}
            yield f"Service {name_of(service)}", selector, port.get("targetPort", port["port"])
    for policy in manifests.of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                yield f"NetworkPolicy {name_of(policy)}", policy["spec"]["podSelector"], port["port"]
    for monitor in manifests.of_kind("PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            yield f"PodMonitor {name_of(monitor)}", monitor["spec"]["selector"], endpoint["port"]


def _has(pod: Pod, port: Any) -> bool:
    return port in pod.ports or port in pod.ports.values()
