"""The names of TRL, transformers and accelerate that we rely on, in each supported minor release.

`PYTHONPATH=tests python -P -m support.symbol_lists` downloads the last patch of every minor from PyPI (`pip
download --no-deps`; about 300 MB, none of it is installed), reads the sources with `ast`, and writes
`tests/unit/runtime/upstream/symbols.json`. `test_releases.py` compares the list with the names in
`runtime/upstream/`, and the page `docs/reference/versions.md` shows which features each release has.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from grpo_run.runtime.features import modules
from grpo_run.runtime.upstream import features, input_gradients, memory_names, rollout_names, trainer_names
from grpo_run.runtime.upstream.features import Feature

FEATURES = (
    *features.FEATURES,
    *(one for module in modules("rank") for one in vars(module).values() if isinstance(one, Feature)),
)
"""What may be off: rows of the table, and what the features of a run say in their parts in a rank."""
FILE = Path(__file__).parents[1] / "unit" / "runtime" / "upstream" / "symbols.json"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- generated: features -->", "<!-- end: features -->"
MINORS = {
    "trl": [*(f"0.{minor}" for minor in range(26, 30)), *(f"1.{minor}" for minor in range(17))],
    "transformers": ["4.57", *(f"5.{minor}" for minor in range(25))],
    "accelerate": [f"1.{minor}" for minor in range(12, 16)],
}
"""The supported minor releases, oldest first."""
ROLLOUTS = (
    *trainer_names.ROLLOUT_METHODS, trainer_names.SINGLE_TURN, trainer_names.MICRO_STEP,
    trainer_names.BUFFERED_INPUTS, *trainer_names.TABLES, trainer_names.TRAIN_TOKENS, rollout_names.SCORE,
    rollout_names.EOS_TOKENS, rollout_names.EOS_TOKEN, rollout_names.TOKENIZER, "_prepare_inputs",
    "compute_loss", "num_iterations", "reward_funcs", "reward_func_names", "num_generations",
    "max_completion_length",
)  # fmt: skip
WATCHED: dict[str, tuple[str, ...]] = {
    "transformers.trainer:Trainer": (
        *trainer_names.TRAINER_METHODS, trainer_names.RUN_EPOCH, trainer_names.FINALIZE,
        trainer_names.PUSH,
        *trainer_names.TRAINER_ATTRIBUTES, rollout_names.ACCUMULATION, "train", "evaluate",
        "training_step", "compute_loss", "save_model", "get_batch_samples", "create_model_card",
        "get_train_dataloader",
    ),
    "transformers.trainer_utils": ("SaveStrategy",),
    "transformers.integrations.integration_utils:TensorBoardCallback": (trainer_names.SUMMARY_WRITER,),
    "transformers.modeling_utils:PreTrainedModel": (
        "enable_input_require_grads", "disable_input_require_grads", "from_pretrained", "_from_config",
        input_gradients.HANDLE,
    ),
    "transformers.training_args": ("is_torch_bf16_gpu_available",),
    "transformers.generation.utils:GenerationMixin": ("generate",),
    "trl.trainer.grpo_trainer": (trainer_names.PARSE_RESPONSE,),
    "trl.trainer.grpo_trainer:GRPOTrainer": (
        *ROLLOUTS, trainer_names.TOOL_CALLS, trainer_names.SYNC_TOOLS, trainer_names.ASYNC_TOOLS,
        trainer_names.ENVIRONMENTS, trainer_names.ENVIRONMENT_LIST, trainer_names.FACTORIES,
        trainer_names.ENGINE,
    ),
    "trl.trainer.rloo_trainer:RLOOTrainer": ROLLOUTS,
    "trl.trainer.sft_trainer:SFTTrainer": (
        trainer_names.METRICS, trainer_names.TRAIN_TOKENS, "compute_loss",
    ),
    memory_names.HEAD_MODULE: (
        memory_names.USES_TRITON, "split_tensor_dict", "split_pixel_values_by_grid",
        "unsplit_pixel_values_by_grid",
    ),
    memory_names.KERNEL_MODULE: (memory_names.HEAD, *memory_names.TILES),
    "trl.generation.vllm_generation": ("VLLMGeneration",),
    "trl.generation.vllm_generation:VLLMGeneration": (trainer_names.WEIGHTS_SLEEP,),
    "accelerate.commands.launch": ("_validate_launch_command", "launch_command_parser"),
    "accelerate.commands.config.config_args": ("load_config_from_file",),
    "accelerate.utils.launch": (
        "prepare_deepspeed_cmd_env", "prepare_multi_gpu_env", "prepare_simple_launcher_cmd_env",
    ),
    "accelerate.state:AcceleratorState": ("_reset_state",),
    "accelerate.state:GradientState": ("_reset_state",),
    "accelerate.state:PartialState": ("_prepare_backend",),
    "accelerate.accelerator:Accelerator": ("backward", "clip_grad_norm_", "gather"),
}  # fmt: skip
"""By module, or class in a module: functions, methods and attributes."""
KINDS = {"": "", "Trainer": "transformers.trainer:Trainer"} | {
    place.partition(":")[2]: place for place in WATCHED if place.startswith("trl.") and ":" in place
}
"""By class of a trainer, its place."""
BEHAVIOURS = {
    "trl>=0.27": ("_prepare_inputs", "self._step % self.args.steps_per_generation]\n    else:"),
    "trl>=0.29": (trainer_names.SINGLE_TURN, "(self, prompt_ids,"),
    "trl>=1.6": (
        trainer_names.GENERATE_AND_SCORE, "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)",
    ),
    "trl: a rollout serves several steps": (
        "_prepare_inputs", "if self._step % generate_every == 0 or self._buffered_inputs is None:",
    ),
    "trl: rewards are a table": (
        trainer_names.CALCULATE_REWARDS, "rewards_per_func = gather(rewards_per_func)",
    ),
    "trl: generation returns prompts and completions first": (
        trainer_names.GENERATE, "return (prompt_ids, completion_ids",
    ),
}  # fmt: skip
"""What no name shows: a method of GRPO's and RLOO's trainers, and a piece of its source as `ast.unparse`
writes it."""

Names = dict[str, str]
"""By name, the parameters of a function; empty for anything else."""


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also those under a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)])


def names_of(owner: ast.Module | ast.ClassDef) -> Names:
    """Return what a module or class defines, imports or assigns; of a class also what methods set."""
    found: Names = {}
    for node in _flat(owner.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = ast.unparse(node.args)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ""
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name): "" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: "" for target in targets if isinstance(target, ast.Name)}
    if isinstance(owner, ast.ClassDef):
        for part in ast.walk(owner):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                found.setdefault(part.attr, "")
    return found


def read(wheel: zipfile.ZipFile, place: str) -> ast.Module | ast.ClassDef | None:
    """Return the parsed module, or class of a module; None if the release does not have it."""
    module, _, name = place.partition(":")
    for file in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
        if file in wheel.namelist():
            tree = ast.parse(wheel.read(file))
            if not name:
                return tree
            return next(
                (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name), None
            )
    return None


def collect(library: str, wheel: zipfile.ZipFile) -> dict[str, Names]:
    """Return the watched names that a release has, by place, and the behaviours under "behaviour"."""
    found: dict[str, Names] = {}
    for place, names in WATCHED.items():
        if place.partition(".")[0] == library and (owner := read(wheel, place)) is not None:
            there = names_of(owner)
            found[place] = {name: there[name] for name in names if name in there}
    if library == "trl":
        trainers = [read(wheel, KINDS[kind]) for kind in ("GRPOTrainer", "RLOOTrainer")]
        found["behaviour"] = {
            text: ""
            for text, (method, source) in BEHAVIOURS.items()
            if all(one is not None and source in _source_of(one, method) for one in trainers)
        }
    return found


def _source_of(owner: ast.Module | ast.ClassDef, method: str) -> str:
    return "".join(ast.unparse(one) for one in owner.body if getattr(one, "name", "") == method)


def listed(library: str, by_minor: dict[str, dict[str, Names]]) -> dict[str, dict[str, list[list[str]]]]:
    """Return for each place and name the ranges of minors that have it: parameters, first and last minor."""
    ranges: dict[str, dict[str, list[list[str]]]] = {}
    minors = MINORS[library]
    for number, minor in enumerate(minors):
        for place, names in by_minor[minor].items():
            for name, parameters in names.items():
                known = ranges.setdefault(place, {}).setdefault(name, [])
                if known and known[-1][0] == parameters and number and known[-1][2] == minors[number - 1]:
                    known[-1][2] = minor
                else:
                    known.append([parameters, minor, minor])
    return ranges


@functools.cache
def symbols() -> dict[str, dict[str, dict[str, list[list[str]]]]]:
    """Return the list in the tree: by library, place and name."""
    loaded: dict[str, dict[str, dict[str, list[list[str]]]]] = json.loads(FILE.read_text())["symbols"]
    return loaded


def parameters_in(library: str, minor: str, place: str, name: str) -> str | None:
    """Return the parameters that a name has in a minor release, empty for anything but a function; None if it
    is not there."""
    order = MINORS[library].index
    for parameters, first, last in symbols()[library].get(place, {}).get(name, ()):
        if order(first) <= order(minor) <= order(last):
            return parameters
    return None


def place_of(need: str, kind: str) -> tuple[str, str]:
    """Return place and name of what a feature needs."""
    if ">=" in need:
        return "behaviour", need
    if ":" in need:
        module, _, name = need.partition(":")
        return module, name
    inherited = need not in WATCHED[KINDS[kind]]
    return KINDS["Trainer" if inherited else kind], need


def is_on(feature: Feature, library: str, minor: str) -> bool:
    """Whether a release of one library leaves a feature on: what is looked up in another counts as there."""
    places = [place_of(need, kind) for kind, needs in feature.needs.items() for need in needs]
    return all(
        place.partition(".")[0].replace("behaviour", "trl") != library
        or parameters_in(library, minor, place, name) is not None
        for place, name in places
    )


def ranges_of(feature: Feature, library: str) -> str:
    """Return the minors of a library that leave a feature on, as text."""
    on = [minor for minor in MINORS[library] if is_on(feature, library, minor)]
    if on == MINORS[library]:
        return "all"
    if not on:
        return "none"
    first, last = on[0], on[-1]
    assert MINORS[library][MINORS[library].index(first) :][: len(on)] == on, f"{feature.text}: a gap"
    return f"from {first}" if last == MINORS[library][-1] else f"{first} to {last}"


def table() -> str:
    """Return which releases have what each feature needs, as a Markdown table."""
    lines = ["| feature | TRL | transformers |", "|---|---|---|"]
    for feature in FEATURES:
        lines.append(
            f"| {feature.text} | {ranges_of(feature, 'trl')} | {ranges_of(feature, 'transformers')} |"
        )
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    """Download the releases, or take those of the folder that is named, and write the list and the table."""
    lists: dict[str, object] = {}
    releases: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for library, minors in MINORS.items():
            by_minor = {}
            for minor in minors:
                if not list(folder.glob(f"{library}-{minor}.*.whl")):
                    words = [
                        "download",
                        "--quiet",
                        "--no-deps",
                        "--dest",
                        str(folder),
                        f"{library}=={minor}.*",
                    ]
                    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
                (file,) = folder.glob(f"{library}-{minor}.*.whl")
                releases.setdefault(library, []).append(file.name.split("-")[1])
                with zipfile.ZipFile(file) as wheel:
                    by_minor[minor] = collect(library, wheel)
            lists[library] = listed(library, by_minor)
    FILE.write_text(json.dumps({"releases": releases, "symbols": lists}, indent=0, sort_keys=True) + "\n")
    symbols.cache_clear()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(FILE, PAGE, sep="\n")


if __name__ == "__main__":
    main()
