"""The manifests of examples/kubernetes against the schemas of Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.29", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=[path.name for path in MANIFESTS])
def test_a_manifest_fits_the_schemas(path: Path, version: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate: make test-launchers installs it"
    )
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        validate.validate(document, version, strict=True)
        broken = {**document, "spec": {**document["spec"], "nodes": 4}}
        with pytest.raises(validate.ValidationError):
            validate.validate(broken, version, strict=True)
