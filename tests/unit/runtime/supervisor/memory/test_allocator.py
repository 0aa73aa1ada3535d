"""Expandable segments: the variables, and vLLM's refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.supervisor.memory import allocator


def test_both_names_are_set_and_the_users_other_settings_are_kept() -> None:
    variables = allocator.expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,"})
    assert variables == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_a_setting_of_the_user_is_found_under_both_names() -> None:
    assert allocator.sets_segments({"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    assert not allocator.sets_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ('assert "expandable_segments:True" not in conf, ("Expandable segments are not compatible")', True),
        ("torch.cuda.memory._set_allocator_settings('expandable_segments:False')", False),
    ],
)
def test_a_vllm_that_asserts_against_them_is_recognized_without_importing_it(
    source: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    (package / "device_allocator").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "device_allocator" / "cumem.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert bool(allocator.refused_by_vllm()) is refused
