"""Models and functions that users name: `my_file.py:build`, `package.module:function`,
`hf:CONFIG.json`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.checked import read_text
from shardwise.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import nn

    from shardwise.description.example import Call

HUGGING_FACE = "hf:"
# Which of transformers' classes to take for a config that names none, by what it is listed in.
_KINDS = (
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
_KINDS_OF_TWO = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_MAPPING",
)


def is_foreign(model: str) -> bool:
    """It names somebody's code or config, not a preset."""
    return ":" in model


def find_function(text: str, option: str, beside: str = "") -> Callable[..., Any]:
    """What `FILE.py:NAME` or `package.module:NAME` names; NAME alone is beside the model's."""
    place, colon, name = text.rpartition(":")
    if not colon and beside and not beside.startswith(HUGGING_FACE):
        place = beside.rpartition(":")[0]
    if not place or not name:
        raise UserError(f"{option} {text}: expected FILE.py:NAME or package.module:NAME")
    module = _load_file(place, option) if place.endswith(".py") else _load_module(place, option)
    found = getattr(module, name, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        said = f"{place} has no function {name!r}{nearest(name, names)}"
        raise UserError(f"{option} {text}: {said if found is None else f'{name} is no function'}")
    return found


@cache
def _load_file(place: str, option: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise UserError(f"{option} {place}: there is no such file")
    name = f"shardwise_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader = spec.loader
    with _importing(str(path.resolve().parent), f"{option} {place}"):
        loader.exec_module(module)
    return module


@cache
def _load_module(place: str, option: str) -> ModuleType:
    with _importing(str(Path.cwd()), f"{option} {place}"):
        return importlib.import_module(place)
    raise AssertionError


@contextmanager
def _importing(folder: str, what: str) -> Any:
    """With `folder` to import from; what goes wrong is told in one line."""
    from shardwise.description.tracing.real_run import tell

    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        yield
    except SystemExit as error:
        raise UserError(
            f"{what} ends the program when it is imported (exit {error.code}): put what runs under "
            'if __name__ == "__main__"'
        ) from error
    except Exception as error:
        raise UserError(f"{what} cannot be imported: {tell(error)}") from error


def build_model(text: str) -> nn.Module:
    """The model that `text` names, on the meta device; on the host if it cannot be built there."""
    import torch
    from torch import nn

    from shardwise.description.tracing.real_run import tell

    if text.startswith(HUGGING_FACE):
        return build_from_config(text)
    function = find_function(text, "--model")

    def build() -> nn.Module:
        made = _call(function)
        if not isinstance(made, nn.Module):
            raise UserError(f"--model {text} gave a {type(made).__name__}, expected an nn.Module")
        return made

    try:
        with torch.device("meta"):
            return build()
    except UserError:
        raise
    except Exception:
        try:
            return build()
        except Exception as error:
            raise UserError(
                f"--model {text} failed, on the meta device and on the host: {tell(error)}. It is "
                "called without arguments"
            ) from error


def build_on_host(text: str) -> nn.Module:
    """The same model with values."""
    if text.startswith(HUGGING_FACE):
        return build_from_config(text, "cpu")
    built: nn.Module = _call(find_function(text, "--model"))
    return built


def _call(function: Callable[..., Any]) -> Any:
    """What it gives; a file may also hold the module itself, which is not called for one."""
    from torch import nn

    from shardwise.description.tracing.real_run import staying

    with staying():
        return function if isinstance(function, nn.Module) else function()


def _as_number(found: dict[str, Any]) -> Any:
    """Transformers writes what JSON has no number for as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if [*found] == ["__float__"] else found


def _load_config(text: str) -> Any:
    """From a config.json, or the defaults of a model type."""
    name = text.removeprefix(HUGGING_FACE)
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"--model {text} needs transformers: pip install transformers") from error
    kinds = transformers.CONFIG_MAPPING
    values: dict[str, Any] = {}
    if name.endswith(".json") or Path(name).exists():
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        try:
            values = json.loads(read_text(str(path), "config"), object_hook=_as_number)
        except ValueError as error:
            raise UserError(f"--model {text} is not JSON: {error}") from error
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise UserError(f"--model {text}: a config of transformers has a model_type")
        name = values.pop("model_type")
    if name not in kinds:
        raise UserError(
            f"--model {text}: transformers {transformers.__version__} has no model type {name!r}"
            + nearest(name, kinds.keys()).partition(" Valid")[0]
        )
    try:
        config = kinds[name].from_dict(values)
    except Exception as error:
        raise UserError(f"--model {text}: {type(error).__name__}: {error}") from error
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
    return config


def build_from_config(text: str, device: str = "meta") -> nn.Module:
    """A model of Transformers without weights: of the class that the config names, else of a
    language model's, an image classifier's, or the bare one.
    """
    import torch

    from shardwise.description.tracing.real_run import tell

    config = _load_config(text)
    transformers = importlib.import_module("transformers")
    kinds = _KINDS_OF_TWO if getattr(config, "is_encoder_decoder", False) else _KINDS
    named = [getattr(transformers, name, None) for name in _architectures(config, text)]
    listed = (getattr(transformers, kind, {}) for kind in kinds)
    found = [*filter(None, named), *(kind[type(config)] for kind in listed if type(config) in kind)]
    if not found:
        raise UserError(f"--model {text}: transformers has no model for {type(config).__name__}")
    kind = found[0][0] if isinstance(found[0], tuple) else found[0]
    try:
        with torch.device(device):
            built: nn.Module = kind(config)
            return built
    except Exception as error:
        raise UserError(f"--model {text} cannot be built: {tell(error)}") from error


def _architectures(config: Any, text: str) -> list[str]:
    """The names of classes in a config."""
    names = config.architectures or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"--model {text}: architectures is {names!r:.60}, expected a list of names")
    return list(names)


def writes_about_images(model: Any) -> bool:
    """A model of Transformers that encodes an image and decodes tokens."""
    config = getattr(model, "config", None)
    sees = getattr(model, "main_input_name", None) == "pixel_values"
    return sees and bool(getattr(config, "is_encoder_decoder", False))


def longest_sequence(model: nn.Module) -> int | None:
    """What a config of Transformers allows, where it says so."""
    config = getattr(model, "config", None)
    writer = getattr(config, "decoder", None) if writes_about_images(model) else config
    most = getattr(writer, "max_position_embeddings", None)
    return most if type(most) is int and most > 0 else None


_OF_TOKENS = ("input_ids", "decoder_input_ids")
_WRITES_TOKENS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")


def count_values(model: nn.Module, name: str) -> int:
    """How many values the integers of an argument have: a model of Transformers knows its tokens. 2
    where nothing is known: 0 and 1 are valid tokens and classes of nearly all models.
    """
    count: Any = getattr(getattr(model, "config", None), "vocab_size", None)
    labels = name == "labels" and type(model).__name__.endswith(_WRITES_TOKENS)
    known = type(count) is int and count > 1 and (name in _OF_TOKENS or labels)
    return int(count) if known else 2


def _frames(model: nn.Module) -> int | None:
    """How many frames an encoder of spectrograms takes, where it takes one number of them."""
    positions = getattr(getattr(model, "config", None), "max_source_positions", None)
    encoder = getattr(getattr(model, "model", model), "encoder", None)
    strides = [getattr(encoder, name, None) for name in ("conv1", "conv2")]
    if positions is None or None in strides:
        return None
    return int(positions) * math.prod(conv.stride[0] for conv in strides if conv is not None)


def inputs_of_config(model: nn.Module, samples: int, sequence: int) -> Call | None:
    """What a model of Transformers is trained with, on the meta device: tokens, images or a
    spectrogram as Whisper's, and labels as its kind has them. None for another model.
    """
    import torch

    from shardwise.description.example import Call

    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or main is None or not hasattr(config, "model_type"):
        return None

    def make(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if main == "input_features" and hasattr(config, "max_target_positions"):
        bins, frames = getattr(config, "num_mel_bins", None), _frames(model)
        if bins and frames:
            labels = make(samples, min(sequence, config.max_target_positions))
            features = make(samples, bins, frames, dtype=torch.float32)
            return Call((), {main: features, "labels": labels})
    if main not in ("input_ids", "pixel_values"):
        more = ",labels:int64[8,...]" if "labels" in signature(model.forward).parameters else ""
        raise UserError(
            f"{type(model).__name__} takes {main!r}, whose sizes neither its config nor a number "
            f"of tokens says: give example inputs, as --inputs '{main}:float32[8,...]{more}' or "
            "--inputs FILE.py:FUNCTION (in a program inputs=)"
        )
    given = {main: make(samples, sequence)}
    if main == "pixel_values":
        # CLIP's kind has a config for each side, an encoder and a decoder have one each.
        seen = getattr(config, "vision_config", getattr(config, "encoder", config))
        side = getattr(seen, "image_size", 224)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(seen, "num_channels", 3)
        given[main] = make(samples, channels, height, width, dtype=torch.float32)
    kind = type(model).__name__
    if writes_about_images(model):
        given["labels"] = make(samples, sequence)
    elif kind.endswith("ForQuestionAnswering"):
        given |= {name: make(samples) for name in ("start_positions", "end_positions")}
    elif "Classification" in kind and "Token" not in kind:
        given["labels"] = make(samples)
    elif (main == "input_ids" and "For" in kind) or kind.endswith("LMHeadModel"):
        given["labels"] = make(samples, sequence)
    return Call((), given)
