"""Everything that Groundhop raises on purpose.

    GroundhopError
    ├── ConfigError(ValueError)          a run's TOML is wrong, or changed under a half-done run
    ├── InputError(ValueError)           a file or row that was given cannot be read
    ├── MissingError(FileNotFoundError)  an earlier stage, a model or a program is not there
    ├── CredentialError(PermissionError) a key is absent or was refused: stops the run
    ├── NoVerdictError(ValueError)       the judge said nothing that can be read: unknown, not wrong
    ├── ProviderError(OSError)           a search or page provider failed: infrastructure, not the model
    ├── ServerError(OSError)             a model server failed or is gone: infrastructure, not the model
    ├── ContextError(ValueError)         a conversation does not fit the model's context: a normal end
    ├── MalformedCallError(ValueError)   the model wrote a tool call that cannot be read
    ├── ChecksumError(ValueError)        bits differ from the digest that was promised
    ├── ConflictError(RuntimeError)      an immutable name holds other content, or somebody else was first
    ├── FencedError(RuntimeError)        a newer publisher has taken over: this one changes nothing more
    ├── RefusedError(RuntimeError)       a control plane declined, and why; asking the same again changes nothing
    ├── StepError(ArithmeticError)       an optimizer's step cannot be taken: calls out of order, or no derivative
    │   └── NotFiniteError               this one step is not finite; the next may be
    ├── PlacementError(ValueError)       an engine's live weights cannot take changes in place, and why
    └── StoreError(OSError)              an object store or a disk failed: may be asked again
        └── SpaceError                   no space left: free some first

Each takes one message that says what was found, what was wanted and where, so that it can be pickled.
"""


class GroundhopError(Exception):
    """Base of all errors of ours; the command line prints it in one line and exits with 1."""


class ConfigError(GroundhopError, ValueError):
    """A run's configuration is wrong, or differs from the one its records were made with."""


class InputError(GroundhopError, ValueError):
    """A file or a row that was given cannot be read as what it should be."""


class MissingError(GroundhopError, FileNotFoundError):
    """Something that should be there is not: an earlier stage's output, a model, a program."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CredentialError(GroundhopError, PermissionError):
    """A key is absent or was refused. No retry helps, so the run stops."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NoVerdictError(GroundhopError, ValueError):
    """The judge gave no verdict that can be read. Never counted as wrong."""


class ProviderError(GroundhopError, OSError):
    """A search or page provider failed. Infrastructure: never counted against the model."""


class ServerError(GroundhopError, OSError):
    """A model server failed or is gone. Infrastructure: never counted against the model."""


class ContextError(GroundhopError, ValueError):
    """A conversation does not fit the model's context. A normal end of a long search, never retried."""


class MalformedCallError(GroundhopError, ValueError):
    """The model wrote a tool call that cannot be read; it is told so and the call is counted."""


class ChecksumError(GroundhopError, ValueError):
    """Bits differ from the digest that was promised for them."""


class ConflictError(GroundhopError, RuntimeError):
    """An immutable name holds other content, or somebody else moved first. Look again before trying again."""


class FencedError(GroundhopError, RuntimeError):
    """A newer publisher has taken over. This one may change nothing more."""


class StoreError(GroundhopError, OSError):
    """An object store or a disk failed. Infrastructure: what was asked for may or may not have happened."""


class SpaceError(StoreError):
    """No space is left on a store or a disk. What is already there is whole."""


class RefusedError(GroundhopError, RuntimeError):
    """A control plane declined a request. The message starts with the reason's code: `failed_precondition: ...`."""

    @property
    def code(self) -> str:
        """The canonical code in lower snake case."""
        return str(self).partition(": ")[0]

    @property
    def reason(self) -> str:
        """The message without the code."""
        return str(self).partition(": ")[2]


class StepError(GroundhopError, ArithmeticError):
    """An optimizer's step cannot be taken: calls came out of order, or nothing can be predicted. Weights are as before."""


class NotFiniteError(StepError):
    """A gradient, a step or its predicted KL is not finite. Weights are as before, and the next step may be taken."""


class PlacementError(GroundhopError, ValueError):
    """An engine keeps its weights in a way that cannot be proven equal to the checkpoint's, or moved them since."""
