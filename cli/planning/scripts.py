"""What a training script says of a job, read as syntax and never executed. Called by `sources.py`.

Literals are read, names that the module sets once to a literal, and dtypes such as `torch.bfloat16`. What decides about memory and
cannot be read is named in a note; what this predictor does not cover is refused, or named in a note if it can only be an upper bound.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import ConfigError

MAX_SCRIPT_BYTES = 1 << 20
ALGORITHMS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "GRPOConfig": "grpo", "RLOOConfig": "rloo"}
MODEL_LOADER = "AutoModelForCausalLM"
IMAGE_MODELS = re.compile(r"AutoModelForImageTextToText|AutoModelForVision2Seq|\w+ForConditionalGeneration")
OTHER_TRAINER = re.compile(r"\w*Trainer")
QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_config")
LORA_DEFAULT_RANK = 8
LORA_REFUSED = (
    "use_dora",
    "modules_to_save",
    "target_parameters",
    "rank_pattern",
    "layers_to_transform",
    "trainable_token_indices",
)
"""Settings of peft's `LoraConfig` that change what is trained, and are not followed."""
_UNKNOWN = object()


@dataclass(kw_only=True)
class Source:
    """What a script or recipe says.

    Attributes:
        settings: by the names of TRL's settings; `model`, `dtype` and `attention` are among them if they are known.
        algorithm: `grpo` or `rloo`.
        lora_rank: of peft's `LoraConfig`; 0 without adapters.
        lora_targets: names of the modules that get adapters; empty for peft's choice.
        unread: names of settings that are given, but by an expression.
        notes: what the user should know, a sentence each.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "grpo"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(path: Path) -> Source:
    """Return what a script says.

    Raises:
        ConfigError: the file cannot be read, trains with something else, or uses what is not covered.
    """
    return _Script(path, _parse(path)).source()


def _parse(path: Path) -> ast.Module:
    try:
        if path.stat().st_size > MAX_SCRIPT_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_SCRIPT_BYTES} bytes")
        return ast.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no Python script: {error}") from None


class _Script:
    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.names = dict(_names_of_imports(tree))
        self.constants = _constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if (known := self._name(base)) in ALGORITHMS:
                        self.names[node.name] = known
        self.calls = [(self._name(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.found = Source()

    def source(self) -> Source:
        """Return what the script says of its one trainer."""
        self._refuse_what_is_not_covered()
        self.found.algorithm = self._algorithm()
        configurations = self._calls_of("GRPOConfig", "RLOOConfig")
        if not configurations:
            self.found.notes.append("The script writes out no configuration; TRL's defaults are taken.")
        elif len(configurations) > 1:
            self.found.notes.append(f"The script has {len(configurations)} configurations; the last is read.")
        if configurations:
            self._read(configurations[-1])
        for call in self._calls_of("GRPOTrainer", "RLOOTrainer")[-1:]:
            self._read_trainer(call)
        return self.found

    def _calls_of(self, *names: str) -> list[ast.Call]:
        return [call for name, call in self.calls if name in names]

    def _name(self, node: ast.expr) -> str:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return self.names.get(name, name)

    def _algorithm(self) -> str:
        used = {ALGORITHMS[name] for name, _ in self.calls if name in ALGORITHMS}
        others = sorted({name for name, _ in self.calls if OTHER_TRAINER.fullmatch(name)} - ALGORITHMS.keys())
        if not used:
            what = (
                f"trains with {', '.join(others)}" if others else "calls neither GRPOTrainer nor RLOOTrainer"
            )
            raise ConfigError(
                f"{self.path} {what}; plan predicts GRPOTrainer and RLOOTrainer (or give --model and --batch)"
            )
        if len(used) > 1:
            raise ConfigError(
                f"{self.path} uses both GRPO and RLOO; give --model, --batch and --algorithm instead of the script"
            )
        if others:
            self.found.notes.append(f"Not predicted: {', '.join(others)}, which the script uses too.")
        return used.pop()

    def _refuse_what_is_not_covered(self) -> None:
        for name, call in self.calls:
            if IMAGE_MODELS.fullmatch(name) or self._owner(call) in ("AutoModelForImageTextToText",):
                raise ConfigError(f"{self.path}: models with images are not covered by plan")
            for keyword in call.keywords:
                if keyword.arg in QUANTIZED and self._value(keyword.value) not in (None, False):
                    raise ConfigError(
                        f"{self.path}: {keyword.arg}: quantized weights are not covered by plan; give --model and --batch for the"
                        " same job with weights in bfloat16 (--dtype bfloat16), which is an upper bound"
                    )

    def _owner(self, call: ast.Call) -> str:
        return self._name(call.func.value) if isinstance(call.func, ast.Attribute) else ""

    def _read(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            if keyword.arg is None:
                self.found.notes.append("A configuration takes settings from `**`, which are not read.")
                continue
            value = self._value(keyword.value)
            if value is _UNKNOWN:
                self.found.unread.append(keyword.arg)
            else:
                self.found.settings[keyword.arg] = value
        given = self.found.settings.get("model_init_kwargs")
        if isinstance(given, dict):
            if any(given.get(name) for name in QUANTIZED):
                raise ConfigError(f"{self.path}: quantized weights are not covered by plan")
            self._model_settings(given)

    def _read_trainer(self, call: ast.Call) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        model = given.get("model", call.args[0] if call.args else None)
        value = _UNKNOWN if model is None else self._value(model)
        if isinstance(value, str):
            self.found.settings["model"] = value
        else:
            self._read_loaded_model()
        adapters = given.get("peft_config")
        if (adapters is not None and self._value(adapters) is not None) or self._calls_of("get_peft_model"):
            self._read_adapters()

    def _read_loaded_model(self) -> None:
        """Read `AutoModelForCausalLM.from_pretrained(...)`, which keeps the type of the saved weights unless it says another."""
        for name, call in self.calls:
            if name == "from_pretrained" and self._owner(call) == MODEL_LOADER and call.args:
                model = self._value(call.args[0])
                if isinstance(model, str):
                    self.found.settings["model"] = model
                self.found.settings["dtype"] = "auto"
                self._model_settings(
                    {keyword.arg: self._value(keyword.value) for keyword in call.keywords if keyword.arg}
                )

    def _model_settings(self, given: dict[Any, Any]) -> None:
        for name, target in (
            ("torch_dtype", "dtype"),
            ("dtype", "dtype"),
            ("attn_implementation", "attention"),
        ):
            value = given.get(name)
            if value is _UNKNOWN:
                self.found.unread.append(name)
            elif isinstance(value, str):
                self.found.settings[target] = value.removeprefix("torch.")

    def _read_adapters(self) -> None:
        calls = self._calls_of("LoraConfig")
        given = {keyword.arg: self._value(keyword.value) for call in calls[-1:] for keyword in call.keywords}
        rank, targets = given.get("r", LORA_DEFAULT_RANK), given.get("target_modules")
        if isinstance(targets, str):
            targets = [targets]
        readable = isinstance(rank, int) and (targets is None or isinstance(targets, list | tuple))
        if not calls or not readable or None in given:
            self.found.notes.append(
                "peft_config cannot be read: predicted without adapters; give --lora-rank if there are any."
            )
            return
        if refused := [name for name in LORA_REFUSED if given.get(name)]:
            raise ConfigError(f"{self.path}: LoraConfig({refused[0]}=...) is not covered by plan")
        self.found.lora_rank = int(rank)
        self.found.lora_targets = tuple(str(one) for one in targets or ())

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.constants.get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
            return node.attr
        if isinstance(node, ast.Dict):
            keys = [None if key is None else self._value(key) for key in node.keys]
            return dict(zip(map(str, keys), map(self._value, node.values), strict=True))
        if isinstance(node, ast.Call) and self._name(node.func) == "dict" and not node.args:
            return {keyword.arg: self._value(keyword.value) for keyword in node.keywords}
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError):
            return _UNKNOWN


def _names_of_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that imports give to other names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if one.asname is not None:
                    yield one.asname, one.name


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that are assigned once in the whole script, by the module itself and to a literal."""
    assigned: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned[node.id] = assigned.get(node.id, 0) + 1
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        if isinstance(target, ast.Name) and assigned[target.id] == 1:
            try:
                found[target.id] = ast.literal_eval(value)
            except (ValueError, TypeError, RecursionError):
                continue
    return found
