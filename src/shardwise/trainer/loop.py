"""The training loop of one rank: the only place of the trainer that calls the engine."""

import hashlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checked import read_text
from shardwise.checkpoint.pieces import place_of
from shardwise.checkpoint.talk import talk
from shardwise.children import Stopped, say
from shardwise.description.language_model import LM, Rope
from shardwise.description.workload import row_of
from shardwise.engine.torch_private import local_of
from shardwise.errors import UserError
from shardwise.predict.foresight import Foresight
from shardwise.run_files import PLAN
from shardwise.trainer.checkpoints import Checkpoints, Progress
from shardwise.trainer.config import OptimConfig, PlanConfig, TrainConfig
from shardwise.trainer.data import Corpus, open_corpus
from shardwise.trainer.foreseen import Comparison, read_choice
from shardwise.trainer.group import Member, join_group, memory_in_use, use_deterministic_kernels
from shardwise.trainer.outputs import StepMetrics, open_log, write_facts
from shardwise.trainer.step_profiler import StepProfiler
from shardwise.trainer.stopping import StopNotice

Batch = tuple[Tensor, Tensor]
Choose = Callable[[TrainConfig, Corpus, Member], tuple[sw.Plan, Foresight]]
_LOOK_EVERY = 10  # steps, at most, until ranks agree on whether to go on


def train(config_toml: str, choose: Choose | None = None) -> None:
    """Train as the configuration says, as one rank of the process group it joins. `choose` finds
    the plan where it says auto.

    On failure the group is left as it is: leaving it would wait for the other ranks.
    """
    config = TrainConfig.from_toml(config_toml)
    if config.run.deterministic:
        use_deterministic_kernels()
    corpus = open_corpus(
        config.data.path,
        vocab=config.model.resolve().vocab,
        seed=config.data.seed,
        token_dtype=config.data.token_dtype,
    )
    member = join_group(config.run)
    with StopNotice(member.rank) as notice:
        model = build_model(config, member)
        plan, foresight = find_plan(config, corpus, model, member, choose)
        sharded, optimizer = _assemble(config, plan, model)
        checkpoints = Checkpoints(config, corpus, sharded, optimizer)
        progress = checkpoints.restore()
        if member.rank == 0:
            write_facts(config, plan, corpus, member, progress.step)
        profiler = StepProfiler(config, sharded, plan, member, progress.step, foresight)
        comparison = Comparison(config, plan, member, foresight, profiler, progress.step)
        training = _Training(
            config, plan.mesh, corpus, member, sharded, optimizer, checkpoints, progress, comparison
        )
        stopped = training.run(profiler, notice)
    dist.destroy_process_group()
    if stopped:
        raise Stopped(stopped)


def find_plan(
    config: TrainConfig, corpus: Corpus, model: nn.Module, member: Member, choose: Choose | None
) -> tuple[sw.Plan, Foresight | None]:
    """The plan that the configuration names; for auto that of the run that goes on, or a new one,
    and what is said of it.
    """
    if not config.plan.is_auto:
        return build_plan(config.plan, model, member.world), None
    kept = talk().first("the plan of the run", lambda: read_choice(config, member.world))
    if kept is not None:
        if member.rank == 0:
            say(f"the plan stays: {kept[0].title}, as {PLAN} of the run has it")
        plan, foresight = kept
    elif choose is None:
        raise UserError("plan.strategy is auto: `shardwise train` chooses the plan then")
    else:
        plan, foresight = choose(config, corpus, member)
    return plan.resolve(model), foresight


def _assemble(
    config: TrainConfig, plan: sw.Plan, model: LM
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under the plan with its first weights, and its optimizer."""
    spreads = model.spreads()
    sharded = sw.shard(model, plan)
    draw_weights(sharded, spreads, config.run.seed)
    return sharded, build_optimizer(config.optim, sharded)


def rehearse(
    config: TrainConfig, plan: sw.Plan, corpus: Corpus, member: Member
) -> Callable[[], None]:
    """What a run does in one step, of a model of its own."""
    sharded, optimizer = _assemble(config, plan, build_model(config, member))
    sizes, tokens = _sizes(config, plan.mesh, member), config.workload.tokens_on(plan.mesh)
    take_step = sw.capture(_take_step) if config.run.capture else _take_step

    def step() -> None:
        batches = _draw_batches(config, sizes, corpus, 1, member)
        loss_sum, _, _ = take_step(sharded, optimizer, batches, tokens, config.optim)
        if config.run.log_every == 1:
            _agree(loss_sum, False)

    return step


def build_model(config: TrainConfig, member: Member) -> LM:
    """The model on the meta device: no rank holds more of it than its shards. What is drawn later,
    for dropout, is another on each rank.
    """
    with torch.device("meta"):
        size, model = config.model.resolve(), config.model
        built = LM(size, config.data.seq, model.checkpoint, model.dropout)
    for module in built.modules():
        if isinstance(module, Rope):
            module.reset_parameters(member.device)
    for block in built.layers if config.run.compile else ():
        block.compile()
    drawn = int(np.random.default_rng([config.run.seed, member.rank]).integers(1 << 32))
    torch.manual_seed(drawn)
    random.seed(drawn)
    np.random.seed(drawn)
    return built


_BLOCK = 1 << 20  # elements of a parameter that are drawn from one seed


@torch.no_grad()
def draw_weights(sharded: nn.Module, spreads: dict[str, float | None], seed: int) -> None:
    """Memory for this rank's rows, and their first values: drawn from seeds of the parameter's name
    and of blocks of its rows, so that they are the same under every plan and on any number of
    ranks.
    """
    sw.materialize(sharded, reset=False)
    for name, parameter in sharded.named_parameters():
        spread, local = spreads[name], local_of(parameter)
        if spread is None:
            local.fill_(1)
            continue
        for part in place_of(parameter).parts(local):
            _draw_rows(part.tensor, part.box.offset[0], parameter.shape, spread, (seed, name))


def _draw_rows(
    rows: Tensor, first: int, shape: torch.Size, spread: float, whose: tuple[int, str]
) -> None:
    """Fill `rows`, which begin with row `first` of a parameter of `shape`."""
    each = max(1, _BLOCK // max(1, shape[1:].numel()))
    generator = torch.Generator(rows.device)
    for block in range(first // each, -(-(first + len(rows)) // each)):
        start = block * each
        text = f"{whose[0]}/{whose[1]}/{block}".encode()
        generator.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "little"))
        drawn = torch.empty(
            (min(each, shape[0] - start), *shape[1:]), dtype=rows.dtype, device=rows.device
        ).normal_(0, spread, generator=generator)
        low, high = max(first, start), min(first + len(rows), start + len(drawn))
        rows[low - first : high - first] = drawn[low - start : high - start]


def build_optimizer(optim: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    return sw.local(
        torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
    )


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


@dataclass
class _Training:
    """A run under way, on one rank."""

    config: TrainConfig
    mesh: tuple[int, int]
    corpus: Corpus
    member: Member
    model: nn.Module
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    progress: Progress
    comparison: Comparison

    def run(self, profiler: StepProfiler, notice: StopNotice) -> str:
        """Train all steps that are left. Every `log_every` of them, and the last, give a row of
        metrics; every `save_every`, and the last, a checkpoint. If a rank was told to end, save and
        say so.
        """
        run, optim, progress = self.config.run, self.config.optim, self.progress
        step_tokens = self.config.workload.tokens_on(self.mesh)
        take_step = sw.capture(_take_step) if run.capture else _take_step
        sizes = _sizes(self.config, self.mesh, self.member)
        logged, start, waited = progress.step, time.perf_counter(), sw.exposed_seconds(self.model)
        with open_log(Path(run.out), run.steps, self.member.rank, progress.step) as log:
            for step in range(progress.step + 1, run.steps + 1):
                lr = lr_at(step, run.steps, optim)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                start += profiler.before(step)
                batches = _draw_batches(self.config, sizes, self.corpus, step, self.member)
                loss_sum, norm, took = take_step(
                    self.model, self.optimizer, batches, step_tokens, optim
                )
                self._count(step, step_tokens, took)
                start += profiler.after(step)
                last = step == run.steps
                logs = last or step % run.log_every == 0
                saves = run.save_every > 0 and (last or step % run.save_every == 0)
                if not (logs or saves or step % _LOOK_EVERY == 0):
                    continue
                # On cuda this also waits for the step to end.
                loss, stops = _agree(loss_sum, notice.asked)
                loss /= step_tokens
                now, waited_now = time.perf_counter(), sw.exposed_seconds(self.model)
                elapsed = now - start
                metrics = StepMetrics(
                    step=step,
                    loss=loss,
                    grad_norm=norm.item(),
                    skipped=progress.skipped,
                    lr=lr,
                    tokens=progress.tokens,
                    tokens_per_s=(step - logged) * step_tokens / elapsed,
                    step_s=elapsed / (step - logged),
                    memory_bytes=memory_in_use(self.member.device),
                    exposed_share=_share(waited, waited_now, elapsed),
                )
                if logs:
                    log(metrics)
                    self.comparison.add(metrics, logged + 1)
                    logged, start, waited = step, now, waited_now
                if took:
                    self._check_finite(metrics)
                stops = stops and not last
                if saves or stops:
                    start += self.checkpoints.save(progress, wait=stops)
                if stops:
                    break
        path = self.checkpoints.finish()
        done = f"step {progress.step} of {run.steps}"
        if progress.step < run.steps:
            return f"stopped by SIGTERM after {done}, saved as {path}; --resume goes on there"
        return ""

    def _count(self, step: int, tokens: int, took: bool) -> None:
        """Note a step; an error, on all ranks, if too many were left out."""
        progress, limit = self.progress, self.config.optim.nonfinite_limit
        progress.step = step
        progress.tokens += tokens
        progress.skipped += not took
        progress.skipped_in_a_row = 0 if took else progress.skipped_in_a_row + 1
        if limit and progress.skipped_in_a_row >= limit:
            raise UserError(
                f"the gradient norm was not finite in {limit} steps in a row, up to step {step} "
                "(optim.nonfinite_limit): lower optim.lr, raise optim.warmup, or compute in a "
                f"wider dtype. {self.checkpoints.advise()}"
            )

    def _check_finite(self, metrics: StepMetrics) -> None:
        """An error, on all ranks, before what has diverged is saved."""
        if math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm):
            return
        raise UserError(
            f"the loss is {metrics.loss} and the gradient norm {metrics.grad_norm} at step "
            f"{metrics.step}: training has diverged; lower optim.lr, raise optim.warmup, compute "
            "in a wider dtype, or leave such steps out with optim.nonfinite = 'skip'. "
            f"{self.checkpoints.advise()}"
        )


def _sizes(config: TrainConfig, mesh: tuple[int, int], member: Member) -> list[int]:
    """Sequences of each micro-batch of this rank."""
    workload = config.workload
    row = row_of(member.rank, mesh, len(workload.sizes or ((),)))
    return [workload.size_of(row, micro) for micro in range(config.run.micro_batches)]


def _agree(loss_sum: Tensor, asked: bool) -> tuple[float, bool]:
    """The loss of all ranks, and in the same message whether any of them was told to end."""
    both = torch.stack((loss_sum, loss_sum.new_tensor(float(asked))))
    dist.all_reduce(both)
    loss, told = both.tolist()
    return loss, told > 0


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
