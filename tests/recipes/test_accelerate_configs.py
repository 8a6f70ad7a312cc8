"""The files of recipes/accelerate, and what `accelerate launch` hands to a script by them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from accelerate.utils.other import get_free_port
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

CONFIGS = Path(__file__).parents[2] / "recipes" / "accelerate"
CLUSTERS = CONFIGS.with_name("clusters")
FILES = sorted(CONFIGS.glob("*.yaml"))
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
# Every variable by which accelerate learns what to do.
OURS = ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_")

# Prints what the launcher has told it; one line, so that processes do not mix theirs.
SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED",
         "FSDP_VERSION", "ACCELERATE_DEEPSPEED_ZERO_STAGE")
sys.stdout.write(json.dumps({name: os.environ.get(name) for name in names}) + "\\n")
"""


def environment(name: str) -> dict[str, str]:
    """What `accelerate launch --config_file NAME.yaml` puts into the environment of a script."""
    # Port 0: any that is free.
    flags = ["--config_file", str(CONFIGS / f"{name}.yaml"), "--main_process_port", "0", "x.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(flags))
    if not args.use_deepspeed:
        return prepare_multi_gpu_env(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return prepare_deepspeed_cmd_env(args)[1]


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The environment of a script under the file NAME, in force during the test."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    with mock.patch.dict(os.environ, clean, clear=True):
        os.environ.update(environment(request.param))
        yield dict(os.environ)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_keys_are_known_to_accelerate(path: Path) -> None:
    """The loader refuses unknown keys, but for those of a section, which are flags."""
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"
    assert (config.num_machines, config.machine_rank) == (1, 0)
    assert config.num_processes == (2 if path.stem == "cpu_2" else 8)
    flags = set(vars(launch_command_parser().parse_args(["x.py"])))
    sections = [value for value in yaml.safe_load(path.read_text()).values() if type(value) is dict]
    for section in sections:
        assert set(section) <= flags


@pytest.mark.parametrize("launched", ["cpu_2", "ddp"], indirect=True)
def test_ddp_config_sets_no_sharding(launched: dict[str, str]) -> None:
    assert launched["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & set(launched)


@pytest.mark.parametrize(
    ("launched", "stage", "device"),
    [("zero1", 1, "none"), ("zero2", 2, "none"), ("zero3", 3, "none"), ("zero3_offload", 3, "cpu")],
    indirect=["launched"],
)
def test_zero_config_sets_deepspeed_plugin(
    launched: dict[str, str], stage: int, device: str
) -> None:
    assert launched["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert launched["ACCELERATE_MIXED_PRECISION"] == "no"
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.zero3_init_flag) == (stage, False)
    assert (plugin.offload_optimizer_device, plugin.offload_param_device) == (device, device)
    # What belongs to the recipe is left open.
    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping) == ("auto", "auto")
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    assert [plugin.deepspeed_config[size] for size in sizes] == ["auto", "auto"]


@pytest.mark.parametrize(
    ("launched", "offload"),
    [("fsdp2", OffloadPolicy), ("fsdp2_offload", CPUOffloadPolicy)],
    indirect=["launched"],
)
def test_fsdp2_config_sets_fsdp_plugin(
    launched: dict[str, str], offload: type[OffloadPolicy]
) -> None:
    assert launched["ACCELERATE_USE_FSDP"] == "true"
    assert launched["ACCELERATE_MIXED_PRECISION"] == "no"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert type(plugin.cpu_offload) is offload
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap is None  # the model's own _no_split_modules
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.mixed_precision_policy is None


@pytest.mark.slow
def test_sbatch_script_starts_four_ranks(tmp_path: Path) -> None:
    """As if SLURM had two machines with two GPUs each.

    It is told to use DDP, for which nothing has to be installed.
    """
    shutil.copytree(CONFIGS, tmp_path / "recipes" / "accelerate")
    (tmp_path / "recipes" / "grpo.py").write_text(SCRIPT)
    command = " ".join(map(shlex.quote, LAUNCH))
    executable(tmp_path / ".venv" / "bin" / "accelerate", f'exec {command} "$@"')
    executable(
        tmp_path / "bin" / "scontrol", 'for n in $(seq "$SLURM_NNODES"); do echo localhost; done'
    )
    task = 'shift 2; for n in 0 1; do SLURM_NODEID=$n "$@" & done; wait'
    executable(tmp_path / "bin" / "srun", task)
    told = {
        "PATH": f"{tmp_path / 'bin'}:{tmp_path / '.venv/bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": str(get_free_port()),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    text = (CLUSTERS / "slurm.sh").read_text().replace("zero2.yaml", "ddp.yaml")
    check_four_ranks(together([["bash", "-c", text]], tmp_path, told))


def torchrun(directory: Path) -> str:
    """A PATH on which `torchrun` is that of these tests."""
    executable(directory / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    return f"{directory}:{os.environ['PATH']}"


@pytest.mark.slow
def test_kubernetes_job_starts_four_ranks(tmp_path: Path) -> None:
    """Two pods with two processes each, which meet at the name of the first."""
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container], name = pod["containers"], service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    main = {one["name"]: one["value"] for one in container["env"]}["MAIN"]
    assert main == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == name
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in pod["volumes"]}
    [text] = container["args"]
    assert f"--nproc_per_node {container['resources']['limits']['nvidia.com/gpu']}" in text
    text = text.replace("_node 8", "_node 2").replace("29500", str(get_free_port()))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "grpo.py").write_text(SCRIPT)
    told = {"PATH": torchrun(tmp_path / "bin"), "MAIN": "127.0.0.1"}
    command = [*container["command"], text]
    pods = [["env", f"JOB_COMPLETION_INDEX={index}", *command] for index in range(2)]
    check_four_ranks(together(pods, tmp_path, told))


@pytest.mark.tasks
def test_ray_starts_four_ranks(tmp_path: Path) -> None:
    """By the real Ray, with two nodes of two pretended GPUs."""
    (tmp_path / "script.py").write_text(SCRIPT)
    port = f"PORT = '{get_free_port()}'"
    script = (CLUSTERS / "ray_torchrun.py").read_text().replace('PORT = "29500"', port)
    start = (
        "from ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 2, 'num_gpus': 2})\n"
        "cluster.add_node(num_cpus=2, num_gpus=2)\ncluster.wait_for_nodes()\n"
        "ray.init(cluster.address)\n"
    )
    script = script.replace("    ray.init()\n", textwrap.indent(start, "    "))
    (tmp_path / "on_ray.py").write_text(script)
    command = [sys.executable, "on_ray.py", "2", "2", str(tmp_path / "script.py")]
    told = {"PATH": torchrun(tmp_path / "bin"), "RAY_DEDUP_LOGS": "0"}
    printed = together([command], tmp_path, told)
    check_four_ranks([re.sub(r"^.*?(?={)", "", printed[0], flags=re.MULTILINE)])


def test_vllm_script_passes_flags_that_the_engine_needs(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "vllm", 'echo "$VLLM_SERVER_DEV_MODE $@"')
    told = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    [said] = together([[str(CLUSTERS / "vllm.sh"), "MODEL", "--seed", "1"]], tmp_path, told)
    assert said.startswith("1 serve MODEL --seed 1 --logprobs-mode processed_logprobs ")


def check_four_ranks(printed: list[str]) -> None:
    lines = [json.loads(x) for text in printed for x in text.splitlines() if x.startswith("{")]
    assert sorted(int(line["RANK"]) for line in lines) == [0, 1, 2, 3]
    assert {line["WORLD_SIZE"] for line in lines} == {"4"}


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def together(commands: list[list[str]], cwd: Path, told: dict[str, str] | None = None) -> list[str]:
    """What commands that need one another print."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    env = clean | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | (told or {})
    started = [
        subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started)
    return printed
