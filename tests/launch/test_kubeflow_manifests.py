"""Manifests for Kubeflow fit the structure of its resources and the options of `pycoll run`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pycoll.launch.host_list import parse_hosts, read_hostfile
from pycoll.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
#: Its first lines name the repositories and commits from which it was made.
SCHEMAS = json.loads((Path(__file__).parent / "kubeflow_schemas.json").read_text())["schemas"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def kind_of(document: dict[str, Any]) -> str:
    return f"{document['apiVersion']} {document['kind']}"


DOCUMENTS = [*documents("train_job.yaml"), *documents("mpi_job.yaml")]


def options_of(command: list[str], given: dict[str, str]) -> dict[str, Any]:
    """The options of `pycoll run` in a command; ``given`` are the variables of its container."""
    assert command[:2] == ["pycoll", "run"]
    words = [given[word[2:-1]] if word.startswith("$(") else word for word in command[2:]]
    return dict(main.commands["run"].make_context("run", words, resilient_parsing=False).params)


def faults(schema: dict[str, Any], value: Any, where: str) -> Iterator[str]:
    """What does not fit the keywords that the stored schemas use."""
    kinds = schema.get("type", "object")
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    wanted = tuple(types[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        yield f"{where}: {value!r} is no {kinds}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{where}: {value} is below {schema['minimum']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(schema.get("items", {}), item, f"{where}[{number}]")
    if isinstance(value, dict):
        yield from (f"{where}: no {n}" for n in schema.get("required", ()) if n not in value)
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner is False:
                yield f"{where}: there is no {name}"
            elif inner:
                yield from faults(inner, item, f"{where}.{name}")


def test_the_stored_schemas_use_known_keywords_only() -> None:
    known = {"type", "enum", "minimum", "required", "items", "properties", "description"}
    known |= {"additionalProperties", "maxLength", "minLength", "maxItems", "minItems", "pattern"}

    def check(schema: dict[str, Any]) -> None:
        assert schema.keys() <= known | {"maximum"}, schema.keys() - known
        for inner in schema.get("properties", {}).values():
            check(inner)
        for word in ("items", "additionalProperties"):
            if isinstance(schema.get(word), dict):
                check(schema[word])

    for schema in SCHEMAS.values():
        check(schema)


@pytest.mark.parametrize("document", DOCUMENTS, ids=kind_of)
def test_a_manifest_fits_the_structure(document: dict[str, Any]) -> None:
    schema = SCHEMAS[kind_of(document)]
    assert list(faults(schema, document, "")) == []
    spec = document["spec"]
    assert list(faults(schema, {**document, "spec": {**spec, "nodes": 4}}, ""))
    for name in schema["properties"]["spec"].get("required", ()):
        without = {key: value for key, value in spec.items() if key != name}
        assert list(faults(schema, {**document, "spec": without}, ""))


def test_a_train_job_starts_agents() -> None:
    runtime, job = documents("train_job.yaml")
    spec = job["spec"]
    assert spec["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].partition("/")[0],
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    trainer = spec["trainer"]
    names = {one["name"]: "3" for one in trainer["env"]}
    options = options_of(trainer["command"], names)
    assert options["nnodes"] == trainer["numNodes"]
    assert (options["node_rank"], options["command"]) == (3, ("train.py",))
    (step,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = step["template"]["spec"]["template"]["spec"]
    # The trainer changes the container "node" of the step with this label.
    assert step["name"] == "node" and [one["name"] for one in pod["containers"]] == ["node"]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert step["template"]["metadata"]["labels"] == {label: "trainer"}
    name = job["metadata"]["name"]
    assert options["address"].startswith(f"{name}-{step['name']}-0-0.{name}:")
    assert options["secret_file"] is None and "PYCOLL_SECRET" in names


def test_an_mpi_job_starts_agents_over_ssh(tmp_path: Path) -> None:
    (job,) = documents("mpi_job.yaml")
    spec = job["spec"]
    replicas = spec["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert launcher["image"] == worker["image"], "the agents need the launcher's Python"
    options = options_of(launcher["command"], {})
    assert options["hostfile"] == "/etc/mpi/hostfile" and options["ranks"] is None
    assert worker["resources"]["limits"]["cpu"] == str(spec["slotsPerWorker"])
    # The operator writes such lines for Open MPI.
    lines = [f"train-worker-{n}.train.default.svc slots={spec['slotsPerWorker']}" for n in (0, 1)]
    (tmp_path / "hostfile").write_text("\n".join(lines) + "\n")
    hosts = read_hostfile(str(tmp_path / "hostfile"))
    assert [host.slots for host in hosts] == [8, 8]
    assert hosts == parse_hosts(",".join(f"{host.name}:8" for host in hosts))
