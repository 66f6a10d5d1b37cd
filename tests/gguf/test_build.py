"""Fetching, checking, patching and compiling; what needs no whole build of llama.cpp."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mbolt_gguf import build, compile, llama_source
from mbolt_gguf.cli.main import main
from mbolt_gguf.llama_source import Pin, apply_patch
from mbolt_mlx.core import files
from mbolt_mlx.core.errors import BuildError, UsageError
from mbolt_mlx.core.places import cache_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache in which nothing was ever built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def error_of(capsys, *arguments):
    """The one line that the command ends with."""
    status = main(["build-llama", *map(str, arguments)])
    lines = capsys.readouterr().err.splitlines()
    assert status == 2 and lines
    return lines[-1]


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Leave nothing on the PATH but the named programs."""

    def leave(*names):
        folder = tmp_path / f"only-{'-'.join(names)}"
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(shutil.which(name))
        monkeypatch.setenv("PATH", str(folder))
        for name in ("CC", "CXX"):
            monkeypatch.delenv(name, raising=False)

    return leave


@pytest.fixture
def tree(tmp_path):
    """A folder with a file, and a patch of it."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    patch = tmp_path / "0001-two.patch"
    patch.write_text(
        "Subject: two\n\ndiff --git a/a.txt b/a.txt\n--- a/a.txt\n+++ b/a.txt\n"
        "@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    )
    return folder, patch


def test_the_pin_names_patches_that_are_there():
    pin = Pin.read()
    assert len(pin.sha256) == len(pin.tree_sha256) == 64
    assert pin.patches == tuple(sorted(pin.folder.glob("*.patch")))
    text = (pin.folder / "README.md").read_text()
    assert all(path.stem in text for path in pin.patches)


def test_patches_touch_the_library_alone_and_say_why():
    for path in Pin.read().patches:
        text = path.read_text()
        assert text.startswith("Subject: llama : ") and text.isascii()
        touched = [line[6:] for line in text.splitlines() if line.startswith("+++ b/")]
        assert touched and all(name.startswith("src/") for name in touched)


def test_another_sdist_is_refused_with_both_hashes(tmp_path, capsys):
    pin = Pin.read()
    small = tmp_path / "small.tar.gz"
    small.write_bytes(b"x")
    assert f"expected {pin.size} bytes, found 1" in error_of(capsys, "--source", small)
    same_size = tmp_path / "same.tar.gz"
    same_size.write_bytes(b"")
    os.truncate(same_size, pin.size)
    said = error_of(capsys, "--source", same_size)
    assert str(same_size) in said and f"expected {pin.sha256}, found " in said
    assert not (cache_folder() / "llama" / "work" / "src").exists()


def test_another_tree_is_refused(tmp_path, capsys):
    (tmp_path / "include").mkdir()
    assert "it has no include/llama.h" in error_of(capsys, "--source", tmp_path)
    (tmp_path / "include" / "llama.h").write_text("// not this one\n")
    assert f"expected {Pin.read().tree_sha256}" in error_of(capsys, "--source", tmp_path)
    assert "no such file or folder" in error_of(capsys, "--source", tmp_path / "none")


def test_without_a_network_the_error_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said = error_of(capsys, "--targets", build.DRIVER)
    assert "pip could not fetch llama-cpp-python" in said and "--source" in said
    assert list((cache_folder() / "llama").glob(".fetch*")) == []


def test_missing_tools_are_named(capsys, only):
    only()
    said = error_of(capsys)
    assert "cmake and a C compiler and a C++ compiler and ninja or make is not installed" in said


def test_one_missing_tool(capsys, only):
    only("gcc", "g++", "ninja")
    assert "error: cmake is not installed" in error_of(capsys)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--targets", "llama-clix"], "there is no target llama-clix"),
        (["--targets", ","], "there is no target (none)"),
        (["--jobs", "0"], "--jobs is at least 1"),
        (["-D", "GGML_BLAS"], "-D GGML_BLAS is not NAME=VALUE"),
        (["--metal", "--cuda"], "not allowed with"),
    ],
)
def test_nonsense_is_one_line(capsys, arguments, said):
    assert said in error_of(capsys, *arguments)


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal is there")
def test_metal_is_for_macos():
    with pytest.raises(UsageError, match="macOS only"):
        build.build(metal=True)


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_patches_apply_with_either_tool(tree, only, tool):
    if shutil.which(tool) is None:
        pytest.skip(f"there is no {tool}")
    folder, patch = tree
    # A repository around the tree must not make git look elsewhere.
    subprocess.run(["git", "init", "-q", folder.parent], check=False)
    only(tool)
    apply_patch(folder, patch)
    assert (folder / "a.txt").read_text() == "one\n2\nthree\n"
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt"]
    with pytest.raises(BuildError, match="0001-two.patch: does not apply"):
        apply_patch(folder, patch)


def test_without_either_tool(tree, only):
    only()
    with pytest.raises(BuildError, match="neither patch nor git is installed"):
        apply_patch(*tree)


def project(folder, source):
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.14)\nproject(p C)\nadd_executable(p p.c)\n"
    )
    (folder / "p.c").write_text(source)


def test_compiling_and_its_errors(tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    source, binary, log = tmp_path / "s", tmp_path / "b", tmp_path / "log"
    project(source, "int main(void) { return 0; }\n")
    compile.configure(source, binary, [], log)
    compile.compile_targets(binary, ["p"], log, jobs=1, quiet=True)
    assert (binary / "p").is_file()
    (source / "p.c").write_text("int main(void) { return nothing; }\n")
    with pytest.raises(BuildError, match="p.c:1.* error: .*nothing"):
        compile.compile_targets(binary, ["p"], log, jobs=1, quiet=True)
    (source / "CMakeLists.txt").write_text("message(FATAL_ERROR no)\n")
    with pytest.raises(BuildError, match="CMake Error at CMakeLists.txt:1"):
        compile.configure(source, binary, [], log)


SMALLER = ("server-context", "llama-server-impl", "llama-cli-impl", "mtmd", "cpp-httplib")
FILES = {
    "ggml": ["ggml.cpp", "gguf.cpp"],
    "llama": ["llama.cpp", "llama-graph.cpp", "llama-kv-cache-dsv4.cpp"],
    "llama-common": ["arg.cpp", "chat.cpp", "json.cpp"],
    **{name: [f"{name}-1.cpp", f"{name}-2.cpp"] for name in SMALLER},
}


@pytest.fixture
def compilers(tmp_path):
    """Configure our driver around empty files by llama.cpp's names; target → file → command."""
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    tree = tmp_path / "tree"
    (tree / "include").mkdir(parents=True)
    (tree / "include" / "llama.h").write_text("")
    for name in (name for names in FILES.values() for name in names):
        (tree / name).write_text("")
    lines = [f"add_library({name} STATIC {' '.join(FILES[name])})" for name in FILES]
    # As upstream does.
    lines.append("set_source_files_properties(llama.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)")
    (tree / "CMakeLists.txt").write_text("\n".join(lines) + "\n")

    def commands(*more):
        binary, log = tmp_path / f"binary{len(more)}", tmp_path / "log"
        options = [f"-DLLAMA_TREE={tree}", "-DCMAKE_BUILD_TYPE=Release", *more]
        options.append("-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
        compile.configure(Pin.read().folder / "driver", binary, options, log)
        found = {}
        for entry in json.loads((binary / "compile_commands.json").read_text()):
            target = re.search(r"CMakeFiles/([\w-]+)\.dir/", entry["command"])[1]
            found.setdefault(target, {})[Path(entry["file"]).name] = entry["command"]
        return found

    return commands


def test_files_are_joined_and_only_what_is_around_the_library_is_optimized_less(compilers):
    found = compilers()
    assert found["ggml"].keys() == set(FILES["ggml"])
    alone = {name for target in found.values() for name in target if not name.startswith("unity")}
    assert alone == {*FILES["ggml"], "llama-kv-cache-dsv4.cpp", "json.cpp", "driver.cpp",
                     "cpp-httplib-1.cpp", "cpp-httplib-2.cpp"}  # fmt: skip
    assert all(len(found[name]) == 2 for name in ("llama", "llama-common"))
    levels = {
        target: {re.findall(r"-O\d", command)[-1] for command in commands.values()}
        for target, commands in found.items()
    }
    less = {"llama-common", *SMALLER}
    assert levels == {name: {"-O1" if name in less else "-O3"} for name in levels}


def test_the_quick_build_can_be_left(compilers):
    found = compilers("-DMBOLT_QUICK=OFF")
    assert all(found[target].keys() == set(names) for target, names in FILES.items())
    assert not any("-O1" in text for commands in found.values() for text in commands.values())


def test_flags_decide_the_key_and_not_the_series():
    pin = Pin.read()
    a = build.Variant.of(pin, ["-DX=1"], patched=True)
    b = build.Variant.of(pin, ["-DX=2"], patched=True)
    c = build.Variant.of(pin, ["-DX=1"], patched=False)
    d = build.Variant.of(replace(pin, sha256="0" * 64), ["-DX=1"], patched=True)
    assert len({v.folder for v in (a, b, c, d)}) == 4
    assert a.series == b.series and len({a.series, c.series, d.series}) == 3


def test_every_file_of_the_driver_decides_the_key(tmp_path):
    folder = tmp_path / "llama_patch"
    shutil.copytree(Pin.read().folder, folder)
    pin = replace(
        Pin.read(), folder=folder, patches=tuple(folder / p.name for p in Pin.read().patches)
    )
    seen = {build.Variant.of(pin, [], patched=True).series}
    paths = [path for path in (folder / "driver").rglob("*") if path.is_file()]
    assert {path.parent.name for path in paths} == {"driver", "preload"}
    for path in paths:
        path.write_bytes(path.read_bytes() + b"\n")
        seen.add(build.Variant.of(pin, [], patched=True).series)
    assert len(seen) == len(paths) + 1


def test_what_was_built_is_found_without_any_tool(only):
    """The second time needs no network, no compiler and no source."""
    pin = Pin.read()
    flags = compile.flags(pin.commit, metal=False, cuda=False, defines=())
    variant = build.Variant.of(pin, flags, patched=True)
    assert build.binaries() is None
    with pytest.raises(BuildError, match="llama-cli is not built; run `mbolt-gguf build-llama`"):
        build.binary("llama-cli")
    folder = variant.folder / "bin"
    folder.mkdir(parents=True)
    for name in ("llama-cli", ".llama-cli.partial"):
        (folder / name).write_text("")
    record = {"series": variant.series, "finished": 1.0}
    (variant.folder / "build.json").write_text(json.dumps(record))
    only()
    assert build.build(["llama-cli"]) == {"llama-cli": folder / "llama-cli"} == build.binaries()
    with pytest.raises(BuildError, match="/nope: no such file or folder"):
        build.build(["llama-cli"], source=Path("/nope"))
    (variant.folder / "build.json").write_text("damaged")
    assert build.binaries() is None


def test_the_latest_build_wins():
    pin = Pin.read()
    for number in (2, 1):
        variant = build.Variant.of(pin, [f"-DX={number}"], patched=True)
        (variant.folder / "bin").mkdir(parents=True)
        (variant.folder / "bin" / "llama-cli").write_text(str(number))
        record = {"series": variant.series, "finished": number}
        (variant.folder / "build.json").write_text(json.dumps(record))
    assert build.binary("llama-cli").read_text() == "2"


def test_two_builds_at_once(capsys, monkeypatch):
    work = cache_folder() / "llama" / "work"
    files.make_folder(work)
    fd = files.open_write(work / ".lock")
    try:
        assert files.try_lock(fd)
        assert "another process is building here" in error_of(capsys, "--targets", build.DRIVER)
    finally:
        files.close(fd)


def test_the_sdist_is_unpacked_patched_and_known_as_a_tree(llama, tmp_path):
    """The real one, when the user's cache has it."""
    pin = Pin.read()
    sdist = llama.stock.parents[2] / pin.file
    if not sdist.is_file():
        pytest.skip("the binaries were built from a folder")
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    llama_source.prepare(pin, stock, source=sdist, patched=False, quiet=True)
    assert llama_source.tree_sha256(stock) == pin.tree_sha256
    assert not (stock / ".git").exists()
    llama_source.prepare(pin, patched, source=stock, patched=True, quiet=True)
    assert (patched / "src" / "llama-expert-hook.cpp").is_file()
    with pytest.raises(BuildError, match="not the pinned llama.cpp"):
        llama_source.prepare(pin, tmp_path / "again", source=patched, patched=True, quiet=True)
    assert not (tmp_path / "again").exists()
    assert Path(tmp_path / ".again.partial").exists() is False
