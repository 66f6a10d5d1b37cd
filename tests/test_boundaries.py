"""Which package may import which, checked on the source and in a fresh interpreter."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MLX = {"mlx", "mlx_lm"}


def modules(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def package_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1]


def imports(path, *, at_load_only=False):
    """The dotted names that a file imports; with ``at_load_only`` not those inside functions
    nor those that only a type checker sees."""
    found = set()

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = package_of(path)
                    above = package[: len(package) - child.level + 1]
                    base = ".".join((*above, *filter(None, [child.module])))
                found.add(base)
                found.update(f"{base}.{alias.name}" for alias in child.names)
            elif at_load_only and (
                isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
            ):
                continue
            else:
                visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def reaches(names, *targets):
    return sorted(n for n in names if any(n == t or n.startswith(t + ".") for t in targets))


@pytest.mark.parametrize("path", modules("mbolt_mlx/core", "mbolt_mlx/profile"), ids=str)
def test_core_and_profile_know_neither_mlx_nor_the_rooms_above(path):
    above = [f"mbolt_mlx.{room}" for room in ("storage", "engine", "cli", "bench", "names", "hub")]
    assert reaches(imports(path), *MLX, *above) == []


@pytest.mark.parametrize("path", modules("mbolt_mlx/core"), ids=str)
def test_core_does_not_know_profile(path):
    assert reaches(imports(path), "mbolt_mlx.profile") == []


@pytest.mark.parametrize("path", modules("mbolt_mlx/storage"), ids=str)
def test_storage_imports_mlx_only_inside_a_function_and_no_engine(path):
    assert reaches(imports(path, at_load_only=True), *MLX) == []
    assert reaches(imports(path), "mbolt_mlx.engine", "mbolt_mlx.cli", "mbolt_mlx.bench") == []


@pytest.mark.parametrize("path", modules("mbolt_mlx/engine"), ids=str)
def test_engine_does_not_know_the_commands(path):
    assert reaches(imports(path), "mbolt_mlx.cli", "mbolt_mlx.bench") == []


@pytest.mark.parametrize("path", modules("mbolt_gguf"), ids=str)
def test_gguf_imports_only_core_and_profile(path):
    ours = reaches(imports(path), "mbolt_mlx")
    allowed = ("mbolt_mlx.core", "mbolt_mlx.profile")
    assert [n for n in ours if n != "mbolt_mlx" and not n.startswith(allowed)] == []
    assert reaches(imports(path), *MLX) == []


@pytest.mark.parametrize("path", modules("mbolt_mlx"), ids=str)
def test_mbolt_mlx_imports_gguf_only_inside_a_function(path):
    assert reaches(imports(path, at_load_only=True), "mbolt_gguf") == []


@pytest.mark.parametrize("path", modules("mbolt_mlx", "mbolt_gguf"), ids=str)
def test_only_core_files_calls_the_system_for_reading_and_writing(path):
    """No other room opens descriptors or reads by position on its own."""
    if path == ROOT / "mbolt_mlx/core/files.py":
        return
    calls = {"pread", "preadv", "pwrite", "pwritev", "fsync", "posix_fadvise", "ftruncate"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    assert used & calls == set()


def loaded_by(statement):
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_mbolt_mlx_loads_no_mlx_and_little_else():
    loaded = loaded_by("import mbolt_mlx")
    assert {m.partition(".")[0] for m in loaded} & {*MLX, "numpy", "huggingface_hub"} == set()


@pytest.mark.parametrize("room", ["core", "profile", "storage"])
def test_importing_a_room_loads_no_mlx(room):
    names = [
        ".".join((*package_of(path), path.stem))
        for path in modules(f"mbolt_mlx/{room}")
        if path.stem != "__init__"
    ]
    loaded = loaded_by("import mbolt_mlx\n" + "\n".join(f"import {name}" for name in names))
    assert reaches(loaded, *MLX) == []


def test_importing_mbolt_gguf_loads_nothing_of_the_engine():
    loaded = loaded_by("import mbolt_gguf")
    rooms = [f"mbolt_mlx.{room}" for room in ("storage", "engine", "cli", "bench")]
    assert reaches(loaded, *MLX, *rooms) == []


def test_the_command_line_loads_no_mlx_to_say_what_is_wrong():
    loaded = loaded_by("from mbolt_mlx.cli.main import main\nassert main(['nonsense']) == 2")
    assert reaches(loaded, *MLX) == []


@pytest.mark.parametrize("path", modules("mbolt_mlx", "mbolt_gguf"), ids=str)
def test_rooms_are_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 450
