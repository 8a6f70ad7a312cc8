"""Two processes, each with a vLLM of its own, which on rank 1 does not start a second time."""

import torch

from rlhf_pg.config import GRPOConfig
from rlhf_pg.rollout import SamplingParams, factory
from rlhf_pg.runtime import Runtime
from rlhf_pg.tasks import arithmetic


def main() -> None:
    runtime = Runtime(cpu=True)
    model, tokenizer = arithmetic().new_model()
    args = GRPOConfig(rollout_engine="vllm")
    engine = factory.new_engine(args, model, [1], tokenizer, runtime.is_main, 20, share=0.3)
    [one] = engine.generate([[5, 6, 7]], 1, SamplingParams(max_tokens=4), seed=0)
    print("sampled", len(one.tokens), flush=True)
    if runtime.rank == 1:
        from vllm.v1.worker.cpu_worker import CPUWorker

        def fails(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("2 GiB")

        CPUWorker.load_model = fails
    failure = None
    try:
        factory.new_engine(args, model, [1], tokenizer, runtime.is_main, 20, share=0.3)
    except torch.OutOfMemoryError as error:
        failure = str(error)
    print("known:", runtime.first_error(failure), flush=True)


if __name__ == "__main__":
    main()
