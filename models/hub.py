"""What a machine without network needs: know it at once, and say it in one line."""

import functools
import os
import socket
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

from safetensors import SafetensorError

from models.errors import UserError

EMBEDDED = "target=smollm2_135m"  # the target that needs no network, named in every offline message


@functools.cache
def hub_reachable(timeout_s: float = 5.0) -> bool:
    """Whether the hub's host answers. Asked once a process: its client would retry for most of a minute instead."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True  # only the proxy can tell
    endpoint = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
        socket.create_connection((endpoint.hostname, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


@contextmanager
def hub_errors(key: str, source: str):
    """Turn what transformers and the hub's client raise for a source that cannot be had into one UserError."""
    try:
        yield
    # the hub client's errors are OSErrors, broken configs ValueErrors
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if Path(source).exists():
            raise UserError(f"{key}={source}: not a model folder that transformers can load: {first_line}") from error
        if not hub_reachable():
            raise UserError(
                f"{key}={source}: not a local folder, and the model hub is out of reach from this machine; check the "
                f"network, give a folder, or use the embedded {EMBEDDED}"
            ) from error
        raise UserError(f"{key}={source}: the hub does not give it: {first_line}") from error
