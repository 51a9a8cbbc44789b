"""LoRA adapters: PEFT folders, and the adapters that a model has loaded."""
