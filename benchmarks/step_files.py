"""Count the files, lines and functions of the package that one step runs through.

    OMP_NUM_THREADS=1 python -m benchmarks.step_files [grpo|ppo]

A step is all that runs between the reward call of one and that of the next (`sys.setprofile`), with
one prompt a step, on the embedded task. Comprehensions and lambdas are not counted as functions.
"""

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import rlhf_pg
from rlhf_pg.tasks import arithmetic

ROOT = str(Path(rlhf_pg.__file__).parent)


def lines_of(files: set[str]) -> int:
    return sum(Path(file).read_text().count("\n") for file in files)


def main(algorithm: str) -> None:
    trainer_type = {"grpo": rlhf_pg.GRPOTrainer, "ppo": rlhf_pg.PPOTrainer}[algorithm]
    task = arithmetic()
    model, tokenizer = task.new_model()
    functions: set[Any] = set()
    calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name[0] != "<":
            functions.add(code)

    def reward(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        watched = profile if calls == 2 else None
        threading.setprofile(watched)
        sys.setprofile(watched)
        return [float(len(said)) for said in completions]

    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_type(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=trainer_type.config_type(
                output_dir=directory,
                max_steps=3,
                prompts_per_step=1,
                num_generations=4,
                max_completion_length=8,
            ),
            train_dataset=task.train_dataset,
        )
        imported = {
            str(module.__file__)
            for name, module in sys.modules.items()
            if name.split(".")[0] == "rlhf_pg" and getattr(module, "__file__", None)
        }
        trainer.train()
    files = {code.co_filename for code in functions}
    print(f"one step: {len(files)} files, {lines_of(files)} lines, {len(functions)} functions")
    print(f"imported by the trainer: {len(imported)} files, {lines_of(imported)} lines")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "grpo")
