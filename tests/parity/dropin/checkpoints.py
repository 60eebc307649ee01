"""torch.distributed.checkpoint: saved under one engine, loaded under another.

The case's own engine loads; `saver` is the engine that trained and saved.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.parity.dropin.catalog import ENGINES, Api, case
from tests.parity.dropin.common import (
    assert_same_parameters,
    assert_trains_alike,
    batch,
    grid,
    line,
    optimizers_of,
    twins,
)
from tests.parity.dropin.models import Stack, wrap

ODD = (7, 13, 3)
MESHES = {"line": line, "grid": grid}


def _data(step: int, index: int) -> torch.Tensor:
    return batch(step, index, ODD[0])


@contextmanager
def _folder() -> Iterator[str]:
    """One temporary folder for all ranks, gone afterwards."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name[0], ignore_errors=True)


def _other(api: Api, style: str, on: Any) -> Any:
    torch.manual_seed(99)
    return wrap(api, Stack(*ODD), style, mesh=on)


@case(2, saver=ENGINES, style=("root", "blocks"))
def model_alone(api: Api, saver: str, style: str) -> None:
    """Loaded in place, through the state dict's own tensors, into another wrapping style."""
    alone, model = twins(Stack, *ODD)
    wrap(Api(saver), model, "blocks", mesh=line())
    assert_trains_alike(model, alone, steps=1, data=_data)
    fresh = _other(api, style, line())
    with _folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        dcp.load({"model": fresh.state_dict()}, checkpoint_id=folder)
    assert_same_parameters(fresh, alone)
    assert_trains_alike(fresh, alone, data=_data)


@case(2, saver=ENGINES, optimizer=("adamw", "momentum"))
def model_and_optimizer(api: Api, saver: str, optimizer: str) -> None:
    """Training goes on under the other engine as if nothing had happened."""
    alone, model = twins(Stack, *ODD)
    wrap(Api(saver), model, mesh=line())
    opts = optimizers_of(optimizer, model, alone)
    assert_trains_alike(model, alone, steps=2, optimizer=opts, data=_data)
    fresh = _other(api, "blocks", line())
    opt = optimizers_of(optimizer, fresh)[0]
    with _folder() as folder:
        values, state = get_state_dict(model, opts[0])
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
        values, state = get_state_dict(fresh, opt)
        dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(fresh, opt, model_state_dict=values, optim_state_dict=state)
    assert_same_parameters(fresh, alone)
    assert_trains_alike(fresh, alone, steps=2, optimizer=[opt, opts[1]], data=_data)


@case(2)
def saved_while_training_goes_on(api: Api) -> None:
    """An asynchronous save has the values of its call, of parameters and of the optimizer."""
    alone, model = twins(Stack, *ODD)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    assert_trains_alike(model, alone, steps=2, optimizer=opts, data=_data)
    fresh = _other(api, "blocks", line())
    opt = optimizers_of("adamw", fresh)[0]
    with _folder() as folder:
        values, state = get_state_dict(model, opts[0])
        both = {"model": values, "optimizer": state}
        # Its thread sends while training does.
        saving = dcp.async_save(both, checkpoint_id=folder, process_group=dist.new_group())
        for step in range(2):
            model(_data(step, dist.get_rank())).square().mean().backward()
            opts[0].step()
            opts[0].zero_grad()
        saving.result()
        values, state = get_state_dict(fresh, opt)
        dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(fresh, opt, model_state_dict=values, optim_state_dict=state)
    assert_same_parameters(fresh, alone)
    assert_trains_alike(fresh, alone, steps=2, optimizer=[opt, opts[1]], data=_data)


@case(4, saver=ENGINES, shapes=(("line", "grid"), ("grid", "line")))
def another_mesh(api: Api, saver: str, shapes: tuple[str, str]) -> None:
    """Saved on one mesh, loaded on another."""
    alone, model = twins(Stack, *ODD)
    wrap(Api(saver), model, mesh=MESHES[shapes[0]]())
    opts = optimizers_of("adamw", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts, data=_data)
    fresh = _other(api, "blocks", MESHES[shapes[1]]())
    opt = optimizers_of("adamw", fresh)[0]
    with _folder() as folder:
        values, state = get_state_dict(model, opts[0])
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
        values, state = get_state_dict(fresh, opt)
        dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(fresh, opt, model_state_dict=values, optim_state_dict=state)
    assert_trains_alike(fresh, alone, steps=1, optimizer=[opt, opts[1]], data=_data)
