"""Subcommands of `ramify`, a module each: `add_arguments(parser)`, `run_command(options)` → exit status."""
