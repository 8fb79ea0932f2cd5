"""The manifest for Kubernetes and the batch job for Slurm: their commands are those of `pycoll
run`, and their numbers agree."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from pycoll.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]


def documents() -> dict[str, Any]:
    text = (ROOT / "examples" / "kubernetes" / "indexed_job.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def options_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The options of `pycoll run` that the container's command gives."""
    (container,) = pod["containers"]
    program, command, *words = container["command"]
    assert (program, command) == ("pycoll", "run")
    names = {entry["name"] for entry in container["env"]}
    variables = {word[2:-1] for word in words if word.startswith("$(")}
    assert variables <= names, "the command uses variables that are not in the container's env"
    given = ["3" if word.startswith("$(") else word for word in words]
    run = main.commands["run"]
    return dict(run.make_context("run", given, resilient_parsing=False).params)


def test_the_command_is_one_of_pycoll_run() -> None:
    job = documents()["Job"]["spec"]
    options = options_of(job["template"]["spec"])
    assert options["nnodes"] == job["completions"] == job["parallelism"]
    assert (options["node_rank"], options["prefix"]) == (3, True)
    assert options["command"] == ("train.py",)


def test_agents_find_the_pod_of_node_0() -> None:
    """An indexed pod is named JOB-INDEX, in the domain of the service that its spec names."""
    found = documents()
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    host, _, port = options_of(pod)["address"].partition(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}" and int(port) > 1024
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_the_secret_is_a_file_of_a_volume() -> None:
    pod = documents()["Job"]["spec"]["template"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    (volume,) = pod["volumes"]
    assert mount["name"] == volume["name"] and mount["readOnly"]
    assert options_of(pod)["secret_file"] == f"{mount['mountPath']}/secret"
    assert volume["secret"]["defaultMode"] == 0o400


def test_the_batch_job_starts_agents() -> None:
    """Its inner shell starts `pycoll run` with the numbers that Slurm gives to each task."""
    path = ROOT / "examples" / "slurm" / "agents.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    inner = text[text.index("srun sh -c '") :].split("'")[1].replace("\\\n", "")
    for name, value in {"$SLURM_NNODES": "2", "$SLURM_NODEID": "1", "$RANKS": "4"}.items():
        inner = inner.replace(name, value)
    words = shlex.split(inner.replace("$HEAD_NODE", "head").replace("$@", "train.py"))
    assert words[:3] == ["exec", "pycoll", "run"]
    options = main.commands["run"].make_context("run", words[3:]).params
    assert f"#SBATCH --nodes={options['nnodes']}\n#SBATCH --ntasks-per-node=1\n" in text
    assert (options["node_rank"], options["ranks"], options["address"]) == (1, 4, "head:5000")
    assert options["command"] == ("train.py",)
    assert "export PYCOLL_SECRET" in text and "secret" not in inner
