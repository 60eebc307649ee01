"""What a program finds around it: a torch built for a device that is not there, ranks without a
group, a newer torch, an interpreter that ends; and what an editor finds.
"""

import ctypes
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
import time
import tomllib
import typing
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine import process, torch_private
from shardwise.engine.mesh import default_device
from shardwise.fsdp2.meshes import default_mesh
from shardwise.planning.settings import Settings

ROOT = Path(__file__).parents[2]

# torch's own module, started before any program's: this build was made for CUDA, and no driver is
# found. (What PyPI's default torch answers on a machine without a GPU.)
NO_DRIVER = """
import torch

def fail(*args, **kwargs):
    raise RuntimeError("Found no NVIDIA driver on your system")

torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
torch.cuda._lazy_init = torch.cuda.current_device = torch.cuda.current_stream = fail
torch.accelerator.current_device_index = fail
"""


@pytest.fixture
def no_driver(tmp_path):
    """An environment in which every program finds itself so."""
    (tmp_path / "sitecustomize.py").write_text(NO_DRIVER)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**outside, "PYTHONPATH": path}


@pytest.mark.slow
def test_a_build_for_cuda_without_a_driver_runs_on_the_host(no_driver, tmp_path):
    """`make demo`'s training and profile, and `shardwise profile` of the README's programs."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    checks = "assert torch.accelerator.current_accelerator().type == 'cuda'\n"
    checks += "assert {p.device.type for p in model.parameters()} == {'cpu'}\n"
    program.write_text("\n".join([*blocks, checks]))
    shardwise = [sys.executable, "-m", "shardwise.cli"]
    small = ["model.layers=1", "model.d_model=32", "model.heads=2", "data.batch=2", "data.seq=16"]
    train = ["train", "--nproc", "2", "--steps", "5", "--profile", "1", "--out", "run"]
    for text in small:
        train += ["--set", text]
    runs = (
        [*shardwise, *train],
        [*shardwise, "profile", "--skip", "1", "--steps", "1", "--", sys.executable, str(program)],
    )
    for command in runs:
        ran = subprocess.run(command, capture_output=True, text=True, env=no_driver, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr


def test_a_model_on_meta_goes_where_something_is(monkeypatch, no_group):
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device().type == "cpu"
    assert default_mesh().device_type == "cpu"
    assert default_device().type == "cpu"  # also with a group, and gloo moves CUDA tensors too


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize("call", [sw.fully_shard, lambda m: sw.shard(m, sw.Plan.of("zero3"))])
def test_ranks_without_a_process_group_are_not_models_of_their_own(
    monkeypatch, no_group, name, call
):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        RuntimeError, match=rf"^2 ranks were started \({name}\).*init_process_group"
    ):
        call(nn.Linear(4, 4))
    assert not dist.is_initialized()


def test_a_plan_for_one_under_torchrun_is_an_error(monkeypatch, no_group):
    """fully_shard makes the group itself there, as torch's does; a Plan says what it is for."""
    for key, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(key, value)
    with pytest.raises(RuntimeError, match="2 ranks were started"):
        sw.shard(nn.Linear(4, 4), sw.Plan.of("ddp", mesh=1))


def test_a_torch_beyond_the_tested_ones_is_told_once(monkeypatch):
    for version, expected in (("2.11.0", 0), ("2.13.1+cpu", 0), ("2.14.0a0", 1), ("3.0", 1)):
        monkeypatch.setattr(torch, "__version__", version)
        torch_private.warn_if_untested.cache_clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch_private.warn_if_untested()
            torch_private.warn_if_untested()
        assert len(said) == expected
        assert not said or "tested with torch 2.11 to 2.13" in str(said[0].message)
    torch_private.warn_if_untested.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="sees threads in /proc")
def test_at_exit_gloo_has_let_go_of_its_tensors(no_group):
    """Its thread waits for the interpreter's lock, to drop a tensor that only it still holds. One
    that waits so when the interpreter ends aborts the process.
    """
    sw.fully_shard(nn.Linear(8, 8))
    assert process.rest_at_exit.cache_info().currsize == 1
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody takes the lock from this thread
    try:
        for _ in range(500):  # until it comes late, as it does one time in a few
            tensor = torch.ones(1000)
            held = weakref.ref(tensor)
            dist.all_reduce(tensor, async_op=True)
            del tensor
            ctypes.PyDLL(None).usleep(2_000)  # keeps the lock
            if held() is not None:
                break
        assert held() is not None
        process._wait_until_idle()
        assert held() is None
    finally:
        sys.setswitchinterval(interval)


def test_the_end_does_not_wait_for_a_rank_that_is_gone(tmp_path, monkeypatch):
    for number, (name, state) in enumerate((("pt_gloo_runloop", "S"), ("python", "R"))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 2")
    monkeypatch.setattr(process, "_TASKS", tmp_path)
    began = time.monotonic()
    process._wait_until_idle()
    assert time.monotonic() - began < 1.0
    (tmp_path / "0" / "stat").write_text("0 (pt_gloo_runloop) R 1 2")
    monkeypatch.setattr(process, "_PATIENCE_S", 0.05)
    began = time.monotonic()
    process._wait_until_idle()
    assert time.monotonic() - began >= 0.05


HEAP = """
import resource, sys, torch
from shardwise.engine import process

def faults():
    for _ in range(3):
        blocks = [torch.ones(2**20) for _ in range(8)]  # 4 MiB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = process.keep_heap()
faults()
before = faults()
print(kept, faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize(
    "setting",
    ["", "MALLOC_TRIM_THRESHOLD_=131072", "GLIBC_TUNABLES=glibc.malloc.trim_threshold=131072"],
)
def test_memory_that_comes_and_goes_is_kept_unless_the_user_says_otherwise(setting):
    env = {name: value for name, value in os.environ.items() if name not in process.SETTINGS}
    env |= dict([setting.split("=", 1)] if setting else [])
    run = subprocess.run([sys.executable, "-c", HEAP], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kept, faults = run.stdout.split()
    if setting:
        assert kept == "False" and int(faults) > 4000  # 24 blocks of 1,024 pages came anew
    else:
        assert kept == "True" and int(faults) < 100


# what an editor finds


def test_public_names_are_listed():
    assert set(sw.__all__) <= set(dir(sw))
    assert sorted(sw.__all__) == sorted(sw._HOMES)
    assert (Path(sw.__file__).parent / "py.typed").exists()


def test_every_setting_has_a_type_and_a_meaning():
    fields = {field.name for field in dataclasses.fields(sw.Plan)} - {
        "name",
        "mesh",
        "cut",
        "device_mesh",
    }
    assert set(typing.get_type_hints(Settings)) == fields
    said = inspect.getdoc(sw.Plan.of)
    assert all(re.search(rf"^.*\b{name}\b.*: ", said, re.MULTILINE) for name in (*fields, "mesh"))
    signature = inspect.signature(sw.fully_shard)
    said = inspect.getdoc(sw.fully_shard)
    assert all(f"{name}: " in said for name in signature.parameters if name != "module")
    shapes = [inspect.signature(each) for each in typing.get_overloads(sw.fully_shard)]
    assert [shape.return_annotation for shape in shapes] == ["FSDPModule", "list[FSDPModule]"]
    for shape in shapes:
        assert list(shape.parameters) == list(signature.parameters)


def test_what_the_package_says_of_itself():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"torch>={torch_private.TESTED[0]}" in project["project"]["dependencies"]
    tested = f"torch {torch_private.TESTED[0]} to {torch_private.TESTED[1]}"
    for name in ("README.md", "pyproject.toml"):
        assert tested in (ROOT / name).read_text(), name
    assert "Typing :: Typed" in project["project"]["classifiers"]
    assert project["project"]["keywords"]
    kept = {
        path.lstrip("/")
        for path in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    }
    assert {"examples", "benchmarks", "Makefile", "constraints.txt"} <= kept
    assert all((ROOT / path).exists() for path in kept)
    module, _, name = project["project"]["scripts"]["shardwise"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
