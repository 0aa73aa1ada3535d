"""Let a script build its trainer without weights, other ranks or a vLLM engine, in a process that never
trains.

`prepare` is called before the script runs, by the process that `grpo-run plan SCRIPT` starts. It replaces
private and public names of transformers, torch and TRL for the rest of that process, and puts nothing back.
Never called in a rank.
"""

from __future__ import annotations

from typing import Any

import wrapt

from grpo_run.runtime.errors import ConfigError

QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_config")
"""Arguments of `from_pretrained` with which weights are quantized."""


def prepare(ranks: int) -> None:
    """Leave out weights and engines from now on, and stand in for the other ranks.

    Args:
        ranks: of the job. Above 1, collectives go to torch's fake process group, which has nobody on the
        other side.
    """
    if ranks > 1:
        import torch
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        wrapt.register_post_import_hook(_use_process_group, "accelerate.state")
    wrapt.register_post_import_hook(_keep_on_meta, "torch.nn.modules.module")
    wrapt.register_post_import_hook(_leave_out_weights, "transformers.modeling_utils")
    wrapt.register_post_import_hook(_accept_bfloat16, "transformers.training_args")
    wrapt.register_post_import_hook(_leave_out_engine, "trl.generation.vllm_generation")


def _use_process_group(module: Any) -> None:
    """Let accelerate take the process group that there is; without a GPU it would see one rank."""

    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        return "gloo", module.DistributedType.MULTI_CPU

    module.PartialState._prepare_backend = prepare_backend


def _keep_on_meta(module: Any) -> None:
    """Let a module without data change its type only, wherever it is moved."""
    original, original_cuda = module.Module.to, module.Module.cuda

    def has_no_data(self: Any) -> bool:
        return any(one.is_meta for one in self.parameters())

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_no_data(self):
            return original(self, *args, **kwargs)
        dtype = module.torch._C._nn._parse_to(*args, **kwargs)[1]
        return self if dtype is None else original(self, dtype)

    def cuda(self: Any, device: Any = None) -> Any:
        return self if has_no_data(self) else original_cuda(self, device)

    module.Module.to, module.Module.cuda = to, cuda


def _leave_out_weights(module: Any) -> None:
    """Let `from_pretrained` read the configuration only, and build the model on torch's `meta` device."""

    def from_pretrained(cls: Any, /, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        import torch
        from transformers import AutoConfig, PretrainedConfig

        if not isinstance(config, PretrainedConfig):
            hub = {key: kwargs[key] for key in ("revision", "trust_remote_code", "token") if key in kwargs}
            config = AutoConfig.from_pretrained(config or name, **hub)
        if getattr(config, "quantization_config", None) or any(kwargs.get(key) for key in QUANTIZED):
            raise ConfigError("quantized weights are not covered by plan")
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if dtype in (None, "auto"):
            dtype = config.dtype or torch.float32
        attention = kwargs.get("attn_implementation", getattr(config, "_attn_implementation", None))
        chosen = {} if attention is None else {"attn_implementation": _attention(attention)}
        for key, value in kwargs.items():
            if hasattr(config, key) and key not in ("dtype", "torch_dtype", "attn_implementation"):
                setattr(config, key, value)
        with torch.device("meta"):
            return cls._from_config(config, dtype=dtype, **chosen).eval()

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _attention(name: Any) -> Any:
    """Return the implementation that is built; flash attention stores what the fused kernels of `sdpa`
    store.
    """
    return "sdpa" if isinstance(name, str) and "flash" in name else name


def _accept_bfloat16(module: Any) -> None:
    """Let a configuration ask for the bfloat16 of a GPU that is not there."""
    module.is_torch_bf16_gpu_available = lambda: True


def _leave_out_engine(module: Any) -> None:
    """Let TRL build an object without an engine where a trainer generates with vLLM."""

    class NoEngine:
        """Takes the place of TRL's `VLLMGeneration`; asked for anything it has, it is that."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def __getitem__(self, key: Any) -> Any:
            return self

    module.VLLMGeneration = NoEngine
