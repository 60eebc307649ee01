"""shardwise.mlx on two real ranks of MLX's ring, against MLX's own averaged gradients."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest

from shardwise.planning.groups import LAYOUTS
from tests.ranks import Ranks

# Only a processor that MLX was not built for keeps these from running: its first sum dies.
_TRIED = subprocess.run(
    [sys.executable, "-c", "import mlx.core as mx; mx.eval(mx.ones(64) + 1)"],
    capture_output=True,
    text=True,
)
pytestmark = pytest.mark.skipif(
    _TRIED.returncode < 0,
    reason=f"this processor lacks what MLX needs: it ended by signal {-_TRIED.returncode}",
)


def _model(bf16: bool = False) -> Any:
    import mlx.core as mx
    import mlx.nn as nn

    class Uneven(nn.Module):
        """Shapes that two ranks do not divide, a number, and frozen weights."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)]
            self.scale, self.row = mx.array(0.7), mx.ones((1, 3))
            self.layers[2].freeze()

        def __call__(self, x: mx.array) -> mx.array:
            for layer in self.layers:
                x = mx.tanh(layer(x))
            return x * self.scale * self.row

    mx.random.seed(0)
    model = Uneven()
    if bf16:
        model.set_dtype(mx.bfloat16)
    return model


def _inputs(step: int, rank: int) -> Any:
    import mlx.core as mx

    return mx.random.normal((6, 5), key=mx.random.key(100 * step + rank))


def _train(kind: str, layout: str, max_norm: float | None, bf16: bool) -> dict[str, Any]:
    """Steps of both kinds from the same weights: how far apart they end, and what they keep."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten

    import shardwise.mlx as swm
    from shardwise.lab.grouped.ring import join_ring

    group = join_ring()
    made = {
        "adamw": lambda: optim.AdamW(1e-2),
        "sgd": lambda: optim.SGD(optim.exponential_decay(0.1, 0.9), momentum=0.9),
    }[kind]
    ours, theirs = _model(bf16), _model(bf16)
    own, whole = made(), made()
    worst, losses = 0.0, []

    def loss(model: Any, x: Any) -> Any:
        return (model(x.astype(model.scale.dtype)) - 0.5).square().mean()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(6):
            x = _inputs(step % 2, group.rank())
            value, gradients = nn.value_and_grad(ours, lambda x: loss(ours, x))(x)
            norm = swm.sharded_step(
                ours, gradients, own, max_norm=max_norm, group_bytes=96, layout=layout, group=group
            )
            mx.eval(ours.parameters(), own.state)
            losses.append(float(value))
            _, gradients = nn.value_and_grad(theirs, lambda x: loss(theirs, x))(x)
            gradients = nn.average_gradients(gradients, group)
            if max_norm is not None:
                gradients, expected = optim.clip_grad_norm(gradients, max_norm)
                worst = max(worst, abs(float(norm) / float(expected) - 1))
            whole.update(theirs, gradients)
            mx.eval(theirs.parameters(), whole.state)
    pairs = zip(tree_flatten(ours.parameters()), tree_flatten(theirs.parameters()), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other and a.dtype == b.dtype and a.shape == b.shape
        difference = (a.astype(mx.float32) - b.astype(mx.float32)).abs().max()
        worst = max(worst, float(difference))

    def held(optimizer: Any) -> int:
        return sum(a.size for name, a in tree_flatten(optimizer.state) if name.count(".") > 0)

    warned = [str(each.message) for each in said if "sum_scatter" in str(each.message)]
    return {
        "worst": worst, "losses": losses, "warned": len(warned),
        "held": held(own), "whole": held(whole),
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ("adamw", "sgd"))
def test_converges_as_averaged_gradients_do(two: Ranks, kind: str, layout: str) -> None:
    for max_norm in (None, 0.05):
        first, second = two.run(_train, kind, layout, max_norm, False)
        assert max(first["worst"], second["worst"]) < 1e-5
        assert first["losses"][-1] < first["losses"][0]
        assert first["held"] + second["held"] == first["whole"]
        assert (first["warned"], second["warned"]) == (1, 0)  # once, by the first rank


def test_bfloat16(two: Ranks) -> None:
    for found in two.run(_train, "sgd", "rows", 0.05, True):
        assert found["worst"] < 0.02


def _misuse() -> list[str]:
    import mlx.core as mx
    import mlx.optimizers as optim

    import shardwise.mlx as swm
    from shardwise.errors import UserError
    from shardwise.lab.grouped.ring import join_ring

    group, model = join_ring(), _model()
    gradients = model.trainable_parameters()
    initialised = optim.Adam(1e-2)
    initialised.init(gradients)
    said = []
    for given, optimizer, settings in (
        (gradients, optim.Adafactor(), {}),
        (gradients, initialised, {}),
        ({"strange": mx.ones(2)}, optim.Adam(1e-2), {}),
        ({"row": mx.ones(2)}, optim.Adam(1e-2), {}),
        (gradients, optim.Adam(1e-2), {"layout": "row"}),
        (gradients, optim.Adam(1e-2), {"max_norm": 0.0}),
    ):
        try:
            swm.sharded_step(model, given, optimizer, group=group, **settings)
        except UserError as error:
            said.append(str(error))
    return said


def test_misuse_is_named(two: Ranks) -> None:
    expected = (
        "Adafactor may need whole arrays", "do not call its init", "'strange', which is no",
        "has shape (2,)", "did you mean 'rows'", "max_norm is 0.0",
    )  # fmt: skip
    for said in two.run(_misuse):
        for part, message in zip(expected, said, strict=True):
            assert part in message


def test_without_mlx_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['mlx'] = None; import shardwise.mlx"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: shardwise.mlx needs MLX" in ended.stderr
    assert "pip install 'shardwise[mlx]'" in ended.stderr


def test_mlx_needs_no_torch() -> None:
    code = "import shardwise.mlx, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
