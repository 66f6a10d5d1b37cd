import sys

import pytest

from mbolt_mlx.bench import plan
from mbolt_mlx.bench.measure import Job
from mbolt_mlx.core.errors import UsageError


def job(**changes):
    return Job(**{"engine": "mbolt", "model": "m", "prompt": [1, 2], "decode": [3], **changes})


def test_every_other_round_runs_backwards():
    order = list(plan.alternating("abc", 4))
    assert "".join(s for _, _, s in order) == "abc" + "cba" + "abc" + "cba"
    assert [place for _, place, _ in order[3:6]] == [2, 1, 0]
    assert [round_ for round_, _, _ in order] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    for settings, runs in (("", 3), ("a", 0)):
        with pytest.raises(UsageError):
            list(plan.alternating(settings, runs))


def test_settings():
    jobs = plan.settings_of(job(policy="lru"), [0.2, 1.0], ["side", None], baseline=True)
    assert [(j.engine, j.resident, j.side_file) for j in jobs] == [
        ("mlx-lm", None, None),
        ("mbolt", 0.2, "side"),
        ("mbolt", 0.2, None),
        ("mbolt", 1.0, "side"),
        ("mbolt", 1.0, None),
    ]
    for wrong in (0, -0.1, 1.5):
        with pytest.raises(UsageError):
            plan.settings_of(job(), [wrong], [None], baseline=False)


def test_run_all_marks_and_reports_each_run():
    seen = []
    results = plan.run_all(
        [job(resident=0.2), job(resident=0.5)],
        3,
        run=lambda j: {"engine": j.engine, "resident": j.resident},
        done=lambda results: seen.append(len(results)),
    )
    assert seen == [1, 2, 3, 4, 5, 6]
    assert [(r["round"], r["setting"], r["order"]) for r in results] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 1, 2),
        (1, 0, 3),
        (2, 0, 4),
        (2, 1, 5),
    ]


def test_job_survives_json_and_ignores_unknown_keys():
    one = job(cold=True, drop=["m"], options={"x": 1})
    assert Job.from_dict({**one.as_dict(), "later": 1}) == one


@pytest.mark.parametrize(
    "script, expected",
    [
        ("import sys; sys.exit('went wrong')", "exit 1 | went wrong"),
        ("import os; os.kill(os.getpid(), 9)", "out of memory?"),
        ("import time; time.sleep(60)", "not finished after"),
        ('print(\'RESULT {"error": "no such model"}\')', "no such model"),
    ],
)
def test_a_failure_is_a_result(script, expected):
    command = (sys.executable, "-c", script)
    result = plan.run_job(job(resident=0.2), command=command, timeout_s=3)
    assert expected in result["error"]
    assert (result["engine"], result["resident"], result["cold"]) == ("mbolt", 0.2, False)


def test_a_command_that_does_not_exist_is_a_result_too():
    assert "cannot start" in plan.run_job(job(), command=("/nonexistent",))["error"]


def test_what_a_worker_prints_around_its_result_does_not_matter():
    script = "print('noise'); print('RESULT {\"engine\": \"x\"}'); print('more')"
    assert plan.run_job(job(), command=(sys.executable, "-c", script)) == {"engine": "x"}
