"""What a wheel and an editable installation contain, and that both work from another folder."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# With the build backend at hand (it is in the test extra) nothing is downloaded.
ISOLATION = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []

CHECK = """
import json
import mbolt_gguf, mbolt_mlx
from mbolt_mlx.names import known_models, resolve
from mbolt_mlx.resources import resource
print(json.dumps({
    "package": mbolt_mlx.__file__,
    "models": len(known_models()),
    "schemas": sorted(p.name for p in resource("manifests/schemas").iterdir()),
    "patches": str(resource("llama_patch/README.md")),
    "demo": sorted(p.name for p in resolve("demo").iterdir()),
}))
"""


def run(*command, cwd, **more):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, **more
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *ISOLATION]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True
    )
    if done.returncode and "No module named pip" in done.stderr:
        pytest.skip("there is no pip here")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("mbolt_mlx-*.whl"))


def environment(folder, *install):
    """A virtual environment that sees this one's packages, with ours installed into it."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    # Only the dependencies: this environment's own mbolt would be found by a .pth file, and
    # those are not followed in folders that are added this way.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--ignore-installed", *ISOLATION, *install),
        cwd=folder,
    )
    return folder / "bin"


def check(scripts, elsewhere):
    found = json.loads(run(scripts / "python", "-c", CHECK, cwd=elsewhere))
    assert found["models"] == 12
    assert "model.schema.json" in found["schemas"]
    assert "config.json" in found["demo"]
    help_text = run(scripts / "mbolt-mlx", "--help", cwd=elsewhere)
    assert "generate" in help_text
    assert "usage" in run(scripts / "coalesce_rewrite.py", "--help", cwd=elsewhere)
    assert "build-llama" in run(scripts / "mbolt-gguf", "--help", cwd=elsewhere)
    assert "--layout" in run(scripts / "mbolt", "--help", cwd=elsewhere)
    assert "prefetch-map" in run(scripts / "mbolt-sim", "--help", cwd=elsewhere)
    text = run(
        *(scripts / "mbolt-mlx", "generate", "--model", "demo", "--resident", "0.25"),
        *("--prompt", "Once", "--max-tokens", "8", "--verbose", "False"),
        cwd=elsewhere,
    )
    assert text.strip()
    return found


def test_a_wheel_works_from_another_folder(wheel, tmp_path):
    scripts = environment(tmp_path / "venv", wheel)
    found = check(scripts, tmp_path)
    assert Path(found["package"]).is_relative_to(tmp_path)
    assert Path(found["patches"]).is_relative_to(tmp_path)


def test_an_editable_installation_works_from_another_folder(tmp_path):
    scripts = environment(tmp_path / "venv", "--editable", ROOT)
    found = check(scripts, tmp_path)
    assert Path(found["package"]).is_relative_to(ROOT)
    assert Path(found["patches"]) == ROOT / "llama_patch" / "README.md"


def test_the_wheel_holds_the_licence_and_no_more_than_the_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"mbolt_mlx", "mbolt_gguf"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size < 20_000_000
