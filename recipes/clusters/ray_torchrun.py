r"""Start one launcher on each of several machines of a Ray cluster, with all their GPUs.

ray job submit --working-dir . -- python recipes/clusters/ray_torchrun.py 2 8 recipes/grpo.py \
        --config my.yaml
"""

import subprocess
import sys

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PORT = "29500"


def launch(rank: int, main: str, machines: int, gpus: int, script: list[str]) -> None:
    """Run this machine's launcher to its end; CalledProcessError if it fails."""
    place = ["--node_rank", str(rank), "--master_addr", main, "--master_port", PORT]
    sizes = ["--nnodes", str(machines), "--nproc_per_node", str(gpus)]
    subprocess.run(["torchrun", *sizes, *place, *script], check=True)


def main(machines: int, gpus: int, *script: str) -> None:
    ray.init()
    group = placement_group([{"CPU": 1, "GPU": gpus}] * machines, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(rank: int, gpus: int) -> dict[str, object]:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        return {"num_gpus": gpus, "num_cpus": 0, "max_retries": 0, "scheduling_strategy": place}

    first = ray.get(ray.remote(get_node_ip_address).options(**on(0, 0)).remote())
    start = ray.remote(launch)
    jobs = [
        start.options(**on(rank, gpus)).remote(rank, first, machines, gpus, list(script))
        for rank in range(machines)
    ]
    ray.get(jobs)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
