"""`python -m lora_jax.demo`."""

from .run import main

if __name__ == "__main__":
    raise SystemExit(main())
