"""Install sets of library versions beside grpo-run, and run one job in each: `make test-versions`.

A set of `tests/versions/sets.json` is what pip installed on a date, or the lowest versions that our metadata
allows. Its environment holds what the wheel asks for and no extra. torchrun trains a small GRPO job in it;
`grpo-run launch` trains it undisturbed, with a killed and a hung rank, and stopped and resumed; all must end
in the same bits. Sets marked `scripts` run TRL's own scripts instead, unmodified, with a killed rank. Results
are kept in `build/versions`, one JSON file a set; a set that was equal is not run again. `python -P -m
support.version_sets` takes names of sets; with `--page` it writes the tables of `docs/reference/versions.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.references import torchrun
from support.runs import SCRIPTS, Run
from support.warm import QUIET

ROOT = Path(__file__).parents[2]
SETS: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "versions" / "sets.json").read_text())
BUILD = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- generated: installed sets -->", "<!-- end: installed sets -->"
UV = BUILD / "tools" / "bin" / "uv"
CUDA_PACKAGES = re.compile(r"nvidia-(?!ml-py)|triton|cuda-")
OWN_OR_CUDA = re.compile(f"grpo-run|{CUDA_PACKAGES.pattern}")
CUDA_LIBRARIES = re.compile(r"lib(cu[a-z]|nccl|nvrtc|nvshmem|nvJitLink|nvToolsExt)")
CUDA_FUNCTIONS = re.compile(r"(__)?(cu[A-Za-z]|nccl[A-Z]|nvrtc|nvshmem|nvJitLink|nvtx)")
CUDA_TEXTS = re.compile(r"(Error|Status)(String|Name)$|ncclGetLastError$")
LIBRARIES = ("torch", "transformers", "trl", "accelerate")
SHOWN = (*LIBRARIES, "datasets", "numpy")
SCENARIOS = ("undisturbed", "killed and hung", "stopped")
JOB = (
    str(SCRIPTS / "grpo.py"), "--max-steps", "24", "--save-steps", "5", "--save-inside-rollouts",
    "--steps-per-generation", "2", "--num-iterations", "2", "--step-seconds", "0.02", "--cpu",
)  # fmt: skip
"""Four optimizer steps a rollout, so that checkpoints and faults lie inside one."""
_ROLLOUTS = ("--reward_funcs", "letters.variety", "--num_generations", "4", "--max_completion_length", "6")
TRL_SCRIPTS: dict[str, tuple[str, ...]] = {
    "sft": (), "dpo": (), "kto": (), "reward": ("--model_name_or_path", "scorer"),
    "grpo": _ROLLOUTS, "rloo": _ROLLOUTS,
    "distillation": ("--teacher_model_name_or_path", "teacher", "--max_completion_length", "6"),
}  # fmt: skip
"""Modules of `trl.scripts` that train, with arguments of their own: model and data are local."""


class Failure(Exception):
    """A step of a set did not end as it must; the message has the end of the output."""


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it prints; raise `Failure` if it fails."""
    answer = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={**os.environ, **QUIET, "UV_CACHE_DIR": str(BUILD / "cache")}, timeout=900,
    )  # fmt: skip
    if answer.returncode:
        raise Failure(f"{Path(command[0]).name} {command[1]}: {(answer.stdout + answer.stderr)[-3000:]}")
    return answer.stdout


def wheel() -> Path:
    """Build the wheel of the working tree and return it."""
    folder = BUILD / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    call(UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


def install(asked: dict[str, Any], built: Path) -> tuple[Path, dict[str, Any]]:
    """Make the environment of a set from that of the last set with the same torch.

    Returns:
        Its folder, and what to keep: `versions` of all packages, and `changed`, those that were replaced when
        pip installed the wheel.
    """
    torch = asked.get("torch", "2.13.0+cpu")
    environment = BUILD / "environments" / f"torch-{torch}"
    python = environment / "bin" / "python"
    if not python.exists():
        call(UV, "venv", "--quiet", "--python", "3.11", environment)
    wanted = [f"torch=={torch}", *LIBRARIES[1:], *asked["pins"]]
    options = ["--quiet", "--python", python]
    resolution: list[str | Path] = ["--no-header", "--no-annotate"]
    if "date" in asked:
        resolution += ["--exclude-newer", asked["date"], "--exclude-newer-package", "torch=2099-01-01"]
    if asked.get("lowest"):
        resolution += ["--resolution", "lowest-direct", ROOT / "pyproject.toml"]
    (file := BUILD / "wanted.txt").write_text("\n".join(wanted))
    resolved = call(UV, "pip", "compile", *options, *resolution, file).splitlines()
    kept = [line for line in resolved if "+cpu" in torch or not CUDA_PACKAGES.match(line)]
    file.write_text("\n".join(kept))
    call(UV, "pip", "sync", *options, file)
    if "+cpu" not in torch:
        replace_cuda(python)
    before = versions(python)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    planned = json.loads(call(*pip, "--dry-run", "--report", "-", built))["install"]
    needed = {
        one["metadata"]["name"].lower().replace("_", "-"): one["metadata"]["version"] for one in planned
    }
    pinned = [f"{name}=={version}" for name, version in needed.items() if not OWN_OR_CUDA.match(name)]
    call(UV, "pip", "install", "--no-deps", *options, *pinned, built)
    changed = sorted((needed.keys() & before.keys()) - {"grpo-run"})
    return environment, {"versions": versions(python), "changed": changed}


def versions(python: Path) -> dict[str, str]:
    """Return the version of each package of an environment."""
    found = json.loads(call(UV, "pip", "list", "--quiet", "--format", "json", "--python", python))
    return {one["name"].lower().replace("_", "-"): one["version"] for one in found}


def replace_cuda(python: Path) -> None:
    """Let a CUDA build of torch run on the CPU without CUDA's libraries, which have several gigabytes.

    One library that defines all their functions stands for each of them; a function returns the text of an
    error, or 100, which is `cudaErrorNoDevice`.
    """
    libraries = next((python.parents[1] / "lib").glob("python*/site-packages/torch/lib"))
    if (stub := libraries / "no_cuda.so").exists():
        return
    names, functions = set[str](), set[tuple[str, str]]()
    for library in libraries.glob("*.so"):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", call("readelf", "--dynamic", library))
        names.update(name for name in needed if CUDA_LIBRARIES.match(name))
        undefined = call("nm", "--dynamic", "--undefined-only", "--format", "just-symbols", library).split()
        functions.update(one.partition("@")[::2] for one in undefined if CUDA_FUNCTIONS.match(one))
    source, script = stub.with_suffix(".c"), stub.with_suffix(".map")
    source.write_text("".join(
        f"char *{name}(void) {{ return \"no CUDA\"; }}\n" if CUDA_TEXTS.search(name)
        else f"int {name}(void) {{ return 100; }}\n"
        for name, _ in sorted(functions)
    ))  # fmt: skip
    versions = {version: [] for _, version in functions if version}
    for name, version in functions:
        versions.get(version, []).append(f"{name};")
    script.write_text("".join(f"{version} {{ {' '.join(found)} }};\n" for version, found in versions.items()))
    call("cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,--version-script={script}", "-o", stub, source)
    for name in names:
        if not (libraries / name).exists():
            (libraries / name).symlink_to(stub.name)


class Trial:
    """One set in its environment: trains under torchrun and under grpo-run, in a folder of its own.

    Each method returns the digest of the final weights. `off` has the features that runs reported as off.
    """

    def __init__(self, environment: Path, folder: Path) -> None:
        self.bin, self.folder, self.off = environment / "bin", folder, set[str]()
        folder.mkdir(parents=True)

    def torchrun(self, name: str, command: Sequence[str]) -> str:
        words = ["--standalone", "--nproc-per-node", "2", *command, "--output-dir", name]
        try:
            torchrun(self.folder, words, folder_of_program=self.bin, timeout_seconds=120)
        except (AssertionError, subprocess.TimeoutExpired):
            if not final_weights(self.folder / name):  # otherwise torch aborted or hung at process exit
                raise
        return final_weights(self.folder / name)

    def launch(
        self, name: str, command: Sequence[str], *options: str, faults: int = 0, stopped: bool = False
    ) -> str:
        words = [*options, "--nproc-per-node", "2", *command, "--output-dir", name]
        run = Run(self.folder, words, name=f"run-{name}", program=(str(self.bin / "grpo-run"),), cold=True)
        if stopped:
            run.stopped(after=3)
        found = run.start().ended(timeout_seconds=240).events("incident")
        if len(found) != faults:
            raise Failure(f"{len(found)} incidents, not {faults}:\n{run.tail(3000)}")
        marked = (line.partition("grpo-run: off: ")[2] for line in run.printed().splitlines())
        self.off |= {text.split(", which needs")[0] for text in marked if text}
        run.close()
        return final_weights(self.folder / name)


def jobs(trial: Trial) -> dict[str, Callable[[], str]]:
    """Return the scenarios of the GRPO job."""
    faults = ("--inject", "kill@rank1:step9", "--inject", "hang@rank0:step17", "--deadline-floor", "4")
    return {
        "torchrun": partial(trial.torchrun, "torchrun", JOB),
        "undisturbed": partial(trial.launch, "undisturbed", JOB),
        "killed and hung": partial(trial.launch, "faults", JOB, *faults, faults=2),
        "stopped": partial(trial.launch, "stopped", JOB, stopped=True),
    }


def scripts(trial: Trial) -> dict[str, Callable[[], str]]:
    """Return TRL's scripts, those that this release has, each under torchrun and with a rank killed."""
    call(trial.bin / "python", ROOT / "tests" / "versions" / "local_files.py", cwd=trial.folder)
    found: dict[str, Callable[[], str]] = {}
    for name, own in TRL_SCRIPTS.items():
        if not next(trial.bin.parent.glob(f"lib/python*/site-packages/trl/scripts/{name}.py"), None):
            continue
        command = [
            "-m", f"trl.scripts.{name}", "--dataset_name", f"data/{name}", "--model_name_or_path", "model",
            "--max_steps", "6", "--save_steps", "2", "--per_device_train_batch_size", "4",
            "--learning_rate", "1e-3", "--report_to", "none", "--use_cpu", "--bf16", "false",
            "--gradient_checkpointing", "false", *own,
        ]  # fmt: skip
        kill = ("--inject", "kill@rank1:step5")
        found[f"{name} torchrun"] = partial(trial.torchrun, f"{name}-torchrun", command)
        found[f"{name} killed"] = partial(trial.launch, f"{name}-killed", command, *kill, faults=1)
    return found


def final_weights(output: Path) -> str:
    """Return the digest of the model that a script saved last, empty if there is none."""
    for name in ("weights.safetensors", "model.safetensors"):
        if (file := output / name).exists():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""


def results(cases: dict[str, Callable[[], str]]) -> dict[str, dict[str, Any]]:
    """Run the cases in order; each must end in the weights of the last torchrun before it."""
    found: dict[str, dict[str, Any]] = {}
    reference = ""
    for name, case in cases.items():
        began, result, made = time.monotonic(), "equal", ""
        try:
            made = case()
        except (Failure, AssertionError, OSError, subprocess.TimeoutExpired) as error:
            result = f"failed: {error}"
        if name.endswith("torchrun"):
            reference = made
        elif result == "equal" and (made != reference or not made):
            result = "other weights"
        found[name] = {"result": result, "seconds": round(time.monotonic() - began, 1)}
        print(f"  {name}: {result[:60].splitlines()[0]}, {found[name]['seconds']} s", flush=True)
    return found


def run_set(name: str, built: Path) -> dict[str, Any]:
    """Install and run one set; return what is kept of it."""
    asked, folder = SETS[name], BUILD / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    environment, kept = install(asked, built)
    kept |= {"date": date.today().isoformat(), "commit": call("git", "rev-parse", "--short", "HEAD").strip()}
    print(name, *(f"{one} {kept['versions'].get(one)}" for one in SHOWN), flush=True)
    trial = Trial(environment, folder)
    with patch.dict(os.environ, asked.get("variables", {})):
        kept["cases"] = results(scripts(trial) if asked.get("scripts") else jobs(trial))
    kept["off"] = sorted(trial.off)
    return kept


def table() -> str:
    """Return the results as Markdown."""
    head = (
        "set",
        *SHOWN,
        *SCENARIOS,
        "off",
        "changed by the installation",
        "seconds of runs",
        "date, commit",
    )
    rows, script_rows = [head, ("---",) * len(head)], [("TRL", *TRL_SCRIPTS), ("---",) * 8]
    for name, asked in SETS.items():
        if not (path := BUILD / f"{name}.json").exists():
            continue
        kept = json.loads(path.read_text())
        results = {case: one["result"].partition(":")[0] for case, one in kept["cases"].items()}
        if asked.get("scripts"):
            found = (results.get(f"{script} killed", "-") for script in TRL_SCRIPTS)
            script_rows.append((kept["versions"]["trl"], *found))
            continue
        rows.append((
            name, *(kept["versions"][library] for library in SHOWN), *(results[one] for one in SCENARIOS),
            "; ".join(kept["off"]) or "none", ", ".join(kept["changed"]) or "none",
            f"{sum(one['seconds'] for one in kept['cases'].values()):.0f}",
            f"{kept['date']}, {kept['commit']}",
        ))  # fmt: skip
    parts = ([f"| {' | '.join(cells)} |" for cells in part] for part in (rows, script_rows))
    return "\n\n".join("\n".join(part) for part in parts)


def is_done(path: Path) -> bool:
    """Whether a set's results are kept and all are equal."""
    return path.exists() and all(
        one["result"] == "equal" for one in json.loads(path.read_text())["cases"].values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}; all by default")
    parser.add_argument("--page", action="store_true", help="write the tables of the page and run nothing")
    options = parser.parse_args()
    if options.page:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")
        return
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):  # otherwise each process compiles all libraries
        os.environ.pop(name, None)
    os.environ |= {"XDG_STATE_HOME": str(BUILD / "state"), "HF_HOME": str(BUILD / "huggingface")}
    if folder := os.environ.get("PIP_FIND_LINKS"):  # where this machine has torch's build for CPU
        os.environ["UV_FIND_LINKS"] = folder
    os.environ["PIP_CONFIG_FILE"] = os.devnull  # this machine's constraints are not the user's
    BUILD.mkdir(parents=True, exist_ok=True)
    if not UV.exists():
        call(sys.executable, "-m", "venv", BUILD / "tools")
        call(UV.with_name("python"), "-m", "pip", "install", "--quiet", "uv")
    failed, built = [], wheel()
    for name in options.sets or SETS:
        path = BUILD / f"{name}.json"
        if is_done(path):
            continue
        try:
            path.write_text(json.dumps(run_set(name, built), indent=1))
        except Failure as error:
            print(f"{name}: {error}", flush=True)
        if not is_done(path):
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
