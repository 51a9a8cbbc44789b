"""The subcommands of `ramify`. Each is a module with `add_arguments(parser)` and `run_command(options)`."""
