import json
import sys

import pytest

from mbolt_mlx.bench import machine

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


def test_describes_this_machine(tmp_path):
    found = machine.describe([tmp_path, tmp_path / "absent"])
    assert found["cores"] >= 1 and found["memory_bytes"] > 0 and found["os"]
    assert {"mlx", "mlx-lm", "numpy"} <= set(found["versions"])
    json.dumps(found)
    drive, same = found["drives"][str(tmp_path)], found["drives"][str(tmp_path / "absent")]
    # Others write to the drive meanwhile.
    assert drive.pop("free_bytes") > 0 and same.pop("free_bytes") > 0
    assert drive["size_bytes"] > 0 and same == drive


@linux
def test_drive_of_a_mount():
    assert machine.mount_of(machine.Path("/proc/self"))["type"] == "proc"
    assert machine.drive("/")["mount"] == "/"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A /proc and a control group tree of our own; returns a function that fills them."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")

    def fill(cgroup, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
        for name, text in files.items():
            path = tmp_path / "cg" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return machine.limits(tmp_path / "cg")

    return fill


def test_limits_of_control_groups_version_2(groups):
    found = groups(
        "0::/a/b\n",
        {
            "memory.max": "max\n",
            "a/memory.max": "5000\n",
            "a/b/memory.max": "7000\n",
            "a/io.max": "8:0 rbps=400000000 wbps=max riops=max wiops=max\n",
            "a/b/io.max": "8:0 rbps=900000000 riops=2000\n",
        },
    )
    assert found == {
        "memory_bytes": 5000,
        "reads": {"8:0": {"bytes_per_s": 400000000, "reads_per_s": 2000}},
    }


def test_limits_of_control_groups_version_1(groups):
    found = groups(
        "7:blkio:/x\n4:memory:/y\n1:cpu:/\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/y/memory.limit_in_bytes": "1363148800\n",
            "blkio/x/blkio.throttle.read_bps_device": "254:0 400000000\n",
            "blkio/x/blkio.throttle.read_iops_device": "",
            "blkio/blkio.throttle.read_bps_device": "",
        },
    )
    assert found == {
        "memory_bytes": 1363148800,
        "reads": {"254:0": {"bytes_per_s": 400000000}},
    }


def test_no_limits(groups):
    assert groups("0::/\n", {"memory.max": "max\n"}) == {"memory_bytes": None, "reads": {}}
