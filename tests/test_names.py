"""From a name to a folder. The hub is stood in for by a small server, or is not there at all."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest

from mbolt_mlx import hub, names
from mbolt_mlx.core.errors import CheckpointError, MboltError, NamesError, UnsupportedError
from mbolt_mlx.core.sizes import format_size
from mbolt_mlx.resources import resource

THE_TWELVE = {
    "Qwen3-235B-A22B": (94, 0, 128, 8, 4096, 1536),
    "Qwen3-30B-A3B": (48, 0, 128, 8, 2048, 768),
    "Qwen3-Coder-480B-A35B": (62, 0, 160, 8, 6144, 2560),
    "Qwen3-Next-80B-A3B": (48, 0, 512, 10, 2048, 512),
    "gpt-oss-120b": (36, 0, 128, 4, 2880, 2880),
    "gpt-oss-20b": (24, 0, 32, 4, 2880, 2880),
    "GLM-4.5-Air": (46, 1, 128, 8, 4096, 1408),
    "GLM-4.6": (92, 3, 160, 8, 5120, 1536),
    "DeepSeek-V3": (61, 3, 256, 8, 7168, 2048),
    "Kimi-K2": (61, 1, 384, 8, 7168, 2048),
    "Mixtral-8x7B": (32, 0, 8, 2, 4096, 14336),
    "OLMoE-1B-7B": (16, 0, 64, 8, 2048, 1024),
}


def one_line(error: MboltError) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 400
    return text


# Manifests


def test_every_manifest_follows_the_schema():
    schema = json.loads(resource("manifests/schemas/model.schema.json").read_text())
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    files = sorted(resource("manifests/models").glob("*"))
    assert len(files) == len(THE_TWELVE)
    for file in files:
        data = json.loads(file.read_text())
        validator(schema).validate(data)
        assert file.name == f"{data['name']}.json"


@pytest.mark.parametrize("name", THE_TWELVE)
def test_geometry_sizes_and_config_agree(name):
    model = names.short_names()[name]
    g, q = model.geometry, model.quantisation
    keys = ("layers", "dense_first", "experts", "top_k", "hidden", "expert_width")
    assert tuple(g[k] for k in keys) == THE_TWELVE[name]
    weights = 3 * g["hidden"] * g["expert_width"]
    overhead = 32 / q["group_size"] if q["mode"] == "affine" else 8 / q["group_size"]
    assert q["bits_per_weight"] == q["bits"] + overhead
    expert = weights * q["bits_per_weight"] / 8 + q["bias_bytes"]
    sparse_layers = g["layers"] - g["dense_first"]
    assert model.sizes["expert_bytes"] == expert
    assert model.sizes["all_experts_bytes"] == expert * g["experts"] * sparse_layers
    assert model.sizes["token_bytes"] == expert * g["top_k"] * sparse_layers
    config = dict(model.config)
    kind = config.pop("model_type")
    assert model.architecture in (kind if isinstance(kind, list) else [kind])
    assert config.pop("num_hidden_layers") == g["layers"]
    assert config.pop("num_experts_per_tok") == g["top_k"]
    assert config.pop("hidden_size") == g["hidden"]
    assert config.pop("first_k_dense_replace", 0) == g["dense_first"]
    config.pop("n_shared_experts", None)
    assert sorted(config.values()) == sorted([g["experts"], g["expert_width"]])


def test_the_numbers_that_are_known_of_qwen3_235b():
    sizes = names.manifest_for("Qwen3-235B").sizes
    shown = [format_size(sizes[k]) for k in ("expert_bytes", "all_experts_bytes", "token_bytes")]
    assert shown == ["10.6 MB", "127.7 GB", "7.98 GB"]


def test_short_names_are_unique_without_regard_to_case():
    listed = [n for m in names.known_models() for n in m.repositories]
    assert len({n.casefold() for n in listed} | {"demo"}) == len(listed) + 1


def test_a_damaged_manifest_is_named(tmp_path):
    bad = tmp_path / "X.json"
    bad.write_text('{"name": "X"}')
    with pytest.raises(NamesError, match="X.json"):
        names.ModelManifest.read(bad)


# Names


@pytest.mark.parametrize(
    "name, meant",
    [
        ("Qwen3-235B-A22B", "Qwen3-235B-A22B"),
        ("qwen3-235b-a22b", "Qwen3-235B-A22B"),
        ("Qwen3-235B", "Qwen3-235B-A22B"),
        ("qwen3-next", "Qwen3-Next-80B-A3B"),
        ("GLM-4.5", "GLM-4.5"),
        ("glm-4.5-air", "GLM-4.5-Air"),
        ("deepseek-r1", "DeepSeek-R1"),
        ("Qwen3-2", None),
        ("nonsense", None),
    ],
)
def test_short_names(name, meant):
    assert names.match_short_name(name) == meant


@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss", "DeepSeek"])
def test_a_name_that_could_be_several_lists_them(name):
    with pytest.raises(NamesError) as error:
        names.resolve(name)
    assert one_line(error.value).count(name) >= 3


def test_manifest_for_a_repository():
    assert names.manifest_for("mlx-community/GLM-4.5-4bit").name == "GLM-4.6"
    assert names.manifest_for("someone/else") is None
    assert names.manifest_for("") is None


def test_a_folder_is_itself(tiny_model, monkeypatch):
    assert names.resolve(str(tiny_model)) == tiny_model
    assert names.resolve(tiny_model) == tiny_model
    monkeypatch.chdir(tiny_model.parent)
    assert names.resolve(tiny_model.name) == Path(tiny_model.name)


def test_a_local_folder_wins_over_the_hub_as_in_mlx_lm(tmp_path, monkeypatch):
    (tmp_path / "org" / "repo").mkdir(parents=True)
    (tmp_path / "Qwen3-235B").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names.resolve("org/repo") == Path("org/repo")
    assert names.resolve("Qwen3-235B") == Path("Qwen3-235B")


def test_demo_ships(tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    demo = names.resolve("demo")
    assert demo == resource("demo") and demo.is_absolute()


@pytest.mark.parametrize("name", ["./foo", "/x/y", "../a/b", "~/nowhere-at-all", "a/b/c", "foo/"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(NamesError, match="no such folder"):
        names.resolve(name)


def test_a_path_object_is_never_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NamesError, match="no such folder"):
        names.resolve(Path("org/repo"))


@pytest.mark.parametrize("name", ["", "  ", "nonsense", "Qwen4-1T", "gpt_oss_20b", "a b/c"])
def test_unknown_names_say_what_to_give(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NamesError) as error:
        names.resolve(name)
    one_line(error.value)


def test_a_close_name_is_suggested():
    with pytest.raises(NamesError, match="did you mean gpt-oss-20b"):
        names.resolve("gptoss-20b")


def test_a_file_and_a_broken_link_are_not_models(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(NamesError, match="not a file"):
        names.resolve(str(file))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(NamesError, match="for GGUF models there is mbolt-gguf"):
        names.resolve(str(tmp_path / "m.gguf"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(NamesError, match="broken link"):
        names.resolve(str(link))


# config.json against the manifest


def test_config_that_agrees_and_one_that_does_not():
    for model in names.known_models():
        config = {k: v[0] if isinstance(v, list) else v for k, v in model.config.items()}
        names.check_config(model, config | {"unknown": 1})
        for key in config:
            with pytest.raises(UnsupportedError, match=key):
                names.check_config(model, config | {key: 7})
            with pytest.raises(UnsupportedError, match=key):
                names.check_config(model, {k: v for k, v in config.items() if k != key})


def test_a_snapshot_with_another_geometry_is_refused(tmp_path, monkeypatch):
    manifest = names.manifest_for("OLMoE-1B-7B")
    (tmp_path / "config.json").write_text(json.dumps(dict(manifest.config, num_experts=32)))
    monkeypatch.setattr(hub, "snapshot", lambda *a, **k: tmp_path)
    for name in ("OLMoE-1B-7B", manifest.repository):
        with pytest.raises(UnsupportedError, match="num_experts differs; expected 64, found 32"):
            names.resolve(name)
    assert names.resolve("someone/else") == tmp_path


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_config_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json"):
        names.read_config(tmp_path)


# The hub


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers every request with ``status``, or hangs, as the server that runs it says."""

    def do_GET(self):
        self.server.asked += 1
        if self.server.status is None:
            time.sleep(30)
            return
        self.send_response(self.server.status)
        for key, value in self.server.extra.items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.status, server.extra, server.asked = 404, {}, 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


RESOLVE = """
import sys
from mbolt_mlx.core.errors import MboltError
from mbolt_mlx.names import resolve
try:
    print(resolve(sys.argv[1], revision=sys.argv[2] if len(sys.argv) > 2 else None))
except MboltError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def resolve_in_process(name, home, *more, **env):
    """Run resolve in a fresh process: the hub's library reads its settings once, at import."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    for key in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        clean.pop(key, None)
    clean |= {"HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **env}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, name, *more],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done.stdout.strip(), done.stderr.strip(), time.monotonic() - start


def fill_cache(home, model, repository, *, leave_out=(), revision="main"):
    """Lay a snapshot out as the hub's library does: blobs, and links to them."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / revision).write_text(commit)
    for i, file in enumerate(sorted(model.iterdir())):
        if file.name not in leave_out:
            blob = root / "blobs" / f"{i:064x}"
            blob.write_bytes(file.read_bytes())
            (folder / file.name).symlink_to(blob)
    return folder


def test_no_network(tmp_path):
    out, err, seconds = resolve_in_process("org/repo", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert out == "" and "\n" not in err
    assert err.startswith("NamesError: the hub cannot be reached for org/repo")
    assert "it is not in the cache" in err
    assert seconds < 30


def test_no_network_for_a_short_name(tmp_path):
    _, err, _ = resolve_in_process("Qwen3-235B", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "\n" not in err
    assert "cannot be reached for mlx-community/Qwen3-235B-A22B-4bit" in err


@pytest.mark.slow
def test_a_hub_that_never_answers_is_given_up_soon(tmp_path, fake_hub):
    fake_hub.status = None
    _, err, seconds = resolve_in_process("org/repo", tmp_path, HF_ENDPOINT=fake_hub.url)
    assert "\n" not in err and "cannot be reached" in err
    assert seconds < 45


def test_offline_and_not_cached(tmp_path):
    _, err, _ = resolve_in_process("org/repo", tmp_path, HF_HUB_OFFLINE="1")
    assert "\n" not in err
    assert "HF_HUB_OFFLINE is set and it is not in the cache" in err


@pytest.mark.parametrize(
    "status, code, says",
    [
        (404, "RepoNotFound", "no folder and no repository on the hub is called org/repo"),
        (401, None, "no folder and no repository on the hub is called org/repo"),
        (403, "GatedRepo", "org/repo is gated on the hub"),
        (404, "RevisionNotFound", "org/repo has no revision 'v9'"),
        (500, None, "the hub answered 500 for org/repo"),
    ],
)
def test_answers_of_the_hub(tmp_path, fake_hub, status, code, says):
    fake_hub.status = status
    fake_hub.extra = {"X-Error-Code": code} if code else {}
    _, err, seconds = resolve_in_process("org/repo", tmp_path, "v9", HF_ENDPOINT=fake_hub.url)
    assert "\n" not in err and says in err
    assert seconds < 45


def test_a_complete_cache_needs_no_network(tmp_path, fake_hub, tiny_model_sharded):
    folder = fill_cache(tmp_path, tiny_model_sharded, "org/repo")
    out, err, _ = resolve_in_process("org/repo", tmp_path, HF_ENDPOINT=fake_hub.url)
    assert (out, err, fake_hub.asked) == (str(folder), "", 0)
    out, err, _ = resolve_in_process("org/repo", tmp_path, HF_HUB_OFFLINE="1")
    assert (out, err) == (str(folder), "")


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-00003.safetensors"])
def test_half_a_download_is_not_a_model(tmp_path, tiny_model_sharded, missing):
    fill_cache(tmp_path, tiny_model_sharded, "org/repo", leave_out=[missing])
    _, err, _ = resolve_in_process("org/repo", tmp_path, HF_HUB_OFFLINE="1")
    assert "\n" not in err and "only part of it is in the cache" in err
    _, err, _ = resolve_in_process("org/repo", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "\n" not in err and "only part of it is in the cache" in err


def test_only_the_files_that_mlx_lm_reads_are_fetched():
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    assert list(hub.PATTERNS) == DEFAULT_ALLOW_PATTERNS
