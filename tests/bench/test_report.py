import json

import jsonschema
import pytest

from mbolt_mlx.bench import report
from mbolt_mlx.core.errors import OutputError


def run(setting, tps, digest="d", **more):
    return {
        **dict.fromkeys(report.KEYS[5:], 1),
        **{"engine": "mbolt", "resident": 0.2, "side_file": None, "policy": "lru", "cold": True},
        **{"decode_tps": tps, "logits_sha256": digest, "setting": setting, "order": setting},
        **more,
    }


def test_spread():
    assert report.spread([3, None, 1, 10]) == {"median": 3, "min": 1, "max": 10, "count": 3}
    assert report.spread([None]) is None


def test_summary_of_settings():
    runs = [run(0, 2.0), run(1, 8.0), run(1, 6.0), run(0, 4.0, cold=False)]
    first, second = report.summarise(runs)
    assert first["decode_tps"] == {"median": 3.0, "min": 2.0, "max": 4.0, "count": 2}
    assert (first["cold"], second["cold"]) == (False, True)
    assert (first["logits"], second["logits"]) == ("same", "same")
    assert (second["runs"], second["errors"]) == (2, 0)


def test_other_logits_are_seen_between_settings_and_within_one():
    assert [s["logits"] for s in report.summarise([run(0, 1), run(1, 1, "e")])] == [
        "same",
        "differ",
    ]
    assert report.summarise([run(0, 1), run(0, 1, "e")])[0]["logits"] == "differ"
    assert report.summarise([run(0, 1, None)])[0]["logits"] is None


def test_only_the_same_work_is_compared():
    runs = [run(0, 1, "a", model="x"), run(1, 1, "b", model="y")]
    assert [s["logits"] for s in report.summarise(runs)] == ["same", "same"]


def test_a_failed_run_is_counted_and_shown():
    bad = {"engine": "mbolt", "resident": 0.2, "side_file": None, "policy": "lru"}
    bad |= {"cold": False, "error": "no memory", "setting": 0, "order": 1}
    (entry,) = report.summarise([run(0, 2.0), bad])
    assert (entry["runs"], entry["errors"], entry["decode_tps"]["count"]) == (2, 1, 1)
    assert "1 (1 failed)" in report.table([entry])
    (entry,) = report.summarise([bad])
    assert entry["decode_tps"] is None and "-" in report.table([entry])


def test_table_has_medians_and_ranges():
    text = report.table(report.summarise([run(0, 2.0), run(0, 4.0), run(0, 2.5)]))
    assert "2.50 [2.00-4.00]" in text and "shards" in text
    head, row = text.splitlines()
    assert head.index("resident") + len("resident") == row.index("0.2") + len("0.2")


def test_document_fits_the_schema(bench_schema):
    machine = {"cpu": None, "cores": 2, "memory_bytes": 1, "os": "x", "python": "3", "versions": {}}
    machine |= {"limits": {"memory_bytes": None, "reads": {}}, "drives": {}}
    data = report.document(machine, [run(0, 2.0)], note="kept")
    jsonschema.validate(data, bench_schema)
    assert data["note"] == "kept" and list(data["runs"][0])[: len(report.KEYS)] == list(report.KEYS)
    del data["runs"][0]["slot_bytes"]
    with pytest.raises(jsonschema.ValidationError, match="slot_bytes"):
        jsonschema.validate(data, bench_schema)


def test_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out.json"
    report.write(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        report.write(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1} and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(OutputError, match="absent"):
        report.write(tmp_path / "absent" / "out.json", {})
