"""Cut a text file into evaluation and curvature windows under a stated protocol.

Two losses compare only if they are means over the same tokens in the same contexts, so everything
that decides this is in the protocol's id, and the id is in every measured row.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from qscale.errors import CheckpointError, TextError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

Bos = Literal["none", "once", "each_window"]
"""Where the beginning-of-sequence token goes: nowhere, before the text, before every window."""

BOS_POLICIES: tuple[Bos, ...] = ("none", "once", "each_window")


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a loss is a mean over.

    Parameters
    ----------
    text, text_hash
        Name of the file without suffix; first 8 hexadecimal digits of the SHA-256 of its bytes.
    tokenizer_hash
        First 6 hexadecimal digits of the SHA-256 of what decides the token ids.
    context
        Tokens in a window, the BOS token included.
    stride
        Text tokens from the start of one window to the next.
    bos
        Where the BOS token goes.
    probe_windows
        Windows kept out of the evaluation for curvature.
    scored_tokens
        Tokens the loss is a mean over.
    dtype, kernel
        Arithmetic and attention implementation of the forward pass.
    scored_bytes
        UTF-8 bytes of the text that the scored tokens stand for, or None if the tokenizer does
        not say where its tokens lie. Not in the id, since the rest decides it.
    detokenised
        Whether the text reads as written. False where most commas and full stops have a space
        before them, as in WikiText: a loss per byte then compares with none of plain text.
    """

    text: str
    text_hash: str
    tokenizer_hash: str
    context: int
    stride: int
    bos: Bos
    probe_windows: int = 0
    scored_tokens: int = 0
    dtype: str = "float32"
    kernel: str = "eager"
    scored_bytes: int | None = None
    detokenised: bool = True

    @property
    def id(self) -> str:
        """One readable string that is equal for equal protocols.

        Examples
        --------
        >>> Protocol("books", "3f2a91c4", "91aa03", 256, 256, "none", 16, 50184).id
        'books-3f2a91c4/tok-91aa03/ctx256/stride256/bos-none/probe16/n50184/float32-eager'
        """
        return (
            f"{self.text}-{self.text_hash}/tok-{self.tokenizer_hash}/ctx{self.context}"
            f"/stride{self.stride}/bos-{self.bos}/probe{self.probe_windows}"
            f"/n{self.scored_tokens}/{self.dtype}-{self.kernel}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Windows of one text, as the model reads them.

    Parameters
    ----------
    ids
        Token ids, shape (windows, context), int64.
    scored
        Whether the loss counts the prediction of token ``j + 1`` from tokens ``0..j``; shape
        (windows, context - 1), bool. Each token of the text is scored at most once.
    starts
        Position in the text's tokens of each window's first text token, shape (windows,).
    protocol
        The protocol, with ``scored_tokens`` those of these windows.
    path, n_tokens
        The text file and its length in tokens.
    scored_bytes
        UTF-8 bytes of the text that each window's scored tokens stand for, shape (windows,), or
        None if the tokenizer does not say where its tokens lie. Each byte of the text belongs to
        one token, so sums over windows are exact.
    """

    ids: NDArray[np.int64]
    scored: NDArray[np.bool_]
    starts: NDArray[np.int64]
    protocol: Protocol
    path: Path
    n_tokens: int
    scored_bytes: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.ids)

    def take(self, index: NDArray[np.int64], probe_windows: int) -> Windows:
        """Return some of the windows, recording how many windows curvature has to itself."""
        scored = self.scored[index]
        n_bytes = None if self.scored_bytes is None else self.scored_bytes[index]
        protocol = replace(
            self.protocol,
            probe_windows=probe_windows,
            scored_tokens=int(scored.sum()),
            scored_bytes=None if n_bytes is None else int(n_bytes.sum()),
        )
        return replace(
            self,
            ids=self.ids[index],
            scored=scored,
            starts=self.starts[index],
            protocol=protocol,
            scored_bytes=n_bytes,
        )


def windows(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    vocab_size: int,
    stride: int | None = None,
    bos: Bos = "none",
) -> Windows:
    """Tokenise a UTF-8 text file and cut it into windows of equal length.

    Windows start every ``stride`` tokens; a rest shorter than a window is left out. The first
    window scores every token that has a predecessor. With ``stride`` below the window's length,
    windows overlap and a later one scores only its last ``stride`` tokens, each with at least
    ``context - stride`` tokens before it.

    Parameters
    ----------
    path
        Text file.
    tokenizer
        Of the checkpoint; special tokens other than BOS are never added.
    context
        Tokens in a window, the BOS token included.
    vocab_size
        Rows of the model's token embedding; ids must lie below.
    stride
        Text tokens from one window to the next; None for windows that do not overlap.
    bos
        Where the BOS token goes.

    Raises
    ------
    TextError
        If the file is missing, not UTF-8 or shorter than one window, or an option is impossible.
    CheckpointError
        If the tokenizer produces ids the model has no embedding for.
    """
    path = Path(path)
    lead = 1 if bos == "each_window" else 0
    body = context - lead
    stride = body if stride is None else stride
    _check_options(context, stride, body, bos)
    raw = _read(path)
    text = _decode(raw, path)
    tokens, sizes = _tokenise(text, tokenizer, path, vocab_size)
    if bos != "none":
        if tokenizer.bos_token_id is None:
            raise TextError(f"bos must be none: the tokenizer has no BOS token. Got {bos} instead.")
        if tokenizer.bos_token_id >= vocab_size:
            raise CheckpointError(
                f"The tokenizer's BOS token is {tokenizer.bos_token_id}, the model's vocabulary "
                f"ends at {vocab_size - 1}. Set bos to none."
            )
        if bos == "once":
            tokens = np.concatenate([[tokenizer.bos_token_id], tokens])
            sizes = None if sizes is None else np.concatenate([[0], sizes])
    if len(tokens) < body:
        raise TextError(
            f"{path}: {len(tokens)} tokens are shorter than one window of {body}. "
            "Give a longer text or a smaller context."
        )
    starts = np.arange(0, len(tokens) - body + 1, stride)
    ids = _cut(tokens, starts, body)
    if lead:
        ids = np.insert(ids, 0, tokenizer.bos_token_id, axis=1)
    scored = np.zeros((len(starts), context - 1), dtype=bool)
    scored[0] = True
    scored[1:, -stride:] = True
    n_bytes = None
    if sizes is not None:
        n_bytes = (_cut(sizes, starts, body)[:, 1 - lead :] * scored).sum(axis=1)
    protocol = Protocol(
        text=re.sub(r"[^\w.-]", "_", path.stem),
        text_hash=hashlib.sha256(raw).hexdigest()[:8],
        tokenizer_hash=tokenizer_hash(tokenizer),
        context=context,
        stride=stride,
        bos=bos,
        scored_tokens=int(scored.sum()),
        scored_bytes=None if n_bytes is None else int(n_bytes.sum()),
        detokenised=not _spaced_out(text),
    )
    return Windows(ids, scored, starts, protocol, path, len(tokens), n_bytes)


def _cut(values: NDArray[np.int64], starts: NDArray[np.int64], body: int) -> NDArray[np.int64]:
    """Return the values in each window, shape (windows, body)."""
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(values, body)[starts])


def split(
    found: Windows, probe_windows: int, *, max_windows: int | None = None
) -> tuple[Windows, Windows]:
    """Share windows out: evenly spaced ones for curvature, those sharing no text for evaluation.

    The choice depends on the text and ``probe_windows`` only, so a prediction from curvature and
    a measurement of the same text use the same curvature windows.

    Parameters
    ----------
    found
        All windows of a text.
    probe_windows
        Number of windows for curvature, non-overlapping.
    max_windows
        Keep at most so many evaluation windows, evenly spaced; None for all.

    Returns
    -------
    probe, evaluation : Windows
        No token of the text is in both.

    Raises
    ------
    TextError
        If there is not at least one window for evaluation beside those for curvature.
    """
    for name, value in (("probe_windows", probe_windows), ("max_windows", max_windows)):
        if value is not None and value < 1:
            raise TextError(f"{name} must be at least 1. Got {value} instead.")
    body = found.protocol.context - (found.protocol.bos == "each_window")
    apart = -(-body // found.protocol.stride)  # windows from one to the next that shares no token
    probe = spread(len(found), probe_windows)
    distance = np.abs(found.starts[:, None] - found.starts[probe][None, :])
    rest = np.flatnonzero((distance >= body).all(axis=1))
    if len(found) < apart * probe_windows + 1 or not len(rest):
        raise TextError(
            f"{found.path}: {found.n_tokens} tokens are too few for {probe_windows} curvature "
            f"windows and one to evaluate on, {(probe_windows + 1) * body} are needed. "
            "Give a longer text, a smaller context or fewer probe windows."
        )
    if max_windows is not None and max_windows < len(rest):
        rest = rest[spread(len(rest), max_windows)]
    return found.take(probe, probe_windows), found.take(rest, probe_windows)


def spread(n: int, k: int) -> NDArray[np.int64]:
    """Return ``min(n, k)`` evenly spaced indices below ``n``.

    Examples
    --------
    >>> spread(10, 2).tolist()
    [2, 7]
    """
    k = min(n, k)
    return (2 * np.arange(k) + 1) * n // (2 * k)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash what decides the token ids: normaliser, pre-tokeniser, model and added tokens."""
    state: object = sorted(tokenizer.get_vocab().items())
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        found = json.loads(tokenizer.backend_tokenizer.to_str())
        state = [found[key] for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:6]


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer by itself puts a BOS token before a text.

    Such models, Gemma above all, were trained to see one; under ``bos="none"`` their loss can come
    out far too high.
    """
    ids = tokenizer("a", verbose=False)["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _check_options(context: int, stride: int, body: int, bos: str) -> None:
    """Refuse windows that cannot be cut."""
    if bos not in BOS_POLICIES:
        raise TextError(f"bos must be one of {', '.join(BOS_POLICIES)}. Got {bos} instead.")
    if body < 2:
        raise TextError(f"context must leave room for 2 text tokens. Got {context} instead.")
    if not 1 <= stride <= body:
        raise TextError(f"stride must be between 1 and {body}. Got {stride} instead.")


def _read(path: Path) -> bytes:
    """Read a file that must hold text."""
    if not path.is_file():
        raise TextError(f"{path}: no such text file.")
    return path.read_bytes()


def _decode(raw: bytes, path: Path) -> str:
    """Decode a file's bytes as UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}: not UTF-8 text, byte {raw[error.start]:#04x} at offset {error.start}."
        ) from error


def _tokenise(
    text: str, tokenizer: PreTrainedTokenizerBase, path: Path, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Turn a text into token ids below ``vocab_size`` and, if known, the bytes of each."""
    offsets = bool(getattr(tokenizer, "is_fast", False))
    found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=offsets)
    tokens = np.asarray(found["input_ids"], dtype=np.int64)
    if len(tokens) and tokens.max() >= vocab_size:
        raise CheckpointError(
            f"The tokenizer turns {path} into token {tokens.max()}, the model's vocabulary ends "
            f"at {vocab_size - 1}. Tokenizer and model do not belong together."
        )
    if not offsets or not len(tokens):
        return tokens, None
    ends = np.fromiter((end for _, end in found["offset_mapping"]), np.int64, len(tokens))
    return tokens, token_bytes(text, ends)


def token_bytes(text: str, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Share the UTF-8 bytes of a text out over its tokens, each byte to one token.

    A token has the bytes from the furthest end of an earlier token to its own; characters that
    the tokenizer skips so go to the next token, those behind the last to the last, and a character
    in several tokens to the first of them.

    Parameters
    ----------
    text
        The text.
    ends
        Index of the first character behind each token, shape (tokens,).

    Examples
    --------
    >>> token_bytes("né  a", np.array([1, 2, 2, 5])).tolist()
    [1, 2, 0, 3]
    """
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    lengths = np.ones(len(points), dtype=np.int64)
    for last in (0x7F, 0x7FF, 0xFFFF):  # last code points of one, two and three bytes
        lengths += points > last
    before = np.concatenate([[0], np.cumsum(lengths)])
    reached = np.maximum.accumulate(before[ends])
    reached[-1] = before[-1]
    return np.diff(reached, prepend=0)


def _spaced_out(text: str) -> bool:
    """Whether punctuation was split off, as the Penn Treebank's tokeniser does."""
    marks = text.count(",") + text.count(".")
    return marks >= 10 and 2 * (text.count(" ,") + text.count(" .")) > marks
