"""Planted errors: each is caught by the check that is named for it, and the manifests as they are have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import load_config
from deployments.manifest_checks import kustomize
from deployments.manifest_checks.findings import Result, ToolAbsent
from deployments.manifest_checks.manifests import ManifestError, Manifests
from deployments.manifest_checks.run import all_checks, run
from deployments.manifests.render import render
from tests.planted_errors import PLANTED, Editor, Plant

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
CHECKS = {check.name: check for check in all_checks(ROOT.parent / "shared")}


def rendered(overlay: str) -> Manifests:
    files = render(load_config(ROOT / "k8s" / "configs" / f"{overlay}.yaml"), overlay)
    return Manifests.parse("\n---\n".join(text for path, text in files.items() if path.stem != "kustomization"))


PRISTINE = {overlay: rendered(overlay) for overlay in ("dev", "prod")}


def checked(name: str, manifests: Manifests) -> Result:
    result = run(CHECKS[name], manifests)
    if result.absent is not None:
        pytest.skip(f"absent: {result.absent}")
    return result


@pytest.mark.parametrize("overlay", PRISTINE)
@pytest.mark.parametrize("name", CHECKS)
def test_the_rendered_manifests_pass_every_check(overlay: str, name: str) -> None:
    assert checked(name, PRISTINE[overlay]).problems == ()


@pytest.mark.parametrize(
    ("overlay", "name", "plant", "said"), PLANTED, ids=[f"{name}-{said}" for _, name, _, said in PLANTED]
)
def test_a_planted_error_is_caught_by_the_check_named_for_it(overlay: str, name: str, plant: Plant, said: str) -> None:
    editor = Editor(PRISTINE[overlay])
    plant(editor)
    problems = checked(name, editor.manifests()).problems
    assert any(said in problem for problem in problems), problems


def test_planted_errors_in_custom_resources_are_caught_by_crd() -> None:  # together: each look takes seconds
    editor = Editor(PRISTINE["prod"])
    editor.cluster.update(headGroupSpecs={}, managedBy="someone")
    editor.group("draft").update(replicas="two")
    editor.named("PodMonitor", "paceline-head")["spec"]["podMetricsEndpoint"] = []
    problems = "\n".join(checked("crd", editor.manifests()).problems)
    for said in ("headGroupSpecs", "field value must be either", "is not of type 'integer'", "podMetricsEndpoint'"):
        assert said in problems


def test_every_check_has_a_planted_error() -> None:
    assert {name for _, name, _, _ in PLANTED} | {"crd"} == CHECKS.keys()


@pytest.mark.parametrize("overlay", PRISTINE)
def test_kustomize_builds_the_overlay_of_the_same_objects_in_its_namespace(overlay: str) -> None:
    try:
        built = kustomize.build(ROOT / "k8s" / "overlays" / overlay)
    except ToolAbsent as error:
        pytest.skip(f"absent: {error}")
    namespace = built.of_kind("Namespace")[0]["metadata"]["name"]
    namespaced = [document for document in built.documents if document["kind"] != "Namespace"]
    assert {document["metadata"].pop("namespace") for document in namespaced} == {namespace}
    names = [{(d["kind"], d["metadata"]["name"]) for d in each.documents} for each in (built, PRISTINE[overlay])]
    assert names[0] == names[1]
    assert built.ray_service == PRISTINE[overlay].ray_service


def test_an_overlay_that_names_a_file_that_is_not_there_does_not_build(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [rayservice.yml]\n")
    try:
        with pytest.raises(ManifestError, match="kustomize cannot build it"):
            kustomize.build(tmp_path)
    except ToolAbsent as error:
        pytest.skip(f"absent: {error}")


@pytest.mark.parametrize(("text", "complaint"), [("kind: Service", "one RayService is needed"), ("a: [", "not YAML")])
def test_what_is_no_paceline_at_all_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ManifestError, match=complaint):
        Manifests.parse(text)


def test_a_check_whose_tool_is_not_there_says_which_and_finds_nothing(tmp_path: Path) -> None:
    check = {check.name: check for check in all_checks(tmp_path)}["crd"]
    assert run(check, PRISTINE["dev"]) == Result(check, absent="CRDs")
