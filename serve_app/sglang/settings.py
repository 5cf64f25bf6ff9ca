"""What the application's YAML may say under `sglang`."""

from ipaddress import ip_network
from typing import Annotated, Self

import httpx
from pydantic import (
    AfterValidator,
    Field,
    IPvAnyNetwork,
    PositiveFloat,
    SecretStr,
    model_validator,
)

from encoders.config import Settings
from serve_app.service import Dtype


def _can_be_called(url: str) -> str:
    try:
        host, port = httpx.URL(url).host, httpx.URL(url).port
    except httpx.InvalidURL as error:
        raise ValueError(f"{error}") from error
    if not host or not (port is None or 1 <= port <= 65535):
        raise ValueError(f"host {host!r} and port {port} cannot be called")
    return url


# SGLang joins addresses and paths as text: a slash at the end would stand there twice.
BaseUrl = Annotated[
    str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s/?#]+)*$"), AfterValidator(_can_be_called)
]
Seconds = Annotated[float, Field(gt=0, lt=5)]
"""A wait in a failure, which has to end in under five seconds."""


class SGLangSettings(Settings):
    """Whom the service encodes for, and where it may connect to."""

    dtype: Dtype = "bfloat16"
    receivers: tuple[IPvAnyNetwork, ...] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
    """Networks of the SGLang servers that rows may be pushed to."""
    push_timeout_s: Seconds = 3.0
    """For the connection to a receiver; the transfer may then take longer, by its length."""
    queue_for_s: Seconds = 3.0
    """How long a part that a full queue refuses is offered again."""
    public_url: BaseUrl | None = None
    bootstrap_urls: tuple[BaseUrl, ...] = ()
    """SGLang servers that are told `public_url`."""
    register_every_s: PositiveFloat = 30.0
    chat_url: BaseUrl | None = None
    """The SGLang server that chat completions are passed to."""
    chat_key: SecretStr | None = None
    chat_timeout_s: PositiveFloat = 300.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.bootstrap_urls and self.public_url is None:
            raise ValueError("bootstrap_urls are told public_url, which is not set")
        if self.chat_key and self.chat_url is None:
            raise ValueError("chat_key is sent to chat_url, which is not set")
        return self
