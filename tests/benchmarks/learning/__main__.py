import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.learning import __doc__ as usage
from tests.benchmarks.learning.job import Job, ensure, lines
from tests.benchmarks.learning.subject import SUBJECTS
from tests.benchmarks.learning.summary import Run, save_picture, table, to_score
from tests.benchmarks.learning.tune import Settings


def main() -> None:
    flags = parsed()
    settings = Settings(flags.out)
    scores = {task: flags.score or SUBJECTS[task].score for task in flags.task}
    runs = []
    for job in jobs(flags):
        if flags.tune:
            settings.choose(job, flags.batches, scores[job.task])
        run = Run.of(lines(ensure(settings.applied(job), flags.out)))
        reached, last = to_score(run.curve, scores[job.task]), run.curve[-1]
        print(
            f"{job.name}: {scores[job.task]:g} after {reached.samples:g} samples and "
            f"{reached.seconds:.0f} s, {last.score:.3f} after {last.samples} and "
            f"{last.seconds:.0f} s",
            flush=True,
        )
        runs.append(run)
    print(f"\n{table(runs, scores)}")
    if flags.picture:
        save_picture(runs, scores, flags.picture)


def jobs(flags: argparse.Namespace) -> Iterator[Job]:
    """Make the jobs in order; the side that is first with one seed is second with the next."""
    for seed in range(flags.seeds):
        for task in flags.task:
            subject = SUBJECTS[task]
            for method in flags.methods:
                for side in flags.sides[:: -1 if seed % 2 else 1]:
                    yield Job(
                        task=task,
                        method=method,
                        side=side,
                        seed=seed,
                        model=str(Path(subject.start(flags.out / "models")).absolute()),
                        samples=flags.samples or subject.samples,
                        every=flags.every,
                        temperature=flags.temperature,
                        learning_rate=subject.learning_rate,
                        batch=flags.batches[0] if side == "trl" else 0,
                        options=dict(flags.option) if side == "ours" else {},
                    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=SUBJECTS, nargs="+", default=list(SUBJECTS))
    parser.add_argument("--methods", choices=["grpo", "rloo"], nargs="+", default=["grpo", "rloo"])
    parser.add_argument("--sides", choices=["ours", "trl"], nargs="+", default=["ours", "trl"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--samples", type=int, help="budget of a run, in place of the task's own")
    parser.add_argument("--score", type=float, help="to be reached, in place of the task's own")
    parser.add_argument("--every", type=int, default=5, help="steps from evaluation to evaluation")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of the evaluations; 0 is greedy"
    )
    parser.add_argument("--tune", action="store_true", help="find each side's settings first")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[32, 64, 128],
        help="completions per forward pass of TRL; untuned, the first",
    )
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further key of this library's config",
    )
    parser.add_argument("--picture", type=Path, help="where to draw the curves, such as a PNG")
    flags = parser.parse_args()
    for task in flags.task:
        rows = SUBJECTS[task].prompts * SUBJECTS[task].n
        if any(rows % batch for batch in flags.batches):
            parser.error(f"--batches must divide the {rows} completions of a step of {task}")
    return flags


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


if __name__ == "__main__":
    main()
