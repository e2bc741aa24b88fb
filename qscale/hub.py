"""Find a checkpoint on disk or fetch it from the Hugging Face hub, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from qscale.errors import CheckpointError, QscaleError

HUB_FILES = (
    "config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "trainer_state.json",
    "qscale.toml",
)
"""All that is fetched of a repository; its code is not."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^\s@]+))?")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint's files lie.

    Parameters
    ----------
    path
        Hugging Face folder, or a GGUF file.
    repo, revision
        Id on the hub and the branch, tag or commit asked for; None for files of the user's own.
    """

    path: Path
    repo: str | None = None
    revision: str | None = None


def find(checkpoint: str | Path, revision: str | None = None) -> Source:
    """Find a checkpoint: a folder or GGUF file if there is one of that name, else on the hub.

    Parameters
    ----------
    checkpoint
        Path of a folder or a ``.gguf`` file, or ``org/name`` or ``org/name@revision`` on the hub.
    revision
        Branch, tag or commit on the hub, if the id does not end in one.

    Raises
    ------
    CheckpointError
        If there is no such folder and it cannot be fetched, saying why.
    QscaleError
        If huggingface_hub is needed and not installed.
    """
    path = Path(checkpoint)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        if revision is not None:
            raise CheckpointError(
                f"revision must be left out for files on disk. Got {revision} for {path} instead."
            )
        return Source(path)
    asked = _HUB_ID.fullmatch(str(checkpoint))
    if path.exists() or asked is None:
        raise CheckpointError(
            f"{checkpoint}: not a folder. Give a Hugging Face checkpoint folder, a .gguf file or "
            "a hub id such as org/name@revision."
        )
    repo, stated = asked["repo"], asked["revision"]
    if stated and revision and stated != revision:
        raise CheckpointError(f"{checkpoint}: revision must be {stated}. Got {revision} instead.")
    revision = stated or revision or "main"
    return Source(_fetch(repo, revision), repo, revision)


def _fetch(repo: str, revision: str) -> Path:
    """Return the folder in huggingface_hub's cache, after fetching what it lacks."""
    try:
        from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - optional
    except ImportError as error:
        raise QscaleError(
            f"{repo}: no such folder, and fetching it from the hub needs {error.name}. "
            "Run: pip install 'qscale[measure]'"
        ) from error
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(HUB_FILES)))
    except errors.GatedRepoError as error:
        why = "access to it is restricted. Ask for it on its page, then run: hf auth login"
        raise _unfetched(repo, revision, why) from error
    except errors.RevisionNotFoundError as error:
        why = f"it has no such revision. See https://huggingface.co/{repo}/tree/main"
        raise _unfetched(repo, revision, why) from error
    except errors.RepositoryNotFoundError as error:
        why = "the hub has no such model, or it is private. Check the name, or run: hf auth login"
        raise _unfetched(repo, revision, why) from error
    except Exception as error:  # of the HTTP library, which differs by version
        why = (
            "it is not wholly in the cache, and the hub cannot be reached. Where there is a "
            f"connection, run: hf download {repo} --revision {revision}"
        )
        raise _unfetched(repo, revision, why) from error


def _unfetched(repo: str, revision: str, why: str) -> CheckpointError:
    """Error for a hub id that is no folder and could not be fetched."""
    return CheckpointError(
        f"{repo}: no such folder, and revision {revision} of it was not fetched from the Hugging "
        f"Face hub: {why}"
    )
