"""The frame of every entry point: compose `conf/<name>.yaml`, run `main(cfg)`, greet a user's mistake with one line.

A mistake (UserError, or an override that does not compose) ends with exit code 2 and one `error:` line; a defect of
ours keeps its traceback and exit code 1.
"""

import ctypes
import errno
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
import transformers
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eval.settings import check_settings
from models.errors import UserError

# a folder that cannot be written, or a file where a folder should be
PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}
CONF_DIR = Path(__file__).parents[1] / "conf"


def entry(config_name: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Decorator for Hydra mains: `@entry("distill") def main(cfg): ...`."""

    def decorate(main: Callable[[DictConfig], object]) -> Callable[[], None]:
        @functools.wraps(main)
        def checked(cfg: DictConfig) -> object:
            try:  # here, because Hydra would print a line of its own about whatever leaves the job
                check_config(cfg)
                return main(cfg)
            except Exception as error:
                if not is_mistake(error):
                    raise
                fail(explain(error))

        @functools.wraps(main)
        def run() -> None:
            transformers.logging.disable_progress_bar()  # each load and save would draw one
            keep_freed_memory()
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what went wrong instead of ending the process
            try:
                hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=config_name)(checked)()
            except Exception as error:
                if not is_mistake(error):
                    raise
                fail(explain(error))
            except KeyboardInterrupt:
                fail("interrupted", code=130)

        return run

    return decorate


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB instead of giving them back: activations then cost no page faults.

    Caching the 135M target spent an eighth of its CPU time in the kernel otherwise (97,000 page faults a second).
    Larger blocks, and all but half a GiB of what is free, go back to the system.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        libc.mallopt(m_mmap_threshold, 32 * 2**20)  # the largest value that glibc takes
        libc.mallopt(m_trim_threshold, 2**29)


def is_mistake(error: Exception) -> bool:
    """Whether the user can mend it, so that a line says more than a traceback."""
    is_path_error = isinstance(error, OSError) and error.errno in PATH_ERRORS
    return is_path_error or isinstance(error, (UserError, HydraException, OmegaConfBaseException))


def fail(message: str, code: int = 2) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def explain(error: BaseException) -> str:
    """One line for a user. Hydra's own messages span several and point at its internals."""
    cause = error
    while cause is not None:  # our own message may stand behind `instantiate`'s
        if isinstance(cause, UserError):
            return " ".join(str(cause).split())
        cause = cause.__cause__
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # a missing config file is both
        return (
            f"{error.filename or 'a file'}: cannot be written ({error.strerror}); make room there, or choose another "
            "out, output_root, checkpoint_root or cache_root"
        )
    if "Could not override 'experiment'" in text or "In 'experiment'" in text:
        text = "experiment: write it with a plus, for example +experiment=quickstart"
    elif "Could not find 'experiment/" in text:
        names = ", ".join(sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")))
        named = re.search(r"Could not find 'experiment/([^']*)'", text)
        text = f"+experiment={named.group(1) if named else '?'}: no such experiment; the experiments are: {names}"
    elif match := re.match(r"Could not override '([\w.]+)'\. To append to your config use \+([^ ]+)", text):
        text = no_such_key(*match.groups())
    elif "is not in struct" in text:
        text = f"{text.split(' full_key')[0]} (unknown key; `--cfg job` prints all keys)"
    return text[:500]


def no_such_key(key: str, override: str) -> str:
    """A key that the chosen `draft`, `target`, ... does not have; Hydra would have it appended, which is no help."""
    group, _, inner = key.partition(".")
    choices = {path.stem: OmegaConf.load(path) for path in sorted((CONF_DIR / group).glob("*.yaml"))}
    having = [
        f"{group}={name}"
        for name, content in choices.items()
        if inner and (OmegaConf.select(content, inner) is not None or OmegaConf.select(content, key) is not None)
    ]
    if not having:
        return f"{override}: unknown key; `--cfg job` prints all keys"
    return f"{override}: the {group} chosen here has no such key ({', '.join(having)} has it); leave it out"


def check_config(cfg: DictConfig) -> None:
    """Refuse keys that nothing reads: a misspelt one, or an experiment file without its `# @package _global_` line."""
    known = OmegaConf.load(CONF_DIR / "base.yaml")
    allowed = {str(key) for key in known if key != "defaults"}
    for item in known.defaults:
        if isinstance(item, DictConfig):
            allowed |= {str(key) for key in item}
    unknown = sorted(str(key) for key in cfg if key not in allowed)
    if unknown == ["experiment"]:
        raise UserError("experiment: the file in conf/experiment lacks its first line `# @package _global_`")
    if unknown:
        raise UserError(f"{', '.join(unknown)}: unknown top-level key; the keys are {', '.join(sorted(allowed))}")
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UserError(f"{missing[0]}: has no value; give it, for example {missing[0]}=<id, folder or file>")
    check_settings(cfg)
