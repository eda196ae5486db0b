"""Predictions beside measurements: the arithmetic of lines, and the table of the documentation."""

from __future__ import annotations

import json

import pytest

from kernels_pallas.device import DATA_SHEETS
from scripts.kernels.on_device import engine, lines, predictions, report

H200, WORK = "NVIDIA H200", lines.Work(4.8e9, 1e9)  # a millisecond of reading
LINE = lines.Line("attention", "decode", "decode", WORK, {})
FULL = report.full_lines()


def test_a_decode_step_reads_every_key_and_value_once():
    work = FULL["attention, decode, 64 x 8,192"].work

    keys_and_values, queries_and_results = 2 * 64 * 8192 * 8 * 128, 2 * 64 * 32 * 128
    assert work.num_bytes == 2 * (keys_and_values + queries_and_results)
    assert work.flops == 4 * 64 * 32 * 128 * 8192


def test_prefill_multiplies_under_the_causal_mask():
    pairs = sum(32768 + i + 1 for i in range(512))

    assert FULL["attention, prefill, 512 tokens after 32,768"].work.flops == 4 * 32 * 128 * pairs


def test_a_step_of_a_model_reads_its_weights():
    # Qwen3-0.6B has 595.8 M weights in products, of which 155.6 M are those of its output.
    layers, head = engine.num_weights(engine.FULL.models["0.6B"])
    assert (layers, head) == (28 * (1024 * 6144 + 3 * 1024 * 3072), 151_936 * 1024)

    work = FULL["0.6B, decode 32 x 1,000"].work
    assert work.num_bytes == 2 * (layers + head) + 32 * 1000 * 28 * 2 * 8 * 128 * 2


def test_names_of_lines_are_unique_and_every_family_has_a_prediction_on_a_gpu():
    every = [*lines.kernel_lines(lines.FULL), *engine.engine_lines(engine.FULL)]

    assert len(FULL) == len(every)
    assert {line.name for line in every if predictions.prediction_of(H200, line.family) is None} == {"start, cold"}
    assert {line.family for line in every} >= predictions.GPU.keys()


@pytest.mark.parametrize("kind", DATA_SHEETS)
def test_devices_with_a_data_sheet_have_predictions(kind):
    predicted, roofline = predictions.predicted_seconds(kind, "decode", WORK), predictions.roofline_seconds(kind, WORK)

    assert predicted is not None
    assert roofline is not None
    assert predicted > roofline


def test_an_unknown_device_has_no_roofline_and_no_prediction():
    record = report.with_rates({"seconds": 1.0}, LINE, "cpu", {})

    names = ("roofline_seconds", "predicted_seconds", "of_sheet", "of_best", "off_by")
    assert [record[name] for name in names] == [None] * 5


def test_rates_are_fractions_of_the_sheet_and_of_the_best_yardstick(monkeypatch):
    monkeypatch.setitem(predictions.GPU, "decode", predictions.Prediction(0.5, 1e-3, "a test"))

    record = report.with_rates({"seconds": 4e-3}, LINE, H200, {"bytes": 2.4e12, "flops": 1e15})

    assert record["roofline_seconds"] == pytest.approx(1e-3)
    assert record["predicted_seconds"] == pytest.approx(3e-3)
    assert record["of_sheet"] == pytest.approx(0.25)
    assert record["of_best"] == pytest.approx(0.5)
    assert record["off_by"] == pytest.approx(1 / 3)


def test_a_peer_has_a_roofline_and_no_prediction():
    record = report.with_rates({"seconds": 4e-3, "implementation": "jax"}, LINE, H200, {})

    assert record["of_sheet"] == pytest.approx(0.25)
    assert record["predicted_seconds"] is None


def test_the_yardstick_is_the_best_of_reading_copying_and_adding():
    records = [
        {"section": "yardstick", "case": "read, 1 MiB", "num_bytes": 1e6, "flops": 0.0, "seconds": 1e-6},
        {"section": "yardstick", "case": "x + 1, 1 MiB", "num_bytes": 2e6, "flops": 0.0, "seconds": 1e-6},
        {"section": "yardstick", "case": "product, 8", "num_bytes": 1e9, "flops": 3e6, "seconds": 1e-6},
        {"section": "yardstick", "case": "copy, 1 MiB", "num_bytes": 9e6, "flops": 0.0, "note": "not available"},
        {"section": "attention", "case": "read", "num_bytes": 9e6, "flops": 0.0, "seconds": 1e-6},
    ]

    assert report.best_rates(records) == {"bytes": pytest.approx(2e12), "flops": pytest.approx(3e12)}


def test_a_run_replaces_its_own_lines_and_keeps_the_others():
    old = {H200: {"about": {}, "seconds": {"a, b": {"ours": 1.0, "jax": 2.0}, "c, d": {"ours": 3.0}}}, "L4": {}}
    records = [{"section": "a", "case": "b", "implementation": "ours", "seconds": 5.0}, {"section": "c", "case": "d"}]

    new = report.measured_with(old, {"device": H200}, records)

    assert new[H200] == {
        "about": {"device": H200},
        "seconds": {"a, b": {"ours": 5.0, "jax": 2.0}, "c, d": {"ours": 3.0}},
    }
    assert new["L4"] == old["L4"]
    assert old[H200]["seconds"]["a, b"]["ours"] == 1.0


def test_figures_of_a_run_are_written_into_the_page(tmp_path, monkeypatch):
    page, measured = tmp_path / "kernels.md", tmp_path / "measured.json"
    page.write_text(f"before\n\n{report.BEGIN}\nearlier\n{report.END}\n\nafter\n")
    measured.write_text("{}")
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "MEASURED", measured)
    about = {"device": H200, "jax": "0.11.2", "date": "2026-12-01"}
    names = {"section": "attention", "case": "decode, 64 x 8,192"}
    ours, peer = ({**names, "implementation": name, "seconds": seconds} for name, seconds in (("ours", 6e-4), ("a", 1)))

    report.write_measured(about, [ours, peer])

    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "earlier" not in text
    assert "**NVIDIA H200**, jax 0.11.2, 2026-12-01" in text
    (row,) = [row for row in text.splitlines() if "decode, 64 x 8,192" in row]
    assert [cell.strip() for cell in row.split("|")][4:8] == ["448", "668", "600", "a 1,000,000"]
    assert json.loads(measured.read_text())[H200]["about"] == about


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="put them where the tables belong"):
        report.with_tables("no marks", {})


def test_the_documentation_has_the_tables_of_today():
    page = report.PAGE.read_text()

    assert report.with_tables(page, json.loads(report.MEASURED.read_text())) == page


def test_the_table_of_a_run_has_what_is_predicted_measured_and_wanted():
    about = {"device": H200, "jax": "1"}
    records = [
        report.with_rates({"section": line.section, "case": line.case, "seconds": seconds}, line, H200, {})
        for line, seconds in ((FULL["start, cold"], 21.0), (FULL["8B, decode 1 x 1,024"], 4e-3), (LINE, 1e-3))
    ]

    heading, *rows = report.result_table(about, records).splitlines()

    assert heading == "NVIDIA H200 · 1"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[3:]]
    assert cells[0][:5] == ["start, cold", "", "21,000,000", "20,000,000", "no"]
    # 77 % of 4.8 TB/s for 15.1 GB.
    assert cells[1][3] == f"{FULL['8B, decode 1 x 1,024'].work.num_bytes / 4.8e12 / 0.77 * 1e6:,.0f}"
    assert cells[1][4] == "yes"
    assert cells[2][3:5] == ["", ""]


def test_every_goal_is_one_of_a_line():
    for goals in predictions.GOALS.values():
        assert goals.keys() <= FULL.keys()
