"""Every error that leaves this service. Each is built from one message, so that it pickles.

EncoderError
├── ConfigError                a YAML file, a checkpoint or the platform cannot serve as configured
│   ├── WeightsError           tensors are missing, unused, misshapen, or not the promised bytes
│   └── BackendUnavailable     an attention backend cannot run here
├── RequestError               the caller's mistake
│   ├── InvalidRequest         malformed: an empty body, wrong base64, a text where an image belongs
│   ├── Unauthorized           no key, or a wrong one
│   ├── UnknownModel           another model than the one that is served
│   ├── NotAcceptable          a reply of a type that is not offered
│   ├── RequestTooLarge        too many bytes, images or pixels
│   ├── UnsupportedImageType   bytes that are not of an accepted image format
│   └── InvalidImage           an image that cannot be decoded, or not encoded
├── DeadlineExceeded           the answer was not ready in time
├── Overloaded                 a queue is full; the same request may pass later
├── ReplicaLost                a replica went away with the work; another may do it
├── PeerUnreachable            a server that the answer goes to or comes from cannot be reached
└── PeerTimeout                such a server was reached, and does not do its part in time
"""

from typing import Self


class EncoderError(Exception):
    """Base of the tree. `item` names the image at fault, or is None."""

    item: str | None = None

    def named(self, item: str) -> Self:
        """The same error as a new object whose message begins with the item's name."""
        error = type(self)(f"{item}: {self}")
        error.item = item  # in __dict__, which pickle carries beside the one argument
        return error


class ConfigError(EncoderError):
    """A YAML file, a checkpoint or the platform cannot serve as configured."""


class WeightsError(ConfigError):
    """Tensors are missing, unused, misshapen, or not the promised bytes."""


class BackendUnavailable(ConfigError):
    """An attention backend cannot run here; the message says why."""


class RequestError(EncoderError):
    """The caller's mistake: the same request will fail again."""


class InvalidRequest(RequestError):
    """A malformed request."""


class Unauthorized(RequestError):
    """No API key, or a wrong one."""


class UnknownModel(RequestError):
    """A model that is not served here."""


class NotAcceptable(RequestError):
    """No offered type of reply is among those that the client accepts."""


class RequestTooLarge(RequestError):
    """More bytes, images or pixels than the limit."""


class UnsupportedImageType(RequestError):
    """Bytes that are not of an accepted image format."""


class InvalidImage(RequestError):
    """An image of an accepted format that cannot be decoded or encoded."""


class DeadlineExceeded(EncoderError):
    """The answer was not ready in time."""


class Overloaded(EncoderError):
    """A queue is full; the same request may pass later."""


class ReplicaLost(EncoderError):
    """A replica went away with the work; another may do it."""


class PeerUnreachable(EncoderError):
    """A server that the answer goes to, or comes from, cannot be reached or fails."""


class PeerTimeout(EncoderError):
    """A server that the answer goes to, or comes from, does not do its part in time."""
