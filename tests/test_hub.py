"""Hub ids against a cache on disk: what is found, what is asked for, and what is said in vain."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from qscale.checkpoint import describe
from qscale.errors import CheckpointError, QscaleError
from qscale.hub import HUB_FILES, find
from qscale.model import load
from tests.checkpoints import build_model, save

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISION = "stage1-step1000-tokens5B"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """An empty cache and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cached(offline):
    """The same with one revision of one model in the cache, laid out as the hub's client does."""
    model = offline / "cache" / "models--org--tiny"
    save(build_model("llama"), model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / REVISION).write_text(COMMIT)
    return model


def test_a_revision_in_the_cache_opens_and_its_name_is_read(cached):
    found = load(f"org/tiny@{REVISION}")
    assert found.description.folder == cached / "snapshots" / COMMIT
    assert found.description.training == {
        "run": "org/tiny",
        "step": 1000,
        "tokens": 5e9,
        "source": f"org/tiny@{REVISION}",
    }
    apart = describe("org/tiny", REVISION)
    assert apart.checkpoint == found.description.checkpoint
    assert apart.training == found.description.training
    by_commit = describe("org/tiny", COMMIT).training
    assert by_commit == {"run": "org/tiny", "source": f"org/tiny@{COMMIT}"}


def test_a_folder_of_that_name_comes_first(cached, offline):
    save(build_model("gpt2"), offline / "org" / "tiny")
    assert describe("org/tiny").architecture == "gpt2"
    with pytest.raises(CheckpointError, match="revision must be left out for files on disk. Got m"):
        describe("org/tiny", "main")


def test_what_cannot_be_fetched_says_what_to_run(offline):
    with pytest.raises(CheckpointError) as caught:
        load("org/tiny@step7")
    message = str(caught.value)
    assert message.startswith("org/tiny: no such folder, and revision step7 of it was not fetched")
    assert message.endswith("run: hf download org/tiny --revision step7")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, "access to it is restricted. Ask for it on its page, then run: hf"),
        (
            errors.RevisionNotFoundError,
            "no such revision. See https://huggingface.co/org/tiny/tree",
        ),
        (errors.RepositoryNotFoundError, "the hub has no such model, or it is private"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached"),
        (errors.HTTPError, "the hub cannot be reached"),
    ],
)
def test_refusals_of_the_hub(offline, monkeypatch, error, message):
    def refuse(repo: str, **_: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=message) as caught:
        find("org/tiny")
    assert isinstance(caught.value.__cause__, error)


def test_weights_and_tokenizer_are_asked_for_but_no_code(monkeypatch, tmp_path):
    asked = {}

    def note(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", note)
    monkeypatch.chdir(tmp_path)
    source = find("org/tiny", "step3")
    assert (source.path, source.repo, source.revision) == (tmp_path, "org/tiny", "step3")
    assert asked == {"repo": "org/tiny", "revision": "step3", "allow_patterns": list(HUB_FILES)}
    present = ["modeling_x.py", "pytorch_model.bin", "model.safetensors", "tokenizer.json",
               "model-00001-of-00002.safetensors", "consolidated.safetensors"]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(present, allow_patterns=list(HUB_FILES))
    assert list(kept) == [
        "model.safetensors",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
    ]


@pytest.mark.parametrize("name", ["absent", "/no/such/folder", "a/b/c", "org/tiny@", "text.txt"])
def test_what_is_neither_folder_nor_hub_id(tmp_path: Path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("not a model")
    with pytest.raises(CheckpointError, match="not a folder. Give a Hugging Face checkpoint fold"):
        find(name)


def test_two_revisions_are_one_too_many():
    with pytest.raises(CheckpointError, match="org/tiny@a: revision must be a. Got b instead"):
        find("org/tiny@a", "b")


def test_the_client_is_named_where_it_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(QscaleError, match=r"needs huggingface_hub. Run: pip install 'qscale"):
        find("org/tiny")


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    folder = save(build_model("llama"), tmp_path / "ckpt")
    trap = tmp_path / "ran"
    (folder / "modeling_trap.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    config = (folder / "config.json").read_text()
    automap = (
        '{"auto_map": {"AutoConfig": "modeling_trap.C", "AutoModelForCausalLM": "modeling_trap.M"},'
    )
    (folder / "config.json").write_text(config.replace("{", automap, 1))
    load(folder)  # transformers' own Llama
    (folder / "config.json").write_text(
        config.replace("{", automap, 1).replace('"model_type": "llama"', '"model_type": "trap"')
    )
    with pytest.raises(CheckpointError, match="transformers cannot load this"):
        load(folder)
    assert not trap.exists()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client needs to list and fetch the files of one revision."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/org/tiny/revision/{REVISION}":
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            listed = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": digest(f)}
                for f in self.folder.iterdir()
            ]
            self.answer(json.dumps(listed).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            file = self.folder / path.rpartition("/")[2]
            self.answer(file.read_bytes(), ETag=f'"{digest(file)}"')
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815 - named by the base class

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {
            **headers,
            "X-Repo-Commit": COMMIT,
            "Content-Length": len(body),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def test_a_model_is_fetched_without_its_code_and_found_again_without_a_network(tmp_path):
    folder = save(build_model("llama"), tmp_path / "repository")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a checkpoint was run')")
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Tiny", (Hub,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "from qscale.checkpoint import describe\n"
        f"found = describe('org/tiny@{REVISION}')\n"
        "print(found.checkpoint, *sorted(f.name for f in found.folder.iterdir()))"
    )
    home = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    env = os.environ | home | {"NO_PROXY": "127.0.0.1"}
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        fetched = run(code, env | {"HF_ENDPOINT": endpoint})
    finally:
        server.shutdown()
        server.server_close()
    assert fetched.split() == [
        describe(folder).checkpoint,
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert run(code, env | {"HF_HUB_OFFLINE": "1"}) == fetched


def run(code: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout
