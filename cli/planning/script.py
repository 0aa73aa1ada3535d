"""Read a job from a training script, as syntax; nothing is executed. Called by `sources.py`.

What decides about memory and cannot be read is named in a note; what this predictor does not cover is refused, or named in a note if
it can only be an upper bound. `expressions.py` says which values can be read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_run.cli.planning.expressions import UNKNOWN, UNKNOWN_KEYS, Expressions
from grpo_run.cli.planning.names import Names
from grpo_run.cli.planning.set_elsewhere import (
    decided_elsewhere,
    defaults_of,
    set_by_other_names,
    sets_computed_names,
)
from grpo_run.cli.planning.source import QUANTIZED, JobSource, refuse_quantized
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.sources import last_name
from grpo_run.runtime.upstream.memory_names import LORA_FOLLOWED

MAX_SCRIPT_BYTES = 1 << 20
TRAINERS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "SFTTrainer": "sft"}
CONFIGURATIONS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft"}
ALGORITHMS = {**TRAINERS, **CONFIGURATIONS}
MODEL_LOADER = "AutoModelForCausalLM"
IMAGE_MODELS = re.compile(r"AutoModelForImageTextToText|AutoModelForVision2Seq|\w+ForConditionalGeneration")
OTHER_TRAINER = re.compile(r"\w*Trainer")
OWN_OPTIMIZERS = ("optimizers", "optimizer_cls_and_kwargs")
"""Arguments of a trainer that give it an optimizer."""
TRLS_QUANTIZATION = "get_quantization_config"
"""Function of TRL that makes a configuration of the arguments of its scripts."""
LORA_DEFAULT_RANK = 8
_KNOWN = ", ".join(TRAINERS)


def read_script(path: Path, algorithm: str | None = None) -> JobSource:
    """Return what a script says.

    Args:
        path: of the script.
        algorithm: which of its trainers is meant, if it has several.

    Raises:
        ConfigError: the file cannot be read, trains with something else, or uses what is not covered.
    """
    return _Script(path, _parse(path), algorithm).source()


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
    def __init__(self, path: Path, tree: ast.Module, wanted: str | None) -> None:
        self.path, self.tree, self.wanted = path, tree, wanted
        self.names = dict(_names_of_imports(tree))
        self.expressions = Expressions(Names(tree))
        self.names.update(_names_of_assignments(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if (known := self._name(base)) in ALGORITHMS:
                        self.names[node.name] = known
        self.calls = [(self._name(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.found = JobSource()

    def source(self) -> JobSource:
        """Return what the script says of one trainer."""
        self._refuse_what_is_not_covered()
        self.found.algorithm = self._algorithm()
        algorithm = self.found.algorithm
        configurations = self._calls_of(*(name for name, of in CONFIGURATIONS.items() if of == algorithm))
        if not configurations:
            self.found.notes.append("The script writes out no configuration; TRL's defaults are taken.")
        elif len(configurations) > 1:
            self.found.notes.append(f"The script has {len(configurations)} configurations; the last is read.")
        if configurations:
            self._read(configurations[-1])
        for call in self._calls_of(*(name for name, of in TRAINERS.items() if of == algorithm))[-1:]:
            self._read_trainer(call)
        own = {
            name: known for name, known in self.names.items() if known in TRAINERS and name not in TRAINERS
        }
        self.found.notes += decided_elsewhere(self.tree, own)
        return self.found

    def _calls_of(self, *names: str) -> list[ast.Call]:
        return [call for name, call in self.calls if name in names]

    def _name(self, node: ast.expr) -> str:
        name = last_name(node)
        return self.names.get(name, name)

    def _algorithm(self) -> str:
        """Return whose trainer is read: the one that is wanted, or the one of reinforcement learning."""
        used = {ALGORITHMS[name] for name, _ in self.calls if name in ALGORITHMS}
        trainers = {name for name, _ in self.calls if OTHER_TRAINER.fullmatch(name)}
        if not used:
            what = f"trains with {', '.join(sorted(trainers))}" if trainers else "calls no trainer of TRL"
            raise ConfigError(f"{self.path} {what}; plan predicts {_KNOWN} (or give --model and --batch)")
        candidates = {self.wanted} if self.wanted in used else used - {"sft"} or used
        if len(candidates) > 1:
            raise ConfigError(f"{self.path} uses both GRPO and RLOO; say which of them with --algorithm")
        (found,) = candidates
        others = sorted(name for name in trainers if TRAINERS.get(name) != found)
        if others:
            known = [TRAINERS[name] for name in others if name in TRAINERS]
            more = f" (--algorithm {known[0]} predicts it)" if known else ""
            self.found.notes.append(f"Not predicted: {', '.join(others)}, which the script uses too{more}.")
        return str(found)

    def _refuse_what_is_not_covered(self) -> None:
        for name, call in self.calls:
            if IMAGE_MODELS.fullmatch(name) or self._owner(call) in ("AutoModelForImageTextToText",):
                raise ConfigError(f"{self.path}: models with images are not covered by plan")
            given = {one.arg: self._value(one.value) for one in call.keywords if one.arg in QUANTIZED}
            if given.get("quantization_config") is UNKNOWN and self._calls_of(TRLS_QUANTIZATION):
                # None, unless the command line of TRL's script says otherwise
                del given["quantization_config"]
                self.found.notes.append(
                    f"{TRLS_QUANTIZATION}() is taken to return None; quantized weights are not covered by plan."
                )
            refuse_quantized(self.path, given)

    def _owner(self, call: ast.Call) -> str:
        return self._name(call.func.value) if isinstance(call.func, ast.Attribute) else ""

    def _read(self, call: ast.Call) -> None:
        own = defaults_of(self.tree, getattr(call.func, "id", ""))
        self._take({name: self._value(value) for name, value in own.items()})
        for keyword in call.keywords:
            value = self._value(keyword.value)
            given = {keyword.arg: value} if keyword.arg is not None else value
            if not isinstance(given, dict) or UNKNOWN_KEYS in given:
                self.found.notes.append("A configuration takes settings from `**`, which are not read.")
            if isinstance(given, dict):
                self._take(given)
        self._read_set_again(call)
        given = self.found.settings.get("model_init_kwargs")
        if isinstance(given, dict):
            refuse_quantized(f"{self.path}: model_init_kwargs", given)
            self.found.take_model_settings(given)

    def _read_set_again(self, call: ast.Call) -> None:
        """Read attributes that are set once, by a later statement of the block in which the configuration gets its name."""
        names: set[str] = set()
        following: set[ast.AST] = set()
        again: dict[str, list[ast.Assign | ast.AugAssign]] = {}
        for block in _blocks(self.tree):
            for number, one in enumerate(block):
                if isinstance(one, (ast.Assign, ast.AnnAssign)) and one.value is call:
                    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
                    following = set(block[number + 1 :])
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Assign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") in names:
                        again.setdefault(target.attr, []).append(node)
        self.found.set_again += set_by_other_names(self.tree, names)
        if sets_computed_names(self.tree, names):
            self.found.notes.append(
                "Attributes of the configuration are set by computed names, which are not read."
            )
        for name, statements in again.items():
            (first, *others) = statements
            value = self._value(first.value)
            if others or first not in following or isinstance(first, ast.AugAssign) or value is UNKNOWN:
                self.found.set_again.append(name)
            else:
                self._take({name: value})

    def _take(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if value is UNKNOWN:
                self.found.unread.append(name)
            else:
                self.found.settings[name] = value

    def _read_trainer(self, call: ast.Call) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        model = given.get("model", call.args[0] if call.args else None)
        value = UNKNOWN if model is None else self._value(model)
        if isinstance(value, str):
            self.found.settings["model"] = value
        else:
            self._read_loaded_model()
            if "model" not in self.found.settings and model is not None:
                self.found.unread.append("model")
        if "compute_loss_func" in given and self._value(given["compute_loss_func"]) is not None:
            raise ConfigError(
                f"{self.path}: compute_loss_func: a loss of the script's own is not covered by plan"
            )
        for name in OWN_OPTIMIZERS:
            if name in given and self._value(given[name]) not in (None, (None, None)):
                self.found.notes.append(
                    f"{name} is not followed: the optimizer of the configuration is traced."
                )
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
                self.found.take_model_settings(
                    {keyword.arg: self._value(keyword.value) for keyword in call.keywords if keyword.arg}
                )

    def _read_adapters(self) -> None:
        calls = self._calls_of("LoraConfig")
        given = {keyword.arg: self._value(keyword.value) for call in calls[-1:] for keyword in call.keywords}
        rank: Any = given.get("r", LORA_DEFAULT_RANK)
        targets = given.get("target_modules")
        if isinstance(targets, str):
            targets = [targets]
        unread = given.get("r") is UNKNOWN
        if not unread and (not isinstance(rank, int) or isinstance(rank, bool)):
            raise ConfigError(f"{self.path}: LoraConfig(r={rank!r}): expected a whole number")
        readable = not unread and (targets is None or isinstance(targets, list | tuple))
        if not calls or not readable or None in given:
            self.found.notes.append(
                "peft_config cannot be read: predicted without adapters; give --lora-rank if there are any."
            )
            return
        if refused := [
            name for name, value in given.items() if name not in LORA_FOLLOWED and _says(name, value)
        ]:
            raise ConfigError(f"{self.path}: LoraConfig({refused[0]}=...) is not covered by plan")
        self.found.lora_rank = int(rank)
        self.found.lora_targets = tuple(str(one) for one in targets or ())
        dropout = given.get("lora_dropout", 0.0)
        if isinstance(dropout, int | float) and 0 <= dropout < 1:
            self.found.lora_dropout = float(dropout)
        else:
            self.found.unread.append("lora_dropout")

    def _value(self, node: ast.expr) -> Any:
        return self.expressions.value(node)


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield the statements of every block."""
    for node in ast.walk(tree):
        for _, part in ast.iter_fields(node):
            if isinstance(part, list) and part and isinstance(part[0], ast.stmt):
                yield part


def _says(name: str | None, value: Any) -> bool:
    """Whether a setting of `LoraConfig` is another one than its default."""
    return value != "none" if name in ("bias", "lora_bias") and isinstance(value, str) else bool(value)


def _names_of_assignments(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that assignments give to trainers and configurations, as in `Config = trl.GRPOConfig`."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            assert isinstance(node, ast.Assign)
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                known = last_name(value)
                if isinstance(name, ast.Name) and known in ALGORITHMS:
                    yield name.id, known


def _names_of_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that imports give to other names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if one.asname is not None:
                    yield one.asname, one.name
