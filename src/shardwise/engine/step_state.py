"""What a recorded step depends on beside its inputs, and what it changes in Python.

A replay runs no Python, so everything that Python would have looked at must be as it was when the
graph was recorded (`look`), and what a step leaves on the parameters is put there (`Left`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from shardwise.engine.collectives import DONE
from shardwise.engine.engine import Engine
from shardwise.engine.gradients import Gradients
from shardwise.engine.torch_private import buffers_of, local_of
from shardwise.schedule.moments import Pass
from shardwise.schedule.unit import Reduces, State, StepSums

Look = tuple[tuple[str, Any], ...]
# Of a model of many small parts these are asked some thousand times before each replay.
_TRAINING, _TRAINABLE, _GRADIENT = map(attrgetter, ("training", "requires_grad", "grad"))


class Watched:
    """The engines and optimizers that a step runs."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        # Of each engine: what its structure was when its modules were listed, and the modules.
        self._modules: dict[int, tuple[Any, list[nn.Module]]] = {}

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Whatever a step may hang a gradient on."""
        engines = (v for e in self.engines for u in e.units for v in u.parameters.visible)
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        others = (p for group in groups for p in group["params"])
        return list({id(p): p for p in chain(engines, others)}.values())

    def settle(self) -> None:
        """Let go of what only an evaluation left gathered."""
        for engine in self.engines:
            for unit in engine.units:
                stays = unit.options.keep_after_backward or not engine.policy.frees_after_step
                if unit.prepared and unit.state is not State.FREE and not (unit.aliased or stays):
                    unit.let_go()

    @property
    def at_rest(self) -> bool:
        """No step is under way, and every parameter is where its engine put it."""
        return all(
            engine.forward_root is None
            and not engine.schedule.current.in_backward
            and not engine.awaits_backward
            and all(u.prepared and u.stands and not u.sums.wait_for_more for u in engine.units)
            for engine in self.engines
        )

    def look(self, rates: Sequence[dict[str, Any]]) -> Look:
        """Everything that a replay takes for granted, by what it is called in a message. `rates`:
        groups whose learning rate is on the device, so that it may be any.
        """
        return (
            ("the modes of torch", _modes()),
            ("the modules, their modes or buffers", tuple(map(self._look_at_model, self.engines))),
            ("the units or their parameters", tuple(map(_look_at_units, self.engines))),
            ("the optimizer's settings", tuple(_settings(self.optimizers, rates))),
            ("the optimizer's state", tuple(_ids_of_state(self.optimizers))),
        )

    def _look_at_model(self, engine: Engine) -> tuple[Any, ...]:
        """Which modules there are, whether each trains, and where their buffers are."""
        structure = engine.structure
        seen, modules = self._modules.get(id(engine), (None, []))
        if seen is not structure.seen:
            model = structure.model()
            assert model is not None
            modules = list(model.modules())
            self._modules[id(engine)] = structure.seen, modules
        each = map(dict.values, map(buffers_of, modules))
        buffers = [b for b in chain.from_iterable(each) if b is not None]
        return (
            structure.look() == structure.seen,
            tuple(map(_TRAINING, modules)),
            tuple([buffer.data_ptr() for buffer in buffers]),
        )

    def keep(self) -> list[Any]:
        """What `look` knows by its address: held, no other can take that."""
        return [
            *(u.parameters.master for e in self.engines for u in e.units),
            *(u.gradients for e in self.engines for u in e.units),
            *(s for o in self.optimizers for state in o.state.values() for s in state.values()),
            *(value for o in self.optimizers for g in o.param_groups for value in g.values()),
        ]


def difference(one: Look, other: Look) -> str:
    """What is not the same in two looks."""
    return next((name for (name, a), (_, b) in zip(one, other, strict=True) if a != b), "nothing")


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _look_at_units(engine: Engine) -> tuple[Any, ...]:
    looks: list[Any] = [engine.relayouts, engine.schedule.policy]
    for unit in engine.units:
        p = unit.parameters
        looks += [id(p.master), unit.state, id(unit.gradients)]
        looks += [p.full.data_ptr(), tuple(map(_TRAINABLE, p.visible))]
        looks += [_by_value(value) for value in vars(unit.options).values()]
    return tuple(looks)


def _settings(
    optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[dict[str, Any]]
) -> Iterator[Any]:
    free = {id(group) for group in rates}
    for optimizer in optimizers:
        yield id(optimizer)
        for group in optimizer.param_groups:
            yield tuple(map(id, group["params"]))
            for key, value in group.items():
                if key != "params" and not (key == "lr" and id(group) in free):
                    yield key, _by_value(value)


def _by_value(value: Any) -> Any:
    """Numbers and words as they are, of all else which it is."""
    if isinstance(value, tuple):
        return tuple(map(_by_value, value))
    return value if isinstance(value, _VALUES) else id(value)


_VALUES = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)


def _ids_of_state(optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    states = chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
    return list(map(id, chain.from_iterable(map(dict.values, states))))


def host_state(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """What an optimizer counts on the host, where a replay does not come."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number or (isinstance(value, torch.Tensor) and local_of(value).is_cpu):
                    return f"{type(optimizer).__name__} keeps {key!r} of its state on the host"
    return None


class Left:
    """The gradients as they are now: on the parameters, and in the engines."""

    def __init__(self, watched: Watched) -> None:
        parameters = watched.parameters
        self.hung = [(parameter, parameter.grad) for parameter in parameters]
        self._parameters, self._grads = parameters, [grad for _, grad in self.hung]
        gradients = (u.gradients for e in watched.engines for u in e.units)
        self._engines = [(g, g.left()) for g in gradients if g is not None]

    def put_back(self) -> None:
        if all(map(is_, map(_GRADIENT, self._parameters), self._grads)):
            return
        for parameter, grad in self.hung:
            parameter.grad = grad
        for gradients, left in self._engines:
            gradients.put_back(left)


Hung = list[tuple[torch.Tensor, torch.Tensor | weakref.ref[torch.Tensor] | None]]


class Before:
    """Engines before a step that may fail while it is recorded: nothing has run on the device, so
    what Python has noted since is undone, and the memory that it took given back.

    The gradients that the last step left are copied to the host meanwhile: a step that begins by
    letting go of them has their memory for its own.
    """

    def __init__(self, watched: Watched) -> None:
        made = {
            id(visible): (unit.gradients, i)
            for engine in watched.engines
            for unit in engine.units
            if unit.gradients is not None
            for i, visible in enumerate(unit.gradients.visible)
        }
        # Each parameter with its gradient; with a reference that does not hold it, and whose it is,
        # where it can be made again.
        self.hung: Hung = []
        self._made: dict[int, tuple[Gradients, int]] = {}
        for parameter in watched.parameters:
            grad, of = parameter.grad, made.get(id(parameter))
            if grad is not None and of is not None and of[0].is_own(of[1]):
                self._made[id(parameter)] = of
                self.hung.append((parameter, weakref.ref(grad)))
            else:
                self.hung.append((parameter, grad))
        gradients = (u.gradients for e in watched.engines for u in e.units)
        self._aside = [(g, g.set_aside()) for g in gradients if g is not None]
        self._optimizers = []
        self._engines = [(engine, _orders(engine), engine.backwards) for engine in watched.engines]
        self._full = {
            unit for e in watched.engines for unit in e.units if unit.state is State.READY
        }
        for optimizer in watched.optimizers:
            states = [(p, state, dict(state)) for p, state in optimizer.state.items()]
            groups = [dict(group) for group in optimizer.param_groups]
            self._optimizers.append((optimizer, states, groups))

    def needs(self, after: Left) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """What a replay has to find: a gradient that was missing must be missing again, and one
        that was added to must be the same. One that the step took off, or replaced, may be any.
        """
        ends = {id(parameter): grad for parameter, grad in after.hung}
        needs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for parameter, grad in self.hung:
            was = grad() if isinstance(grad, weakref.ref) else grad
            if grad is None or (was is not None and ends.get(id(parameter)) is was):
                needs.append((parameter, was))
        return needs

    def restore(self) -> None:
        for engine, orders, backwards in self._engines:
            schedule, executor = engine.schedule, engine.executor
            executor.forget()
            schedule.reduces = Reduces(executor, schedule.policy.depth(executor.ordered))
            schedule.micro, engine.backwards = None, backwards
            schedule.forward_order.expected, schedule.forward_order.current = orders[0]
            schedule.backward_order.expected, schedule.backward_order.current = orders[1]
            for unit in engine.units:
                unit.arriving = DONE, None
                unit.sums = StepSums()
                unit.hide()
                unit.forget_piece()
                if not unit.aliased and unit not in self._full:
                    unit.parameters.buffer.release()
                    unit.state = State.FREE
                if unit.gradients is not None and unit.gradients.slot is not None:
                    unit.gradients.slot.buffer.release()
                for shown in unit.parameters.shown:
                    shown.grad = None
            if executor.arena is not None:
                executor.arena.forget()
            schedule.current = Pass(engine.units)
            engine.forward_root = engine.hold = engine.interrupted = None
            engine.failed = False
        self._hang_again()
        for optimizer, states, groups in self._optimizers:
            optimizer.state.clear()
            for parameter, state, content in states:
                state.clear()
                state.update(content)
                optimizer.state[parameter] = state
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)

    def _hang_again(self) -> None:
        for gradients, aside in self._aside:
            gradients.take_back(aside)
        for parameter, grad in self.hung:
            if isinstance(grad, weakref.ref):
                gradients, i = self._made[id(parameter)]
                there = grad()
                parameter.grad = gradients.summed[i] if there is None else there
            else:
                parameter.grad = grad


def _orders(engine: Engine) -> list[tuple[list[Any], list[Any]]]:
    orders = engine.schedule.forward_order, engine.schedule.backward_order
    return [(list(order.expected), list(order.current)) for order in orders]
