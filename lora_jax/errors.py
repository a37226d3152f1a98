"""Exceptions a caller may see. Host only: never imports jax.

Every message names the offending thing and says what to do about it. The server maps them to HTTP statuses by class alone.
"""


class LoraJaxError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(LoraJaxError, ValueError):
    """An option, or a combination of options, that cannot work."""


class ModelLoadError(LoraJaxError, ValueError):
    """A base checkpoint that cannot be served: unsupported, incomplete, of wrong shapes, quantised, or no model at all."""


class AdapterError(LoraJaxError, ValueError):
    """An adapter folder that is broken or asks for something unsupported. Nothing has changed on the device."""


class AdapterNotFoundError(LoraJaxError, KeyError):
    """A request, or an unload, names an adapter that is not loaded."""

    def __init__(self, name: str, known: list[str]):
        self.name, self.known = name, known
        super().__init__(f"no adapter named {name!r} is loaded; loaded: {', '.join(sorted(known)) or 'none'}")

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class AdapterCapacityError(LoraJaxError):
    """No host memory slot is free for one more adapter (max_cpu_loras); unload one first."""


class RequestError(LoraJaxError, ValueError):
    """A request that cannot be served as asked. `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None):
        self.param = param
        super().__init__(message)


class CapacityError(LoraJaxError):
    """The memory plan does not fit the device; the message lists each item's size and what to change."""


class StepKeyError(LoraJaxError, LookupError):
    """The dispatch table holds no executable for a key: a bug, or a table built for another configuration."""


class EngineDeadError(LoraJaxError, RuntimeError):
    """The engine has stopped after a failure it could not recover from; every open request fails with this."""
