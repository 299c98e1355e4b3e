"""Who a provider of the chart is towards its backend: a ServiceAccount, and environment variables from Secrets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import NAMESPACE, ROOT, command_of, needs_helm, pod_templates, refusal, rendered
from tests.deploy.command_lines import parsed_flags
from tests.guides import blocks

pytestmark = pytest.mark.slow

ROLE = {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/bigfleet-provider"}


def words_of(folder: Path, more: Mapping[str, Any]) -> tuple[str, str]:
    path = folder / "values.json"
    path.write_text(json.dumps({"image": {"repository": "r", "tag": "t"}, "backend": ["aws"], **more}))
    return ("--values", str(path))


def account_and_pod(folder: Path, more: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    objects = rendered("bigfleet-provider", words_of(folder, more))
    ((_name, pod),) = pod_templates(objects)
    return [each for each in objects if each["kind"] == "ServiceAccount"], pod


@needs_helm
@pytest.mark.parametrize("more", [{}, {"serviceAccount": None, "envFrom": None}], ids=["default", "older values"])
def test_a_provider_has_no_account_and_no_variables_by_default(tmp_path: Path, more: Mapping[str, Any]) -> None:
    accounts, pod = account_and_pod(tmp_path, more)

    assert accounts == []
    assert "serviceAccountName" not in pod
    assert "envFrom" not in pod["containers"][0]


@needs_helm
@pytest.mark.parametrize(("name", "expected"), [("", "fleet"), ("own", "own")])
def test_an_account_is_made_with_its_annotations(tmp_path: Path, name: str, expected: str) -> None:
    """What gives the pod a role mounts a token of its own, so the pod gets none for the Kubernetes API."""
    values = {"serviceAccount": {"create": True, "name": name, "annotations": ROLE}}
    accounts, pod = account_and_pod(tmp_path, values)

    assert accounts == [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": expected, "namespace": NAMESPACE, "annotations": ROLE},
            "automountServiceAccountToken": False,
        }
    ]
    assert pod["serviceAccountName"] == expected
    assert pod["automountServiceAccountToken"] is False


@needs_helm
def test_an_account_that_exists_is_used(tmp_path: Path) -> None:
    accounts, pod = account_and_pod(tmp_path, {"serviceAccount": {"name": "own"}})

    assert accounts == []
    assert pod["serviceAccountName"] == "own"
    assert pod["automountServiceAccountToken"] is False


@needs_helm
def test_annotations_of_an_account_that_the_chart_does_not_make_are_refused(tmp_path: Path) -> None:
    """They would be set on nothing."""
    said = refusal("bigfleet-provider", words_of(tmp_path, {"serviceAccount": {"name": "own", "annotations": ROLE}}))

    assert "serviceAccount.annotations: need serviceAccount.create=true" in said


@needs_helm
def test_variables_come_from_secrets_and_config_maps(tmp_path: Path) -> None:
    sources = [{"secretRef": {"name": "aws"}}, {"configMapRef": {"name": "proxy", "optional": True}}]
    _accounts, pod = account_and_pod(tmp_path, {"envFrom": sources})

    assert pod["containers"][0]["envFrom"] == sources


@needs_helm
def test_a_source_of_variables_is_one_of_both(tmp_path: Path) -> None:
    """The API server refuses it later."""
    both = {"secretRef": {"name": "a"}, "configMapRef": {"name": "b"}}

    assert "envFrom: write one item for each" in refusal("bigfleet-provider", words_of(tmp_path, {"envFrom": [both]}))


@needs_helm
def test_the_values_of_the_page_about_ec2_give_the_pod_a_role(tmp_path: Path) -> None:
    ((_language, values),) = blocks(ROOT / "docs" / "aws-provider.md", ("yaml",))
    (tmp_path / "values.yaml").write_text(values)
    (tmp_path / "offerings.json").write_text("[]")
    words = ("--values", str(tmp_path / "values.yaml"), "--set", "image.repository=r,image.tag=t")
    objects = rendered("bigfleet-provider", (*words, "--set-file", f"files.offerings\\.json={tmp_path}/offerings.json"))
    ((_name, pod),) = pod_templates(objects)
    (account,) = [each for each in objects if each["kind"] == "ServiceAccount"]

    assert account["metadata"]["annotations"] == ROLE
    assert pod["serviceAccountName"] == account["metadata"]["name"] == "fleet"
    assert str(parsed_flags(command_of(pod))["offerings"]) == "/etc/bigfleet/files/offerings.json"
    assert [each["data"] for each in objects if each["kind"] == "ConfigMap"] == [{"offerings.json": "[]"}]
