"""The training loop of one rank: the only place of the trainer that calls the engine."""

import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checked import read_text
from shardwise.description.language_model import LM
from shardwise.description.workload import row_of
from shardwise.errors import UserError
from shardwise.trainer.config import OptimConfig, PlanConfig, TrainConfig
from shardwise.trainer.data import Corpus, open_corpus
from shardwise.trainer.group import Member, join_group, memory_in_use
from shardwise.trainer.outputs import StepMetrics, open_log, write_facts
from shardwise.trainer.step_profiler import StepProfiler

Batch = tuple[Tensor, Tensor]


def train(config_toml: str) -> None:
    """Train as the configuration says, as one rank of the process group it joins.

    On failure the group is left as it is: leaving it would wait for the other ranks.
    """
    config = TrainConfig.from_toml(config_toml)
    corpus = open_corpus(
        config.data.path,
        vocab=config.model.resolve().vocab,
        seed=config.data.seed,
        token_dtype=config.data.token_dtype,
    )
    member = join_group(config.run)
    torch.manual_seed(config.run.seed)
    model = LM(config.model.resolve(), config.data.seq, config.model.checkpoint).to(member.device)
    plan = build_plan(config.plan, model, member.world)
    if member.rank == 0:
        write_facts(config, plan, corpus, member)
    sharded = sw.shard(model, plan)
    profiler = StepProfiler(config, sharded, plan, member)
    _run_steps(config, sharded, plan.mesh, corpus, member, profiler)
    dist.destroy_process_group()


def build_plan(config: PlanConfig, model: nn.Module, world: int) -> sw.Plan:
    """Make the plan and resolve it against the model."""
    plan = load_plan(config, world)
    try:
        return plan.resolve(model)
    except ValueError as error:
        raise UserError(f"plan {config.strategy}: {error}") from error


def load_plan(config: PlanConfig, world: int) -> sw.Plan:
    """Make the plan for so many ranks; a strategy's mesh defaults to all of them."""
    try:
        if config.is_file:
            if not Path(config.strategy).exists():
                raise UserError(f"there is no {config.strategy}: `shardwise plan` writes one")
            plan = sw.Plan.from_json(read_text(config.strategy, "the plan"))
        else:
            plan = sw.Plan.of(config.strategy, **{"mesh": world, **config.settings})
        if plan.average:
            raise ValueError(
                "average=True would divide twice: the trainer divides by the tokens of all ranks "
                "itself; leave plan.average out"
            )
        if plan.world != world:
            raise UserError(
                f"the plan's mesh {plan.mesh} is for {plan.world} ranks, but {world} are running: "
                f"give --nproc {plan.world}, or another plan.mesh"
            )
        return plan
    except (ValueError, TypeError) as error:
        raise UserError(f"plan {config.strategy}: {error}") from error


def lr_at(step: int, steps: int, optim: OptimConfig) -> float:
    """Give the learning rate of step 1 to `steps`: a linear warm-up, then a cosine to its end."""
    if step <= optim.warmup:
        return optim.lr * step / optim.warmup
    done = (step - optim.warmup) / max(1, steps - optim.warmup)
    lowest = optim.lr * optim.min_lr_ratio
    return lowest + (optim.lr - lowest) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _run_steps(
    config: TrainConfig,
    model: nn.Module,
    mesh: tuple[int, int],
    corpus: Corpus,
    member: Member,
    profiler: StepProfiler,
) -> None:
    """Train all steps; every `log_every` of them, and the last, give a row of metrics."""
    run, optim, workload = config.run, config.optim, config.workload
    optimizer = sw.local(
        torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
    )
    step_tokens = workload.tokens_on(mesh)
    row = row_of(member.rank, mesh, len(workload.sizes or ((),)))
    sizes = [workload.size_of(row, micro) for micro in range(run.micro_batches)]
    logged, skipped, start, waited = 0, 0, time.perf_counter(), sw.exposed_seconds(model)
    with open_log(Path(run.out), run.steps, member.rank) as log:
        for step in range(1, run.steps + 1):
            lr = lr_at(step, run.steps, optim)
            for group in optimizer.param_groups:
                group["lr"] = lr
            start += profiler.before(step)
            batches = _draw_batches(config, sizes, corpus, step, member)
            loss_sum, norm, took = _take_step(model, optimizer, batches, step_tokens, optim)
            skipped += not took
            start += profiler.after(step)
            if step % run.log_every and step != run.steps:
                continue
            dist.all_reduce(loss_sum)
            loss = loss_sum.item() / step_tokens  # on cuda this also waits for the step to end
            now, waited_now = time.perf_counter(), sw.exposed_seconds(model)
            elapsed = now - start
            metrics = StepMetrics(
                step=step,
                loss=loss,
                grad_norm=norm.item(),
                skipped=skipped,
                lr=lr,
                tokens=step * step_tokens,
                tokens_per_s=(step - logged) * step_tokens / elapsed,
                step_s=elapsed / (step - logged),
                memory_bytes=memory_in_use(member.device),
                exposed_share=_share(waited, waited_now, elapsed),
            )
            log(metrics)
            if took and not (math.isfinite(loss) and math.isfinite(metrics.grad_norm)):
                raise UserError(
                    f"the loss is {loss} and the gradient norm {metrics.grad_norm} at step {step}: "
                    "training has diverged; lower optim.lr, raise optim.warmup, compute in a wider "
                    "dtype, or leave such steps out with optim.nonfinite = 'skip'"
                )
            logged, start, waited = step, now, waited_now


def _take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    step_tokens: int,
    optim: OptimConfig,
) -> tuple[Tensor, Tensor, bool]:
    """Run all micro-batches, clip, update; give this rank's summed loss, the norm, and whether the
    step was taken. The norm is the same on every rank, so all decide alike.
    """
    loss_sum = torch.zeros((), device=batches[0][0].device)
    for tokens_BT, targets_BT in sw.microbatches(model, batches):
        loss = model(tokens_BT, targets_BT)
        (loss / step_tokens).backward()
        loss_sum += loss.detach()
    skips = optim.nonfinite == "skip"
    norm = sw.clip_grad_norm(model, optim.clip or math.inf)
    # Only skipping has to know now, which makes the host wait for the step; an error can wait for
    # the next row of metrics.
    takes = not skips or bool(torch.isfinite(norm))
    if takes:
        optimizer.step()
    optimizer.zero_grad()
    return loss_sum, norm, takes


def _draw_batches(
    config: TrainConfig, sizes: list[int], corpus: Corpus, step: int, member: Member
) -> list[Batch]:
    """Give tokens and targets of every micro-batch, on this rank's device."""
    data, batches = config.data, []
    for micro, size in enumerate(sizes):
        drawn = corpus.batch(
            seed=data.seed, step=step, micro=micro, rank=member.rank, batch=size, seq=data.seq
        )
        tokens_BT, targets_BT = (torch.from_numpy(part).to(member.device) for part in drawn)
        batches.append((tokens_BT, targets_BT))
    return batches


def _share(before: float | None, after: float | None, elapsed: float) -> float | None:
    return None if before is None or after is None else (after - before) / elapsed
