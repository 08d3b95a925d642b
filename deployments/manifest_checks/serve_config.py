"""What Serve is told. Serve itself drops keys that it does not know, at every level and without a word."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from cluster.config import ClusterConfig
from deployments.live_config import LIVE_FIELDS, with_live_part
from deployments.manifest_checks.manifests import Json, Manifests
from deployments.names import BUILDER, CONTROL, ROUTER, draft_deployment, target_deployment

FREE_FORM = ("args", "user_config", "runtime_env", "policy_kwargs")  # whose keys are somebody else's


def serve_config_problems(manifests: Manifests) -> Iterator[str]:
    """Unknown keys, values out of range, a builder or services that are not there, bad arguments."""
    from ray.serve.schema import ServeDeploySchema  # takes seconds

    config = manifests.serve_config
    yield from _unknown_keys(config, ServeDeploySchema, "")
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        yield from _said_by(error, "")
        return
    yield from _services(config.get("grpc_options", {}).get("grpc_servicer_functions", []))
    for application in config["applications"]:
        yield from _application(application)


def _application(application: Json) -> Iterator[str]:
    if application["import_path"] != BUILDER:
        yield f"import_path: is {application['import_path']}, not {BUILDER}"
    try:
        config = ClusterConfig.model_validate(application.get("args", {}))
    except ValidationError as error:
        yield from _said_by(error, "args.")
        return
    known = deployment_names(config)
    for deployment in application.get("deployments", []):
        if deployment["name"] not in known:
            yield f"deployments: there is no {deployment['name']}, only {', '.join(known)}"
        yield from _live(config, deployment)


def deployment_names(config: ClusterConfig) -> list[str]:
    """The deployments that the builder makes of a configuration."""
    targets = [target_deployment(model.name) for model in config.models]
    drafts = [draft_deployment(model.name) for model in config.models if model.draft is not None]
    return [ROUTER, CONTROL, *targets, *drafts]


def _live(config: ClusterConfig, deployment: Json) -> Iterator[str]:
    live = deployment.get("user_config")
    if live is None:
        return
    where = f"deployments.{deployment['name']}.user_config"
    if deployment["name"] not in (ROUTER, CONTROL):
        yield f"{where}: only {ROUTER} and {CONTROL} take one"
    for section, values in live.items():
        for name in values.keys() - set(LIVE_FIELDS.get(section, ())):
            yield f"{where}: {section}.{name} does not change in place"
    try:
        with_live_part(config, {section: live[section] for section in live.keys() & LIVE_FIELDS.keys()})
    except ValidationError as error:
        yield from _said_by(error, f"{where}.")


def _services(functions: list[str]) -> Iterator[str]:
    if not functions:
        yield "grpc_options.grpc_servicer_functions: none, so that there is no gRPC"
    for path in functions:
        module, _, name = path.rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), name)
        except (ImportError, ValueError):
            found = False
        if not found:
            yield f"grpc_options.grpc_servicer_functions: {path} cannot be imported"


def _said_by(error: ValidationError, prefix: str) -> Iterator[str]:
    for each in error.errors():
        yield f"{prefix}{'.'.join(str(part) for part in each['loc'])}: {each['msg']}"


def _unknown_keys(value: Any, model: type[BaseModel], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, inner in value.items():
        if key not in fields:
            yield f"{where}{key}: Serve knows no such key and would ignore it"
        elif key not in FREE_FORM:
            for each in _models_in(fields[key].annotation):
                for index, item in enumerate(inner if isinstance(inner, list) else [inner]):
                    place = f"{where}{key}[{index}]." if isinstance(inner, list) else f"{where}{key}."
                    yield from _unknown_keys(item, each, place)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models inside a field's type, however deep in unions and lists."""
    if get_origin(annotation) is None and not isinstance(annotation, UnionType):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in get_args(annotation):
        yield from _models_in(argument)
