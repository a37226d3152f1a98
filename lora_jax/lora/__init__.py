"""LoRA adapters: PEFT folders on the host, slots on the device, and their application inside a step."""
