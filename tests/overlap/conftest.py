"""The engine of tests.support.overlap as fixtures."""

from tests.support.overlap import adapters, base, engine_of_module, llm, oracles

__all__ = ["adapters", "base", "engine_of_module", "llm", "oracles"]
