"""Every check, and running them."""

from __future__ import annotations

from pathlib import Path

from deployments.manifest_checks.alerts import metric_problems, promql_problems, promtool_problems
from deployments.manifest_checks.findings import Check, Result, ToolAbsent
from deployments.manifest_checks.manifests import ManifestError, Manifests
from deployments.manifest_checks.network import isolation_problems, selector_problems
from deployments.manifest_checks.operator import operator_problems
from deployments.manifest_checks.placement import bundle_problems, capacity_problems, placement_problems
from deployments.manifest_checks.ports import port_problems, proxy_problems
from deployments.manifest_checks.safety import (
    budget_problems,
    readiness_problems,
    resource_problems,
    secret_problems,
    user_problems,
)
from deployments.manifest_checks.schemas import core_problems, custom_problems
from deployments.manifest_checks.serve_config import serve_config_problems


def all_checks(custom_resources: Path) -> tuple[Check, ...]:
    """The checks. `custom_resources` is a folder with kuberay-crds/ and tools/check_crds.py."""
    return (
        Check("schema", "kinds of Kubernetes, field by field", core_problems),
        Check("crd", "custom resources against their definitions, CEL included", custom_problems(custom_resources)),
        Check("operator", "what KubeRay checks when it reconciles", operator_problems),
        Check("serve-config", "what Serve is told, unknown keys included", serve_config_problems),
        Check("proxy", "a proxy on every node", proxy_problems),
        Check("ports", "ports by number and name", port_problems),
        Check("placement", "labels that bring replicas to their groups", placement_problems),
        Check("bundles", "one replica in one pod, with every GPU in a bundle", bundle_problems),
        Check("capacity", "a pod for every replica", capacity_problems),
        Check("selectors", "selectors that select something", selector_problems),
        Check("isolation", "pools reached by routers only", isolation_problems),
        Check("secrets", "secrets by reference", secret_problems),
        Check("resources", "requests and limits", resource_problems),
        Check("users", "nothing runs as root", user_problems),
        Check("readiness", "a real generation", readiness_problems),
        Check("budgets", "drains of nodes", budget_problems),
        Check("promql", "alert expressions", promql_problems),
        Check("metrics", "metrics that exist", metric_problems),
        Check("promtool", "alert rules as Prometheus reads them", promtool_problems),
    )


def run(check: Check, manifests: Manifests) -> Result:
    """Run one check."""
    try:
        return Result(check, tuple(check.problems(manifests)))
    except ToolAbsent as error:
        return Result(check, absent=str(error))
    except ManifestError as error:
        return Result(check, (str(error),))
