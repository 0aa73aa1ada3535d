"""What torch and safetensors do when they write and read files of tensors."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.serialization import get_crc32_options

from grpo_run.runtime.upstream import tensor_files


def test_torch_save_is_looked_up_where_it_is_replaced() -> None:
    """Both names refer to the same function."""
    assert [getattr(sys.modules[module], name) for module, name in tensor_files.TORCH_SAVE] == [
        torch.save
    ] * 2


def test_files_without_checksums_are_loaded(tmp_path: Path) -> None:
    """Torch's setting is restored after the block."""
    before = get_crc32_options()
    with tensor_files.without_checksums():
        torch.save({"weight": torch.arange(10.0)}, tmp_path / "x.pt")
    assert get_crc32_options() == before
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert {entry.CRC for entry in archive.infolist()} == {0}
    assert torch.equal(torch.load(tmp_path / "x.pt")["weight"], torch.arange(10.0))


def test_safetensors_checks_run() -> None:
    """They raise the errors that safetensors raises before writing."""
    tensor_files.check_safetensors({"weight": torch.ones(2)})
    for tensors in ([torch.ones(1)], {"weight": "text"}, {"weight": torch.eye(2).to_sparse()}):
        with pytest.raises(ValueError, match=r"Expected a dict|is invalid|sparse"):
            tensor_files.check_safetensors(tensors)


def test_safetensors_save_file_has_the_expected_parameters() -> None:
    """They are read by name."""
    assert list(inspect.signature(safetensors.torch.save_file).parameters) == [
        "tensors",
        "filename",
        "metadata",
    ]


def test_safetensors_types_match_a_written_file() -> None:
    """Names and order of a file with one tensor of each type."""
    tensors = {name: torch.empty(1, dtype=getattr(torch, name)) for name in tensor_files.SAFETENSORS_TYPES}
    content = safetensors.torch.save(tensors)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert [(name, entry["dtype"]) for name, entry in header.items()] == list(
        tensor_files.SAFETENSORS_TYPES.items()
    )


@pytest.mark.parametrize(
    ("package", "file", "name"),
    [
        ("transformers", "modeling_utils.py", "safe_save_file"),
        ("transformers", "integrations/accelerate.py", "save_file"),
        ("accelerate", "utils/other.py", "safe_save_file"),
    ],
)
def test_the_library_imports_save_file_under_this_name(package: str, file: str, name: str) -> None:
    """The function is replaced under this name."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    kept = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "safetensors.torch"
        for alias in node.names
        if alias.name == "save_file"
    }
    assert kept == {name}
    module = ".".join([package, *file.removesuffix(".py").split("/")])
    assert (module, name) in tensor_files.SAFETENSORS_SAVE


def test_a_failed_sharded_save_reports_each_ranks_error(tmp_path: Path) -> None:
    """Torch's error of a real save into an impossible directory. It does not derive from `Exception`."""
    from torch.distributed import checkpoint

    taken = tmp_path / "file"
    taken.write_text("in the way")
    writer = checkpoint.FileSystemWriter(taken / "checkpoint")
    with pytest.raises(tensor_files.collective_save_error()) as raised:
        checkpoint.save({"weight": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert not isinstance(raised.value, Exception)
    (cause,) = tensor_files.save_errors(raised.value)
    assert isinstance(cause, NotADirectoryError)


def test_any_other_save_error_is_its_own_cause() -> None:
    """It is returned unchanged."""
    error = ValueError("one")
    assert tensor_files.save_errors(error) == [error]


def test_a_numbered_cpu_is_a_place_to_load_to(tmp_path: Path) -> None:
    """As transformers before 5.18 loads the optimizer of CPU ranks."""
    torch.save({"step": torch.ones(3)}, tmp_path / "optimizer.pt")
    tensor_files.accept_numbered_cpus()
    tensor_files.accept_numbered_cpus()
    loaded = torch.load(tmp_path / "optimizer.pt", map_location=torch.device("cpu", 0), weights_only=True)
    assert loaded["step"].tolist() == [1.0, 1.0, 1.0]
    assert loaded["step"].device.type == "cpu"
