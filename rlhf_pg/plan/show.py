"""The estimated step as a table, with its assumptions."""

from rich.table import Table

from rlhf_pg.plan.devices import Device
from rlhf_pg.plan.job import Job, spread
from rlhf_pg.plan.memory import Memory
from rlhf_pg.plan.meta_models import MetaModels
from rlhf_pg.plan.paper import LIBRARIES, Library, stages
from rlhf_pg.plan.shapes import Shape
from rlhf_pg.plan.sharding import Sharding


def job_of(meta: MetaModels, memory: Memory, layout: Sharding, processes: int) -> Job:
    """Return one GPU's share of a step, with completions from 1 token to the longest."""
    args = meta.args
    groups = -(-args.prompts_per_step // processes)
    policy = list(meta.policy.parameters())
    trained = sum(p.numel() for p in policy if p.requires_grad) / sum(p.numel() for p in policy)
    shares_trunk = meta.critic is not None and meta.critic.shares_trunk
    computes_old = args.needs_old_logprobs and args.old_logprobs_source == "policy"
    return Job(
        prompt=meta.prompt,
        lengths=spread(groups * args.num_generations, args.max_completion_length),
        generations=args.num_generations,
        rows=memory.rows,
        micro_batch=memory.micro_batch_tokens,
        processes=processes,
        layout=layout,
        recomputes=bool(args.gradient_checkpointing),
        trained=trained,
        old=computes_old or shares_trunk,
        references=int(args.beta > 0),
        epochs=args.num_iterations,
        updates=args.updates_per_step,
        models=1 if meta.critic is None or shares_trunk else 2,
    )


def paper_table(device: Device, shape: Shape, job: Job, has_critic: bool) -> Table:
    """Tabulate the seconds by stage and library; "-" if a library cannot take such a step."""
    columns = [_seconds(library, device, shape, job, has_critic) for library in LIBRARIES]
    table = Table("seconds, on paper", *(library.name for library in LIBRARIES))
    for stage in next((column for column in columns if column), {}):
        cells = [_short(column[stage]) if column else "-" for column in columns]
        table.add_row(stage, *cells, style="bold" if stage == "total" else None)
    return table


def _seconds(
    library: Library, device: Device, shape: Shape, job: Job, has_critic: bool
) -> dict[str, float]:
    """Estimate the seconds by stage, or return {} if the library cannot take such a step."""
    try:
        return stages(library, device, shape, job) if library.critics >= has_critic else {}
    except ValueError:
        return {}


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.2g}"


def said_beside(job: Job) -> str:
    """State the assumptions, and how far the model is off on what others have published."""
    return (
        f"On paper, none of it measured: bfloat16; {len(job.lengths)} completions on each GPU, "
        f"of 1 to {max(job.lengths)} tokens, after prompts of {job.prompt}; {job.micro_batch} "
        "tokens at a time; the same sharding everywhere; TRL and verl with gradient checkpointing "
        "and a scoring pass, as they are by default; rewards are not in it. On 20 published "
        "throughputs (docs/scaling.md) this model is off by a factor of 1.14 in the median and "
        "2.19 at worst."
    )
