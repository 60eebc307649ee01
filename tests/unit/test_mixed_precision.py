"""The exercises on mixed precision: the document's sums, dtypes and a layer norm's parts."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from shardwise.cli import main
from shardwise.lab.exercises import seed004


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    command = ["bench", "mixed-precision", "--quick", "--json", str(folder / "m.json")]
    assert main([*command, "--plot", str(folder / "m.svg")]) == 0
    ElementTree.parse(folder / "m.svg")
    return json.loads((folder / "m.json").read_text())["rows"]


def part(rows, name):
    return [row for row in rows if row["part"] == name]


def test_the_documents_sums_come_out_to_the_digit(ran):
    given = {(r["sum"], r["term"], r["cast"]): r for r in part(ran, "sums")}
    for key, value in seed004.SUMS.items():
        assert given[key]["value"] == given[key]["document"]["value"] == value
    stalled = given["bf16", "bf16", False]
    assert stalled["value"] == 4.0 and "changes nothing" in stalled["reason"]
    assert "rounding the sum to 0.0078" in given["fp16", "fp16", False]["reason"]


def test_dtypes_under_cudas_lists_are_the_documents_but_for_the_loss(ran):
    (row,) = (r for r in part(ran, "dtypes") if (r["device"], r["autocast"]) == ("cuda", "fp16"))
    differ = {name for name, dtype in row["document"].items() if row["dtypes"][name] != dtype}
    assert differ == {"cross-entropy"} and row["dtypes"]["cross-entropy"] == "float32"
    assert row["dtypes"]["mean of logits"] == "float16"


def test_fp16_loses_a_layer_norms_statistics_and_bf16_only_digits(ran):
    errors = {(r["dtype"], r["input"]): r["errors"] for r in part(ran, "layer-norm")}
    assert errors["fp16", "large"]["variance"] == pytest.approx(1)  # infinite: the output is zero
    assert errors["fp16", "off centre"]["mean"] is None and errors["fp16", "small"]["all"] is None
    assert all(e < 0.05 for (d, _), told in errors.items() if d == "bf16" for e in told.values())
    assert errors["bf16", "off centre"]["mean"] > 10 * errors["bf16", "usual"]["mean"]
    assert all(told["torch"] < 2e-3 for told in errors.values())


def test_tables_fit_80_columns_and_say_why(ran, capsys, tmp_path):
    path = tmp_path / "rows.json"
    assert main(["bench", "mixed-precision", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "…" not in said
    assert "10.0021" in said and "Sensitive are the statistics" in said
    assert main(["bench", "mixed-precision", "--parts", "sum"]) == 2
    assert "did you mean 'sums'" in capsys.readouterr().err
