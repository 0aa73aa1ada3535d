"""The examples for Kubernetes fit the models of its API, and the command takes what they set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime
from support.builders.launch_commands import prepare

from grpo_run.runtime.errors import EXIT_GAVE_UP, EXIT_STOPPED, EXIT_USAGE

FOLDER = Path(__file__).parents[4] / "examples" / "kubernetes"
MODELS: dict[str, Any] = {
    "JobSet": JobsetV1alpha2JobSet,
    "TrainJob": TrainerV1alpha1TrainJob,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
}


def _documents() -> dict[str, dict[str, Any]]:
    """The objects of both files, by kind."""
    found = [one for name in ("jobset", "trainjob") for one in _read(FOLDER / f"{name}.yaml")]
    return {one["kind"]: one for one in found}


def _read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", MODELS)
def test_an_example_fits_the_model_of_its_kind(kind: str) -> None:
    """Every field is known, has the right type, and none that is required is missing."""
    document = _documents()[kind]
    assert MODELS[kind].from_dict(document).to_dict() == document
    document["spec"]["unknown"] = 1  # the models drop what they do not know
    assert MODELS[kind].from_dict(document).to_dict() != document


def _job(kind: str) -> dict[str, Any]:
    spec = _documents()[kind]["spec"]
    jobs = (spec if kind == "JobSet" else spec["template"]["spec"])["replicatedJobs"]
    job: dict[str, Any] = jobs[0]["template"]["spec"]
    return job


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime"])
def test_exit_codes_stops_and_memory_are_told_to_the_cluster(kind: str) -> None:
    """A refused or hopeless command is not repeated, and a stop is no failure and has time to save."""
    job, spec = _job(kind), _documents()[kind]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    fails, stopped, disrupted = job["podFailurePolicy"]["rules"]
    for rule, action, codes in (
        (fails, "FailJob", [EXIT_USAGE, EXIT_GAVE_UP]),
        (stopped, "Ignore", [EXIT_STOPPED]),
    ):
        assert rule["action"] == action
        wanted = {"containerName": container["name"], "operator": "In", "values": codes}
        assert rule["onExitCodes"] == wanted
    assert disrupted["action"] == "Ignore"
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    policy = (spec if kind == "JobSet" else spec["template"]["spec"])["failurePolicy"]
    assert policy["rules"][0]["action"] == "FailJobSet"
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert pod["restartPolicy"] == "Never"  # what a policy of exit codes requires
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def _launch(
    arguments: list[str], variables: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = [word.replace("/shared", str(folder)) for word in arguments]
    for name, value in variables.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words)
    return prepare(words)


def test_the_command_takes_what_jobset_sets(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of nodes is that of the pods, and they meet at the first one's name."""
    document, job = _documents()["JobSet"], _job("JobSet")
    (container,) = job["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value", "3") for one in container["env"]}
    launch = _launch(container["args"], variables, here, monkeypatch)
    name, node = document["metadata"]["name"], document["spec"]["replicatedJobs"][0]["name"]
    assert launch.elastic.rdzv_endpoint == f"{name}-{node}-0-0.{name}:29500"
    assert launch.elastic.rdzv_backend == "c10d"
    assert launch.elastic.nnodes == str(job["parallelism"]) == str(job["completions"])
    assert launch.ranks_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    grace = job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert launch.config.timeouts.stop_seconds < grace


def test_the_command_takes_what_kubeflow_sets(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables, of which rank and address of a static rendezvous do not count with c10d."""
    trainer = _documents()["TrainJob"]["spec"]["trainer"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "grpo-node-0-0.grpo",
        "PET_MASTER_PORT": "29400",
    }
    launch = _launch(trainer["args"], variables, here, monkeypatch)
    assert launch.elastic.rdzv_endpoint == "grpo-node-0-0.grpo:29400"
    assert launch.elastic.rdzv_backend == "c10d"
    assert (launch.elastic.nnodes, launch.ranks_per_node) == ("4", 8)
    assert launch.config.run_directory.name == "node-2"
    grace = _job("TrainingRuntime")["template"]["spec"]["terminationGracePeriodSeconds"]
    assert launch.config.timeouts.stop_seconds < grace
