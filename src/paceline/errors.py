"""What can go wrong, and what the user can do then.

    PacelineError
    ├── ConfigError (also a ValueError)   the recipe, an option or a combination of options
    ├── DataError (also a ValueError)     a dataset, a tokenizer or a raw text file
    ├── CheckpointError                   a checkpoint is missing, damaged or does not fit
    ├── LaunchError                       processes, devices, network, launcher
    │   └── LostContactError              another rank is gone; it says why, this one only that
    ├── RunFolderError                    the run folder cannot be used
    └── TrainingError                     the run itself cannot go on (non-finite loss, nothing left to do)

Every error carries a subject (what), evidence (the values and the reason) and a next step. The command line prints the
three and exits with ``exit_code``: 2 for bad use, 1 for everything else.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that are meant for the user.

    Args:
        subject: what is wrong, with the offending value: ``"parallel.tp = 6 does not divide model.num_kv_heads = 8"``.
        evidence: why, with numbers; may be empty where the subject says it all.
        next_step: what to do now; never empty in practice.
    """

    exit_code = 1

    def __init__(self, subject: str, *, evidence: str = "", next_step: str = "") -> None:
        self.subject = subject
        self.evidence = evidence
        self.next_step = next_step
        super().__init__(subject)

    def __str__(self) -> str:
        lines = [self.subject]
        lines += [f"  {text}" for text in (self.evidence, self.next_step) if text]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # keyword arguments would be lost by the default pickling, which worker processes use to report errors
        return (_rebuild, (type(self), self.subject, self.evidence, self.next_step))


def _rebuild(kind: type[PacelineError], subject: str, evidence: str, next_step: str) -> PacelineError:
    return kind(subject, evidence=evidence, next_step=next_step)


class ConfigError(PacelineError, ValueError):
    """The recipe, an option or a combination of options is not usable."""

    exit_code = 2


class DataError(PacelineError, ValueError):
    """A dataset, tokenizer or raw input file is missing, damaged or does not fit."""


class CheckpointError(PacelineError):
    """A checkpoint is missing, damaged, half-written or belongs to another model."""


class LaunchError(PacelineError):
    """Processes, devices, the network or the launcher do not match what was asked for."""


class LostContactError(LaunchError):
    """A collective failed because another rank is gone. That rank knows the reason."""


class RunFolderError(PacelineError):
    """The run folder cannot be written or belongs to another recipe."""

    exit_code = 2


class TrainingError(PacelineError):
    """The run cannot go on, or has nothing left to do."""


def to_install(extra: str) -> str:
    """The command that adds an extra of this package, for next steps. From the clone: `constraints.txt` lies there."""
    return f"in the clone, pip install -c constraints.txt -e '.[{extra}]'; with a torch of your own, without that -c"
