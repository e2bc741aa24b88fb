"""``qscale --install-completion``: have the shell complete commands, options and choices."""

from __future__ import annotations

from typing import Literal

from qscale.cli.console import console
from qscale.errors import QscaleError

_NEXT = {
    "bash": "~/.bashrc loads it.",
    "zsh": "~/.zshrc puts its folder on fpath; compinit must be called after that line.",
    "fish": "fish finds it there.",
    "powershell": "The profile loads it.",
}


def install(*, shell: Literal["bash", "zsh", "fish", "powershell"] | None = None) -> None:
    """Install completion of commands, options and choices by the Tab key.

    A script is written to the shell's own folder for such scripts, and bash, zsh and PowerShell
    get a line in their start-up file that loads it. Install again after an update of qscale.

    ```sh
    qscale --install-completion
    qscale --install-completion --shell zsh
    ```

    Then open a new session and try: qscale plan b, followed by Tab.

    Parameters
    ----------
    shell
        Shell to install for; by default the one that qscale was called from.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell  # noqa: PLC0415

    from qscale.cli import app  # noqa: PLC0415 - which has this command

    try:
        chosen = shell or detect_shell()
        path = app.install_completion(shell=chosen)
    except ShellDetectionError:
        raise QscaleError("cannot tell which shell this is; name it, as in --shell bash.") from None
    except OSError as error:
        raise QscaleError(f"{error.filename}: cannot be written ({error.strerror}).") from error
    console.print(f"Completion for {chosen} written to {path}.", markup=False, soft_wrap=True)
    console.print(f"{_NEXT[chosen]} New sessions have it.", markup=False)
