import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checked import write_key, write_value
from shardwise.errors import UserError
from shardwise.trainer.config import TrainConfig, describe_keys, load_config


def load(*texts, path=None):
    return load_config(path, [tuple(text.split("=", 1)) for text in texts])


def test_the_defaults_round_trip():
    assert TrainConfig.from_toml(TrainConfig().to_toml()) == TrainConfig()


def test_a_changed_configuration_round_trips():
    config = load(
        "model.size=small",
        "model.tied=true",
        "model.kv_heads=4",
        'data.path=a "quoted" \\ path # é.txt',
        "plan.strategy=hsdp",
        "plan.mesh=2x2",
        "plan.bucket_bytes=1048576",
        "plan.units=['layers.*', 'head']",
        "optim.lr=1e-5",
        "run.steps=7",
    )
    assert TrainConfig.from_toml(config.to_toml()) == config
    assert config.plan.settings == {
        "mesh": "2x2",
        "bucket_bytes": 1048576,
        "units": ["layers.*", "head"],
    }
    assert (config.optim.lr, config.run.steps, config.model.tied) == (1e-5, 7, True)
    assert config.data.path == 'a "quoted" \\ path # é.txt'


@given(
    st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.floats() | st.booleans())
)
def test_any_value_round_trips_through_toml(values):
    try:
        text = "".join(f"{write_key(k)} = {write_value(v)}\n" for k, v in values.items())
        text.encode()
    except UnicodeEncodeError:
        return  # a lone surrogate is no text
    assert repr(tomllib.loads(text)) == repr(values)


def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[run]\nsteps = 5\nseed = 3\n[optim]\nlr = 1\n")
    config = load("run.steps=9", path=str(file))
    assert (config.run.steps, config.run.seed, config.optim.lr) == (9, 3, 1.0)


def test_overrides_change_the_preset():
    size = load("model.size=small", "model.layers=3", "model.heads=6").model.resolve()
    assert (size.d_model, size.layers, size.heads, size.kv_heads) == (768, 3, 6, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.stpes=3", r"unknown key run\.stpes: did you mean 'steps'\? Valid: steps, micro"),
        ("rnu.steps=3", r"unknown section \[rnu\]: did you mean 'run'\? Valid: model, data, plan"),
        ("run.zzz=3", r"unknown key run\.zzz\. Valid: steps"),
        ("run.steps=many", r"run\.steps must be a whole number, got a string 'many'"),
        ("run.steps=1.5", r"run\.steps must be a whole number, got a number 1\.5"),
        ("run.steps=true", r"run\.steps must be a whole number, got true or false True"),
        ("run.steps=0", r"run\.steps must be at least 1, got 0"),
        ("optim.lr=fast", r"optim\.lr must be a number, got a string 'fast'"),
        ("optim.beta2=1", r"optim\.beta2 must be at least 0 and below 1, got 1\.0"),
        ("model.tied=1", r"model\.tied must be true or false, got a whole number 1"),
        ("model.size=smal", r"unknown model size 'smal': did you mean 'small'\?"),
        ("model.heads=7", r"d_model must be heads times"),
        ("run.device=gpu", r"run\.device = 'gpu' is not a choice.*Valid: auto, cpu, cuda"),
        ("steps=3", r"--set steps=3: expected SECTION\.KEY=VALUE"),
    ],
)
def test_a_wrong_setting_says_what_is_expected(text, message):
    with pytest.raises(UserError, match=message):
        load(text)


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("run.steps=abc", "2", r"run\.steps must be a whole number, got a string 'abc'"),
        ("run.steps=0", "2", r"run\.steps must be at least 1, got 0"),
        ("run.nproc=2.5", "2", r"run\.nproc must be a whole number, got a number 2\.5"),
        ("run.save_every=-1", "2", r"run\.save_every must be at least 0, got -1"),
        ("run.profile=-1", "2", r"run\.profile must be at least 0, got -1"),
        ("run.out=", "run", r"run\.out must be the path of a directory, got ''"),
        ("run.micro_batches=two", "2", r"run\.micro_batches must be a whole number"),
        ("data.sizes=1,x", "1,2", r"micro-batches are '1,x', expected how many"),
        ("plan.strategy=zer3", "zero3", r"plan\.strategy is 'zer3': did you mean 'zero3'\?"),
        ("model.size=smal", "small", r"unknown model size 'smal'"),
    ],
)
def test_a_wrong_value_is_told_though_a_later_one_hides_it(tmp_path, wrong, right, message):
    key, _, value = wrong.partition("=")
    with pytest.raises(UserError, match=message):
        load(wrong, f"{key}={right}")
    section, _, name = key.partition(".")
    file = tmp_path / "config.toml"
    quotes = "" if value.lstrip("-").replace(".", "").isdigit() else "'"
    file.write_text(f"[{section}]\n{name} = {quotes}{value}{quotes}\n")
    with pytest.raises(UserError, match=message):
        load(f"{key}={right}", path=str(file))


def test_a_hidden_value_need_not_go_with_the_others():
    config = load("run.steps=5", "run.profile=9", "run.steps=20", "plan.mesh=x", "plan.mesh=2x2")
    assert (config.run.steps, config.run.profile) == (20, 9)


def test_a_section_must_be_a_table(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("run = 3\n")
    with pytest.raises(UserError, match="run must be a table, got a whole number 3"):
        load(path=str(file))
    with pytest.raises(UserError, match="run must be a table, got a whole number 3"):
        load("run.steps=1", path=str(file))


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read configuration .*absent\.toml: No such file"):
        load(path=str(tmp_path / "absent.toml"))
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(UserError, match=r"bad\.toml is not valid TOML"):
        load(path=str(tmp_path / "bad.toml"))


def test_a_plan_file_admits_no_settings():
    with pytest.raises(UserError, match=r"plan settings mesh were given beside the plan file"):
        load("plan.strategy=some/plan.json", "plan.mesh=2")


def test_help_lists_every_key_that_is_written():
    text = load("model.vocab=300").to_toml()
    section = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif line:
            assert f"  {section}.{line.split(' = ')[0]} " in describe_keys()
