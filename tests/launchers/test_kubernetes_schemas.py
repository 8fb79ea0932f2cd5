"""The manifests of examples/kubernetes against the schemas of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.29", "1.37")


def known_parts(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The document, or the pods in it if Kubernetes itself does not know its kind."""
    if "kubeflow.org" not in document["apiVersion"]:
        yield document
        return
    for name, value in document.items():
        if name == "template" and "containers" in value.get("spec", {}):
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **value}
        elif isinstance(value, dict | list):
            for inner in [value] if isinstance(value, dict) else value:
                if isinstance(inner, dict):
                    yield from known_parts({"apiVersion": document["apiVersion"], **inner})
    trainer = document.get("trainer", {})
    if "command" in trainer:
        container = {name: trainer[name] for name in ("image", "command", "env")}
        container |= {"name": "node", "resources": trainer["resourcesPerNode"]}
        yield {
            **{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}},
            "spec": {"containers": [container]},
        }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=[path.name for path in MANIFESTS])
def test_a_manifest_fits_the_schemas(path: Path, version: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate: make test-launchers installs it"
    )
    documents = [
        one for whole in yaml.safe_load_all(path.read_text()) for one in known_parts(whole)
    ]
    assert documents
    for document in documents:
        validate.validate(document, version, strict=True)
        broken = {**document, "spec": {**document["spec"], "nodes": 4}}
        with pytest.raises(validate.ValidationError):
            validate.validate(broken, version, strict=True)
