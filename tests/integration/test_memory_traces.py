"""What a trace shows: exact in the number of layers, two steps, and TRL's private names."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest

from grpo_run.cli.main import main
from grpo_run.cli.planning import requested_job
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning._trace import open_trace
from grpo_run.runtime.planning.job import COMPLETION_TOKENS, Job
from grpo_run.runtime.planning.model_config import load_model_config
from grpo_run.runtime.planning.prediction import Predictor
from grpo_run.runtime.upstream import memory_names, rollout_names

SHALLOW = "layers=2,hidden=64,heads=4,kv-heads=2,intermediate=176,vocabulary=1000"
MODEL = "layers=7,hidden=64,heads=4,kv-heads=2,intermediate=176,vocabulary=1000"
JOB = Job(batch=4, prompt=16, completion=32)


@pytest.mark.parametrize(
    ("device", "checkpointing"),
    [
        ("cuda", True),
        pytest.param("cuda", False, marks=pytest.mark.full),
        pytest.param("cpu", True, marks=pytest.mark.full),
        pytest.param("cpu", False, marks=pytest.mark.full),
    ],
)
def test_two_shallow_traces_give_the_peaks_of_all_layers(device: str, checkpointing: bool) -> None:
    """Activations in the first half of backward and gradients in the second grow differently; both are
    followed.
    """
    config = load_model_config(MODEL)
    job = replace(JOB, device=device, checkpointing=checkpointing)
    predictors = Predictor(config), Predictor(config, all_layers=True)
    assert [one.depths for one in predictors] == [(2, 4), (7,)]
    shallow, whole = (one.predict(job) for one in predictors)
    for phase, memory in whole.phases.items():
        assert shallow.phases[phase].allocated_bytes == pytest.approx(memory.allocated_bytes, rel=0.01)


def test_the_private_names_of_the_head_exist() -> None:
    """The head is an autograd function of tiles, and its caller asks whether Triton is used."""
    import trl.kernels.chunked_logprob as kernels
    from trl import GRPOTrainer
    from trl.trainer import utils

    head = getattr(kernels, memory_names.HEAD)
    assert list(inspect.signature(head.forward).parameters)[:2] == ["ctx", "hidden"]
    for name in memory_names.TILES:
        assert callable(getattr(kernels, name))
    assert callable(getattr(utils, memory_names.USES_TRITON))
    assert utils._ChunkedLogProbFunction is head
    parameters = inspect.signature(getattr(GRPOTrainer, rollout_names.SCORE)).parameters
    assert list(parameters)[1:6] == ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]


def test_adapters_grow_linearly_with_their_layers_too() -> None:
    """Beside a model in another type, and without a second one for the reference."""
    config = load_model_config(MODEL)
    job = replace(JOB, lora_rank=4, lora_targets=("all-linear",), weights="bfloat16", reference=True)
    shallow, whole = Predictor(config).predict(job), Predictor(config, all_layers=True).predict(job)
    assert shallow.trained_parameters == whole.trained_parameters
    for phase, memory in whole.phases.items():
        assert shallow.phases[phase].allocated_bytes == pytest.approx(memory.allocated_bytes, rel=0.01)


def test_a_mixture_of_experts_is_traced() -> None:
    """Which expert takes a token is not known without data, and changes no size. The experts keep their type
    under autocast.
    """
    predictor = Predictor(load_model_config(f"type=mixtral,{SHALLOW}"))
    found = predictor.predict(JOB)
    assert found.phases["forward"].traced["activations"] > 0
    held = found.phases["optimizer"].traced
    assert held["gradients"] == pytest.approx(4 * predictor.shape.parameters, rel=0.01)


def test_a_job_that_the_libraries_refuse_is_one_line() -> None:
    """Here peft, which finds no such module."""
    job = replace(JOB, lora_rank=4, lora_targets=("no_such_module",))
    with pytest.raises(ConfigError, match=r"cannot be traced: .*no_such_module"):
        Predictor(load_model_config(SHALLOW)).predict(job)


@pytest.mark.full
def test_an_optimizer_of_8_bits_keeps_embeddings_in_fp32() -> None:
    """One byte and its share of a scale per state and weight; transformers excludes embeddings."""
    predictor = Predictor(load_model_config(SHALLOW.replace("hidden=64", "hidden=128")))
    found = predictor.predict(replace(JOB, optimizer="adamw_8bit", device="cpu"))
    embedding = 1000 * 128
    expected = 8 * embedding + 2 * (1 + 4 / 256) * (predictor.shape.parameters - embedding)
    assert found.phases["forward"].traced["optimizer"] == pytest.approx(expected, rel=0.05)


def test_the_defaults_of_trl_are_those_that_a_plan_takes() -> None:
    """They are written out so that bad input is reported before TRL is imported."""
    from trl import GRPOConfig, RLOOConfig, SFTConfig

    lengths = SFTConfig.__dataclass_fields__
    assert lengths["max_length"].default == requested_job.TRL_LENGTH
    assert lengths["per_device_train_batch_size"].default == requested_job.TRL_BATCH
    for kind, algorithm in ((GRPOConfig, "grpo"), (RLOOConfig, "rloo")):
        fields = kind.__dataclass_fields__
        assert fields["beta"].default == requested_job.TRL_BETA[algorithm]
        assert fields["max_completion_length"].default == COMPLETION_TOKENS
        assert fields["per_device_train_batch_size"].default == requested_job.TRL_BATCH
        assert fields["vllm_gpu_memory_utilization"].default == requested_job.TRL_VLLM_SHARE


def test_nothing_stays_replaced_after_a_trace() -> None:
    """The head's functions are those of TRL again."""
    import trl.kernels.chunked_logprob as kernels

    before = {name: getattr(kernels, name) for name in memory_names.TILES}
    with open_trace(JOB, load_model_config(MODEL), layers=1):
        assert {name: getattr(kernels, name) for name in memory_names.TILES} != before
    assert {name: getattr(kernels, name) for name in memory_names.TILES} == before


def test_a_plan_as_json_has_phases_kinds_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes of kinds and of what is added make up the allocated bytes."""
    job = ["--model", SHALLOW, "--algorithm", "sft", "--length", "24", "--batch", "4"]
    assert main(["plan", *job, "--gpu", "8GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["largest_batch"] > 4
    assert any(change["exact"] for change in found["changes"])
    for phase in ("forward", "backward", "optimizer"):
        kinds = found["phases"][phase]["kinds"]
        assert sum(kinds.values()) == pytest.approx(found["phases"][phase]["allocated_bytes"], abs=16)
