"""The flags of tools/serve.py."""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.declarations.config_fields import flag
from megatron.core.exceptions import UserError

_LOOPBACK_NAMES = ("localhost",)


@dataclass(kw_only=True, frozen=True)
class ModelToServe:
    """Which model is served."""

    load: str | None = None
    """Folder of checkpoints, as in a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint. Default: the newest whole checkpoint."""

    base: str | None = None
    """Folder of the model that adapters belong to (--lora-rank), if it has moved since the run."""

    ema: bool = False
    """Use the moving average of the weights (--ema-decay of the run)."""

    model_name: str | None = None
    """Name of the model in requests and answers. Default: the name of the folder of --load, or of its parent for a
    folder "checkpoints"."""

    vocab_file: str | None = None
    """Vocabulary file, if it has moved since the run."""

    merge_file: str | None = None
    """File of merges, if it has moved since the run."""

    tokenizer_model: str | None = None
    """Tokenizer, if it has moved since the run."""

    chat_template: str | None = None
    """File with a Jinja template for /v1/chat/completions. Default: that of the run, or of the tokenizer's folder."""

    spec: list[str] | None = flag(None, nargs="*")
    """Module and name of the layers, for a model that was trained with --spec. No code is taken from a checkpoint, so
    give it again."""

    @property
    def name(self) -> str:
        """The name of the model."""
        if self.model_name is not None:
            return self.model_name
        folder = Path(self.load or "model").absolute()
        return (folder.parent if folder.name == "checkpoints" else folder).name or "model"

    def validate(self) -> Iterator[str]:
        """Yields what is wrong with the values."""
        if self.load is None:
            yield "{load:name} is required"
        if self.model_name is not None and (not self.model_name or not self.model_name.isprintable()):
            yield "{model_name}: give a name of printable characters"


@dataclass(kw_only=True, frozen=True)
class ServeConfig:
    """How the model is served."""

    host: str = "127.0.0.1"
    """Address to listen on. Another address than loopback needs --api-key or --api-key-file."""

    port: int = 8000
    """Port to listen on. 0: a free one, which the start message names."""

    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`. Other users of this machine may see the command line;
    --api-key-file keeps the key from them."""

    api_key_file: str | None = None
    """File whose first line is the key."""

    max_texts: int = 32
    """Number of texts that are written at once."""

    max_waiting_texts: int = 128
    """Number of texts that may wait; further ones are refused with 429."""

    max_sequence_length: int | None = None
    """Tokens of the longest prompt and text together. Default: the length that the model was trained with."""

    max_new_tokens: int = 512
    """Length of an answer to a chat that names none."""

    cache_gib: float | None = None
    """Memory for keys, values and states on each rank, in GiB. Default: on a GPU 85% of its free memory, on a CPU 1
    GiB; never more than the texts at once can use."""

    page_size: int = 16
    """Tokens of a page of the cache."""

    prefill_tokens: int = 2048
    """Largest number of tokens of prompts that are computed between two tokens of the other texts."""

    decoding_graphs: bool = False
    """On one GPU, compute the tokens after the prompts by CUDA graphs. No effect on several ranks, on a CPU, and for
    models that wait for the device. Tested with recorded operations on a CPU, and not yet on a GPU."""

    max_connections: int = 512
    """Number of open connections; further ones are refused with 503."""

    max_body_mib: float = 4.0
    """Size of the largest request, in MiB."""

    read_seconds: float = 30.0
    """Time for a request to arrive."""

    request_seconds: float = 600.0
    """Time in which an answer must be finished."""

    shutdown_seconds: float = 10.0
    """Time after SIGTERM in which open answers may be finished."""

    dry_run: bool = False
    """Load the model, print the size of the cache, and end."""

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine can connect."""
        if self.host in _LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def validate(self) -> Iterator[str]:
        """Yields what is wrong with the values."""
        if not 0 <= self.port < 1 << 16:
            yield "{port} must be from 0 to 65535"
        if self.api_key is not None and self.api_key_file is not None:
            yield "give {api_key:name} or {api_key_file:name}, not both"
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            yield "{api_key:name}: give printable ASCII characters"
        if not self.is_local and self.api_key is None and self.api_key_file is None:
            yield "{host}: everybody who reaches this address could use the model; add {api_key_file:name} FILE"
        for name in ("max_texts", "max_new_tokens", "page_size", "prefill_tokens", "max_connections"):
            if getattr(self, name) < 1:
                yield f"{{{name}}} must be at least 1"
        if self.max_sequence_length is not None and self.max_sequence_length < 2:
            yield "{max_sequence_length} must be at least 2"
        if self.max_waiting_texts < 0 or self.shutdown_seconds < 0:
            yield f"{{{'max_waiting_texts' if self.max_waiting_texts < 0 else 'shutdown_seconds'}}} must be at least 0"
        for name in ("max_body_mib", "read_seconds", "request_seconds", "cache_gib"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                yield f"{{{name}}} must be larger than 0"

    def read_api_key(self) -> str | None:
        """Returns the key that clients must send; None: none. Raises UserError if the file has none."""
        if self.api_key_file is None:
            return self.api_key
        try:
            key = (Path(self.api_key_file).read_text("ascii").splitlines() or [""])[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api-key-file {self.api_key_file}: {error}") from None
        if not key.isprintable() or not key:
            raise UserError(f"--api-key-file {self.api_key_file}: its first line has no key of printable characters")
        return key
